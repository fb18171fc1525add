"""Layers that mix tokens without attention, over a whole pack on the CPU.

They stand in for the packages that transformers calls on a GPU with the boundaries of documents, by
the same arguments: causal-conv1d and flash-linear-attention. Results are those of each document
alone, computed in fp32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""tokens of a chunk: fewer are less padding and work inside of chunks, more are fewer steps"""
_installed: set[Callable[..., Any]] = set()


def install_cpu_kernels(forward: Callable[..., Any]) -> None:
    """Let the functions that a mixer's `forward` calls take boundaries of documents on the CPU.

    Only where the package that takes them is not installed. Without boundaries, and on other
    devices, they remain transformers' own.
    """
    names = inspect.unwrap(forward).__globals__
    for name, package, kernel in (
        ("causal_conv1d_fn", "causal_conv1d", causal_conv1d),
        ("torch_chunk_gated_delta_rule", "fla", gated_delta_rule),
    ):
        own = names.get(name)
        if own is not None and own not in _installed and find_spec(package) is None:
            names[name] = _on_cpu(own, kernel)
            _installed.add(names[name])


def _on_cpu(own: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        is_row = len(args[0]) == 1  # own says that it cannot keep those of several rows apart
        is_taken = is_packed and is_row and args[0].device.type == "cpu"
        return (kernel if is_taken else own)(*args, **kwargs)

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
    """Convolve each channel of `hidden` [1, channels, tokens] with its past in its document.

    weight [channels, taps], the last of them for the token itself; seq_idx [1, tokens].
    """
    from transformers.activations import ACT2FN

    mixed: Tensor = _Convolution.apply(hidden[0].mT, weight, seq_idx[0])
    if bias is not None:
        mixed = mixed + bias
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    return mixed.to(hidden.dtype).mT.unsqueeze(0)


class _Convolution(torch.autograd.Function):
    """Each tap's weight times the token so many before, where that is in the same document."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, numbers)
        exact = torch.promote_types(weight.dtype, torch.float32)
        hidden, taps = hidden.to(exact), weight.to(exact).unbind(1)[::-1]
        output = hidden * taps[0]
        for back, tap in enumerate(taps[1:], start=1):
            output[back:].addcmul_(hidden[:-back] * _is_same(numbers, back), tap)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, numbers = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        given = outer[0]
        taps = weight.to(given.dtype).unbind(1)[::-1]
        to_hidden = given * taps[0]
        to_taps = [(given * hidden).sum(0)] if needs_weight else []
        for back, tap in enumerate(taps[1:], start=1):
            inside = given[back:] * _is_same(numbers, back)
            if needs_hidden:
                to_hidden[:-back].addcmul_(inside, tap)
            if needs_weight:
                to_taps.append((inside * hidden[:-back]).sum(0))
        return (
            to_hidden.to(hidden.dtype) if needs_hidden else None,
            torch.stack(to_taps[::-1], 1).to(weight.dtype) if needs_weight else None,
            None,
        )


def _is_same(numbers: Tensor, back: int) -> Tensor:
    """Return whether each token [tokens - back, 1] is in the document of the one `back` before."""
    return (numbers[back:] == numbers[:-back]).unsqueeze(1)


@dataclass(slots=True)
class _Chunks:
    """The chunks of a pack: the first of each document, then the second of each that has one, ...

    Documents with most chunks come first, so that those that go on are the first of a step.
    """

    steps: list[slice]
    """chunks of each step, which run together"""
    slots: Tensor
    """position of each token in the chunks, flat: [tokens]"""

    @property
    def number(self) -> int:
        """Return how many chunks there are."""
        return int(self.steps[-1].stop)


@functools.lru_cache(maxsize=4)
def _chunks_of(lengths: tuple[int, ...]) -> _Chunks:
    numbers = [-(-length // CHUNK) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda document: -numbers[document])
    counts = [sum(number > step for number in numbers) for step in range(max(numbers))]
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
    the decay, and beta [1, tokens, value heads]. What happens inside of chunks is computed for all
    documents at once, what goes from chunk to chunk for all documents that have so many.
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

    # A state is read in later chunks alone: in the first ones it is zero.
    first, later = chunks.steps[0], slice(chunks.steps[0].stop, None)
    new = _solve(system[first], targets[first])
    outputs = [seen[first] @ new]
    if len(chunks.steps) > 1:
        queries, keys = (one.repeat_interleave(shared, 1) for one in (queries, keys))
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

    targets, reads, queries and seen are of the later chunks, keys and decays of all.
    """
    offset = steps[0].stop
    queries = queries * decays[offset:].exp()
    ends = decays[:, :, -1:]
    keys = (keys * (ends - decays).exp()).mT
    kept = ends.exp()
    outputs, state = [], torch.zeros(())
    for before, step in pairwise(steps):
        going = step.stop - step.start
        last = slice(before.start, before.start + going)
        added = keys[last] @ new[:going]
        state = added if before is steps[0] else state[:going] * kept[last] + added
        here = slice(step.start - offset, step.stop - offset)
        new = targets[here] - reads[here] @ state
        outputs.append(queries[here] @ state + seen[here] @ new)
    return outputs


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve for a lower triangle whose diagonal counts as one."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def _cut(part: Tensor, chunks: _Chunks) -> Tensor:
    """Return [1, tokens, heads, ...] as [chunks, heads, CHUNK, ...], zeros behind each document."""
    whole = torch.zeros(chunks.number * CHUNK, *part.shape[2:])
    whole.index_copy_(0, chunks.slots, part[0].float())
    return whole.unflatten(0, (chunks.number, CHUNK)).transpose(1, 2)


def _normalized(part: Tensor) -> Tensor:
    part = part.float()
    return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)
