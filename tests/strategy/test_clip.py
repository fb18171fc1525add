"""On a GPU a fused AdamW clips as it reads gradients: the same step with one pass less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from app.strategy import mixin as interface
from app.strategy.mixin import Step
from app.training.module import skip_nonfinite_step


def step(size: float, *, limit: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Return the weights after a step on gradients scaled by `size`, and the gradient norm."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(8, 3, generator=random)) for _ in range(3)]
    optimizer: Any = torch.optim.AdamW(weights, lr=0.1, eps=1.0, fused=True)
    for weight in weights:
        weight.grad = size * torch.randn(8, 3, generator=random)
    norm = Step().clip(optimizer, limit)
    skip_nonfinite_step(optimizer, norm, is_scaled=False)
    optimizer.step()
    return [weight.detach() for weight in weights], norm


@pytest.mark.parametrize("size", [1e-3, 100.0, float("nan")])
def test_clipping_in_the_step_equals_clipping_before(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, norm_before = step(size)
    monkeypatch.setattr(interface, "_is_on_gpu", lambda weight: True)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    within, norm = step(size)
    assert norm.item() == pytest.approx(norm_before.item(), nan_ok=True)
    for one, other in zip(before, within, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("within", [False, True])
def test_without_a_limit_gradients_stay_as_they_are(
    within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.max_grad_norm=null`: bit for bit the step of a limit that nothing reaches."""
    monkeypatch.setattr(interface, "_is_on_gpu", lambda weight: within)
    unclipped, norm = step(100.0, limit=math.inf)
    far, _ = step(100.0, limit=1e9)
    clipped, _ = step(100.0, limit=1.0)
    assert norm.item() > 100
    for one, other, third in zip(unclipped, far, clipped, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, third)
    before, bad = step(float("nan"), limit=math.inf)
    assert math.isnan(bad.item())
    assert all(torch.isfinite(weight).all() for weight in before), "the step was skipped"
