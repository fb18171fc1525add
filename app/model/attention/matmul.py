"""Causal attention by matrix products, for short documents in half precision on the CPU.

PyTorch's flash attention takes several times as long there. Scores are rounded to half precision,
as in transformers' eager attention; flash keeps them in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_TOKENS = 512
"""up to here the probabilities are small enough to keep, and the products faster than flash"""


def is_faster(query: Tensor) -> bool:
    """Say whether `attend_causally` is the faster way for this device, dtype and length."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and is_half and query.shape[2] <= MAX_TOKENS


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return [documents, heads, tokens, head_dim], as `scaled_dot_product_attention` would.

    query [documents, heads, tokens, head_dim]; key and value may have fewer heads, each shared by
    as many consecutive query heads.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _MatmulAttention.apply(query, key, value, scale)
    return output


class _MatmulAttention(torch.autograd.Function):
    """Scores, softmax and values; query heads that share a key head are rows of one product."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        documents, heads, tokens, width = query.shape
        shared = heads // key.shape[1]
        queries = (query * scale).reshape(-1, shared * tokens, width)
        keys, values = (part.reshape(-1, tokens, width) for part in (key, value))
        future = torch.full((tokens, tokens), float("-inf"), dtype=query.dtype).triu_(1)
        scores = torch.bmm(queries, keys.transpose(1, 2)).add_(future.repeat(shared, 1))
        shares = torch.softmax(scores, dim=-1)
        output = torch.bmm(shares, values)
        ctx.save_for_backward(queries, keys, values, shares, output)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape)
        return output.view(documents, heads, tokens, width)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the rule of the softmax (arXiv 2205.14135, appendix B)."""
        queries, keys, values, shares, output = ctx.saved_tensors
        grad = outer[0].reshape(output.shape)
        grad_values = torch.bmm(shares.transpose(1, 2), grad)
        row_sums = (grad.float() * output).sum(-1, keepdim=True).to(grad.dtype)
        grad_scores = torch.bmm(grad, values.transpose(1, 2)).sub_(row_sums).mul_(shares)
        grad_queries = torch.bmm(grad_scores, keys).mul_(ctx.scale)
        grad_keys = torch.bmm(grad_scores.transpose(1, 2), queries)
        of_query, of_key = ctx.shapes
        return grad_queries.view(of_query), grad_keys.view(of_key), grad_values.view(of_key), None
