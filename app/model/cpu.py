"""Layers on the CPU, faster than PyTorch's: fp32 products and RMS norms, and causal attention.

Matrix products use oneDNN (10 % faster), which PyTorch uses only for half precision. The operator
is the one that `torch.compile` uses for frozen models; there is no public API for oneDNN's fp32
products (torch 2.13). The norm needs half as many passes over memory.

Attention is computed by matrix products, document by document: a block of queries is multiplied
only with the keys up to the end of the block, so that masked scores are mostly not computed.
PyTorch's flash attention takes up to three times as long on a CPU. In half precision, scores are
rounded as in transformers' eager attention; flash attention keeps them in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from app.model.attention.documents import DocumentSpan


ROWS = 64
"""oneDNN is used for multiples of this row count; it compiles a kernel for each row count, and
others are rare"""
MAX_SAVED_TOKENS = 1024
"""last token of a document whose attention probabilities are saved for the backward pass; those of
later tokens are recomputed"""
BLOCK = 64
"""queries per matrix product: fewer waste less on masked scores, more make larger products"""


def multiplies_faster(rows: Tensor) -> bool:
    """Return whether oneDNN multiplies these rows by a matrix faster than PyTorch."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and len(rows) % ROWS == 0
        and torch.backends.mkldnn.is_available()
    )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows @ weight.T + bias; rows [positions, width], weight [features, width]."""
    if not multiplies_faster(rows):
        return torch.nn.functional.linear(rows, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


def trained_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer whose weight is trained; hidden [..., width]."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.nn.functional.linear(hidden, weight, bias)
    output: Tensor = _TrainedLinear.apply(hidden.flatten(0, -2), weight, bias)
    return output.unflatten(0, hidden.shape[:-1])


class _TrainedLinear(torch.autograd.Function):
    """rows @ weight.T + bias; oneDNN is not faster for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that need one."""
        rows, weight = ctx.saved_tensors
        grad = outer[0]
        rows_need_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        return (
            linear(grad, weight.T) if rows_need_grad else None,
            grad.T @ rows if weight_needs_grad else None,
            grad.sum(0) if bias_needs_grad else None,
        )


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, *_: Any
) -> Tensor:
    """Return hidden / rms(hidden) * (weight + offset) over the last axis.

    casting: "llama" rounds to hidden's dtype before the product with the weight, "gemma" after it.
    The further argument of Liger's kernel, `in_place`, is ignored.
    """
    output: Tensor = _RMSNorm.apply(hidden, weight, eps, offset, casting)
    return output


class _RMSNorm(torch.autograd.Function):
    """RMS norm computed in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str
    ) -> Tensor:
        exact = hidden.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = length.square_().div_(exact.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        ctx.offset = offset
        if casting == "gemma":
            return (exact * scale).mul_(weight.float() + offset).to(hidden.dtype)
        normed = (exact * scale).to(hidden.dtype)
        return normed.mul_(weight) if weight.dtype == normed.dtype else normed * weight

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, and of the weight if it is trained."""
        hidden, weight, scale = ctx.saved_tensors
        normed, grad = hidden.float() * scale, outer[0].float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad * (weight.float() + ctx.offset)
        projection = torch.linalg.vecdot(grad_normed, normed).div_(normed.shape[-1]).unsqueeze(-1)
        grad_hidden = grad_normed.addcmul_(normed, projection, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def attends_faster(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether `attend_causally` supports these inputs, and is faster than PyTorch."""
    # In latent attention, values have a different width.
    return query.device.type == "cpu" and not dropout and query.shape[-1] == value.shape[-1]


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stacks: Sequence[Sequence[DocumentSpan]],
    scaling: float | None,
) -> Tensor:
    """Return the attention output [rows, tokens, heads, head_dim].

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads, each shared by the
    same number of consecutive query heads. `stacks`: groups of documents that are computed
    together; each token must be in a document of one of them.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _DocumentAttention.apply(query, key, value, stacks, scale)
    return output


class _DocumentAttention(torch.autograd.Function):
    """softmax(Q K^T) V; query heads that share a key head are rows of one product."""

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
        saved = []
        for stack in stacks:
            queries, keys, values = (_cut(part, stack) for part in parts)
            for start, end, rows_of_block in _blocks(queries, keys):
                probs = _probabilities(queries[:, rows_of_block], keys[:, :end], future)
                _put(attended, torch.bmm(probs, values[:, :end]), stack, start)
                if end <= MAX_SAVED_TOKENS:
                    saved.append(probs)
        ctx.save_for_backward(query, key, value, future, *saved)
        ctx.stacks, ctx.scale = stacks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value (arXiv 2205.14135, appendix B)."""
        query, key, value, future, *saved = ctx.saved_tensors
        num_groups = key.shape[1]
        parts = _by_key_head(num_groups, query * ctx.scale, key, value, outer[0].transpose(1, 2))
        grads = [torch.empty_like(part) for part in (query, key, value)]
        grad_query, grad_key, grad_value = _by_key_head(num_groups, *grads)
        for stack in reversed(ctx.stacks):
            queries, keys, values, grad_outputs = (_cut(part, stack) for part in parts)
            # Sums over blocks of queries, from the last block, which has all keys. In fp32, to
            # round only once.
            grad_keys = grad_values = torch.empty(0)
            for start, end, rows_of_block in reversed(_blocks(queries, keys)):
                block_queries, block_keys = queries[:, rows_of_block], keys[:, :end]
                grad_block = grad_outputs[:, rows_of_block]
                if end <= MAX_SAVED_TOKENS:
                    probs = saved.pop()
                else:
                    probs = _probabilities(block_queries, block_keys, future)
                grad_probs = torch.bmm(grad_block, values[:, :end].mT)
                grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
                _put(grad_query, torch.bmm(grad_scores, block_keys), stack, start)
                keys_summand = torch.bmm(grad_scores.mT, block_queries)
                values_summand = torch.bmm(probs.mT, grad_block)
                if end == keys.shape[1]:
                    grad_keys, grad_values = keys_summand.float(), values_summand.float()
                else:
                    grad_keys[:, :end] += keys_summand
                    grad_values[:, :end] += values_summand
            _put(grad_key, grad_keys, stack)
            _put(grad_value, grad_values, stack)
        grads[0].mul_(ctx.scale)
        return (*grads, None, None)


