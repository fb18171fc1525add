"""The chunked loss of a head equals the loss of the model's logits, or is not used."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.model import recompute
from app.model.adapter import LoraConfig, apply_adapter
from app.model.head import (
    LossHead,
    check_head_loss,
    fuse_head,
    head_log_probs,
    head_loss,
    linear_cross_entropy,
    linear_log_probs,
    token_losses,
)
from tests.families import tiny_family
from tests.operators import Operators
from tests.tiny import random_ids, tiny_gpt2, tiny_llama, tiny_t5

MODELS = {
    "tied": lambda: tiny_llama(),
    "untied": lambda: tiny_llama(tie_word_embeddings=False),
    "gpt2": lambda: tiny_gpt2(),
    "softcap": lambda: tiny_family("gemma2", final_logit_softcapping=2.0),
    "softcap of another name": lambda: tiny_family("recurrent_gemma", logits_soft_cap=2.0),
    "divided": lambda: tiny_family("granite", logits_scaling=3.0),
    "multiplied": lambda: tiny_family("cohere", logit_scale=0.3),
    "bias": lambda: tiny_family("phi"),
}


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= bound * tensor.norm(), name


def losses_of(model: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return sum, losses and gradients of trainable parameters, from `head_loss`."""
    ids, weights = random_ids(2), torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, ::4] = -100
    model.zero_grad()
    total, losses = head_loss(model, {"input_ids": ids, "use_cache": False}, labels, weights)
    total.backward()
    return total.detach(), losses, labels, gradients_of(model)


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_equal_those_of_the_logits(kind: str) -> None:
    model = MODELS[kind]()
    plain_total, plain_losses, _, plain_grads = losses_of(model)
    fuse_head(model)
    check_head_loss(model, "eager")
    assert isinstance(model.get_output_embeddings(), LossHead), "it was proven equal"
    total, losses, _, grads = losses_of(model)
    assert total.item() == pytest.approx(plain_total.item(), rel=1e-6)
    assert torch.allclose(losses, plain_losses, rtol=1e-5, atol=1e-6)
    assert_near(grads, plain_grads, 1e-5)


@pytest.mark.parametrize("kind", [*MODELS, "t5"])
def test_log_probabilities_and_gradients_equal_those_of_the_logits(kind: str) -> None:
    model = MODELS[kind]() if kind in MODELS else tiny_t5()
    ids = random_ids(2)
    inputs = {"input_ids": ids, "use_cache": False}
    inputs |= {} if kind in MODELS else {"decoder_input_ids": ids}
    labels = ids.roll(-1, 1)
    labels[:, ::4] = -100
    found = []
    for fuses in (False, True):
        if fuses:
            fuse_head(model)
            assert isinstance(model.get_output_embeddings(), LossHead)
        model.zero_grad()
        log_probs = head_log_probs(model, inputs, labels)
        assert log_probs.shape == labels.shape
        chosen, rejected = log_probs.sum(1)
        (-torch.nn.functional.logsigmoid((chosen - rejected) / 100)).backward()
        found.append({"log_probs": log_probs.detach(), **gradients_of(model)})
    assert_near(found[1], found[0], 1e-5)


def test_a_fused_head_keeps_logits_and_parameter_names() -> None:
    plain, fused = tiny_llama(), tiny_llama()
    fuse_head(fused)
    ids = random_ids()
    assert torch.equal(fused(ids).logits, plain(ids).logits)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert fused.lm_head.weight is fused.get_input_embeddings().weight


def test_a_head_with_an_adapter_returns_logits() -> None:
    model = tiny_llama(tie_word_embeddings=False)
    fuse_head(model)
    adapted = apply_adapter(model, LoraConfig(r=4), half_precision=False, token_ids=[5])
    assert not isinstance(adapted.get_output_embeddings(), LossHead)
    total, *_ = losses_of(adapted)
    assert total.isfinite()


def modify_logits(model: Any, factor: float) -> None:
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * factor
        return output

    model.forward = changed


