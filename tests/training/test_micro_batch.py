"""trainer.micro_batch_size=auto: by arithmetic, tried with a step, halved, alike on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import app.planning.resolve
import app.training.module
from app.config import load_config
from app.model.recompute import RecomputeConfig, choose_recompute
from app.planning.resolve import resolve_micro_batch
from app.run import Run, describe_global_batch
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig
from app.training.micro_batch import can_try, choose_micro_batch, divisors, try_micro_batch
from app.training.model_states import Footprint
from app.training.objective import batch_loss
from app.training.trainer import Environment, TrainerConfig
from data_modules import Batch
from tests.conftest import TrainRun, read_column
from tests.model.test_recompute_choice import memory
from tests.tiny import small_run

SEQUENCE_LEN = 4096


def of_packs(device_gib: float) -> Callable[[int], Any]:
    return lambda packs: memory(device_gib, tokens=packs * SEQUENCE_LEN)


@pytest.mark.parametrize(
    ("device_gib", "packs", "mode", "size"),
    [
        (79.2, 8, "auto", 2),  # 35 GiB of activations, as traced; four packs would be 70
        (139.8, 8, "auto", 4),
        (79.2, 8, "full", 8),
        (79.2, 1, "auto", 1),
        (79.2, 7, "auto", 1),  # 7 packs divide into 1 or 7
        (79.2, 6, "auto", 3),
        (47.5, 8, "auto", 1),
    ],
)
def test_the_largest_divisor_that_fits_is_taken(
    device_gib: float, packs: int, mode: str, size: int
) -> None:
    choice = choose_micro_batch(of_packs(device_gib), packs, RecomputeConfig(mode=mode))
    assert choice.size == size, choice
    assert "\n" not in str(choice)
    if size < packs:
        assert f"{min(one for one in divisors(packs) if one > size)}, the next divisor" in str(
            choice
        )


def test_more_packs_never_cost_a_recomputation() -> None:
    choice = choose_micro_batch(of_packs(79.2), 64, RecomputeConfig())
    assert choose_recompute(of_packs(79.2)(choice.size)).mode == "none"


def test_what_is_not_tried_leaves_more_room() -> None:
    sizes = [
        choose_micro_batch(of_packs(79.2), 6, RecomputeConfig(), is_tried=is_tried).size
        for is_tried in (True, False)
    ]
    assert sizes == [3, 2]


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


ONE = Environment(
    accelerator="gpu", devices=1, num_ranks=1, num_data_ranks=1, precision="bf16", accumulation=8
)


def test_a_gpu_takes_more_a_cpu_one_and_a_resumed_run_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    architecture = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256
    )
    base: Any = SimpleNamespace(
        architecture=architecture,
        backend="varlen",
        dtype=torch.bfloat16,
        shapes_builder=lambda *_: lambda: None,
    )
    taken: list[int] = []
    data: Any = SimpleNamespace(sequence_len=2048, take_together=taken.append)
    config = load_config("train", ["+experiment=llama8b"])
    assert config.trainer.micro_batch_size == "auto"
    monkeypatch.setattr("app.planning.resolve.measure_footprint", lambda *_: Footprint(15.1, 0.5))
    gpu = SimpleNamespace(total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    new = Run(config=config, folder=tmp_path)
    single = StrategyConfig(name="single")

    def resolve(config: Any, env: Environment, run: Any) -> tuple[int, int, bool]:
        found = resolve_micro_batch(config, base, data, env, single, run)
        assert taken[-1:] == [found.micro_batch_size]
        return found.micro_batch_size, found.accumulation, found.tries_micro_batch

    with caplog.at_level(logging.INFO):
        assert resolve(config, ONE, new) == (4, 2, True)
    assert "micro-batch: 4 packs at once (of a step's 8 a rank: " in caplog.text
    assert resolve(config, replace(ONE, accelerator="cpu"), new) == (1, 8, False)
    streamed = replace(config, data=replace(config.data, streaming=True))
    assert resolve(streamed, ONE, new) == (1, 8, False)

    before = {"packs": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_ranks": 1}
    manifest = {"versions": {}, "base": {}, "data": [], "global_batch": before}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    checkpoint: Any = object()
    resumed = replace(new, checkpoint=checkpoint)
    assert resolve(config, ONE, resumed) == (2, 4, False)
    assert describe_global_batch(config.trainer, 1, before) == before


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

    def resolve(config: Any, base: Any, data: Any, env: Environment, *_: Any) -> Environment:
        data.take_together(packs)
        return replace(env.with_micro_batch(packs), tries_micro_batch=True)

    full = Full(limit)
    monkeypatch.setattr(app.planning.resolve, "resolve_micro_batch", resolve)
    monkeypatch.setattr(app.training.module, "batch_loss", full)
    return full


WORDS = small_run(
    "trainer.gradient_accumulation_steps=8", "trainer.max_steps=2", "adapter.dropout=0.1"
)


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

        def take_together(self, size: int) -> None:
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
