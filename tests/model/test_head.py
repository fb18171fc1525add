"""The chunked loss of a head equals the loss of the model's logits, or is not used."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from app.model.adapter import LoraConfig, apply_adapter
from app.model.chunks import rows_per_chunk
from app.model.head import (
    LossHead,
    check_head_loss,
    fuse_head,
    head_log_probs,
    head_loss,
    linear_cross_entropy,
    token_losses,
)
from tests.tiny import random_ids, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(kind: str, **numbers: Any) -> Any:
    """Build a tiny random model of this type."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, **numbers)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS = {
    "tied": lambda: tiny_llama(),
    "untied": lambda: tiny_llama(tie_word_embeddings=False),
    "gpt2": lambda: tiny_gpt2(),
    "softcap": lambda: causal("gemma2", head_dim=8, final_logit_softcapping=2.0),
    "softcap of another name": lambda: causal("recurrent_gemma", logits_soft_cap=2.0),
    "divided": lambda: causal("granite", logits_scaling=3.0),
    "multiplied": lambda: causal("cohere", logit_scale=0.3),
    "bias": lambda: causal("phi"),
}


def losses_of(model: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return sum, losses and gradients of trainable parameters, from `head_loss`."""
    ids, weights = random_ids(2), torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, ::4] = -100
    model.zero_grad()
    total, losses = head_loss(model, {"input_ids": ids, "use_cache": False}, labels, weights)
    total.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return total.detach(), losses, labels, grads


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
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() <= 1e-5 * plain_grads[name].norm(), name


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
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"log_probs": log_probs.detach(), **grads})
    assert found[0].keys() == found[1].keys()
    for name, plain in found[0].items():
        assert (found[1][name] - plain).norm() <= 1e-5 * plain.norm(), name


def test_a_fused_head_keeps_logits_and_parameter_names() -> None:
    plain, fused = tiny_llama(), tiny_llama()
    fuse_head(fused)
    ids = random_ids()
    assert torch.equal(fused(ids).logits, plain(ids).logits)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert fused.lm_head.weight is fused.get_input_embeddings().weight


def test_the_head_of_bart_is_not_fused() -> None:
    model = tiny_bart()
    fuse_head(model)
    assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_a_head_with_an_adapter_returns_logits() -> None:
    model = tiny_llama(tie_word_embeddings=False)
    fuse_head(model)
    adapted = apply_adapter(model, LoraConfig(r=4), half_precision=False, token_ids=[5])
    assert not isinstance(adapted.get_output_embeddings(), LossHead)
    total, *_ = losses_of(adapted)
    assert total.isfinite()


@pytest.mark.parametrize("factor", [2.0, 1.001])
def test_modified_logits_are_detected_and_logged(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * factor
        return output

    model.forward = changed
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


def test_a_forward_without_a_call_of_the_head_is_an_error() -> None:
    model = tiny_llama()
    fuse_head(model)
    with pytest.raises(RuntimeError, match="did not call its head"):
        model.lm_head.pop_loss()


def test_gpu_chunks_are_whole_tiles_of_a_minimum_size() -> None:
    for vocabulary in (32_000, 128_256, 262_144):
        rows = rows_per_chunk(vocabulary, "cuda")
        assert rows % 128 == 0
        assert rows >= 1024
    assert rows_per_chunk(2**26, "cpu") == 1


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
    head, forward = model.get_output_embeddings(), model.forward
    head.__class__ = type("UnitLossHead", (Unit, LossHead), {})

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2.0
        return output

    model.forward = changed
    check_head_loss(model, "eager")
    assert isinstance(head, Unit) and not isinstance(head, LossHead)
    assert head(torch.ones(1, 1, head.in_features)).shape == (1, 1, head.out_features)
