"""Adapters in a gate's kernel equal peft's own layers; other MLPs run without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model import fp8, kernels
from app.model.adapter import gated, hold_transposed
from app.model.adapter.gated import by_operators
from app.model.recompute import RecomputeConfig, apply_recompute
from tests.model.test_lora_fused import (
    check_against_peft,
    distance,
    grouped,
    in_4_bits,
    inputs_of,
    outcome,
    pair,
)
from tests.tiny import tiny_llama

CPU = torch.device("cpu")


def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, low_down: Tensor,
    b_gate: Tensor, b_up: Tensor, a_down: Tensor, factors: Sequence[Tensor] = (),
    *, is_gelu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients by autograd; those of gate and up overwrite them, or are quantized."""
    with torch.enable_grad():
        inputs = [
            each.detach().clone().requires_grad_() for each in (gate, up, low, b_gate, b_up, a_down)
        ]
        outputs = by_operators(*inputs, is_gelu=is_gelu)
        found = torch.autograd.grad(outputs, inputs, [grad, low_down])
    sums = found[2], found[3].T, found[4].T, found[5]
    if factors:
        return *sums, *fp8.quantize_rows(*found[:2], factors=factors)
    gate.data.copy_(found[0])
    up.data.copy_(found[1])
    return sums


STANDIN: Any = SimpleNamespace(forward=by_operators, backward=_backward, MAX_RANK=6, MULTIPLE=16)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the GPU's code path on the CPU."""
    monkeypatch.setattr(gated, "_proven_kernels", lambda *_: STANDIN)
    monkeypatch.setattr(gated, "_HALF", (torch.float32,))
    monkeypatch.setattr("app.model.adapter.fused.lora_comes_first", lambda x: True)
    monkeypatch.setattr("app.model.adapter.fused._is_faster_in_4_bits", lambda x, _: x.training)
    monkeypatch.setattr(kernels, "is_faster", lambda *_: True)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def joined(model: Any, decided: Mapping[str, bool] | None = None) -> int:
    """Fuse gates, group adapters and join both; the number of joined MLPs."""
    gates = []
    for module in model.modules():
        if hasattr(module, "gate_proj"):
            gates.append(kernels.FusedGate(_swiglu, module, "silu"))
            module.forward = gates[-1]
    grouped(model)
    found = kernels.join_adapters(model, lambda module: nullcontext(), CPU, decided or {})
    assert found == (decided or found)
    return sum(gate.joined is not None for gate in gates)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("make", "mode"), [(tiny_llama, "full"), (in_4_bits, "none"), (in_4_bits, "selective")]
)
def test_values_and_gradients_equal_peft(make: Any, mode: str) -> None:
    base = make()
    apply_recompute(base, RecomputeConfig(mode=mode))
    plain, fused = pair(base, alpha=12.0, alpha_pattern={"down_proj": 2.0})
    assert joined(fused) == 2
    check_against_peft(plain, fused)


