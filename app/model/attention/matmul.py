"""Causal attention by matrix products, a document at a time, on the CPU.

A block of queries is multiplied with the keys up to its end, so that what causality hides is not
computed. PyTorch's flash attention takes up to three times as long there. In half precision scores
are rounded, as in transformers' eager attention; flash keeps them in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from app.model.attention.documents import Document

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
    documents: Sequence[Document],
    scaling: float | None,
) -> Tensor:
    """Return [rows, tokens, heads, head_dim]; each token is in one of the documents.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads, each shared by as
    many consecutive query heads.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _DocumentAttention.apply(query, key, value, documents, scale)
    return output


class _DocumentAttention(torch.autograd.Function):
    """Scores, softmax and values; query heads that share a key head are rows of one product."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Sequence[Document],
        scale: float,
    ) -> Tensor:
        rows, heads, tokens, width = query.shape
        output = query.new_empty(rows, tokens, heads, width)
        future = query.new_full((BLOCK, BLOCK), -torch.inf).triu_(1)
        kept = []
        for document in documents:
            queries, keys, values = (_cut(part, document, key) for part in (query, key, value))
            queries = queries * scale
            attended = torch.empty_like(queries)
            for start, end in _blocks(queries):
                share = _shares(queries[:, :, start:end], keys[:, 0, :end], future)
                product = torch.bmm(share, values[:, 0, :end])
                attended[:, :, start:end] = product.unflatten(1, (-1, end - start))
                if end <= MAX_TOKENS:
                    kept.append(share)
            _put(output.transpose(1, 2), attended, document)
        ctx.save_for_backward(query, key, value, future, *kept)
        ctx.documents, ctx.scale = documents, scale
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the rule of the softmax (arXiv 2205.14135, appendix B)."""
        query, key, value, future, *kept = ctx.saved_tensors
        shares = iter(kept)
        grad = outer[0].transpose(1, 2)
        grads = tuple(torch.empty_like(part) for part in (query, key, value))
        for document in ctx.documents:
            queries, keys, values = (_cut(part, document, key) for part in (query, key, value))
            queries = queries * ctx.scale
            given = _cut(grad, document, key)
            grad_queries = torch.empty_like(queries)
            # A key's gradient is a sum over blocks of queries: in fp32, or each would round it.
            grad_keys, grad_values = (torch.zeros(part.shape) for part in (keys, values))
            for start, end in _blocks(queries):
                block, block_keys = queries[:, :, start:end], keys[:, 0, :end]
                is_kept = end <= MAX_TOKENS
                share = next(shares) if is_kept else _shares(block, block_keys, future)
                block_grad = given[:, :, start:end].flatten(1, 2)
                grad_values[:, 0, :end] += torch.bmm(share.mT, block_grad)
                grad_share = torch.bmm(block_grad, values[:, 0, :end].mT)
                grad_scores = torch._softmax_backward_data(grad_share, share, -1, share.dtype)
                product = torch.bmm(grad_scores, block_keys)
                grad_queries[:, :, start:end] = product.unflatten(1, (-1, end - start))
                grad_keys[:, 0, :end] += torch.bmm(grad_scores.mT, block.flatten(1, 2))
            grad_queries.mul_(ctx.scale)
            for whole, part in zip(grads, (grad_queries, grad_keys, grad_values), strict=True):
                _put(whole, part, document)
        return (*grads, None, None)


def _cut(part: Tensor, document: Document, key: Tensor) -> Tensor:
    """A document's [key heads, heads a key head, tokens, head_dim] of [rows, heads, tokens, ...].

    In half precision its tokens are a multiple of BLOCK: a product of a new shape waits for a
    kernel to be made, longer than it then takes. No real token sees those at the end.
    """
    row, start, end = document
    cut = part[row, :, start:end].unflatten(0, (key.shape[1], -1))
    missing = 0 if part.dtype == torch.float32 else (start - end) % BLOCK
    return torch.nn.functional.pad(cut, (0, 0, 0, missing)) if missing else cut


def _put(whole: Tensor, part: Tensor, document: Document) -> None:
    """Write what `_cut` would cut back into `whole` [rows, heads, tokens, head_dim]."""
    row, start, end = document
    whole[row, :, start:end] = part.flatten(0, 1)[:, : end - start]


def _blocks(queries: Tensor) -> Iterator[tuple[int, int]]:
    tokens = queries.shape[2]
    for start in range(0, tokens, BLOCK):
        yield start, min(start + BLOCK, tokens)


def _shares(queries: Tensor, keys: Tensor, future: Tensor) -> Tensor:
    """Probabilities [key heads, heads a key head * queries, keys] of the last of these keys."""
    num_queries, num_keys = queries.shape[2], keys.shape[1]
    scores = torch.bmm(queries.flatten(1, 2), keys.mT)
    last = scores.unflatten(1, (-1, num_queries))[..., num_keys - num_queries :]
    last.add_(future[:num_queries, :num_queries])
    return torch.softmax(scores, dim=-1)
