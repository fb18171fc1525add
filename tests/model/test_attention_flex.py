"""The block masks of flex attention contain every document's past, and nothing else.

PyTorch's kernel has no gradient on the CPU. A substitute reads the blocks as the kernel does: full
blocks as a whole, partial blocks by their mask. The tests marked `gpu` run the kernel itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.integrations import flex_attention

from app.model.attention import (
    AttentionConfig,
    attention_implementation,
    choose_backend,
)
from app.model.attention.backends import ModelOnDevice, support_error
from app.model.attention.inputs import BLOCK, block_mask
from tests.model.test_attention_varlen import assert_same, mistral, run
from tests.tiny import probe, tiny_llama

CASES = [
    # document lengths by row, tokens per row
    ([[80]], 80),
    ([[5, 9, 3, 30, 7, 20], [40, 1, 2]], 80),
    ([[BLOCK] * 3], 3 * BLOCK),
    ([[3 * BLOCK + 1]], 3 * BLOCK + 1),
    ([[300, 1, 260, 70], [500]], 640),
    ([[700, 50]], 750),
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
    visible = torch.zeros(rows, num_blocks * BLOCK, num_blocks * BLOCK, dtype=torch.bool)
    for row in range(rows):
        for block in range(num_blocks):
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            query = torch.arange(span.start, span.stop).unsqueeze(1)
            for number in mask.full_kv_indices[
                row, 0, block, : mask.full_kv_num_blocks[row, 0, block]
            ]:
                visible[row, span, number * BLOCK : (number + 1) * BLOCK] = True
            for number in mask.kv_indices[row, 0, block, : mask.kv_num_blocks[row, 0, block]]:
                key = torch.arange(number * BLOCK, (number + 1) * BLOCK).unsqueeze(0)
                visible[row, span, key[0]] = mask.mask_mod(torch.tensor(row), 0, query, key)
    return visible[:, :queries, :keys]


def flex_substitute(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    scale: float,
    **_: Any,
) -> torch.Tensor:
    assert query.dtype == key.dtype == value.dtype
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = score_mod(query @ key.mT * scale, 0, 0, 0, 0)
    scores = scores.masked_fill(~visible_keys(block_mask).unsqueeze(1), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.fixture
def _use_substitute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", flex_substitute)


@pytest.mark.parametrize("window", [None, 1, 8, 150])
@pytest.mark.parametrize(("lengths", "tokens"), CASES)
def test_blocks_contain_exactly_the_visible_keys(
    lengths: list[list[int]], tokens: int, window: int | None
) -> None:
    mask = block_mask(lengths, (len(lengths), tokens), torch.device("cpu"), window=window)
    assert mask.shape == (len(lengths), 1, tokens, tokens)
    assert torch.equal(visible_keys(mask), expected(lengths, tokens, window))


def test_hidden_blocks_are_not_computed() -> None:
    mask = block_mask([[2 * BLOCK] * 4], (1, 8 * BLOCK), torch.device("cpu"), window=None)
    assert mask.kv_num_blocks.sum() == 8  # the blocks on the diagonal
    assert mask.full_kv_num_blocks.sum() == 4  # and one before it in every document
    assert torch.equal(mask.full_q_num_blocks.sum(), mask.full_kv_num_blocks.sum())


@pytest.mark.usefixtures("_use_substitute")
def test_each_layer_type_gets_its_own_blocks() -> None:
    shape = tiny_llama().config.to_dict() | {"head_dim": 8, "sliding_window": 8}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**shape)).eval()
    assert_same(run(model, "flex", CASES[1][0]), run(model, "eager", CASES[1][0]))


@pytest.mark.usefixtures("_use_substitute")
@pytest.mark.parametrize("make", [tiny_llama, mistral])
def test_without_blocks_every_row_is_a_document(make: Any) -> None:
    model, found = make(), []
    for backend in ("flex", "sdpa"):
        model.set_attn_implementation(attention_implementation(backend))
        with torch.no_grad():
            found.append(model(**probe(rows=2, tokens=40), use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_use_substitute")
def test_attention_runs_in_the_dtype_of_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = run(tiny_llama(), "flex", CASES[1][0])
    assert logits.dtype == torch.bfloat16


def test_flex_cannot_train_on_the_cpu() -> None:
    model = tiny_llama().config
    with pytest.raises(ValueError, match=r"attention=flex: .* type attention=sdpa"):
        choose_backend(AttentionConfig(backend="flex"), model, "cpu", "fp32")
    reason = support_error("flex", ModelOnDevice(model, "gpu", "bf16"))
    assert reason is not None and "head dimension of 16 or more, not 8" in reason
