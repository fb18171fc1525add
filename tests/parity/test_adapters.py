"""Every adapter computes the formula of its paper, compared with a merge without peft."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.model.adapter import Ia3Config, LoraConfig, apply_adapter, probe_logits
from tests.tiny import TINY, probe_of

R, ALPHA = 4, 6.0
ATTENTION = {"llama": ["k_proj", "v_proj"], "gpt2": ["attn.c_attn"], "t5": ["k", "v"]}
FEED_FORWARD = {"llama": ["down_proj"], "gpt2": ["mlp.c_proj"], "t5": ["wo"]}


def adapt_and_train(base: Any, config: Any) -> tuple[Any, dict[str, dict[str, torch.Tensor]]]:
    """Adapt a base and change its trainable weights; return it with tensors by module and kind."""
    model = apply_adapter(base, config, half_precision=False).eval()
    torch.manual_seed(9)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            module, _, kind = short.removesuffix(".default").rpartition(".")
            tensors.setdefault(module, {})[kind] = parameter.data.clone()
    return model, tensors


def change(base: Any, module: str, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the weight [outputs, inputs] of a module by `new` of it."""
    found = base.get_submodule(module)
    transposed = type(found).__name__ == "Conv1D"
    weight = found.weight.data.T if transposed else found.weight.data
    weight = new(weight)
    found.weight.data = (weight.T if transposed else weight).contiguous()


def assert_same(model: Any, by_hand: Any, base: Any) -> None:
    row = probe_of(base)
    moved, expected, plain = (probe_logits(each, row) for each in (model, by_hand, base))
    assert (moved - plain).abs().max() > 0.05 * plain.abs().max()
    assert torch.allclose(moved, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "rslora", "has_patterns"),
    [("llama", False, False), ("gpt2", True, True), ("t5", True, False), ("t5", False, True)],
)
def test_lora_is_w_plus_scaled_b_a(kind: str, rslora: bool, has_patterns: bool) -> None:
    """arXiv 2106.09685 eq. 3, scale alpha / r; arXiv 2312.03732 alpha / sqrt(r)."""
    base = TINY[kind]()
    by_hand, plain = copy.deepcopy(base), copy.deepcopy(base)
    ending = FEED_FORWARD[kind][0]
    patterns = {"rank_pattern": {ending: 7}, "alpha_pattern": {ending: 21.0}}
    config = LoraConfig(r=R, alpha=ALPHA, dropout=0.0, use_rslora=rslora)
    for name, pattern in patterns.items() if has_patterns else ():
        setattr(config, name, pattern)
    model, tensors = adapt_and_train(base, config)
    seen = set()
    for module, part in tensors.items():
        is_other = has_patterns and module.endswith(f".{ending}")
        rank, alpha = (7, 21.0) if is_other else (R, ALPHA)
        seen.add(part["lora_A"].shape[0])
        update = alpha / (math.sqrt(rank) if rslora else rank) * part["lora_B"] @ part["lora_A"]
        change(by_hand, module, lambda weight, update=update: weight + update)
    assert seen == ({R, 7} if has_patterns else {R})
    assert_same(model, by_hand, plain)


@pytest.mark.parametrize(
    ("kind", "where"),
    [("llama", "attention"), ("gpt2", "both"), ("t5", "both"), ("llama", "feed-forward")],
)
def test_ia3_scales_outputs_of_attention_and_inputs_of_the_feed_forward(
    kind: str, where: str
) -> None:
    """arXiv 2205.05638 section 3.3: l_k * K, l_v * V, and (l_ff * f(x W1)) W2."""
    base = TINY[kind]()
    by_hand, plain = copy.deepcopy(base), copy.deepcopy(base)
    targets = (ATTENTION[kind] if where != "feed-forward" else []) + (
        FEED_FORWARD[kind] if where != "attention" else []
    )
    config = Ia3Config() if where == "both" else Ia3Config(target_modules=targets)
    model, tensors = adapt_and_train(base, config)
    blocks = 4 if kind == "t5" else 2
    attentions = 2 + 2 * 2 if kind == "t5" else 2  # T5's decoder has two per block
    num_vectors = attentions * len(ATTENTION[kind]) * (where != "feed-forward")
    assert len(tensors) == num_vectors + blocks * (where != "attention")
    for module, part in tensors.items():
        vector = part["ia3_l"].flatten()
        if any(module.endswith(f".{ending}") for ending in FEED_FORWARD[kind]):
            change(by_hand, module, lambda weight, vector=vector: weight * vector)
            continue
        change(by_hand, module, lambda weight, vector=vector: weight * vector.unsqueeze(1))
        bias = getattr(by_hand.get_submodule(module), "bias", None)
        if bias is not None:
            bias.data *= vector
    assert_same(model, by_hand, plain)


@pytest.mark.parametrize(
    ("kind", "init"),
    [("llama", "pissa"), ("gpt2", "pissa"), ("t5", "olora")],
)
def test_pissa_and_olora_start_as_the_base_and_train_as_lora(kind: str, init: str) -> None:
    """arXiv 2404.02948 and 2406.01775: initially W = residual + s B A, then trained as LoRA."""
    base = TINY[kind]()
    by_hand, plain = copy.deepcopy(base), copy.deepcopy(base)
    config = LoraConfig(r=R, alpha=ALPHA, dropout=0.0, init=init)
    started = apply_adapter(copy.deepcopy(base), config, half_precision=False)
    row = probe_of(plain)
    start, expected = probe_logits(started, row), probe_logits(plain, row)
    assert torch.allclose(start, expected, atol=1e-4 * expected.abs().max().item())
    first = {name: p.data.clone() for name, p in started.named_parameters() if p.requires_grad}
    model, tensors = adapt_and_train(base, config)
    for module, part in tensors.items():
        before = [
            first[f"base_model.model.{module}.{kind_of}.default.weight"]
            for kind_of in ("lora_B", "lora_A")
        ]
        update = ALPHA / R * (part["lora_B"] @ part["lora_A"] - before[0] @ before[1])
        change(by_hand, module, lambda weight, update=update: weight + update)
    moved, expected = probe_logits(model, row), probe_logits(by_hand, row)
    assert torch.allclose(moved, expected, atol=2e-4 * expected.abs().max().item())
