"""adapter=freeze trains the chosen layers and modules and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.model.adapter import FreezeConfig, apply_adapter
from app.model.base import ModelConfig, load_base
from app.model.quantization import QuantizationConfig
from tests.tiny import probe_of, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

BF16, FP32 = torch.bfloat16, torch.float32


def freeze(model: Any, *, half: bool = False, token_ids: Any = (), **settings: Any) -> Any:
    config = FreezeConfig(**settings)
    return apply_adapter(model, config, half_precision=half, token_ids=token_ids)


def trained(model: Any) -> set[str]:
    return {name.removesuffix(".weight") for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("model", "prefixes"),
    [
        (tiny_llama(num_hidden_layers=3), ("model.layers.1.", "model.layers.2.")),
        (tiny_gpt2(), ("transformer.h.0.", "transformer.h.1.")),
        (tiny_t5(num_layers=2), ("decoder.block.0.", "decoder.block.1.")),
        (tiny_bart(), ("model.decoder.layers.0.", "model.decoder.layers.1.")),
    ],
)
def test_the_last_two_layers_train_by_default(model: Any, prefixes: tuple[str, ...]) -> None:
    frozen = freeze(model)
    expected = {
        name.removesuffix(".weight")
        for name, _ in model.named_parameters()
        if name.startswith(prefixes)
    }
    assert trained(frozen) == expected


def test_layers_and_modules_add_up() -> None:
    model = tiny_llama(tie_word_embeddings=False)
    chosen = trained(freeze(model, layers=[0], modules=["lm_head", r"model\.layers\.1\..*norm"]))
    layer = {name for name in chosen if name.startswith("model.layers.0.")}
    assert len(layer) == 9
    assert chosen - layer == {
        "lm_head",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
    }
    assert trained(freeze(tiny_llama(), layers="none", modules=["norm"])) == {"model.norm"}
    assert len(trained(freeze(tiny_llama(), layers="all"))) == 18


@pytest.mark.parametrize(("half", "expected"), [(False, FP32), (True, BF16)])
def test_trainable_layers_are_fp32_unless_half_precision(half: bool, expected: torch.dtype) -> None:
    model = freeze(tiny_llama().to(BF16), half=half, layers="top 1", modules=["lm_head"])
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {
        (True, expected),
        (False, BF16),
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.autocast("cpu", BF16, enabled=not half):
        model.train()(**probe_of(model)).logits.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_rows_of_new_tokens_need_trainable_embedding_and_head() -> None:
    said = r"in model.embed_tokens .*adapter\.modules=\[embed_tokens"
    with pytest.raises(ValueError, match=said):
        freeze(tiny_llama(), token_ids=[3])
    assert trained(freeze(tiny_llama(), token_ids=[3], modules=["embed_tokens"]))
    untied = {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match="rows of new tokens in lm_head"):
        freeze(tiny_llama(**untied), token_ids=[3], modules=["embed_tokens"])
    assert trained(freeze(tiny_llama(**untied), token_ids=[3], modules=["embed_tokens", "lm_head"]))


def test_quantized_layers_cannot_train_and_unquantized_modules_can(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    settings = QuantizationConfig(method="nf4")
    base = load_base(ModelConfig(path=str(tmp_path)), "sdpa", FP32, settings)
    with pytest.raises(ValueError, match=r"model\.layers\.1 is quantized .*type quantization=none"):
        freeze(base, layers="top 1")
    assert trained(freeze(base, layers="none", modules=["norm"])) == {"model.norm"}