@pytest.mark.parametrize("factor", [2.0, 1.001])
def test_modified_logits_are_detected_and_logged(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    modify_logits(model, factor)
    fuse_head(model)
    with caplog.at_level(logging.INFO):
        check_head_loss(model, "eager")
    assert "full logits" in caplog.text
    head = model.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    ids = random_ids()
    labels, weights = ids.roll(-1, 1), torch.ones(1, 16)
    total, _ = head_loss(model, {"input_ids": ids, "use_cache": False}, labels, weights)
    expected = token_losses(model(ids).logits, labels).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("computed", [head_loss, head_log_probs])
def test_the_backward_pass_visits_the_output_of_the_forward(computed: Any) -> None:
    """Strategies gather the weights for the head's gradient in a hook on that output."""
    model = tiny_llama()
    fuse_head(model)
    order: list[str] = []

    def wait_at(module: Any, inputs: Any, output: Any) -> None:
        output.logits.register_hook(lambda grad: order.append("output"))

    model.register_forward_hook(wait_at)
    model.lm_head.weight.register_hook(lambda grad: order.append("head"))
    ids = random_ids()
    if computed is head_loss:
        total, _ = head_loss(model, {"input_ids": ids}, ids, torch.ones(ids.shape))
    else:
        total = head_log_probs(model, {"input_ids": ids}, ids).sum()
    total.backward()
    assert order == ["output", "head"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_bf16_loss_on_a_gpu_is_accurate_in_a_tenth_of_the_memory(is_fused: bool) -> None:
    kernel = import_module("app.model.loss_kernel").cross_entropy_ if is_fused else None
    vocabulary, width, positions = 128_256, 512, 8192
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * 0.05
    hidden = torch.randn(positions, width, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (positions,), device="cuda")
    labels[::3] = -100
    weights = torch.rand(positions, device="cuda")

    def measured(of: Any) -> tuple[float, Tensor, int]:
        hidden.requires_grad_().grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total = of()
        total.backward()
        assert hidden.grad is not None
        return total.item(), hidden.grad.float(), torch.cuda.max_memory_allocated() - before

    def plain() -> Tensor:
        losses = token_losses((hidden @ weight.T).unsqueeze(0), labels.unsqueeze(0))
        return (losses * weights).sum()

    plain_total, plain_grad, plain_bytes = measured(plain)
    total, grad, num_bytes = measured(
        lambda: linear_cross_entropy(hidden, weight, labels, weights, kernel=kernel)[0]
    )
    exact = token_losses((hidden.detach().float() @ weight.float().T)[None], labels[None])
    exact_total = (exact * weights).sum().item()
    assert abs(total - exact_total) <= 1.5 * abs(plain_total - exact_total) + 1e-4 * exact_total
    assert (grad - plain_grad).norm() <= 2e-2 * plain_grad.norm()
    assert num_bytes <= 0.1 * plain_bytes


def test_a_class_that_fsdp_derived_from_a_head_is_kept() -> None:
    """FSDP2 finds the module by this class to gather its weights."""

    class Unit:
        pass

    model = tiny_llama()
    fuse_head(model)
    head = model.get_output_embeddings()
    head.__class__ = type("UnitLossHead", (Unit, LossHead), {})
    modify_logits(model, 2.0)
    check_head_loss(model, "eager")
    assert isinstance(head, Unit) and not isinstance(head, LossHead)
    assert head(torch.ones(1, 1, head.in_features)).shape == (1, 1, head.out_features)


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
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor,
    bias: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with all logits at once, in fp64."""
    logits = hidden.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (losses * loss_weights).sum(), losses


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
    (7, False, 3.0, by_torch),
    (10_000, True, 3.0, None),
    (10_000, False, None, by_torch),
]


def preference(log_probs: Tensor) -> Tensor:
    """A loss of two halves, in which no position's weight is known before all are."""
    half = len(log_probs) // 2
    margin = log_probs[:half].sum() - log_probs[half:].sum()
    return -torch.nn.functional.logsigmoid(margin - margin.detach() + 0.3)


@pytest.mark.parametrize("of_log_probs", [False, True])
@pytest.mark.parametrize(("chunk", "has_bias", "softcap", "kernel"), CASES)
def test_values_and_gradients_equal_those_of_the_whole_logits(
    chunk: int,
    has_bias: bool,
    softcap: float | None,
    kernel: Any,
    of_log_probs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    hidden, weight, labels, weights = case(23)
    own = [hidden, weight, *([torch.randn(VOCABULARY)] if has_bias else [])]
    found = []
    for is_plain in (False, True):
        leaves = [each.clone().requires_grad_() for each in own]
        given = {"bias": leaves[2] if has_bias else None, "softcap": softcap}
        given |= {} if is_plain else {"kernel": kernel}
        if of_log_probs and not is_plain:
            values = linear_log_probs(*leaves[:2], labels, **given)
        else:
            one = plain if is_plain else linear_cross_entropy
            total, values = one(*leaves[:2], labels, weights, **given)
            values = -values if of_log_probs else values
        loss = preference(values) if of_log_probs else total * 0.25
        loss.backward()
        found.append((loss.double(), values.detach().double(), *(leaf.grad for leaf in leaves)))
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


def test_the_whole_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", 5 * VOCABULARY)
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
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", VOCABULARY)  # one position a chunk
    hidden, weight, *rest = case(600, dtype=torch.bfloat16)
    exact = weight.float().requires_grad_()
    linear_cross_entropy(hidden, weight.requires_grad_(), *rest)[0].backward()
    plain(hidden.float(), exact, *rest)[0].backward()
    assert (weight.grad.float() - exact.grad).norm() / exact.grad.norm() < 1e-2


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
