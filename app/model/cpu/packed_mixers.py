"""Causal convolution and gated delta rule over packed documents on the CPU.

Replacements, with the same arguments, for the packages that transformers calls on a GPU with
document boundaries: causal-conv1d and flash-linear-attention. The results equal those of each
document alone, and are computed in fp32. On a GPU, the convolution of flash-linear-attention, which
has wheels, replaces causal-conv1d, which is compiled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""tokens per chunk: fewer mean less padding and less work within chunks, more mean fewer steps"""
_installed: set[Callable[..., Any]] = set()


def install_kernels(forward: Callable[..., Any]) -> None:
    """Make the functions that a mixer's `forward` calls support document boundaries.

    A function is replaced only if its package is not installed. Without boundaries, or on another
    device, the replacement calls transformers' own function.
    """
    names = inspect.unwrap(forward).__globals__
    on_gpu = {"cuda": triton_causal_conv1d} if find_spec("fla") is not None else {}
    for name, package, kernels in (
        ("causal_conv1d_fn", "causal_conv1d", {"cpu": causal_conv1d} | on_gpu),
        ("torch_chunk_gated_delta_rule", "fla", {"cpu": gated_delta_rule}),
    ):
        original = names.get(name)
        if original is not None and original not in _installed and find_spec(package) is None:
            names[name] = _dispatch(original, kernels)
            _installed.add(names[name])


