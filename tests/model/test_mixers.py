"""Layers without attention run document by document: states never cross a boundary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.adapter import LoraConfig, apply_adapter
from app.model.attention import attention_implementation, generation_attention, mixers
from app.model.attention.inputs import attention_inputs
from app.model.attention.mixers import MixerForward, has_isolated_mixers
from app.model.attention.probes import check_isolation
from app.model.recompute import RecomputeConfig, apply_recompute
from common.errors import UserError
from tests.families import tiny_family
from tests.tiny import tiny_llama

KINDS = {
    "lfm2": {"Lfm2ShortConv"},  # short convolution
    "jamba": {"JambaMambaMixer"},  # Mamba 1
    "minimax": {"MiniMaxLightningAttention"},
    "qwen3_5_text": {"Qwen3_5GatedDeltaNet"},
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock"},  # RG-LRU
    "rwkv": {"RwkvSelfAttention", "ZeroPad2d"},  # its state, and the shift by a token
}
LENGTHS, TOKENS = [[13, 7, 17], [21, 9]], 40


def by_document(model: Any) -> set[str]:
    found = (vars(module).get("forward") for module in model.modules())
    return {type(one._original.__self__).__name__ for one in found if isinstance(one, MixerForward)}


def isolated_model(family: str, backend: str = "sdpa") -> Any:
    """A model whose mixers were found and isolated."""
    model = tiny_family(family)
    if model._supports_sdpa:
        model.set_attn_implementation(attention_implementation(backend))
    check_isolation(model, backend)
    return model


def packed(model: Any, backend: str = "sdpa") -> Tensor:
    """Logits of the packed documents, concatenated."""
    ids, positions = (one.to(model.device) for one in ids_and_positions())
    inputs = attention_inputs(model, backend, LENGTHS, ids)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    return torch.cat([logits[row, : sum(lengths)] for row, lengths in enumerate(LENGTHS)])


def alone(model: Any) -> Tensor:
    ids, _ = ids_and_positions()
    documents = [
        part
        for row, lengths in zip(ids, LENGTHS, strict=True)
        for part in row[: sum(lengths)].split(lengths)
    ]
    return torch.cat([model(input_ids=one[None], use_cache=False).logits[0] for one in documents])


def ids_and_positions() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.zeros_like(ids)
    for row, lengths in enumerate(LENGTHS):
        positions[row, : sum(lengths)] = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions


@pytest.mark.parametrize("family", KINDS)
def test_every_mixer_is_found_and_keeps_documents_apart(family: str) -> None:
    model = isolated_model(family)
    assert by_document(model) == KINDS[family]
    assert torch.allclose(packed(model), alone(model), atol=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "minimax", "rwkv"])
def test_the_probe_finds_a_leak_in_every_mixer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If mixers run whole rows, the state crosses a boundary, and the model is refused."""
    monkeypatch.setattr(
        mixers.MixerForward, "__call__", lambda self, *a, **k: self._original(*a, **k)
    )
    with pytest.raises(UserError, match=r"documents packed together see each other .*packing=none"):
        isolated_model(family)


def test_a_model_without_mixers_is_unchanged() -> None:
    model = tiny_llama()
    model.set_attn_implementation(attention_implementation("sdpa"))
    check_isolation(model, "sdpa")
    assert not has_isolated_mixers(model) and not by_document(model)
    assert "mixer_documents" not in attention_inputs(model, "sdpa", LENGTHS, torch.ones(2, 40))


def test_eager_attention_in_a_model_with_mixers() -> None:
    model = isolated_model("qwen3_next", "eager")
    assert torch.allclose(packed(model, "eager"), alone(model), atol=1e-4)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_layer_is_recomputed_on_its_own_documents(mode: str) -> None:
    """The backward pass of a batch may follow the forward pass of another one."""
    expected = gradients(isolated_model("qwen3_5_text"), between=False)
    model = tiny_family("qwen3_5_text")
    apply_recompute(model, RecomputeConfig(mode=mode))
    model.set_attn_implementation(attention_implementation("sdpa"))
    check_isolation(model, "sdpa")
    found = gradients(model, between=True)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-5), name


def gradients(model: Any, *, between: bool) -> dict[str, Tensor]:
    loss = packed(model.train()).logsumexp(1).sum()
    if between:
        model(input_ids=torch.ones(1, 7, dtype=torch.int64), use_cache=False)
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_mixers_run_by_document_under_an_adapter_and_in_a_copy() -> None:
    model: Any = apply_adapter(tiny_family("jamba"), LoraConfig(r=2), half_precision=False)
    model.base_model.model.set_attn_implementation(attention_implementation("sdpa"))
    check_isolation(model, "sdpa")
    assert by_document(model) == KINDS["jamba"]
    expected = alone(model.eval())
    assert torch.allclose(packed(model), expected, atol=1e-4)
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.data.zero_()
    assert not packed(other).any() and torch.allclose(packed(model), expected, atol=1e-4)


def test_generation_runs_whole_rows() -> None:
    """Even right after a packed batch of the same size."""
    model = isolated_model("lfm2").eval()
    plain = tiny_family("lfm2").eval()
    packed(model)
    ids, _ = ids_and_positions()
    plain.set_attn_implementation("sdpa")
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with generation_attention(model):
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
