"""Layers that mix tokens without attention: recurrent states, convolutions, token shifts.

They take no document boundaries on a CPU, and on a GPU only with kernels that take them. Which
modules these are is found by `mixer_search`, not by a list of names. Where a mixer's kernels take
the boundaries of the documents, by transformers' names, it runs the whole pack; else it runs
document by document, those of similar lengths as one padded batch, with padding on the right, where
no token sees it.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from app.model.attention.documents import DocumentGroups, Lengths, group_documents
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ARGUMENT = "mixer_documents"
"""name of the forward argument that carries a batch's documents to the mixers"""
BOUNDARIES = (
    "documents",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""arguments that describe a whole batch, which a mixer no longer sees"""
RECURRENT_MASK = "create_recurrent_attention_mask"
"""name of the function by which transformers' models hide padding from recurrent layers"""


class _Running:
    """The documents of the pass that runs now.

    Not a context variable: a backward pass that recomputes a layer may be in a thread of autograd.
    """

    documents: DocumentGroups | None = None


@contextmanager
def use_documents(documents: DocumentGroups | None) -> Iterator[None]:
    """Run mixers on these documents; None: a row is one document."""
    before, _Running.documents = _Running.documents, documents
    try:
        yield
    finally:
        _Running.documents = before


def recompute_on_same_documents(run_layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpoint recompute its layer on the documents that it first ran on."""

    def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        documents = _Running.documents

        @wraps(layer)
        def on_same_documents(*inputs: Any, **named: Any) -> Any:
            with use_documents(documents):
                return layer(*inputs, **named)

        return run_layer(on_same_documents, *args, **kwargs)

    return run


class DocumentsOfModel:
    """A model's forward, which takes the documents of its mixers besides."""

    def __init__(self, model: Any) -> None:
        self._plain = model.forward
        self.__signature__ = inspect.signature(model.forward)  # generation reads it

    def __call__(self, *args: Any, mixer_documents: Any = None, **kwargs: Any) -> Any:
        with use_documents(mixer_documents):
            return self._plain(*args, **kwargs)


class ByDocument:
    """A mixer's forward, document by document, or by their boundaries where its kernels take them.

    Boundaries of the attention do not reach it: they may count through several rows.
    """

    def __init__(self, module: Any, plain: Any = None, *, takes_boundaries: bool = False) -> None:
        import torch

        self._module, self._plain = module, plain or module.forward
        self.takes_boundaries = takes_boundaries
        self._chunk = chunk_of(module)
        # Documents differ from batch to batch: no graph of a compiled layer holds them.
        self._run = torch.compiler.disable(
            run_by_boundaries if takes_boundaries else run_by_document
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {key: value for key, value in kwargs.items() if key not in BOUNDARIES}
        if _Running.documents is None:
            return self._plain(*args, **named)
        forward = self._plain if self.takes_boundaries else self._run_group
        return self._run(forward, _Running.documents, args, named)

    def _run_group(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of documents; on a CPU in chunks no longer than they are.

        A scan pads each document to whole chunks (256 tokens in Mamba 2, 64 in a delta rule), whose
        size changes no result. Kernels of a GPU are compiled for one size.
        """
        import torch

        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        if self._chunk is None or hidden.device.type != "cpu":
            return self._plain(*args, **kwargs)
        tokens = hidden.shape[1]
        if "chunk_size" not in vars(self._module):
            even = math.ceil(tokens / math.ceil(tokens / self._chunk))
            return self._plain(*args, **kwargs, chunk_size=even)
        self._module.chunk_size = min(self._chunk, tokens)
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._module.chunk_size = self._chunk


def mixers_run_by_document(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Go over the mixers of a model that run once for each group of documents of a batch."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ByDocument) and not forward.takes_boundaries:
            yield module


def chunk_of(module: Any) -> int | None:
    """Return the tokens of a chunk in a mixer's scan, None where it is not known or not to choose.

    It is the module's own, or the default of a function that its forward hands its arguments on to.
    """
    own = vars(module).get("chunk_size")
    if type(own) is int:
        return own
    forward = inspect.unwrap(type(module).forward)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in _parameters(forward).values())
    if not takes_any or not inspect.isfunction(forward):
        return None
    for name in forward.__code__.co_names:
        called = forward.__globals__.get(name)
        if inspect.isfunction(called) and "chunk_size" in (taken := _parameters(called)):
            default = taken["chunk_size"].default
            return default if type(default) is int else None
    return None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def run_by_boundaries(
    forward: Callable[..., Any],
    documents: DocumentGroups,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `forward` on all rows as one, with the boundaries of documents by transformers' names.

    Kernels take boundaries for one row alone. Outputs as of `run_by_document`.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    rows, tokens = documents.rows, documents.tokens

    def join(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != tokens or tensor.shape[0] not in (1, rows):
            return tensor
        return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1).unsqueeze(0)

    args, kwargs = tree_map_only(torch.Tensor, join, (args, kwargs))
    with use_documents(None):  # what is inside gets the same boundaries
        output = forward(*args, **kwargs, **documents.boundaries)
    if isinstance(output, torch.Tensor):
        return output.unflatten(1, (rows, tokens)).squeeze(0)
    whole = 1, rows * tokens
    return tuple(
        part.unflatten(1, (rows, tokens)).squeeze(0) if _is_of_tokens(part, whole) else None
        for part in output
    )


def run_by_document(
    forward: Callable[..., Any],
    documents: DocumentGroups,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `forward` on batches of documents instead of rows.

    Tensors [rows, tokens, ...] among the arguments are cut into documents, and such outputs put
    together again; of a tuple's other outputs, as states, nothing remains. UserError for a mask of
    queries by keys.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    shape = documents.rows, documents.tokens
    outputs = []
    with use_documents(None):  # what is inside runs on whole documents already
        for index in documents.gather:
            cut = partial(_cut, index=index, shape=shape)
            on_group = tree_map_only(torch.Tensor, cut, (args, kwargs))
            outputs.append(forward(*on_group[0], **on_group[1]))

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return flat[documents.restore].unflatten(0, shape)

    if isinstance(outputs[0], torch.Tensor):
        return join(outputs)
    sizes = [index.shape for index in documents.gather]
    return tuple(
        join(list(parts)) if all(map(_is_of_tokens, parts, sizes)) else None
        for parts in zip(*outputs, strict=True)
    )


def _cut(tensor: torch.Tensor, index: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    rows, tokens = shape
    if tensor.ndim == 4 and tuple(tensor.shape[-2:]) == (tokens, tokens):
        raise UserError("a mask of queries by keys cannot be cut into documents: type packing=none")
    if tensor.ndim < 2 or tensor.shape[1] != tokens or tensor.shape[0] not in (1, rows):
        return tensor
    return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1)[index]


def _is_of_tokens(value: Any, size: tuple[int, ...]) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == tuple(size)


def has_isolated_mixers(model: torch.nn.Module) -> bool:
    """Return whether mixers were found in a model, or in the base below its adapter."""
    return isinstance(vars(transformers_model(model)).get("forward"), DocumentsOfModel)


def masks_recurrent_layers(model: torch.nn.Module) -> bool:
    """Return whether a model makes a mask for recurrent layers out of that for its attention."""
    return RECURRENT_MASK in vars(sys.modules[type(transformers_model(model)).__module__])


def mixer_inputs(
    model: torch.nn.Module,
    document_lengths: Lengths,
    shape: tuple[int, int],
    device: torch.device,
) -> dict[str, Any]:
    """Return the argument of the forward that keeps documents apart in a model's mixers."""
    if not has_isolated_mixers(model):
        return {}
    return {ARGUMENT: group_documents(document_lengths, shape, device)}


def transformers_model(model: torch.nn.Module) -> Any:
    """Return the transformers model inside an adapter: peft calls its `forward`."""
    from transformers import PreTrainedModel

    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))
