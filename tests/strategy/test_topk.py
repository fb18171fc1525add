"""Top-k with error feedback: sent and unsent gradients add up to all gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.strategy.settings import DdpConfig, build_strategy
from tests.ranks import on_ranks, prepare_strategy
from tests.strategy.test_compression import SIZE, Matrix, whole

pytestmark = pytest.mark.slow

STEPS, SHARE = 6, 0.02


def gradients(share: float, bad_step: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's gradients after each backward pass, and its unsent gradients."""
    config = DdpConfig(compression="topk", topk_share=share)
    strategy: Any = prepare_strategy(build_strategy(config, accelerator="cpu", num_ranks=2))
    strategy.model = module = Matrix()
    strategy.configure_ddp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found, left = [], []
    for step in range(STEPS):
        rows = torch.randn(
            64, SIZE, generator=torch.Generator().manual_seed(9 * step + strategy.global_rank)
        )
        loss = strategy.model(rows) / 64
        (loss * float("nan") if step == bad_step else loss).backward()
        weight = module.matrix.weight
        assert weight.grad is not None
        found.append(weight.grad.clone())
        strategy.clip(optimizer, 1e9)
        left.append(strategy._topk.residuals.get(weight, torch.zeros(SIZE**2)).view(SIZE, SIZE))
        optimizer.zero_grad()
    return found, left


def test_sent_and_unsent_gradients_add_up() -> None:
    (first, left), (second, left_there) = on_ranks(2, gradients, SHARE)
    came = torch.zeros(SIZE, SIZE)
    meant = torch.zeros(SIZE, SIZE)
    for step in range(STEPS):
        assert torch.equal(first[step], second[step])
        assert 0 < first[step].count_nonzero() <= 2 * -(-SHARE * SIZE**2 // 1)
        came, meant = came + first[step], meant + whole(step)
        torch.testing.assert_close(came + (left[step] + left_there[step]) / 2, meant)


def test_topk_of_everything_equals_ddp() -> None:
    (first, left), (second, _) = on_ranks(2, gradients, 1.0)
    for step in range(STEPS):
        assert torch.equal(first[step], second[step])
        torch.testing.assert_close(first[step], whole(step), rtol=1e-6, atol=1e-6)
        assert not left[step].any()


def test_nonfinite_gradients_are_not_fed_back() -> None:
    for found, left in on_ranks(2, gradients, SHARE, 2):
        assert not found[2].isfinite().all() and not left[2].any()
        assert all(gradient.isfinite().all() for gradient in found[3:])


def test_state_of_another_strategy_is_not_restored() -> None:
    strategy: Any = build_strategy(DdpConfig(compression="topk"), accelerator="cpu", num_ranks=2)
    module = Matrix()
    strategy._lightning_module = SimpleNamespace(model=module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    weight = module.matrix.weight
    of_local_sgd = {"weight/matrix.weight": torch.ones(SIZE, SIZE), "step/matrix.weight": weight}
    strategy.restore_local_state(optimizer, of_local_sgd)
    assert strategy.local_state(optimizer) == {}
    strategy._topk.residuals[weight] = torch.ones(SIZE**2)
    own = strategy.local_state(optimizer)
    strategy.restore_local_state(optimizer, of_local_sgd | own)
    assert strategy._topk.residuals.keys() == {weight}
    assert torch.equal(strategy._topk.residuals[weight], torch.ones(SIZE**2))
