"""Documents packed together do not see each other, whichever attention computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from app.model.attention import (
    AttentionConfig,
    attend,
    attention_implementation,
    attention_inputs,
    check_isolation,
    choose_backend,
    generation_attention,
    inputs,
)
from app.model.attention.documents import group_documents

ON_CPU = ["sdpa", "eager"]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LENGTHS = [[5, 9, 3, 30, 7, 20], [40, 1, 2]]
TOKENS = 80


def llama(backend: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, attn_implementation=attention_implementation(backend))
    return LlamaForCausalLM(config).eval()


def positions(lengths: list[list[int]], tokens: int) -> torch.Tensor:
    rows = [torch.cat([torch.arange(n) for n in (*row, tokens - sum(row))]) for row in lengths]
    return torch.stack(rows)


@torch.no_grad()
def logits(model: LlamaForCausalLM, backend: str, ids: torch.Tensor) -> torch.Tensor:
    lengths = LENGTHS[: len(ids)]
    inputs = attention_inputs(model, backend, lengths, ids)
    position_ids = positions(lengths, ids.shape[1])
    return model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits


@pytest.mark.parametrize("backend", ON_CPU)
def test_each_document_of_a_pack_has_the_logits_it_has_alone(backend: str) -> None:
    model, ids = llama(backend), torch.randint(0, 64, (2, TOKENS))
    packed = logits(model, backend, ids)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = ids[row : row + 1, start : start + length]
            with torch.no_grad():
                alone = model(input_ids=document, use_cache=False).logits
            assert torch.allclose(packed[row, start : start + length], alone[0], atol=1e-5)
            start += length


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("backend", ON_CPU)
def test_each_padded_row_has_the_logits_it_has_alone(backend: str, window: int | None) -> None:
    torch.manual_seed(0)
    name = attention_implementation(backend)
    config = MistralConfig(**SHAPE, sliding_window=window, attn_implementation=name)
    model, ids = MistralForCausalLM(config).eval(), torch.randint(0, 64, (3, 20))
    lengths = [[20], [13], [1]]
    inputs = attention_inputs(model, backend, lengths, ids)
    position_ids = positions(lengths, 20)
    padded = model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits
    for row, (length,) in enumerate(lengths):
        alone = model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
        assert torch.allclose(padded[row, :length], alone, atol=1e-5)


@pytest.mark.parametrize("backend", ON_CPU)
def test_editing_one_document_changes_no_logit_of_another(backend: str) -> None:
    model, ids = llama(backend), torch.randint(0, 64, (1, TOKENS))
    edited = ids.clone()
    edited[0, 5:14] = (edited[0, 5:14] + 1) % 64  # the second document
    before, after = logits(model, backend, ids), logits(model, backend, edited)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:14], after[0, 5:14])
    assert torch.equal(before[0, 14:], after[0, 14:])


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_probe_accepts_isolated_documents(backend: str) -> None:
    check_isolation(llama(backend), backend)


def test_the_probe_refuses_a_model_that_does_not_hand_documents_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "group_documents", lambda *_: None)
    with pytest.raises(ValueError, match="see each other"):
        check_isolation(llama("sdpa"), "sdpa")


def test_both_backends_give_the_same_gradients() -> None:
    ids = torch.randint(0, 64, (1, TOKENS))
    gradients = []
    for backend in ON_CPU:
        model = llama(backend).train()
        inputs = attention_inputs(model, backend, LENGTHS[:1], ids)
        out = model(
            input_ids=ids, position_ids=positions(LENGTHS[:1], TOKENS), use_cache=False, **inputs
        )
        out.logits.logsumexp(-1).sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_sliding_window_holds_inside_a_document(backend: str) -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"sliding_window": 8}
    reference = MistralForCausalLM(MistralConfig(**shape, attn_implementation="eager")).eval()
    ours = MistralForCausalLM(
        MistralConfig(**shape, attn_implementation=attention_implementation(backend))
    ).eval()
    ours.load_state_dict(reference.state_dict())
    ids = torch.randint(0, 64, (1, TOKENS))
    packed = logits(ours, backend, ids)
    with torch.no_grad():
        alone = reference(input_ids=ids[:, 17:47], use_cache=False).logits[0]
    assert torch.allclose(packed[0, 17:47], alone, atol=1e-5)


def test_groups_hold_every_position_once() -> None:
    groups = group_documents(LENGTHS, (2, TOKENS), torch.device("cpu"))
    assert groups is not None
    flat = torch.cat([index.flatten() for index in groups.gather])
    assert torch.equal(flat[groups.restore], torch.arange(2 * TOKENS))


def test_rows_of_one_document_need_no_groups() -> None:
    assert group_documents([[7], [5]], (2, 7), torch.device("cpu")) is None


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_generation_uses_an_attention_that_knows_caches(backend: str) -> None:
    model = llama(backend)
    ids = torch.randint(3, 64, (2, 6))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with generation_attention(model):
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert model.config._attn_implementation == attention_implementation(backend)
    model.set_attn_implementation("eager")
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(answer, expected)


def test_a_variant_that_it_cannot_compute_is_refused(tmp_path: Path) -> None:
    part = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="attention=eager"):
        attend.attend_by_document(torch.nn.Identity(), part, part, part, None, softcap=50.0)


def test_layers_of_two_kinds_get_a_mask_each() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, sliding_window=8, attn_implementation="eager")
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(3, 64, (1, TOKENS))
    packed = logits(model, "eager", ids)
    with torch.no_grad():
        alone = model(input_ids=ids[:, 17:47], use_cache=False).logits[0]
    assert torch.allclose(packed[0, 17:47], alone, atol=1e-5)


def test_auto_takes_eager_where_a_model_computes_its_attention_itself() -> None:
    gemma = Gemma2Config(**SHAPE)
    assert choose_backend(AttentionConfig(), gemma, "cpu", "fp32").backend == "eager"
    llama = LlamaConfig(**SHAPE)
    assert choose_backend(AttentionConfig(), llama, "cpu", "fp32").backend == "sdpa"
    with pytest.raises(ValueError, match="attention=eager"):
        choose_backend(AttentionConfig(backend="sdpa"), gemma, "cpu", "fp32")


def test_experts_that_round_otherwise_are_not_taken_for_a_leak() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        **SHAPE, num_local_experts=4, attn_implementation=attention_implementation("sdpa")
    )
    check_isolation(MixtralForCausalLM(config), "sdpa")
