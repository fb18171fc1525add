"""The chunked loss of the head equals the plain one, in value and in every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.model import chunks
from app.model.head import linear_cross_entropy, linear_log_probs
from tests.operators import Operators

VOCABULARY, WIDTH = 50, 16


def case(positions: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """hidden, weight, labels, loss weights; a third of the labels are -100."""
    torch.manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (positions,))
    labels[::3] = -100
    weights = torch.rand(positions) + 0.5
    hidden, weight = torch.randn(positions, WIDTH), torch.randn(VOCABULARY, WIDTH)
    return [hidden.to(dtype), weight.to(dtype), labels, weights]


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with all logits at once, in fp64."""
    logits = hidden.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (losses * loss_weights).sum(), losses


def gradients(function: Any, tensors: list[Tensor], **more: Any) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
    bias = more.pop("bias", None)
    leaves += [bias.clone().requires_grad_()] if bias is not None else []
    options = {"bias": leaves[2]} if bias is not None else {}
    total, _ = function(*leaves[:2], *tensors[2:], **options, **more)
    (total * 0.25).backward()
    return [leaf.grad for leaf in leaves]


def by_torch(
    logits: Tensor, labels: Tensor, losses: Tensor, softcap: float | None, *, writes_gradient: bool
) -> None:
    """What the Triton kernel computes."""
    found = logits.detach().float().clone().requires_grad_()
    with torch.enable_grad():
        capped = found if softcap is None else softcap * torch.tanh(found / softcap)
        all_losses = torch.nn.functional.cross_entropy(capped, labels, reduction="none")
        (gradient,) = torch.autograd.grad(all_losses.sum(), found)
    losses.copy_(all_losses)
    if writes_gradient:
        logits.copy_(gradient)


CASES = [
    (1, True, None, None),
    (7, False, 3.0, None),
    (7, True, 3.0, by_torch),
    (7, False, None, by_torch),
    (10_000, True, 3.0, None),
    (10_000, False, None, by_torch),
]


