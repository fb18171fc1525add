"""Causal attention by matrix products, document by document, on the CPU.

A block of queries is multiplied with the keys up to its end, so that what causality hides is not
computed. PyTorch's flash attention takes up to three times as long there. In half precision scores
are rounded, as in transformers' eager attention; flash keeps them in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.model.attention.documents import DocumentSpan

MAX_TOKENS = 1024
"""up to here a document's probabilities are small enough to keep; beyond they are computed again"""
BLOCK = 64
"""queries a product; fewer compute less that is hidden, more are larger products"""


def is_faster(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Say whether `attend_causally` can compute this, and is the faster way to."""
    # Latent attention has values of another width.
    return query.device.type == "cpu" and not dropout and query.shape[-1] == value.shape[-1]


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stacks: Sequence[Sequence[DocumentSpan]],
    scaling: float | None,
) -> Tensor:
    """Return [rows, tokens, heads, head_dim]; each token is in a document of one of the stacks.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads, each shared by as
    many consecutive query heads.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _DocumentAttention.apply(query, key, value, stacks, scale)
    return output


class _DocumentAttention(torch.autograd.Function):
    """Scores, softmax and values; query heads that share a key head are rows of one product."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stacks: Sequence[Sequence[DocumentSpan]],
        scale: float,
    ) -> Tensor:
        rows, heads, tokens, width = query.shape
        output = query.new_empty(rows, tokens, heads, width)
        future = query.new_full((BLOCK, BLOCK), -torch.inf).triu_(1)
        future = future.repeat_interleave(heads // key.shape[1], 0)
        parts = _by_key_head(key.shape[1], query * scale, key, value)
        (attended,) = _by_key_head(key.shape[1], output.transpose(1, 2))
        kept = []
        for stack in stacks:
            queries, keys, values = (_cut(part, stack) for part in parts)
            for block in _blocks(queries, keys):
                share = _shares(queries[:, block.rows], keys[:, : block.end], future)
                _put(attended, torch.bmm(share, values[:, : block.end]), stack, block.start)
                if block.end <= MAX_TOKENS:
                    kept.append(share)
        ctx.save_for_backward(query, key, value, future, *kept)
        ctx.stacks, ctx.scale = stacks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the rule of the softmax (arXiv 2205.14135, appendix B)."""
        query, key, value, future, *kept = ctx.saved_tensors
        num_groups = key.shape[1]
        parts = _by_key_head(num_groups, query * ctx.scale, key, value, outer[0].transpose(1, 2))
        grads = [torch.empty_like(part) for part in (query, key, value)]
        to_queries, to_keys, to_values = _by_key_head(num_groups, *grads)
        for stack in reversed(ctx.stacks):
            queries, keys, values, given = (_cut(part, stack) for part in parts)
            # Added up over blocks of queries, of which the last has all keys: in fp32, or each
            # would round.
            grad_keys = grad_values = torch.empty(0)
            for block in reversed(_blocks(queries, keys)):
                block_queries, block_keys = queries[:, block.rows], keys[:, : block.end]
                block_given = given[:, block.rows]
                is_kept = block.end <= MAX_TOKENS
                share = kept.pop() if is_kept else _shares(block_queries, block_keys, future)
                grad_share = torch.bmm(block_given, values[:, : block.end].mT)
                grad_scores = torch._softmax_backward_data(grad_share, share, -1, share.dtype)
                _put(to_queries, torch.bmm(grad_scores, block_keys), stack, block.start)
                of_keys = torch.bmm(grad_scores.mT, block_queries)
                of_values = torch.bmm(share.mT, block_given)
                if block.end == keys.shape[1]:
                    grad_keys, grad_values = of_keys.float(), of_values.float()
                else:
                    grad_keys[:, : block.end] += of_keys
                    grad_values[:, : block.end] += of_values
            _put(to_keys, grad_keys, stack)
            _put(to_values, grad_values, stack)
        grads[0].mul_(ctx.scale)
        return (*grads, None, None)


def _by_key_head(num_groups: int, *parts: Tensor) -> list[Tensor]:
    """View [rows, heads, tokens, head_dim] as [rows, key heads, tokens, heads a key head, ...]."""
    return [part.unflatten(1, (num_groups, -1)).transpose(2, 3) for part in parts]


def _cut(part: Tensor, stack: Sequence[DocumentSpan]) -> Tensor:
    """Return documents as [documents * key heads, tokens * heads a key head, head_dim].

    Shorter ones are padded by zeros at the end, which no real token sees. In half precision the
    tokens are a multiple of BLOCK: a product of a new shape waits for a kernel to be made, longer
    than it then takes.
    """
    tokens = max(document.length for document in stack)
    if part.dtype != torch.float32:
        tokens += -tokens % BLOCK
    first = stack[0]
    if len(stack) == 1 and first.length == tokens:
        return part[first.row, :, first.start : first.end].flatten(1, 2)
    _, num_groups, _, shared, width = part.shape
    cut = part.new_zeros(len(stack), num_groups, tokens, shared, width)
    for slot, (row, start, end) in zip(cut, stack, strict=True):
        slot[:, : end - start] = part[row, :, start:end]
    return cut.flatten(2, 3).flatten(0, 1)


def _put(whole: Tensor, part: Tensor, stack: Sequence[DocumentSpan], first: int = 0) -> None:
    """Write what documents have from token `first` on back into what `_cut` cut from."""
    _, num_groups, _, shared, _ = whole.shape
    slots = part.unflatten(1, (-1, shared)).unflatten(0, (len(stack), num_groups))
    for slot, (row, start, end) in zip(slots, stack, strict=True):
        place = whole[row, :, start + first : end][:, : slot.shape[1]]
        place.copy_(slot[:, : place.shape[1]])


class _Block(NamedTuple):
    """Queries of a product: their first token, the one behind their last, and their rows."""

    start: int
    end: int
    rows: slice


def _blocks(queries: Tensor, keys: Tensor) -> list[_Block]:
    tokens = keys.shape[1]
    shared = queries.shape[1] // tokens
    starts = range(0, tokens, BLOCK)
    ends = (min(start + BLOCK, tokens) for start in starts)
    return [
        _Block(start, end, slice(start * shared, end * shared))
        for start, end in zip(starts, ends, strict=True)
    ]


def _shares(queries: Tensor, keys: Tensor, future: Tensor) -> Tensor:
    """Probabilities [documents * key heads, queries, keys] of the last of these keys."""
    scores = torch.bmm(queries, keys.mT)
    num_queries = queries.shape[1]
    num_own = num_queries * future.shape[1] // future.shape[0]
    scores[:, :, -num_own:].add_(future[:num_queries, :num_own])
    return torch.softmax(scores, dim=-1)
