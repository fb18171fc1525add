"""A strategy owns the forward and backward passes of a step: their order is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from app.strategy.ddp import SingleDevice
from data_modules import Batch
from tests.conftest import TrainRun
from tests.tiny import small_run

WORDS = small_run("trainer.max_steps=4", "trainer.gradient_accumulation_steps=2")


def all_forward_first(
    strategy: SingleDevice, batches: Sequence[Batch], loss: Callable[[Batch], Tensor]
) -> Tensor:
    """Run all forward passes, then the backward passes from the last to the first (GPipe)."""
    values: list[Any] = [strategy.run_forward(loss, strategy.shard_batch(b)) for b in batches]
    for value in reversed(values):
        strategy.run_backward(value)
    return sum(value.detach() for value in values)  # type: ignore[return-value]


def trained(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_schedule_of_a_step_can_be_exchanged(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(train_run(*WORDS))
    sizes: list[int] = []

    def counted(strategy: SingleDevice, batches: Sequence[Batch], loss: Any) -> Tensor:
        sizes.append(len(batches))
        return all_forward_first(strategy, batches, loss)

    monkeypatch.setattr(SingleDevice, "run_micro_batches", counted)
    other = trained(train_run(*WORDS))
    assert sizes == [2] * 4
    # Bit for bit: a sum of two gradients does not depend on their order.
    assert plain.keys() == other.keys()
    assert all(plain[name].equal(other[name]) for name in plain)
