"""attention=flex: PyTorch's `flex_attention` with a block mask built from document lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from app.model.attention.documents import Lengths

BLOCK = 128
"""tokens per block of PyTorch's kernels"""


def attend_by_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the kernel as transformers does; without a mask, every row is one document.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads (GQA). Returns
    [rows, tokens, heads, head_dim].
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    from app.model.attention.attend import cast_to_one_dtype

    # As in transformers: a layer without the attribute is causal.
    if attention_mask is None and getattr(module, "is_causal", True):
        rows, _, tokens, _ = query.shape
        documents = [[tokens]] * rows
        attention_mask = block_mask(documents, (rows, tokens), query.device, window=sliding_window)
    if query.is_cuda and query.shape[2] < BLOCK:
        # PyTorch would choose its decoding kernel, for which these blocks are too large.
        options["kernel_options"] = {"BACKEND": "TRITON"}
    parts = cast_to_one_dtype(query, key, value)
    attended: tuple[torch.Tensor, torch.Tensor | None] = flex_attention_forward(
        module, *parts, attention_mask, **options
    )
    return attended


def block_mask(
    document_lengths: Lengths,
    shape: tuple[int, int],
    device: torch.device,
    *,
    window: int | None,
) -> BlockMask:
    """Build the mask of a batch: a token sees its document's past, at most `window` tokens.

    `shape`: rows and tokens. Computed from the document lengths, never as a matrix of tokens.
    """
    first = _first_visible_keys(document_lengths, shape, window)
    blocks = first.unflatten(1, (-1, BLOCK))
    lowest, highest = blocks.amin(2).unsqueeze(2), blocks.amax(2).unsqueeze(2)
    number = torch.arange(blocks.shape[1])
    is_past = number.unsqueeze(0) < number.unsqueeze(1)
    is_needed = (is_past | torch.eye(len(number), dtype=torch.bool)) & (
        (number + 1) * BLOCK > lowest
    )
    is_whole = is_past & (number * BLOCK >= highest)
    first = first.to(device)

    def is_visible(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (first[row, query] <= key) & (key <= query)

    mask: BlockMask = BlockMask.from_kv_blocks(
        *_list_key_blocks(is_needed & ~is_whole),
        *_list_key_blocks(is_whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(shape[1], shape[1]),
    )
    return mask.to(device)


def _first_visible_keys(
    document_lengths: Lengths, shape: tuple[int, int], window: int | None
) -> torch.Tensor:
    """Return the column of the first key that each query sees, [rows, tokens padded to a block].

    The padding of a row counts as one more document.
    """
    rows, tokens = shape
    padded = -(-tokens // BLOCK) * BLOCK
    first = torch.empty(rows, padded, dtype=torch.int32)
    for row, documents in enumerate(document_lengths):
        lengths = torch.tensor([*documents, padded - sum(documents)])
        starts = lengths.cumsum(0) - lengths
        first[row] = starts.repeat_interleave(lengths)
    if window is not None:
        first = torch.maximum(first, torch.arange(padded, dtype=torch.int32) + 1 - window)
    return first


def _list_key_blocks(is_chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks of each query block, and indices that start with these."""
    counts = is_chosen.sum(-1, dtype=torch.int32)
    numbers = is_chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.unsqueeze(1), numbers.unsqueeze(1)