@pytest.mark.usefixtures("on_a_gpu")
def test_on_an_fp8_base_the_result_is_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_llama(hidden_size=64, intermediate_size=128)
    fp8.quantize_to_fp8(base, torch.float32)
    plain, fused = pair(base)
    assert joined(fused) == 2
    with fp8.without_rounding():
        truth, exact = outcome(plain)
        logits, grads = outcome(fused)
    assert (logits - truth).norm() < 1e-5 * truth.norm() and distance(grads, exact) < 1e-4
    (expected, theirs), (logits, grads) = outcome(plain), outcome(fused)
    assert (logits - expected).norm() < 2e-3 * expected.norm()
    assert distance(grads, exact) < 1.02 * distance(theirs, exact)
    hold_transposed(fused)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "transpose", None)
        torch.testing.assert_close(outcome(fused), (logits, grads), rtol=0, atol=0)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("numbers", "settings"),
    [
        ({"mlp_bias": True}, {}),
        ({}, {"dropout": 0.1}),
        ({}, {"rank_pattern": {"down_proj": 2}}),
        ({}, {"alpha_pattern": {"up_proj": 3.0}}),
        ({}, {"r": 8}),
        ({"intermediate_size": 72}, {}),
        ({}, {"target_modules": ["gate_proj", "up_proj"]}),
    ],
    ids=["bias", "dropout", "ranks", "scales", "wide rank", "width", "down is frozen"],
)
def test_other_layers_are_not_joined(
    numbers: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = pair(tiny_llama(**numbers), **settings)
    assert joined(fused) == 0
    assert distance(outcome(fused)[1], outcome(plain)[1]) < 1e-5


@pytest.mark.usefixtures("on_a_gpu")
def test_evaluation_and_a_disabled_adapter_compute_what_peft_does() -> None:
    plain, fused = pair(tiny_llama())
    joined(fused)
    for model in (plain, fused):
        model.eval()
    with torch.no_grad():
        assert torch.equal(fused(**inputs_of(fused)).logits, plain(**inputs_of(plain)).logits)
        fused.train()
        with plain.disable_adapter(), fused.disable_adapter():
            base, found = (model(**inputs_of(model)).logits for model in (plain, fused))
    assert torch.allclose(found, base, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("decided", [True, False])
def test_a_resumed_run_takes_the_kernel_that_its_checkpoint_names(
    decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_faster", lambda *_: not decided)
    _, fused = pair(tiny_llama())
    mlp = fused.base_model.model.model.layers[0].mlp
    widths = f"{mlp.up_proj.in_features}x{mlp.up_proj.out_features}"
    assert joined(fused, {widths: decided}) == 2 * decided


@pytest.mark.parametrize("is_gelu", [False, True])
def test_kernels_that_compute_something_else_are_found(is_gelu: bool) -> None:
    checks: list[Any] = [gated._are_equal] * 4 + [gated._quantizes_equally] * 2
    for number, is_right in enumerate(checks):

        def wrong(*given: Any, is_gelu: bool, number: int = number) -> tuple[Tensor, ...]:
            found = list(_backward(*given, is_gelu=is_gelu))
            wrong = slice(number, number + 1 if number < 4 else None)
            found[wrong] = [(1.05 * each.float()).to(each) for each in found[wrong]]
            return tuple(found)

        assert is_right(STANDIN, CPU, is_gelu)
        differing = SimpleNamespace(**vars(STANDIN) | {"backward": wrong})
        assert not is_right(differing, CPU, is_gelu)
    other = SimpleNamespace(
        **vars(STANDIN)
        | {"forward": lambda *given, is_gelu: by_operators(*given, is_gelu=not is_gelu)}
    )
    assert not gated._are_equal(other, CPU, is_gelu)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [4, 16, 40, 64])
@pytest.mark.parametrize("base", ["bf16", "nf4", "fp8"])
def test_on_a_gpu_the_kernels_give_what_the_layers_give(base: str, rank: int) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 2560}
    model = in_4_bits(torch.bfloat16, **shape) if base == "nf4" else tiny_llama(**shape).bfloat16()
    if base == "fp8":
        fp8.quantize_to_fp8(model, torch.bfloat16)
    plain, fused = (each.to("cuda") for each in pair(model, r=rank))
    device = torch.device("cuda", 0)
    found = gated._proven_kernels(device, base == "fp8")
    assert found is not None and found.__name__.endswith("gate_kernel")
    kernels.fuse_layers(fused, device=device)
    grouped(fused)
    kernels.join_adapters(fused, lambda module: nullcontext(), device, {})
    (expected, truths), (logits, grads) = (outcome(each, torch.bfloat16) for each in (plain, fused))
    assert (logits - expected).norm() < 0.02 * expected.norm()
    assert distance(grads, truths) < (0.2 if base == "fp8" else 0.05)
