"""trainer.micro_batch_size=auto: by arithmetic, tried with a step, halved, alike on all ranks."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import app.assembly.auto
import app.training.module
from app.run import describe_global_batch
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig
from app.training.micro_batch import can_try, try_micro_batch
from app.training.objective import batch_loss
from app.training.trainer import Environment, TrainerConfig
from data_modules import Batch
from tests.conftest import TrainRun, read_column
from tests.tiny import small_run


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (StrategyConfig(name="single"), True),
        (DdpConfig(), True),
        (FsdpConfig(), False),
        (ZeroConfig(stage=1), False),
    ],
)
def test_ranks_that_wait_for_each_other_in_a_micro_batch_do_not_try_it(
    strategy: StrategyConfig, expected: bool
) -> None:
    assert can_try(strategy) == expected


def test_another_number_of_ranks_may_not_divide_into_a_resumed_run_s_micro_batches() -> None:
    before = {"packs": 8, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "num_ranks": 2}
    now = describe_global_batch(TrainerConfig(global_batch_size=8), 4, before)
    assert now == {
        "packs": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "num_ranks": 4,
    }  # fmt: skip


class Full:
    """A device with room for `limit` tokens, and a step's work on it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tried = limit, list[int]()

    def __call__(self, model: Any, batch: Batch, *others: Any) -> Any:
        if torch.is_grad_enabled():
            self.tried.append(batch.input_ids.numel())
            if self.tried[-1] > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_loss(model, batch, *others)


def start_with(monkeypatch: pytest.MonkeyPatch, packs: int, limit: int) -> Full:
    """Have the next run choose so many packs and try them, on a device with so much room."""

    def resolve(config: Any, data: Any, env: Environment, *_: Any) -> Environment:
        data.set_micro_batch_size(packs)
        return replace(env.with_micro_batch(packs), tries_micro_batch=True)

    full = Full(limit)
    monkeypatch.setattr(app.assembly.auto, "resolve_micro_batch", resolve)
    monkeypatch.setattr(app.training.module, "batch_loss", full)
    return full


WORDS = small_run(
    "trainer.gradient_accumulation_steps=8", "trainer.max_steps=2", "adapter.dropout=0.1"
)


@pytest.mark.slow
def test_it_is_halved_until_it_fits_and_trains_as_if_it_had_been_typed(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = train_run(*WORDS, "trainer.micro_batch_size=2", "trainer.gradient_accumulation_steps=4")
    with monkeypatch.context() as patch:
        full = start_with(patch, packs=8, limit=600)
        chosen = train_run(*WORDS)
    said = capsys.readouterr().out
    assert "micro-batch: 8 packs at once do not fit after all; 4 instead" in said
    assert "micro-batch: 4 packs at once do not fit after all; 2 instead" in said
    sizes = [tokens > full.limit for tokens in full.tried]
    assert sizes[:4] == [True, True, False, False]  # twice: beside the gradients of the first
    assert not any(sizes[4:])
    for curve in ("train/loss", "val/loss"):
        assert read_column(typed, curve) == read_column(chosen, curve)
    before, after = (
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (typed, chosen)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    manifest = json.loads((chosen / "manifest.json").read_text())
    assert manifest["global_batch"] == {
        "packs": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_ranks": 1,
    }  # fmt: skip


def test_a_single_pack_that_does_not_fit_ends_the_run(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, packs=2, limit=1)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train_run(*WORDS)


def test_a_rank_that_has_room_takes_what_the_others_have_room_for() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    answers = iter([torch.tensor([1, 0]), torch.tensor([1, 1])])

    class Data:
        batching = SimpleNamespace(micro_batch_size=6, accumulation_steps=1)

        def fullest_batch(self) -> Any:
            return SimpleNamespace(to=lambda device: device)

        def set_micro_batch_size(self, size: int) -> None:
            self.batching = SimpleNamespace(micro_batch_size=size, accumulation_steps=6 // size)

    trainer: Any = SimpleNamespace(
        datamodule=Data(),
        accumulate_grad_batches=1,
        val_check_interval=5,
        strategy=SimpleNamespace(all_gather=lambda fits: next(answers)),
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
    )
    module: Any = SimpleNamespace(
        trainer=trainer,
        model=torch.nn.ParameterList([weight]),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        global_rank=0,
        loss=lambda batch: weight.sum(),
        zero_grad=lambda: None,
        reset_step=lambda: None,
    )
    try_micro_batch(module, "adamw")
    assert (trainer.accumulate_grad_batches, trainer.val_check_interval) == (2, 10)
    assert trainer.datamodule.batching.micro_batch_size == 3
