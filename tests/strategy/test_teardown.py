"""The end of a fit moves no weights: saving and evaluation need them where they are."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch

from app.strategy.settings import DdpConfig, StrategyConfig, ZeroConfig, build_strategy
from tests.conftest import TrainRun
from tests.ranks import on_ranks
from tests.tiny import small_run

PARTS = ["accelerator", "checkpoint_io", "cluster_environment", "precision_plugin"]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        return strategy.run_micro_batches([torch.ones(2, 4)], lambda rows: self.model(rows).sum())

    def cpu(self) -> Any:
        raise AssertionError("all weights are moved to the host")


def fit(config: StrategyConfig, num_ranks: int) -> tuple[bool, list[str]]:
    """Return whether a strategy unwraps the module, and which of its parts are torn down."""
    strategy: Any = build_strategy(config, accelerator="cpu", num_ranks=num_ranks)
    ended: list[str] = []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for part in PARTS:
        getattr(strategy, part).teardown = lambda part=part: ended.append(part)
    module = Module()
    trainer.fit(module, [0])
    return strategy.model is module, sorted(ended)


def test_one_device_tears_down_in_place() -> None:
    is_back, ended = fit(StrategyConfig(name="single"), 1)
    assert is_back and ended == PARTS


def fit_both() -> list[tuple[bool, list[str]]]:
    found, environment = [], dict(os.environ)
    for config in (DdpConfig(), ZeroConfig(name="zero2", stage=2)):
        os.environ |= environment  # Lightning takes out what it has read
        found.append(fit(config, 2))
    return found


@pytest.mark.slow
def test_two_ranks_tear_down_in_place() -> None:
    assert on_ranks(2, fit_both) == [[(True, PARTS)] * 2] * 2


def test_optimizer_states_are_freed_before_the_end(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is loaded next to the trained model for verification, and needs the memory."""
    from app import train

    modules: list[Any] = []
    own = train.finish

    def finish(config: Any, run: Any, module: Any, *others: Any) -> Any:
        modules.append(module)
        return own(config, run, module, *others)

    monkeypatch.setattr(train, "finish", finish)
    train_run(*small_run("trainer.max_steps=1"))
    assert not modules[0].optimizer.state
