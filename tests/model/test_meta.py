"""A rank that reads no weights builds the same modules, which the others' tensors then fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.base import ModelConfig
from common.errors import UserError
from tests.tiny import TINY_BASE, built, save_with_tokenizer, tiny_bart, tiny_gpt2, tiny_t5

LORA = LoraConfig(r=4)


def tensors_of(model: Any) -> Iterator[tuple[Any, ...]]:
    """All that a rank must be handed: weights, buffers, and tensors that are neither."""
    for name, module in model.named_modules():
        for kind in (module._parameters, module._buffers, vars(module)):
            for key, tensor in kind.items():
                if isinstance(tensor, torch.Tensor):
                    packed = type(tensor).__name__ == "Params4bit"
                    shape = None if packed else (tuple(tensor.shape), tensor.dtype)
                    yield f"{name}.{key}", type(tensor), shape, tensor.requires_grad


def check_same(base: Path, adapter: AdapterConfig, precision: str = "fp32", **how: Any) -> None:
    read, empty = (
        built(base, precision=precision, adapter=adapter, on_meta=on_meta, **how)
        for on_meta in (False, True)
    )
    assert list(tensors_of(empty)) == list(tensors_of(read))
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
    assert [type(module) for module in empty.modules()] == [type(one) for one in read.modules()]
    assert tied_names(empty) == tied_names(read)


def tied_names(model: Any) -> list[str]:
    """The names under which a weight is found that has another name already."""
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return sorted({*every} - {name for name, _ in model.named_parameters()})


@pytest.mark.parametrize(
    ("adapter", "precision", "how"),
    [
        (LORA, "bf16", {}),
        (LORA, "bf16-pure", {"method": "nf4"}),
        (LoraConfig(r=4, use_dora=True), "fp32", {}),
        (LoraConfig(r=4, init="pissa"), "bf16", {}),
        (LoraConfig(r=4, init="olora"), "fp32", {}),
        (LORA, "fp32", {"new_ids": [768, 769], "token_ids": [768, 769]}),
        (LoraConfig(r=4, modules_to_save=["norm"]), "fp32", {}),
        (Ia3Config(), "fp32", {}),
        (FreezeConfig(layers="top 1"), "bf16", {}),
        (FullConfig(), "bf16", {}),
    ],
    ids=["lora", "nf4", "dora", "pissa", "olora", "tokens", "to save", "ia3", "freeze", "full"],
)
def test_any_adapter_is_the_same_on_meta(
    adapter: AdapterConfig, precision: str, how: dict[str, Any]
) -> None:
    check_same(TINY_BASE, adapter, precision, **how)


@pytest.mark.parametrize(("make", "is_equal"), [(tiny_t5, False), (tiny_bart, True)])
def test_a_head_beside_a_tied_embedding_is_the_same_on_meta(
    make: Any, is_equal: bool, tmp_path: Path
) -> None:
    """As FLAN-T5's: transformers declares every T5 as tied, and ties what the files hold equal."""
    base = save_with_tokenizer(make(vocab_size=768, tie_word_embeddings=True), tmp_path)
    file = base / "model.safetensors"
    tensors = load_file(file)
    embedding = next(
        tensor for name, tensor in tensors.items() if ("shared." in name or "embed_tok" in name)
    )
    tensors["lm_head.weight"] = embedding.clone() if is_equal else torch.rand_like(embedding)
    save_file(tensors, file, {"format": "pt"})
    for how in ({}, {"new_ids": [768, 769], "token_ids": [768, 769]}):
        check_same(base, LORA, "bf16", **how)
    if is_equal:
        check_same(base, FullConfig())
        return
    for adapter in (FullConfig(), FreezeConfig()):
        with pytest.raises(UserError, match=rf"^adapter={adapter.name} saves .* a head unlike"):
            check_same(base, adapter)


@pytest.mark.parametrize(
    "model",
    [
        tiny_gpt2(vocab_size=768),
        tiny_t5(vocab_size=768, tie_word_embeddings=False),
        tiny_bart(vocab_size=768),
    ],
    ids=["gpt2", "flan-t5", "bart"],
)
def test_any_architecture_is_the_same_on_meta(model: Any, tmp_path: Path) -> None:
    check_same(save_with_tokenizer(model, tmp_path), LORA, "bf16")


def test_a_class_that_no_module_has_is_refused() -> None:
    config = ModelConfig(path=str(TINY_BASE), wrap_class="MistralDecoderLayer")
    with pytest.raises(ValueError, match=r"type model.wrap_class=LlamaDecoderLayer"):
        built(config, on_meta=True)
