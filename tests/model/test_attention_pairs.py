"""Encoder-decoder models: a target sees its own source, never padding or other documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LEDConfig,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from app.model.attention import (
    AttentionConfig,
    attention_implementation,
    choose_backend,
    generation_attention,
    inputs,
)
from app.model.attention.attend import attend_by_document
from app.model.attention.documents import PairGroups, group_pairs
from app.model.attention.inputs import pair_inputs
from app.model.attention.probes import check_pair_isolation
from common.errors import UserError
from tests.tiny import tiny_bart, tiny_t5

SOURCES, TARGETS = [[5, 9, 3, 30], [2, 40]], [[7, 1, 2, 20], [12, 11]]
SOURCE_SHAPE, TARGET_SHAPE = (2, 50), (2, 35)


def ids(shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def switch(model: Any, name: str) -> None:
    """In transformers 5.17, the model's method does not change its encoder and decoder."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(name)


def by_document(model: Any) -> Any:
    """Switch a model to our attention, and check encoder and decoder."""
    name = attention_implementation("sdpa")
    switch(model, name)
    halves = (model.get_encoder(), model.get_decoder())
    assert {half.config._attn_implementation for half in halves} == {name}
    return model


def batched(
    model: Any,
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_lengths: list[list[int]],
    target_lengths: list[list[int]],
    backend: str = "sdpa",
) -> torch.Tensor:
    inputs = pair_inputs(model, backend, source_lengths, target_lengths, sources, targets)
    return model(input_ids=sources, decoder_input_ids=targets, use_cache=False, **inputs).logits


def documents(lengths: list[list[int]], tokens: torch.Tensor) -> list[torch.Tensor]:
    return [
        part.unsqueeze(0)
        for row, parts in zip(tokens, lengths, strict=True)
        for part in row[: sum(parts)].split(parts)
    ]


def alone(
    reference: Any,
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_lengths: list[list[int]],
    target_lengths: list[list[int]],
) -> list[torch.Tensor]:
    """Logits of each document alone, with transformers' eager attention."""
    documents_of = documents(source_lengths, sources), documents(target_lengths, targets)
    return [
        reference(input_ids=source, decoder_input_ids=target, use_cache=False).logits[0]
        for source, target in zip(*documents_of, strict=True)
    ]


def small(model_class: Any, config_class: Any, **numbers: Any) -> Callable[..., Any]:
    """Return a function that builds another model of T5's or BART's shape."""
    template = tiny_t5() if issubclass(config_class, (MT5Config, UMT5Config)) else tiny_bart()
    shape = {k: v for k, v in template.config.to_diff_dict().items() if k not in SKIPPED}

    def make(**more: Any) -> Any:
        torch.manual_seed(0)
        return model_class(config_class(**(shape | numbers | more))).eval()

    return make


SKIPPED = ("model_type", "transformers_version", "architectures", "dtype")
T5_KIN = {
    "t5": tiny_t5,
    "mt5": small(MT5ForConditionalGeneration, MT5Config),
    "umt5": small(UMT5ForConditionalGeneration, UMT5Config),
}
BART_KIN = {
    "bart": tiny_bart,
    "mbart": small(MBartForConditionalGeneration, MBartConfig),
    "pegasus": small(PegasusForConditionalGeneration, PegasusConfig),
    "marian": small(MarianMTModel, MarianConfig),
}
ALL = T5_KIN | BART_KIN