def _dispatch(
    original: Callable[..., Any], kernels: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function that calls the kernel of a device for one packed row, else `original`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        is_one_row = len(args[0]) == 1  # `original` raises an error for several packed rows
        kernel = kernels.get(args[0].device.type, original)
        return (kernel if is_packed and is_one_row else original)(*args, **kwargs)

    return call


def causal_conv1d(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve each channel of `hidden` [1, channels, tokens] causally within each document.

    weight [channels, taps], the last tap for the token itself; seq_idx [1, tokens], the document of
    each token.
    """
    from transformers.activations import ACT2FN

    mixed: Tensor = _Convolution.apply(hidden[0].mT, weight, seq_idx[0])
    if bias is not None:
        mixed = mixed + bias
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    return mixed.to(hidden.dtype).mT.unsqueeze(0)


def triton_causal_conv1d(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve as `causal_conv1d` by flash-linear-attention; boundaries int32 [documents + 1]."""
    from fla.modules.causal_conv1d import causal_conv1d as convolve

    rows = hidden.mT.contiguous()
    mixed, _state = convolve(rows, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
    return mixed.mT


class _Convolution(torch.autograd.Function):
    """Sum over taps of the weight times an earlier token, if that is in the same document."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, documents)
        exact = torch.promote_types(weight.dtype, torch.float32)
        hidden, taps = hidden.to(exact), weight.to(exact).unbind(1)[::-1]
        output = hidden * taps[0]
        for back, tap in enumerate(taps[1:], start=1):
            output[back:].addcmul_(hidden[:-back] * _is_same_document(documents, back), tap)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, documents = ctx.saved_tensors
        hidden_needs_grad, weight_needs_grad, _ = ctx.needs_input_grad
        grad = outer[0]
        taps = weight.to(grad.dtype).unbind(1)[::-1]
        grad_hidden = grad * taps[0]
        grad_taps = [(grad * hidden).sum(0)] if weight_needs_grad else []
        for back, tap in enumerate(taps[1:], start=1):
            inside = grad[back:] * _is_same_document(documents, back)
            if hidden_needs_grad:
                grad_hidden[:-back].addcmul_(inside, tap)
            if weight_needs_grad:
                grad_taps.append((inside * hidden[:-back]).sum(0))
        return (
            grad_hidden.to(hidden.dtype) if hidden_needs_grad else None,
            torch.stack(grad_taps[::-1], 1).to(weight.dtype) if weight_needs_grad else None,
            None,
        )


def _is_same_document(documents: Tensor, back: int) -> Tensor:
    """Return whether a token and the one `back` before it share a document, [tokens - back, 1]."""
    return (documents[back:] == documents[:-back]).unsqueeze(1)


@dataclass(slots=True)
class _Chunks:
    """The chunks of packed documents: first chunks of all documents, then all second chunks, ...

    Documents are sorted by number of chunks, descending, so that the documents with a next chunk
    are always the first ones of a step.
    """

    steps: list[slice]
    """chunks of each step, which are computed together"""
    slots: Tensor
    """index of each token in the flattened chunks, [tokens]"""

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all documents."""
        return int(self.steps[-1].stop)


@functools.lru_cache(maxsize=4)
def _chunks_of(lengths: tuple[int, ...]) -> _Chunks:
    num_chunks = [-(-length // CHUNK) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda document: -num_chunks[document])
    counts = [sum(number > step for number in num_chunks) for step in range(max(num_chunks))]
    ends = list(accumulate(counts))
    starts = torch.tensor([0, *ends[:-1]])
    slots = []
    for document, length in enumerate(lengths):
        tokens = torch.arange(length)
        chunks = starts[tokens // CHUNK] + order.index(document)
        slots.append(chunks * CHUNK + tokens % CHUNK)
    steps = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return _Chunks(steps, torch.cat(slots))


@torch.autocast("cpu", enabled=False)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, tokens, value heads, width] of the gated delta rule (arXiv 2412.06464, eq. 10).

    query, key [1, tokens, key heads, width]; value [1, tokens, value heads, width]; g, the log of
    the decay, and beta [1, tokens, value heads]. Within chunks, all documents are computed at once;
    from chunk to chunk, all documents that have a next chunk.
    """
    chunks = _chunks_of(tuple(cu_seqlens.diff().tolist()))
    normalized = _normalized if use_qk_l2norm_in_kernel else Tensor.float
    queries = _cut(normalized(query) * query.shape[-1] ** -0.5, chunks)
    keys = _cut(normalized(key), chunks)
    rates, decays = _cut(beta, chunks).unsqueeze(-1), _cut(g, chunks).cumsum(2).unsqueeze(-1)
    targets = _cut(value, chunks) * rates
    shared = targets.shape[1] // keys.shape[1]

    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (decays - decays.mT).masked_fill(future, -torch.inf).exp()
    between = between.unflatten(1, (-1, shared))
    system = ((keys @ keys.mT).unsqueeze(2) * between).flatten(1, 2) * rates
    seen = ((queries @ keys.mT).unsqueeze(2) * between).flatten(1, 2)

    # The state is zero in first chunks, so only later chunks read it.
    first, later = chunks.steps[0], slice(chunks.steps[0].stop, None)
    new = _solve(system[first], targets[first])
    outputs = [seen[first] @ new]
    if len(chunks.steps) > 1:
        queries, keys = (part.repeat_interleave(shared, 1) for part in (queries, keys))
        reads = keys[later] * rates[later] * decays[later].exp()
        targets, reads = _solve(system[later], torch.cat([targets[later], reads], -1)).split(
            [targets.shape[-1], reads.shape[-1]], -1
        )
        outputs += _scan(
            chunks.steps, new, targets, reads, queries[later], keys, seen[later], decays
        )
    joined = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return joined[chunks.slots].unsqueeze(0).to(query.dtype), None


def _scan(
    steps: list[slice],
    new: Tensor,
    targets: Tensor,
    reads: Tensor,
    queries: Tensor,
    keys: Tensor,
    seen: Tensor,
    decays: Tensor,
) -> list[Tensor]:
    """Return the outputs of all steps but the first, whose new values are `new`.

    targets, reads, queries and seen have the chunks after the first step, keys and decays all.
    """
    offset = steps[0].stop
    queries = queries * decays[offset:].exp()
    ends = decays[:, :, -1:]
    keys = (keys * (ends - decays).exp()).mT
    total_decays = ends.exp()
    outputs, state = [], torch.zeros(())
    for before, step in pairwise(steps):
        num_continued = step.stop - step.start
        last = slice(before.start, before.start + num_continued)
        added = keys[last] @ new[:num_continued]
        is_first = before is steps[0]
        state = added if is_first else state[:num_continued] * total_decays[last] + added
        current = slice(step.start - offset, step.stop - offset)
        new = targets[current] - reads[current] @ state
        outputs.append(queries[current] @ state + seen[current] @ new)
    return outputs


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve a lower triangular system; its diagonal is taken to be ones."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def _cut(part: Tensor, chunks: _Chunks) -> Tensor:
    """Return [1, tokens, heads, ...] as [chunks, heads, CHUNK, ...], padded by zeros."""
    whole = torch.zeros(chunks.num_chunks * CHUNK, *part.shape[2:])
    whole.index_copy_(0, chunks.slots, part[0].float())
    return whole.unflatten(0, (chunks.num_chunks, CHUNK)).transpose(1, 2)


def _normalized(part: Tensor) -> Tensor:
    """Return `part` in fp32 with L2 norm 1 over the last axis."""
    part = part.float()
    return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)
