"""Lightning's trainer with our strategies: its first step is checked, and its end moves nothing."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch

from app.model.adapter import LoraConfig, apply_adapter
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig
from app.training.callbacks import GradientCheck
from common.errors import UserError
from tests.conftest import TrainRun
from tests.ranks import on_ranks
from tests.strategy.zero_training import SHARD_EVERYTHING, trainer_of
from tests.tiny import small_run, tiny_llama

STRATEGIES: list[StrategyConfig] = [
    DdpConfig(),
    FsdpConfig(name="tp", tensor_parallel_size=2, shards_data_parallel=False),
    ZeroConfig(name="zero2", stage=2),
    ZeroConfig(name="zero3", config=SHARD_EVERYTHING),
]
PARTS = ["accelerator", "checkpoint_io", "cluster_environment", "precision_plugin"]


def build(on_meta: bool = False, **_: Any) -> Any:
    """A Llama with LoRA whose second layer never calls its MLP."""
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = tiny_llama(hidden_act="silu")
        model.model.layers[1].mlp.forward = torch.zeros_like
        return apply_adapter(model, LoraConfig(r=4, dropout=0.0), half_precision=False)


class Module(L.LightningModule):
    """Takes a step, of which it never sees the clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.strategy: Any = self.trainer.strategy
            self.model = self.strategy.build_model(build)

    def configure_optimizers(self) -> Any:
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        return torch.optim.AdamW(weights, fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = torch.arange(3, 15).unsqueeze(0) + self.global_rank
        return self.strategy.run_micro_batches(
            [ids, ids], lambda rows: self.model(input_ids=rows, labels=rows, use_cache=False).loss
        )

    def optimizer_zero_grad(self, *args: Any) -> None: ...

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the step came")


class Still(Module):
    """A module that must stay where it is."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...

    def cpu(self) -> Any:
        raise AssertionError("all weights are moved to the host")


def first_error(config: StrategyConfig) -> str:
    """Return the error of the check of gradients in the first step."""
    try:
        trainer_of(config, callbacks=[GradientCheck()]).fit(Module(), [0])
    except UserError as error:
        return str(error)
    return "no error"


def end_of(config: StrategyConfig) -> tuple[bool, list[str]]:
    """Return whether a strategy unwraps the module, and which of its parts are torn down."""
    ended: list[str] = []
    trainer, module = trainer_of(config), Still()
    for part in PARTS:
        getattr(trainer.strategy, part).teardown = lambda part=part: ended.append(part)
    trainer.fit(module, [0])
    strategy: Any = trainer.strategy
    return strategy.model is module, sorted(ended)


def first_steps() -> list[list[Any]]:
    found: list[list[Any]] = []
    environment = dict(os.environ)
    for find in (first_error, end_of):
        found.append([])
        for config in STRATEGIES:
            os.environ |= environment  # Lightning takes out what it has read
            found[-1].append(find(config))
    return found


@pytest.mark.slow
def test_every_rank_reports_matrices_without_gradients_and_tears_down_in_place() -> None:
    skipped = "3 of 14 adapted matrices got no gradient, the first is model.layers.1.mlp."
    for errors, ends in on_ranks(2, first_steps):
        for config, error, (is_back, ended) in zip(STRATEGIES, errors, ends, strict=True):
            assert skipped in error, config.name
            assert ended == PARTS and is_back is (config.name != "zero3"), config.name


def test_one_device_tears_down_in_place() -> None:
    assert end_of(StrategyConfig(name="single")) == (True, PARTS)


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