@torch.no_grad()
@pytest.mark.parametrize("kind", T5_KIN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_a_packed_document_has_the_logits_of_the_document_alone(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    sources, targets = ids(SOURCE_SHAPE), ids(TARGET_SHAPE, 2)
    reference = T5_KIN[kind](attn_implementation="eager").to(dtype)
    model = by_document(T5_KIN[kind]().to(dtype))
    packed = batched(model, sources, targets, SOURCES, TARGETS)
    expected = alone(reference, sources, targets, SOURCES, TARGETS)
    for ours, theirs in zip(documents(TARGETS, packed), expected, strict=True):
        assert torch.allclose(ours[0], theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ALL)
def test_a_padded_document_has_the_logits_of_the_document_alone(kind: str, backend: str) -> None:
    sources, targets = ids((4, 20)), ids((4, 9), 2)
    lengths = [[20], [3], [1], [18]], [[2], [9], [1], [8]]
    reference = ALL[kind](attn_implementation="eager")
    model = ALL[kind]() if backend == "eager" else by_document(ALL[kind]())
    switch(model, attention_implementation(backend))
    padded = batched(model, sources, targets, *lengths, backend)
    expected = alone(reference, sources, targets, *lengths)
    for ours, theirs in zip(documents(lengths[1], padded), expected, strict=True):
        assert torch.allclose(ours[0], theirs, rtol=0, atol=1e-5)


def gradients(model: Any, outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.cat([logits.flatten(0, -2) for logits in outputs]).logsumexp(-1).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["t5", "umt5", "bart"])
def test_gradients_equal_those_of_the_documents_alone(kind: str, recompute: bool) -> None:
    sources, targets = ids(SOURCE_SHAPE), ids(TARGET_SHAPE, 2)
    lengths = (SOURCES, TARGETS) if kind in T5_KIN else ([[50], [20]], [[7], [35]])
    reference = ALL[kind](attn_implementation="eager").train()
    expected = gradients(reference, alone(reference, sources, targets, *lengths))
    model = by_document(ALL[kind]()).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = batched(model, sources, targets, *lengths)
    found = gradients(model, documents(lengths[1], logits))
    assert found.keys() == expected.keys()
    assert kind == "bart" or any("relative_attention_bias" in name for name in found)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6 * largest), name


@torch.no_grad()
def test_a_batch_without_documents_runs() -> None:
    for model in (by_document(tiny_t5()), by_document(tiny_bart())):
        logits = batched(model, ids((1, 1)), ids((1, 1)), [[]], [[]])
        assert torch.isfinite(logits).all()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_an_empty_row_does_not_change_the_logits_of_others(backend: str) -> None:
    model = tiny_t5(attn_implementation=attention_implementation(backend))
    sources, targets = ids((2, 9)), ids((2, 5), 2)
    logits = batched(model, sources, targets, [[7], []], [[4], []], backend)
    (expected,) = alone(tiny_t5(), sources[:1], targets[:1], [[7]], [[4]])
    assert torch.allclose(logits[0, :4], expected, atol=1e-5)
    assert torch.isfinite(logits).all()


def tiny_t5gemma(start: int) -> Any:
    """A random T5Gemma whose decoder starts with token `start`; its pad token is 0."""
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    side |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    config = T5GemmaConfig(encoder=side, decoder=side, vocab_size=64, decoder_start_token_id=start)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return T5GemmaForConditionalGeneration(config).eval()


def tiny_nllb_moe() -> Any:
    shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    shape |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = NllbMoeConfig(**shape, decoder_ffn_dim=48, num_experts=4, encoder_sparse_step=1)
    return NllbMoeForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(tiny_t5gemma, 0), r"decoder starts with one \(decoder_start_token_id\)"),
        (tiny_nllb_moe, "expert_capacity that all documents of a batch share"),
    ],
    ids=["t5gemma", "nllb-moe"],
)
def test_models_whose_documents_depend_on_their_batch_are_refused(
    make: Callable[..., Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"{message}.*: type model.path=ANOTHER_BASE"):
        check_pair_isolation(make(), "eager", is_packed=False)


def test_padding_does_not_change_a_t5gemma_with_another_start_token() -> None:
    model, sources, targets = tiny_t5gemma(1), ids((2, 9)), ids((2, 8), 2)
    targets[:, 0] = 1
    lengths = [[9], [4]], [[8], [3]]
    logits = batched(model, sources, targets, *lengths, "eager")
    expected = alone(model, sources, targets, *lengths)
    for row, document in zip(logits, expected, strict=True):
        assert torch.allclose(row[: len(document)], document, atol=1e-5)


def test_the_probe_accepts_isolated_pairs() -> None:
    for model in (tiny_t5(), tiny_t5().bfloat16()):
        check_pair_isolation(by_document(model), "sdpa", is_packed=True)


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_probe_accepts_padded_pairs(make: Callable[..., Any], backend: str) -> None:
    model = make()
    switch(model, attention_implementation(backend))
    check_pair_isolation(model, backend, is_packed=False)


@pytest.mark.parametrize(
    ("is_packed", "lost", "dtype"),
    [
        *itertools.product([True], ["encoder", "decoder", "cross"], [torch.float32]),
        *itertools.product([False], ["encoder", "decoder", "cross"], [torch.bfloat16]),
    ],
)
def test_the_probe_refuses_a_leak_of_any_kind(
    is_packed: bool, lost: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaky(*arguments: Any) -> PairGroups:
        groups = group_pairs(*arguments)
        setattr(groups, lost, None)
        return groups

    monkeypatch.setattr(inputs, "group_pairs", leaky)
    model = by_document(tiny_t5().to(dtype))
    if lost == "decoder" and not is_packed:
        check_pair_isolation(model, "sdpa", is_packed=False)  # a decoder sees no padding anyway
        return
    with pytest.raises(ValueError, match="packing=none" if is_packed else "the padding after"):
        check_pair_isolation(model, "sdpa", is_packed=is_packed)


def test_the_probe_refuses_positions_that_continue_across_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = by_document(tiny_bart())
    with pytest.raises(ValueError, match=r"bart models compute positions .* packing=none"):
        check_pair_isolation(model, "sdpa", is_packed=True)
    monkeypatch.setattr(inputs, "packing_error", lambda numbers: None)
    with pytest.raises(ValueError, match=r"wrong positions .* packing=none"):
        check_pair_isolation(model, "sdpa", is_packed=True)


def test_eager_attention_refuses_packed_pairs() -> None:
    model = tiny_t5(attn_implementation="eager")
    with pytest.raises(ValueError, match=r"attention=eager .* type packing=none"):
        check_pair_isolation(model, "eager", is_packed=True)
    check_pair_isolation(model, "eager", is_packed=False)


def test_encoder_decoder_models_never_run_flash_attention() -> None:
    for architecture in (tiny_t5().config, tiny_bart().config):
        for device in ("cpu", "gpu"):
            assert choose_backend(AttentionConfig(), architecture, device, "bf16").backend == "sdpa"
        for backend in ("flash2", "flash3", "varlen", "flex"):
            with pytest.raises(ValueError, match=r"encoder and a decoder; type attention=sdpa"):
                choose_backend(AttentionConfig(backend=backend), architecture, "gpu", "bf16")
    led = LEDConfig()
    assert choose_backend(AttentionConfig(), led, "cpu", "fp32").backend == "eager"
    with pytest.raises(ValueError, match="attention=eager packing=none"):
        choose_backend(AttentionConfig(backend="sdpa"), led, "cpu", "fp32")


def test_a_layer_that_mixes_encoder_and_decoder_is_refused() -> None:
    part, layer = torch.zeros(1, 4, 6, 8), torch.nn.Identity()
    layer.is_causal = False
    groups = PairGroups(None, None, None)
    with pytest.raises(ValueError, match=r"Identity: type attention=eager packing=none"):
        attend_by_document(layer, part, part, part, None, documents=groups)
    layer.is_decoder = True
    output, _ = attend_by_document(layer, part, part, part, None, documents=groups)
    assert output.shape == (1, 6, 4, 8)


def test_rows_of_one_document_need_no_groups() -> None:
    device = torch.device("cpu")
    groups = group_pairs([[7], [7]], [[5], [2]], (2, 7), (2, 5), device)
    assert groups.encoder is groups.decoder is groups.cross is None


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
def test_generation_uses_an_attention_with_a_cache(make: Callable[..., Any]) -> None:
    tokens, real = ids((3, 6)), torch.ones(3, 6, dtype=torch.int64)
    real[1, 2:] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model = by_document(make())
    with generation_attention(model):
        answer = model.generate(tokens, attention_mask=real, **settings)
    by_document(model)
    switch(model, "eager")
    assert torch.equal(answer, model.generate(tokens, attention_mask=real, **settings))
