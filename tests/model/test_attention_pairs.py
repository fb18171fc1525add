"""Encoder-decoder models: a target sees its own source, never padding or other documents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, UMT5Config, UMT5ForConditionalGeneration

from app.model.attention import attention_implementation, inputs
from app.model.attention.documents import PairGroups, group_pairs
from app.model.attention.inputs import pair_inputs
from app.model.attention.probes import check_pair_isolation
from tests.tiny import tiny_bart, tiny_t5

SOURCES, TARGETS = [[5, 9, 3, 30], [2, 40]], [[7, 1, 2, 20], [12, 11]]
SOURCE_SHAPE, TARGET_SHAPE = (2, 50), (2, 35)
Pair = tuple[torch.Tensor, torch.Tensor]
Lengths = tuple[list[list[int]], list[list[int]]]
"""of sources, and of targets"""


def pair_of(source: tuple[int, int], target: tuple[int, int]) -> Pair:
    random = torch.Generator()
    sources = torch.randint(3, 64, source, generator=random.manual_seed(1))
    return sources, torch.randint(3, 64, target, generator=random.manual_seed(2))


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


def batched(model: Any, tokens: Pair, lengths: Lengths, backend: str = "sdpa") -> torch.Tensor:
    inputs = pair_inputs(model, backend, *lengths, *tokens)
    return model(input_ids=tokens[0], decoder_input_ids=tokens[1], use_cache=False, **inputs).logits


def documents(lengths: list[list[int]], tokens: torch.Tensor) -> list[torch.Tensor]:
    return [
        part.unsqueeze(0)
        for row, parts in zip(tokens, lengths, strict=True)
        for part in row[: sum(parts)].split(parts)
    ]


def alone(reference: Any, tokens: Pair, lengths: Lengths) -> list[torch.Tensor]:
    """Logits of each document alone, with transformers' eager attention."""
    return [
        reference(input_ids=source, decoder_input_ids=target, use_cache=False).logits[0]
        for source, target in zip(*map(documents, lengths, tokens), strict=True)
    ]


def tiny_umt5(**more: Any) -> Any:
    """A model of T5's shape in which each layer has a position bias of its own."""
    skipped = ("model_type", "transformers_version", "architectures", "dtype")
    shape = {k: v for k, v in tiny_t5().config.to_diff_dict().items() if k not in skipped}
    torch.manual_seed(0)
    return UMT5ForConditionalGeneration(UMT5Config(**(shape | more))).eval()


T5_KIN = {"t5": tiny_t5, "umt5": tiny_umt5}
ALL: dict[str, Any] = T5_KIN | {"bart": tiny_bart}


@torch.no_grad()
@pytest.mark.parametrize("kind", T5_KIN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_a_packed_document_has_the_logits_of_the_document_alone(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    tokens = pair_of(SOURCE_SHAPE, TARGET_SHAPE)
    reference = T5_KIN[kind](attn_implementation="eager").to(dtype)
    packed = batched(by_document(T5_KIN[kind]().to(dtype)), tokens, (SOURCES, TARGETS))
    expected = alone(reference, tokens, (SOURCES, TARGETS))
    for ours, theirs in zip(documents(TARGETS, packed), expected, strict=True):
        assert torch.allclose(ours[0], theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ALL)
def test_a_padded_document_has_the_logits_of_the_document_alone(kind: str, backend: str) -> None:
    tokens = pair_of((4, 20), (4, 9))
    lengths = [[20], [3], [1], [18]], [[2], [9], [1], [8]]
    reference = ALL[kind](attn_implementation="eager")
    model = ALL[kind]() if backend == "eager" else by_document(ALL[kind]())
    switch(model, attention_implementation(backend))
    padded = batched(model, tokens, lengths, backend)
    expected = alone(reference, tokens, lengths)
    for ours, theirs in zip(documents(lengths[1], padded), expected, strict=True):
        assert torch.allclose(ours[0], theirs, rtol=0, atol=1e-5)


def gradients(model: Any, outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.cat([logits.flatten(0, -2) for logits in outputs]).logsumexp(-1).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["t5", "umt5", "bart"])
def test_gradients_equal_those_of_the_documents_alone(kind: str, recompute: bool) -> None:
    tokens = pair_of(SOURCE_SHAPE, TARGET_SHAPE)
    lengths = (SOURCES, TARGETS) if kind in T5_KIN else ([[50], [20]], [[7], [35]])
    reference = ALL[kind](attn_implementation="eager").train()
    expected = gradients(reference, alone(reference, tokens, lengths))
    model = by_document(ALL[kind]()).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = batched(model, tokens, lengths)
    found = gradients(model, documents(lengths[1], logits))
    assert found.keys() == expected.keys()
    assert kind == "bart" or any("relative_attention_bias" in name for name in found)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6 * largest), name


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_an_empty_row_does_not_change_the_logits_of_others(backend: str) -> None:
    model = tiny_t5(attn_implementation=attention_implementation(backend))
    tokens = sources, targets = pair_of((2, 9), (2, 5))
    logits = batched(model, tokens, ([[7], []], [[4], []]), backend)
    (expected,) = alone(tiny_t5(), (sources[:1], targets[:1]), ([[7]], [[4]]))
    assert torch.allclose(logits[0, :4], expected, atol=1e-5)
    assert torch.isfinite(logits).all()
    empty = pair_of((1, 1), (1, 1))
    assert torch.isfinite(batched(model, empty, ([[]], [[]]), backend)).all()


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
