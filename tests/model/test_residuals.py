"""Residual sums in a norm's kernel give the same values and gradients, in layers like Llama's."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.head import run_probe
from app.model.kernels import NORMED, fuse_layers, unfuse_layers
from app.model.recompute import RecomputeConfig, apply_recompute
from app.model.residuals import FusedLayer, fuse_sums
from tests.families import tiny_family
from tests.model.test_head import assert_near
from tests.model.test_kernels import add_rms_norm, install, packed_losses, references, trained
from tests.tiny import random_ids, tiny_llama

__all__ = ["install", "references"]


def with_sums(model: Any, *, joins_layers: bool = True) -> list[FusedLayer]:
    """Fuse a model's layers and their sums; the layers that have fused sums."""
    run = partial(run_probe, model, "sdpa", model.device)
    fuse_layers(model.train(), run=run)
    fuse_sums(model, lambda module: nullcontext(), run, joins_layers=joins_layers)
    forwards = (vars(module).get("forward") for module in model.modules())
    return [each for each in forwards if isinstance(each, FusedLayer)]


@pytest.mark.parametrize("family", ["qwen3", "olmoe"])
def test_values_and_gradients_are_the_same(references: None, family: str) -> None:
    model: Any = tiny_family(family)
    expected, truths = packed_losses(model.train())
    fused = with_sums(model)
    assert len(fused) == model.config.num_hidden_layers
    assert [each.following is None for each in fused] == [False] * (len(fused) - 1) + [True]
    loss, grads = packed_losses(model)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_near(grads, truths, 1e-5)
    unfuse_layers(model)
    assert packed_losses(model)[0].item() == expected.item()


@pytest.mark.parametrize(("every", "number"), [(1, 0), (2, 1)])
def test_recomputed_layers_are_left_alone(references: None, every: int, number: int) -> None:
    model: Any = tiny_llama()
    apply_recompute(model, RecomputeConfig(mode="full", every=every))
    expected, _ = packed_losses(model.train())
    fused = with_sums(model)
    assert len(fused) == number and all(each.following is None for each in fused)
    assert packed_losses(model)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_layer_norms_for_the_next_one_only_what_it_hands_on(references: None) -> None:
    model: Any = tiny_llama()
    with_sums(model)
    first, second = model.model.layers
    handed: list[Any] = []
    second.register_forward_pre_hook(lambda _, args: handed.append(vars(args[0]).get(NORMED)))
    packed_losses(model)
    assert handed[0][0] is second.input_layernorm.forward
    hidden = torch.randn(1, 4, 32)
    vars(hidden)[NORMED] = first.input_layernorm.forward, torch.zeros(1, 4, 32)
    expected = type(second.input_layernorm).forward(second.input_layernorm, hidden)
    assert torch.allclose(second.input_layernorm(hidden), expected)
    assert not vars(hidden)


def test_sharded_layers_are_not_joined(references: None) -> None:
    fused = with_sums(tiny_llama(), joins_layers=False)
    assert len(fused) == 2 and all(each.following is None for each in fused)


@pytest.mark.parametrize("family", ["gemma2", "phi3", "cohere"])
def test_layers_of_another_form_are_left_alone(references: None, family: str) -> None:
    assert with_sums(tiny_family(family)) == []


@pytest.mark.parametrize("way", ["wrong gradient", "broken"])
def test_a_kernel_that_differs_is_left_out(
    way: str, references: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def differing(hidden: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if way == "broken":
            raise RuntimeError("no such block")
        normed, total = add_rms_norm(hidden, residual, *rest)
        return normed, total.detach()

    functional = sys.modules["liger_kernel.transformers.functional"]
    monkeypatch.setattr(functional, "liger_fused_add_rms_norm", differing)
    assert with_sums(tiny_llama()) == []
    reason = "no such block" if way == "broken" else "the results differ"
    assert f"residual sums by PyTorch's operators ({reason})" in caplog.text


@pytest.mark.gpu
def test_sums_are_equal_on_a_gpu() -> None:
    pytest.importorskip("liger_kernel")
    model: Any = tiny_llama(hidden_size=256, intermediate_size=512).to("cuda", torch.bfloat16)
    ids = random_ids(2, 64).cuda()
    _, own = trained(model.train(), ids)
    assert len(with_sums(model)) == 2
    assert_near(trained(model.train(), ids)[1], own, 0.15)
    unfuse_layers(model)
