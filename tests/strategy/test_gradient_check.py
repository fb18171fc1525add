"""Under every strategy, all ranks report adapted matrices that got no gradient."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch

from app.model.adapter import LoraConfig, apply_adapter
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig, build_strategy
from app.training.callbacks import GradientCheck
from common.errors import UserError
from tests.ranks import on_ranks
from tests.strategy.zero_training import SHARD_EVERYTHING
from tests.tiny import tiny_llama

STRATEGIES: list[StrategyConfig] = [
    DdpConfig(),
    FsdpConfig(),
    FsdpConfig(name="tp", tensor_parallel_size=2, shards_data_parallel=False),
    ZeroConfig(name="zero1", stage=1),
    ZeroConfig(name="zero2", stage=2),
    ZeroConfig(name="zero3", config=SHARD_EVERYTHING),
]
SKIPPED = "model.layers.1.mlp"


def build(on_meta: bool = False, **_: Any) -> Any:
    """A Llama with LoRA whose second layer never calls its MLP."""
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = tiny_llama(hidden_act="silu")
        model.model.layers[1].mlp.forward = torch.zeros_like
        return apply_adapter(model, LoraConfig(r=4, dropout=0.0), half_precision=False)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.strategy.build_model(build)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [w for w in self.model.parameters() if w.requires_grad], fused=True
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = torch.arange(3, 15).unsqueeze(0) + self.global_rank
        return self.strategy.run_micro_batches(
            [ids, ids], lambda rows: self.model(input_ids=rows, labels=rows, use_cache=False).loss
        )

    def optimizer_zero_grad(self, *args: Any) -> None: ...

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the step came")


def first_step(config: StrategyConfig) -> str:
    num_ranks = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=build_strategy(config, accelerator="cpu", num_ranks=num_ranks),
        callbacks=[GradientCheck()],
        max_steps=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(Module(), [0])
    except UserError as error:
        return str(error)
    return "no error"


def first_steps() -> list[str]:
    messages, environment = [], dict(os.environ)
    for config in STRATEGIES:
        os.environ |= environment  # Lightning takes out what it has read
        messages.append(first_step(config))
    return messages


@pytest.mark.slow
def test_every_rank_reports_matrices_without_gradients() -> None:
    for answers in on_ranks(2, first_steps):
        for config, messages in zip(STRATEGIES, answers, strict=True):
            assert (
                f"3 of 14 adapted matrices got no gradient, the first is {SKIPPED}." in messages
            ), config.name