@pytest.mark.parametrize(("chunk", "has_bias", "softcap", "kernel"), CASES)
def test_it_equals_the_plain_loss_and_its_gradients(
    chunk: int, has_bias: bool, softcap: float | None, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    tensors = case(23)
    more: dict[str, Any] = {"softcap": softcap}
    more |= {"bias": torch.randn(VOCABULARY)} if has_bias else {}
    fused = partial(linear_cross_entropy, kernel=kernel)
    ours, theirs = fused(*tensors, **more), plain(*tensors, **more)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-6)
    assert torch.allclose(ours[1].double(), theirs[1], rtol=1e-5, atol=1e-6)
    for one, other in zip(
        gradients(fused, tensors, **more),
        gradients(plain, tensors, **more),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def preference(log_probs: Tensor) -> Tensor:
    """A loss of two halves, in which no position's weight is known before all are."""
    half = len(log_probs) // 2
    margin = log_probs[:half].sum() - log_probs[half:].sum()
    return -torch.nn.functional.logsigmoid(margin - margin.detach() + 0.3)


@pytest.mark.parametrize(("chunk", "has_bias", "softcap", "kernel"), CASES)
def test_log_probabilities_and_gradients_of_a_loss_of_all_of_them(
    chunk: int, has_bias: bool, softcap: float | None, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    hidden, weight, labels, _ = case(23)
    ones = torch.ones(23)
    bias = torch.randn(VOCABULARY) if has_bias else None
    found = []
    for is_plain in (False, True):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        leaves += [bias.clone().requires_grad_()] if bias is not None else []
        own_bias = leaves[2] if has_bias else None
        if is_plain:
            log_probs = -plain(*leaves[:2], labels, ones, own_bias, softcap)[1]
        else:
            log_probs = linear_log_probs(
                *leaves[:2], labels, bias=own_bias, softcap=softcap, kernel=kernel
            )
        preference(log_probs).backward()
        found.append((log_probs.detach().double(), *(leaf.grad for leaf in leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert all(each.abs().max() > 0.01 for each in found[0])


def test_log_probabilities_keep_neither_logits_nor_a_copy_of_the_weight() -> None:
    hidden, weight, labels, _ = case(64)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, id)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        linear_log_probs(hidden.requires_grad_(), weight, labels)
    assert any(each is weight for each in kept)
    assert sorted(map(Tensor.numel, kept)) == sorted([64 * WIDTH, VOCABULARY * WIDTH, 64])


@settings(deadline=None, max_examples=30)
@given(positions=st.integers(1, 40), seed=st.integers(0, 100), scale=st.sampled_from([1e-3, 1, 30]))
def test_any_number_of_positions_and_any_size_of_logits(
    positions: int, seed: int, scale: float
) -> None:
    hidden, weight, labels, weights = case(positions, seed=seed)
    tensors = [hidden * scale, weight, labels, weights]
    assert linear_cross_entropy(*tensors)[0].item() == pytest.approx(
        plain(*tensors)[0].item(), rel=1e-5, abs=1e-6
    )


def test_a_position_without_a_label_learns_nothing() -> None:
    tensors = case(9)
    tensors[2][:] = -100
    total, losses = linear_cross_entropy(*tensors)
    assert total.item() == 0.0
    assert not losses.any()
    assert not any(gradient.any() for gradient in gradients(linear_cross_entropy, tensors))


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, labels, weights = case(9)
    hidden.requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, labels, weights)
    assert not losses.requires_grad
    assert total.grad_fn.grads[1] is None
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_the_whole_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 5 * VOCABULARY)
    largest = 0

    def note(*call: Any) -> None:
        nonlocal largest
        result = call[-1]
        # The transposed weight has as many columns, too.
        if isinstance(result, Tensor) and sorted(result.shape) != [1, VOCABULARY]:
            largest = max(largest, result.numel())

    hidden, weight, labels, weights = case(40)
    with Operators(note):
        linear_cross_entropy(hidden[:, :1].requires_grad_(), weight[:, :1], labels, weights)
        log_probs = linear_log_probs(hidden[:, :1].requires_grad_(), weight[:, :1], labels)
        preference(log_probs).backward()
    assert largest == 5 * VOCABULARY


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_rounds_the_products_and_nothing_else(autocast: bool) -> None:
    tensors = case(300, dtype=torch.float32 if autocast else torch.bfloat16)
    rounded = [tensors[0].bfloat16(), tensors[1].bfloat16(), *tensors[2:]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, losses = linear_cross_entropy(*tensors)
    logits = (rounded[0] @ rounded[1].T).double()
    expected = torch.nn.functional.cross_entropy(
        logits, tensors[2], ignore_index=-100, reduction="none"
    )
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert ours.item() == pytest.approx((expected * tensors[3]).sum().item(), rel=1e-5)


def test_weight_gradients_do_not_lose_small_parts_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", VOCABULARY)  # one position a chunk
    tensors = case(600, dtype=torch.bfloat16)
    ours = gradients(linear_cross_entropy, tensors)[1].float()
    exact = gradients(plain, [tensor.float() for tensor in tensors[:2]] + tensors[2:])[1]
    assert (ours - exact).norm() / exact.norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_gpu_is_that_of_pytorch(dtype: torch.dtype, softcap: float | None) -> None:
    from app.model.loss_kernel import MAX_BLOCK, cross_entropy_

    torch.manual_seed(0)
    logits = (4 * torch.randn(9, MAX_BLOCK + 100, device="cuda")).to(dtype)
    labels = torch.arange(9, device="cuda") * (MAX_BLOCK // 8)
    labels[::3] = -100
    found = []
    for kernel in (by_torch, cross_entropy_):
        losses, own = torch.full((9,), 7.0, device="cuda"), logits.clone()
        kernel(own, labels, losses, softcap, writes_gradient=False)
        assert torch.equal(own, logits)
        kernel(own, labels, losses, softcap, writes_gradient=True)
        found.append((losses, own))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-5)
