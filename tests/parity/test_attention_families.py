"""Packed and padded documents give the losses and gradients of one document at a time.

Tests tiny models of families with different attention layers; windows and chunks are shorter than
the documents. The reference is plain transformers with the family's own eager attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import flex_attention

from app.model.attention import AttentionConfig, attention_implementation, choose_backend
from app.model.attention.backends import ModelOnDevice, support_error
from app.model.attention.inputs import attention_inputs
from app.model.attention.probes import check_against_eager, check_isolation
from app.model.families import family_of
from common.errors import UserError
from data_modules import DataConfig
from tests import families
from tests.batches import open_data
from tests.model.test_attention_flex import flex_substitute
from tests.model.test_attention_varlen import varlen_2_13
from tests.multimodal import VISION
from tests.parity.plain import ALPACA_LISTS
from tests.tiny import TINY_BASE

PACKED, PADDED = [[13, 7, 17], [21, 9]], [[33], [21]]
TOKENS, WINDOW, CHUNK = 40, 4, 5
SHAPE = families.SHAPE | {"initializer_range": 0.2, "attention_dropout": 0.0}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SELECTED = 33
"""number of keys that a query selects: all of the longest document, but not of its row"""
INDEXED = LATENT | {"index_topk": SELECTED, "index_n_heads": 2, "index_head_dim": 16}
GEMMA_3N = KINDS | {
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.5, 0.0],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "axk2": INDEXED,
    "cohere2": KINDS,
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "doge": {"keep_window_size": SELECTED},
    "exaone4": KINDS,
    "gemma2": KINDS,
    "gemma3_text": KINDS,
    "gemma3n_text": GEMMA_3N,
    "glm": {},
    "glm_moe_dsa": INDEXED,
    "flint": KINDS | EXPERTS | {"moe_intermediate_size": 24},
    "gpt_oss": KINDS | EXPERTS,
    "granite_swa": KINDS,
    "granitemoe_swa": KINDS | EXPERTS,
    "hy_v4": INDEXED | {"hc_mult": 2},
    "llama": {},
    "llama4_text": EXPERTS
    | {"attention_chunk_size": CHUNK, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"]},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS | {"sliding_window": WINDOW},
    "olmo3": KINDS,
    "phi3": {"sliding_window": WINDOW},
    "phimoe": EXPERTS
    | {"sliding_window": WINDOW, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "smollm3": {"use_sliding_window": True} | KINDS,
    "starcoder2": {"sliding_window": WINDOW},
}
COMPOSITES = {"gemma3": "gemma3_text"}
"""multimodal models, whose windows are in their text config"""
SLOW = (
    *("deepseek_v3", "exaone4", "flint", "glm", "granitemoe_swa", "olmo3", "phi3", "qwen3"),
    *("smollm3", "starcoder2"),
)
"""families whose attention is the same as that of another family"""

Found = tuple[float, dict[str, torch.Tensor]]


def numbers(family: str) -> dict[str, Any]:
    """Return config.json of a tiny model."""
    if family in COMPOSITES:
        text = COMPOSITES[family]
        return {
            "text_config": {"model_type": text} | numbers(text),
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        }
    return SHAPE | FAMILIES[family]


def build(family: str, backend: str = "eager", *, long: bool = False) -> Any:
    """Build a model; with `long`, its windows and chunks are as long as those of large models."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **numbers(family))
    if long:
        text = config.get_text_config()
        reach = {"sliding_window": 4096, "attention_chunk_size": 8192}
        for name in reach.keys() & text.to_dict().keys():
            setattr(text, name, reach[name])
    name = attention_implementation(backend)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).float()
    for parameter in model.parameters():
        if not parameter.any():  # as after some training: Doge selects keys by this weight
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def spans(lengths: list[list[int]]) -> list[tuple[int, int, int]]:
    """Return (row, first column, end column) of each document."""
    found = []
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            found.append((row, start, start + length))
            start += length
    return found


def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of one document; logits [tokens, vocabulary], ids [tokens]."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def finish(model: Any, total: torch.Tensor) -> Found:
    model.zero_grad()
    total.backward()
    named = model.named_parameters()
    return total.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def train_separately(model: Any, ids: torch.Tensor, lengths: list[list[int]]) -> Found:
    total = torch.zeros(())
    for row, start, end in spans(lengths):
        document = ids[row : row + 1, start:end]
        total = total + loss(model(input_ids=document, use_cache=False).logits[0], document[0])
    return finish(model, total)


