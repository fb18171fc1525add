"""Documents of a batch are grouped once; windows and chunks of a mask apply inside each.

Answers are written by an attention with a cache. `tests/parity/test_attention_families.py` compares
what is computed with documents alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, masking_utils

from app.model.attention import attend, attention_implementation, generation_attention
from app.model.attention.attend import MaskRule, attend_by_document, build_mask_rule
from app.model.attention.documents import group_documents
from app.model.attention.inputs import _dense_mask, has_attention
from app.model.attention.varlen import VarlenKernel, attend_by_boundaries
from tests.model.test_attention_varlen import varlen_2_13
from tests.tiny import random_ids, tiny_llama, tiny_t5

BATCH = [[5, 9, 3, 30, 7, 20], [40, 1, 2]]


def test_every_position_is_in_exactly_one_group() -> None:
    groups = group_documents(BATCH, (2, TOKENS), torch.device("cpu"))
    assert groups is not None
    flat = torch.cat([index.flatten() for index in groups.gather])
    assert torch.equal(flat[groups.restore], torch.arange(2 * TOKENS))
    assert group_documents([[7], [5]], (2, 7), torch.device("cpu")) is None, "rows of one each"


@pytest.mark.parametrize(
    ("make", "backend"),
    [(tiny_llama, "sdpa"), (tiny_llama, "varlen"), (tiny_llama, "flex"), (tiny_t5, "sdpa")],
)
def test_generation_uses_an_attention_with_a_cache(make: Any, backend: str) -> None:
    plain, ids, real = make(attn_implementation="eager"), random_ids(3, 6), torch.ones(3, 6)
    model = make(attn_implementation=attention_implementation(backend))
    if make is tiny_t5:
        real[1, 2:] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with generation_attention(model):
        answer = model.generate(ids, attention_mask=real.long(), **settings)
    assert model.config._attn_implementation == attention_implementation(backend)
    expected = plain.generate(ids, attention_mask=real.long(), **settings)
    assert torch.equal(answer, expected)


def test_an_unsupported_variant_is_refused() -> None:
    part = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="attention=eager"):
        attend.attend_by_document(torch.nn.Identity(), part, part, part, None, softcap=50.0)


@pytest.mark.parametrize(
    ("family", "expected"), [("gpt2", True), ("dots3_note_text", True), ("mamba2", False)]
)
def test_attention_is_recognized_by_any_name_of_its_heads(family: str, expected: bool) -> None:
    model: Any = SimpleNamespace(config=CONFIG_MAPPING[family]())
    assert has_attention(model) is expected


LENGTHS, TOKENS = [[5, 9, 3, 30, 7, 20]], 80
LAYER = torch.nn.Identity()
KERNEL = VarlenKernel.of(varlen_2_13)


def rule(kind: str, size: int) -> MaskRule:
    rows = torch.zeros(1, dtype=torch.int64)
    functions = {
        "window": masking_utils.sliding_window_causal_mask_function(size),
        "chunk": masking_utils.chunked_causal_mask_function(size, rows),
    }
    built = build_mask_rule(mask_function=functions[kind], local_size=size)
    assert built is not None
    return built


def parts(tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))


def expected(kind: str, size: int) -> torch.Tensor:
    """Attention of each document alone, with a dense mask."""
    query, key, value = parts(TOKENS)
    key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
    outputs, start = [], 0
    for length in (*LENGTHS[0], TOKENS - sum(LENGTHS[0])):
        number = torch.arange(length)
        mask = number.unsqueeze(1) >= number
        if kind == "window":
            mask &= number.unsqueeze(1) - number < size
        else:
            mask &= number.unsqueeze(1) // size == number // size
        cut = (part[:, :, start : start + length] for part in (query, key, value))
        q, k, v = cut
        scores = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(1, 2))
        start += length
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("size", [1, 4, 9, 100])
@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("block", [attend.BLOCK_TOKENS, 3])
def test_a_mask_rule_holds_in_every_document(
    block: int, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "BLOCK_TOKENS", block)
    groups = group_documents(LENGTHS, (1, TOKENS), torch.device("cpu"))
    output, _ = attend_by_document(LAYER, *parts(TOKENS), rule(kind, size), documents=groups)
    torch.testing.assert_close(output, expected(kind, size))
    if kind == "window":  # which layers pass as an argument, too, in some models alone
        how = {"documents": groups, "sliding_window": size}
        output, _ = attend_by_document(LAYER, *parts(TOKENS), None, **how)
        torch.testing.assert_close(output, expected(kind, size))


def test_a_mask_of_more_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more than the positions .* type attention=eager"):
        build_mask_rule(mask_function=masking_utils.causal_mask_function, use_vmap=True)
    whole = torch.zeros(1, 1, 6, 6)
    with pytest.raises(ValueError, match=r"mask that Identity computed .* type attention=eager"):
        attend_by_document(LAYER, *parts(6), whole)  # type: ignore[arg-type]


def test_varlen_supports_only_the_layers_own_window() -> None:
    query, key, value = parts(12)
    ours, _ = attend_by_boundaries(
        LAYER, query, key, value, rule("window", 4), sliding_window=4, kernel=KERNEL
    )
    by_document, _ = attend_by_document(LAYER, query, key, value, rule("window", 4))
    torch.testing.assert_close(ours, by_document)
    attend_by_boundaries(LAYER, query, key, value, rule("chunk", 12), kernel=KERNEL)
    for kind, window in (("window", None), ("chunk", None), ("chunk", 3)):
        with pytest.raises(ValueError, match="another kind of mask: type attention=sdpa"):
            attend_by_boundaries(
                LAYER, query, key, value, rule(kind, 4), sliding_window=window, kernel=KERNEL
            )


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_dense_mask_is_that_of_each_document(window: int | None) -> None:
    shape, device = (1, sum(LENGTHS[0])), torch.device("cpu")
    mask = _dense_mask(LENGTHS, shape, device, torch.float32, window=window)
    blocks = []
    for length in LENGTHS[0]:
        number = torch.arange(length)
        distance = number.unsqueeze(1) - number
        blocks.append((distance >= 0) & (distance < (window or length)))
    assert torch.equal(mask[0, 0] == 0, torch.block_diag(*blocks).bool())