def _by_key_head(num_groups: int, *parts: Tensor) -> list[Tensor]:
    """View [rows, heads, tokens, ...] as [rows, key heads, tokens, heads per key head, ...]."""
    return [part.unflatten(1, (num_groups, -1)).transpose(2, 3) for part in parts]


def _cut(part: Tensor, stack: Sequence[DocumentSpan]) -> Tensor:
    """Copy documents out as [documents * key heads, tokens * heads per key head, head_dim].

    Shorter documents are padded by zeros at the end, which no real token attends to. In half
    precision, tokens are padded to a multiple of BLOCK: oneDNN compiles a kernel for each new
    shape, which takes longer than the product.
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
    """Write `part`, the tokens of documents from `first` on, back to where `_cut` read from."""
    _, num_groups, _, shared, _ = whole.shape
    slots = part.unflatten(1, (-1, shared)).unflatten(0, (len(stack), num_groups))
    for slot, (row, start, end) in zip(slots, stack, strict=True):
        target = whole[row, :, start + first : end][:, : slot.shape[1]]
        target.copy_(slot[:, : target.shape[1]])


def _blocks(queries: Tensor, keys: Tensor) -> list[tuple[int, int, slice]]:
    """Return first token, end, and rows of the queries, one per head that shares the key head."""
    tokens = keys.shape[1]
    shared = queries.shape[1] // tokens
    starts = range(0, tokens, BLOCK)
    bounds = [(start, min(start + BLOCK, tokens)) for start in starts]
    return [(start, end, slice(start * shared, end * shared)) for start, end in bounds]


def _probabilities(queries: Tensor, keys: Tensor, future: Tensor) -> Tensor:
    """Return attention probabilities [documents * key heads, queries, keys].

    The queries belong to the last of the keys. `future`: mask of a block, added to its scores.
    """
    scores = torch.bmm(queries, keys.mT)
    num_queries = queries.shape[1]
    num_own = num_queries * future.shape[1] // future.shape[0]
    scores[:, :, -num_own:].add_(future[:num_queries, :num_own])
    return torch.softmax(scores, dim=-1)