def train_together(model: Any, backend: str, ids: torch.Tensor, lengths: list[list[int]]) -> Found:
    positions = torch.zeros_like(ids)
    for row, start, end in spans(lengths):
        positions[row, start:end] = torch.arange(end - start)
    inputs = attention_inputs(model, backend, lengths, ids)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    parts = [
        loss(logits[row, start:end], ids[row, start:end]) for row, start, end in spans(lengths)
    ]
    return finish(model, torch.stack(parts).sum())


def assert_equal(ours: Found, plain: Found) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert ours[1].keys() == plain[1].keys() and plain[1]
    largest = max(gradient.norm().item() for gradient in plain[1].values())
    for name, gradient in plain[1].items():
        difference = (ours[1][name] - gradient).norm().item()
        assert difference <= 1e-3 * gradient.norm().item() + 1e-6 * largest, name


def check(family: str, backends: Iterable[str], lengths: list[list[int]]) -> None:
    model = build(family)
    ids = torch.randint(3, 64, (len(lengths), TOKENS))
    plain = train_separately(model, ids, lengths)
    for backend in backends:
        model.set_attn_implementation(attention_implementation(backend))
        if lengths is PACKED:
            check_isolation(model, backend)
        check_against_eager(model, backend, is_packed=lengths is PACKED)
        assert_equal(train_together(model, backend, ids, lengths), plain)


SWEPT = (pytest.mark.slow, pytest.mark.versions)
CASES = [
    pytest.param(family, marks=SWEPT if family in SLOW else ())
    for family in (*FAMILIES, *COMPOSITES)
]
OFTEN_ON_A_GPU = ("gemma2", "gemma3_text", "llama", "mistral", "phimoe")
"""one family of each kind of window, and one with capped scores"""


@pytest.mark.parametrize("lengths", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("family", CASES)
def test_eager_and_the_choice_of_auto_equal_the_models_own_attention(
    family: str, lengths: list[list[int]]
) -> None:
    taken = choose_backend(AttentionConfig(), build(family).config, "cpu", "fp32")
    check(family, {taken.backend, "eager"}, lengths)


@pytest.mark.parametrize("lengths", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in OFTEN_ON_A_GPU else SWEPT)
        for family in (*FAMILIES, *COMPOSITES)
    ],
)
def test_gpu_backends_equal_the_models_own_attention(
    family: str, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CPU substitutes of the kernels, for families that would not be refused."""
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", flex_substitute)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_2_13)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    # On a CPU, flex supports no sinks; for varlen's see tests/model/test_attention_sinks.py.
    if family_of(family).has_sinks:
        return
    situation = ModelOnDevice(build(family).config, "gpu", "bf16")
    reasons = {backend: support_error(backend, situation) for backend in ("varlen", "flex")}
    # The heads of these tiny models are too narrow for flex.
    check(
        family, [b for b, reason in reasons.items() if not reason or "16 wide" in reason], lengths
    )


@pytest.mark.parametrize(
    ("family", "lengths"), [("axk2", PACKED), ("doge", PADDED), ("hy_v4", PADDED)]
)
def test_documents_longer_than_the_selected_keys_are_refused(
    family: str, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among keys with equal scores, the selected ones depend on the length of the row."""
    name = "keep_window_size" if family == "doge" else "index_topk"
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {name: 4})
    model, ids = build(family), torch.randint(3, 64, (len(lengths), TOKENS))
    with pytest.raises(UserError, match=rf"{family} models .* the 4 keys .*sequence_len=4$"):
        train_together(model, "eager", ids, lengths)
    with pytest.raises(UserError, match=r"sequence_len=4$"):
        check_against_eager(model, "eager", is_packed=lengths is PACKED)


def test_padding_keeps_gradients_of_gemma_3n_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n takes the root of a token's mean square, and its pad embedding is zero."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    monkeypatch.setitem(SHAPE, "vocab_size", len(tokenizer))
    monkeypatch.setitem(GEMMA_3N, "vocab_size_per_layer_input", len(tokenizer))
    monkeypatch.setitem(FAMILIES, "gemma3n_text", GEMMA_3N)
    model = build("gemma3n_text", "sdpa")
    assert not model.get_input_embeddings().weight[tokenizer.pad_token_id].any()
    data = DataConfig(datasets=[ALPACA_LISTS], sequence_len=256)
    ((batch,),) = open_data(data, max_steps=1, pad_packs=True).train_dataloader()
    assert sum(batch.document_lengths[0]) < batch.input_ids.shape[1]
    ids = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    inputs = attention_inputs(model, "sdpa", batch.document_lengths, batch.input_ids)
    logits = model(**ids, **inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
