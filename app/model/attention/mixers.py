"""Keep documents apart in mixers: recurrent layers, convolutions and token shifts.

`mixer_search` finds these modules by running them, not by a list of names. If a mixer's kernels
support document boundaries, as some GPU kernels do, it runs whole packs with them. Otherwise it
runs document by document: documents of similar lengths form a batch, padded on the right, where no
token sees the padding.

On the CPU, a causal convolution and a gated delta rule over packed documents, in fp32, replace the
packages that transformers calls on a GPU with document boundaries, causal-conv1d and
flash-linear-attention. On a GPU, the convolution of flash-linear-attention, which has wheels,
replaces causal-conv1d, which is compiled.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from app.model.attention.documents import DocumentGroups, Lengths, group_documents
from common.errors import UserError
from data_modules import SequenceSlice

log = logging.getLogger(__name__)

_ARGUMENT = "mixer_documents"
"""name of the forward argument that carries a batch's documents to the mixers"""
RANKS = "mixer_ranks"
"""name of the one that carries the ranks that hold slices of the rows"""
_BOUNDARIES = (
    *("documents", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
)
"""arguments that describe a whole batch, which mixers do not get"""
_RECURRENT_MASK = "create_recurrent_attention_mask"
"""name of the function with which transformers' models hide padding from recurrent layers"""
CHUNK = 32
"""tokens per chunk: fewer mean less padding and less work within chunks, more mean fewer steps"""
Forward = Callable[..., Any]
_installed: set[Forward] = set()


class _CurrentBatch:
    """The documents of the forward pass in progress.

    Not a context variable, since autograd may recompute a layer in a thread of its own.
    """

    documents: DocumentGroups | None = None
    ranks: ProcessGroup | None = None


@contextmanager
def use_documents(
    documents: DocumentGroups | None, ranks: ProcessGroup | None = None
) -> Iterator[None]:
    """Run mixers on these documents in this context; None: every row is one document.

    `ranks`: those that hold slices of the rows; None for whole rows.
    """
    before = _CurrentBatch.documents, _CurrentBatch.ranks
    _CurrentBatch.documents, _CurrentBatch.ranks = documents, ranks
    try:
        yield
    finally:
        _CurrentBatch.documents, _CurrentBatch.ranks = before


def recompute_on_same_documents(run_layer: Forward) -> Forward:
    """Make an activation checkpoint recompute its layer on the documents of its forward pass."""

    def run(layer: Forward, *args: Any, **kwargs: Any) -> Any:
        documents, ranks = _CurrentBatch.documents, _CurrentBatch.ranks

        @wraps(layer)
        def on_same_documents(*inputs: Any, **named: Any) -> Any:
            with use_documents(documents, ranks):
                return layer(*inputs, **named)

        return run_layer(on_same_documents, *args, **kwargs)

    return run


class ForwardWithDocuments:
    """A model's forward with further arguments, `mixer_documents` and `mixer_ranks`."""

    def __init__(self, model: Any) -> None:
        self._original = model.forward
        self.__signature__ = inspect.signature(model.forward)  # generation reads it

    def __call__(
        self, *args: Any, mixer_documents: Any = None, mixer_ranks: Any = None, **kwargs: Any
    ) -> Any:
        with use_documents(mixer_documents, mixer_ranks):
            return self._original(*args, **kwargs)


class MixerForward:
    """A mixer's forward: document by document, or with boundaries if its kernels support them.

    The boundaries for attention are dropped, since they may count through several rows.
    """

    def __init__(
        self, module: Any, original: Any = None, *, takes_boundaries: bool = False
    ) -> None:
        self._module, self._original = module, original or module.forward
        self.takes_boundaries = takes_boundaries
        self._chunk_size = _find_chunk_size(module)
        # Not in the graph of a compiled layer, since documents differ from batch to batch.
        self._run = torch.compiler.disable(
            _run_by_boundaries if takes_boundaries else _run_by_document
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {key: value for key, value in kwargs.items() if key not in _BOUNDARIES}
        if (ranks := _CurrentBatch.ranks) is not None:
            with use_documents(_CurrentBatch.documents):
                return _run_on_whole_rows(self, ranks, args, named)
        if _CurrentBatch.documents is None:
            return self._original(*args, **named)
        forward = self._original if self.takes_boundaries else self._run_group
        return self._run(forward, _CurrentBatch.documents, args, named)

    def _run_group(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of documents, on a CPU with chunks that are not longer than the documents.

        A scan pads each document to whole chunks (256 tokens in Mamba 2, 64 in a delta rule). Their
        size does not change the result. GPU kernels are compiled for one size.
        """
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = next(tensors)
        if self._chunk_size is None or hidden.device.type != "cpu":
            return self._original(*args, **kwargs)
        tokens = hidden.shape[1]
        if "chunk_size" not in vars(self._module):
            chunk_size = math.ceil(tokens / math.ceil(tokens / self._chunk_size))
            return self._original(*args, **kwargs, chunk_size=chunk_size)
        self._module.chunk_size = min(self._chunk_size, tokens)
        try:
            return self._original(*args, **kwargs)
        finally:
            self._module.chunk_size = self._chunk_size


def mixers_run_by_document(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the mixers of a model that run once for each group of documents of a batch."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, MixerForward) and not forward.takes_boundaries:
            yield module


def _find_chunk_size(module: Any) -> int | None:
    """Return the tokens per chunk of a mixer's scan; None if it is unknown or cannot be changed.

    It is an attribute of the module, or a default of the function that its forward passes keyword
    arguments on to.
    """
    own = vars(module).get("chunk_size")
    if type(own) is int:
        return own
    forward = inspect.unwrap(type(module).forward)
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in _parameters(forward).values())
    if not takes_kwargs or not inspect.isfunction(forward):
        return None
    for name in forward.__code__.co_names:
        called = forward.__globals__.get(name)
        if inspect.isfunction(called) and "chunk_size" in (parameters := _parameters(called)):
            default = parameters["chunk_size"].default
            return default if type(default) is int else None
    return None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _run_by_boundaries(
    forward: Forward, documents: DocumentGroups, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `forward` on all rows joined into one, with the boundaries of the documents.

    Kernels support boundaries only in a single row. Outputs as in `_run_by_document`.
    """
    rows, tokens = documents.rows, documents.tokens

    def join(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != tokens or tensor.shape[0] not in (1, rows):
            return tensor
        return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1).unsqueeze(0)

    args, kwargs = tree_map_only(Tensor, join, (args, kwargs))
    with use_documents(None):  # nested mixers get the same boundaries as arguments
        output = forward(*args, **kwargs, **documents.boundaries)
    if isinstance(output, Tensor):
        return output.unflatten(1, (rows, tokens)).squeeze(0)
    joined = 1, rows * tokens
    return tuple(
        part.unflatten(1, (rows, tokens)).squeeze(0) if _has_shape(part, joined) else None
        for part in output
    )


def _run_on_whole_rows(
    forward: Forward, ranks: ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `forward` on the tokens of all ranks that hold slices of the rows; return the own slice.

    Each rank computes whole rows. Outputs as in `_run_by_document`.
    """
    from app.model.attention.exchange import gather_tokens

    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    tokens = next(tensors).shape[1]
    own = SequenceSlice.of_rank(ranks.size() * tokens, ranks)

    def gather(tensor: Tensor) -> Tensor:
        is_by_token = tensor.ndim > 1 and tensor.shape[1] == tokens
        return gather_tokens(tensor, ranks, 1) if is_by_token else tensor

    args, kwargs = tree_map_only(Tensor, gather, (args, kwargs))
    output = forward(*args, **kwargs)
    if isinstance(output, Tensor):
        return own.take(output)
    return tuple(
        own.take(part)
        if isinstance(part, Tensor) and part.shape[1:2] == (ranks.size() * tokens,)
        else None
        for part in output
    )


def _run_by_document(
    forward: Forward, documents: DocumentGroups, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `forward` on batches of documents instead of rows.

    Arguments [rows, tokens, ...] are split into documents, and outputs of this shape joined again;
    other outputs in a tuple, such as states, become None. Raises UserError for a mask of queries by
    keys.
    """
    shape = documents.rows, documents.tokens
    outputs = []
    with use_documents(None):  # nested mixers already run on whole documents
        for index in documents.gather:
            gather = partial(_gather_documents, index=index, shape=shape)
            group_args, group_kwargs = tree_map_only(Tensor, gather, (args, kwargs))
            outputs.append(forward(*group_args, **group_kwargs))

    def join(parts: list[Tensor]) -> Tensor:
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return flat[documents.restore].unflatten(0, shape)

    if isinstance(outputs[0], Tensor):
        return join(outputs)
    sizes = [index.shape for index in documents.gather]
    return tuple(
        join(list(parts)) if all(map(_has_shape, parts, sizes)) else None
        for parts in zip(*outputs, strict=True)
    )


def _gather_documents(tensor: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, tokens = shape
    if tensor.ndim == 4 and tuple(tensor.shape[-2:]) == (tokens, tokens):
        raise UserError(
            "a mask of queries by keys cannot be split into documents: type packing=none"
        )
    if tensor.ndim < 2 or tensor.shape[1] != tokens or tensor.shape[0] not in (1, rows):
        return tensor
    return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1)[index]


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape[:2]) == tuple(shape)


def has_isolated_mixers(model: torch.nn.Module) -> bool:
    """Return whether mixers were found in a model, or in the base of an adapter."""
    return isinstance(vars(transformers_model(model)).get("forward"), ForwardWithDocuments)


def masks_recurrent_layers(model: torch.nn.Module) -> bool:
    """Return whether a model derives a mask for recurrent layers from its attention mask."""
    return _RECURRENT_MASK in vars(sys.modules[type(transformers_model(model)).__module__])


def mixer_inputs(
    model: torch.nn.Module,
    document_lengths: Lengths,
    shape: tuple[int, int],
    device: torch.device,
    ranks: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments that keep documents apart in a model's mixers, if any.

    `shape` of whole rows; `ranks`: those that hold slices of them.
    """
    if not has_isolated_mixers(model):
        return {}
    return {_ARGUMENT: group_documents(document_lengths, shape, device), RANKS: ranks}


def transformers_model(model: torch.nn.Module) -> Any:
    """Return the transformers model inside an adapter, whose `forward` peft calls."""
    from transformers import PreTrainedModel

    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def install_kernels(forward: Forward) -> None:
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


def _dispatch(original: Forward, kernels: Mapping[str, Forward]) -> Forward:
    """Return a function that calls the kernel of a device for one packed row, else `original`."""

    @wraps(original)
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
        return int(self.steps[-1].stop)


@lru_cache(maxsize=4)
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
