"""Batch sizes that are `auto`: probed, halved on all ranks alike, and lowered for little data."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import app.assembly.auto
import app.model.adapter
import app.training.module
from app.assembly.auto import probe_micro_batch
from app.config import load_config
from app.plan import plan
from app.preview import preview
from app.run import describe_global_batch
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    StrategyConfig,
    ZeroConfig,
    can_probe_micro_batch,
)
from app.training.objective.objective import batch_loss
from app.training.trainer import Environment, TrainerConfig, adapts_to_small_data
from data_modules import Batch, fit_accumulation
from tests.conftest import TrainRun, read_column
from tests.resumed import go_on
from tests.tiny import SAMPLES, small_run, tiny_llama, train_into


def test_no_probe_if_ranks_communicate_within_a_micro_batch() -> None:
    for alone in (StrategyConfig(name="single"), DdpConfig()):
        assert can_probe_micro_batch(alone)
    for together in (FsdpConfig(), ZeroConfig(stage=1)):
        assert not can_probe_micro_batch(together)


def test_a_resume_on_more_ranks_changes_micro_batches_that_no_longer_divide() -> None:
    before = {"packs": 8, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "num_ranks": 2}
    now = describe_global_batch(TrainerConfig(global_batch_size=8), 4, before)
    assert now == {
        "packs": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "num_ranks": 4,
    }  # fmt: skip


class LimitedDevice:
    """A loss on a device with room for `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit, self.batch_tokens = limit, list[int]()

    def __call__(self, objective: Any, model: Any, batch: Batch, *others: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            self.batch_tokens.append(batch.input_ids.numel())
            if self.batch_tokens[-1] > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_loss(objective, model, batch, *others, **named)


def choose_micro_batch(monkeypatch: pytest.MonkeyPatch, packs: int, limit: int) -> LimitedDevice:
    """Make the next run probe micro-batches of `packs`, with room for `limit` tokens."""

    def resolve(config: Any, data: Any, env: Environment, *_: Any) -> tuple[Any, Environment]:
        data.set_micro_batch_size(packs)
        return config, replace(env.with_micro_batch(packs), probes_micro_batch=True)

    device = LimitedDevice(limit)
    monkeypatch.setattr(app.assembly.auto, "resolve_micro_batch", resolve)
    monkeypatch.setattr(app.training.module, "batch_loss", device)
    return device


ACCUMULATED = small_run(
    "trainer.gradient_accumulation_steps=8", "trainer.max_steps=2", "adapter.dropout=0.1"
)


@pytest.mark.slow
def test_the_size_is_halved_until_it_fits_and_trains_as_if_it_had_been_typed(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = train_run(
        *ACCUMULATED, "trainer.micro_batch_size=2", "trainer.gradient_accumulation_steps=4"
    )
    with monkeypatch.context() as patch:
        device = choose_micro_batch(patch, packs=8, limit=600)
        chosen = train_run(*ACCUMULATED)
    output = capsys.readouterr().out
    assert "micro-batch: 8 packs do not fit in memory; using 4 instead" in output
    assert "micro-batch: 4 packs do not fit in memory; using 2 instead" in output
    is_too_large = [tokens > device.limit for tokens in device.batch_tokens]
    assert is_too_large[:4] == [True, True, False, False]  # the last twice: with gradients present
    assert not any(is_too_large[4:])
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
    choose_micro_batch(monkeypatch, packs=2, limit=1)
    released: list[Any] = []
    monkeypatch.setattr("app.training.module.drop_pending_outputs", released.append)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train_run(*ACCUMULATED)
    assert len(released) == 2  # after 2 packs, and after 1


def test_all_ranks_use_the_size_that_fits_on_every_rank() -> None:
    model = tiny_llama()
    weight = model.lm_head.weight
    fits_on_ranks = iter([torch.tensor([1, 0]), torch.tensor([1, 1])])

    class Data:
        batching = SimpleNamespace(micro_batch_size=6, accumulation_steps=1)

        def fullest_batch(self) -> Any:
            return SimpleNamespace(to=lambda device: device)

        def set_micro_batch_size(self, size: int) -> None:
            self.batching = SimpleNamespace(micro_batch_size=size, accumulation_steps=6 // size)

    trainer: Any = SimpleNamespace(
        datamodule=Data(),
        strategy=SimpleNamespace(all_gather=lambda fits: next(fits_on_ranks)),
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
    )
    module: Any = SimpleNamespace(
        trainer=trainer,
        model=model,
        strategy=SimpleNamespace(root_device=torch.device("cpu"), shard_batch=lambda batch: batch),
        global_rank=0,
        loss=lambda batch: weight.sum(),
        reset_step=lambda: None,
    )
    probe_micro_batch(module, "adamw")
    assert trainer.datamodule.batching.micro_batch_size == 3


AUTO = (
    "trainer.gradient_accumulation_steps=auto",
    "trainer.max_steps=null",
    f"data.datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}}]",
)


@pytest.mark.parametrize(
    ("packs", "at_once", "expected"),
    [(1000, 1, 8), (80, 1, 8), (79, 1, 7), (20, 1, 2), (9, 1, 1), (80, 4, 2), (1, 64, 1)],
)
def test_an_epoch_has_ten_steps_if_it_has_the_packs(
    packs: int, at_once: int, expected: int
) -> None:
    assert fit_accumulation(8, packs, at_once) == expected


def batch_of(run: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return manifest["global_batch"] | {"total_steps": manifest["total_steps"]}


@pytest.mark.slow
def test_a_run_lowers_its_global_batch_says_so_and_keeps_it_when_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_into(tmp_path / "run", *AUTO)
    batch = batch_of(run)
    assert batch["gradient_accumulation_steps"] < 8
    assert batch["total_steps"] >= 10
    said = f"global batch: {batch['packs']}, not 8"
    assert said in (run / "train.log").read_text()

    longer = f"trainer.max_steps={batch['total_steps'] + 1}"
    go_on(run, longer, "resume_allow=[epochs]")
    assert batch_of(run) == batch | {"total_steps": batch["total_steps"] + 1}

    words = [word for word in small_run(*AUTO) if not word.startswith("evaluation.")]
    capsys.readouterr()
    preview(load_config("preview", [*words, f"output.dir={tmp_path / 'preview'}"]))
    assert said in " ".join(capsys.readouterr().out.split())
    on_card = ["hardware=h100", f"output.dir={tmp_path / 'plan'}"]
    plan(load_config("plan", [*words, *on_card]))
    settings = json.loads((tmp_path / "plan" / "plan.json").read_text())["settings"]
    assert settings["accumulation"] * settings["micro_batch_size"] == batch["packs"]


@pytest.mark.parametrize(
    "typed", [{"global_batch_size": 8}, {"gradient_accumulation_steps": 8}, {"max_steps": 3}, {}]
)
def test_a_typed_batch_or_number_of_steps_stays(typed: dict[str, int]) -> None:
    assert adapts_to_small_data(TrainerConfig(**typed), StrategyConfig()) is not bool(typed)
