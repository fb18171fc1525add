"""The block masks of flex attention contain every document's past, and nothing else.

PyTorch's kernel has no gradient on the CPU. A substitute reads the blocks as the kernel does: full
blocks as a whole, partial blocks by their mask. The tests marked `gpu` run the kernel itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations import flex_attention

from app.model.attention import attention_implementation
from app.model.attention.inputs import FLEX_BLOCK, block_mask
from tests.families import tiny_family
from tests.model.test_attention_varlen import assert_same, mistral, run
from tests.tiny import probe, tiny_llama

CASES = [
    # document lengths by row, tokens per row
    ([[5, 9, 3, 30, 7, 20], [40, 1, 2]], 80),
    ([[FLEX_BLOCK] * 3], 3 * FLEX_BLOCK),
    ([[300, 1, 260, 70], [500]], 640),
]


def expected(lengths: list[list[int]], tokens: int, window: int | None) -> torch.Tensor:
    """Visible keys of each query, bool [rows, tokens, tokens]."""
    document = torch.stack(
        [
            torch.repeat_interleave(torch.tensor([*row, tokens - sum(row)]))[:tokens]
            for row in lengths
        ]
    )
    visible = (document.unsqueeze(2) == document.unsqueeze(1)).tril()
    return visible if window is None else visible.triu(1 - window)


def visible_keys(mask: BlockMask) -> torch.Tensor:
    """Visible keys by the blocks, as a kernel reads them, bool [rows, tokens, tokens]."""
    rows, _, _, num_blocks = mask.kv_indices.shape
    queries, keys = mask.seq_lengths
    visible = torch.zeros(rows, num_blocks * FLEX_BLOCK, num_blocks * FLEX_BLOCK, dtype=torch.bool)
    for row in range(rows):
        for block in range(num_blocks):
            span = slice(block * FLEX_BLOCK, (block + 1) * FLEX_BLOCK)
            query = torch.arange(span.start, span.stop).unsqueeze(1)
            for number in mask.full_kv_indices[
                row, 0, block, : mask.full_kv_num_blocks[row, 0, block]
            ]:
                visible[row, span, number * FLEX_BLOCK : (number + 1) * FLEX_BLOCK] = True
            for number in mask.kv_indices[row, 0, block, : mask.kv_num_blocks[row, 0, block]]:
                key = torch.arange(number * FLEX_BLOCK, (number + 1) * FLEX_BLOCK).unsqueeze(0)
                visible[row, span, key[0]] = mask.mask_mod(torch.tensor(row), 0, query, key)
    return visible[:, :queries, :keys]


def flex_substitute(
    query: Any, key: Any, value: Any, *,
    score_mod: Any, block_mask: BlockMask, scale: float, **_: Any,
) -> torch.Tensor:  # fmt: skip
    assert query.dtype == key.dtype == value.dtype
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = score_mod(query @ key.mT * scale, 0, 0, 0, 0)
    scores = scores.masked_fill(~visible_keys(block_mask).unsqueeze(1), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.fixture
def _use_substitute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", flex_substitute)


@pytest.mark.parametrize("window", [None, 8, 150])
@pytest.mark.parametrize(("lengths", "tokens"), CASES)
def test_blocks_contain_exactly_the_visible_keys(
    lengths: list[list[int]], tokens: int, window: int | None
) -> None:
    mask = block_mask(lengths, (len(lengths), tokens), torch.device("cpu"), window=window)
    assert mask.shape == (len(lengths), 1, tokens, tokens)
    assert torch.equal(visible_keys(mask), expected(lengths, tokens, window))


@pytest.mark.usefixtures("_use_substitute")
def test_each_layer_type_gets_its_own_blocks() -> None:
    model = tiny_family("gemma2", sliding_window=8).eval()
    assert_same(run(model, "flex", CASES[0][0]), run(model, "eager", CASES[0][0]))


@pytest.mark.usefixtures("_use_substitute")
@pytest.mark.parametrize("make", [tiny_llama, mistral])
def test_without_blocks_every_row_is_a_document(make: Any) -> None:
    model, found = make(), []
    for backend in ("flex", "sdpa"):
        model.set_attn_implementation(attention_implementation(backend))
        with torch.no_grad():
            found.append(model(**probe(rows=2, tokens=40), use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
