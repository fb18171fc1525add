"""In half precision, LoRA's inputs are not cast: the same results with fewer copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from app.model.adapter import LoraConfig, apply_adapter, skip_redundant_casts, unfuse_adapters
from benchmarks.gpu.model import quantize
from tests.operators import Operators
from tests.tiny import built, move, random_ids, save_with_tokenizer, tiny_llama


def trained(config: LoraConfig, *, is_quantized: bool = False) -> Any:
    """A bf16 or nf4 base with nonzero adapters in fp32."""
    model = tiny_llama(tie_word_embeddings=False).to(torch.bfloat16)
    if is_quantized:
        quantize(model, torch.bfloat16)
    adapted = apply_adapter(model, config, half_precision=False)
    move(adapted)
    unfuse_adapters(adapted)  # as for layers that cannot be fused
    for module in adapted.modules():
        vars(module).pop("forward", None)
    return adapted.train()


def step(model: Any) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes saved for the backward pass."""
    ids, kept = random_ids(2, 64), {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), saved:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads, sum(kept.values())


@pytest.mark.parametrize("is_quantized", [False, True])
def test_results_are_bit_equal_and_fewer_bytes_are_saved(is_quantized: bool) -> None:
    model = trained(LoraConfig(r=4, dropout=0.0), is_quantized=is_quantized)
    loss, grads, kept = step(model)
    skip_redundant_casts(model)
    new_loss, new_grads, new_kept = step(model)
    assert new_loss == loss
    assert grads.keys() == new_grads.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in new_grads.items())
    assert new_kept < 0.95 * kept


def test_a_4_bit_layers_output_is_not_copied() -> None:
    model = trained(LoraConfig(r=4, dropout=0.0), is_quantized=True)
    widths: list[int] = []

    def note(function: Any, args: Any, *_: Any) -> None:
        if function is torch.ops.aten.clone.default:
            widths.append(args[0].shape[-1])

    def count() -> int:
        widths.clear()
        with torch.autocast("cpu", torch.bfloat16), Operators(note), torch.no_grad():
            model(input_ids=random_ids(2, 64), use_cache=False)
        return sum(width in (16, 32, 48) for width in widths)

    before = count()
    skip_redundant_casts(model)
    assert before - count() == 14  # of two layers, seven matrices each
    with model.disable_adapter(), torch.no_grad():
        plain = model(input_ids=random_ids(), use_cache=False).logits
    assert plain.isfinite().all()


def test_dora_keeps_its_cast() -> None:
    model = trained(LoraConfig(r=4, use_dora=True))
    skip_redundant_casts(model)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert layers
    assert all(layer.cast_input_dtype_enabled for layer in layers)


@pytest.mark.parametrize(("precision", "casts"), [("bf16", False), ("fp32", True)])
def test_a_built_model_casts_only_without_autocast(
    tmp_path: Path, precision: str, casts: bool
) -> None:
    base = save_with_tokenizer(tiny_llama(vocab_size=768), tmp_path)
    model = built(base, precision=precision)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert {layer.cast_input_dtype_enabled for layer in layers} == {casts}
