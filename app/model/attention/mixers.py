"""Layers that mix tokens without attention: recurrent states, convolutions, token shifts.

They take no document boundaries on a CPU, and on a GPU only with kernels that take them. Which
modules these are is not a list of names: each module of a model is run twice on a pack, and one
whose outputs of a document change with another document is a mixer. It is given the boundaries of
the documents by transformers' names; where its kernels take them, which the same search proves, it
runs the whole pack. Else it runs document by document, those of similar lengths as one padded
batch; padding is on the right, where no token sees it.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
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
PROBE = (5, 6)
"""tokens of the two documents of the search"""
ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"
"""name under which transformers' layers look up their attention"""
RECURRENT_MASK = "create_recurrent_attention_mask"
"""name of the function by which transformers' models hide padding from recurrent layers"""
TOLERANCE = 2.0**-5
"""largest difference of a kernel's outputs from those document by document, over their norm"""
LEAST_EPS, FLOOR = 4, 1e-4
"""least change that is a leak: in eps of the outputs' dtype, and as a share of their size"""


class _Running:
    """The documents of the pass that runs now.

    Not a context variable: a backward pass that recomputes a layer may be in a thread of autograd.
    """

    documents: DocumentGroups | None = None


@contextmanager
def running_documents(documents: DocumentGroups | None) -> Iterator[None]:
    """Run mixers on these documents; None: a row is one document."""
    before, _Running.documents = _Running.documents, documents
    try:
        yield
    finally:
        _Running.documents = before


def keep_documents(run_layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpoint recompute its layer on the documents that it first ran on."""

    def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        documents = _Running.documents

        def on_same_documents(*inputs: Any, **named: Any) -> Any:
            with running_documents(documents):
                return layer(*inputs, **named)

        return run_layer(on_same_documents, *args, **kwargs)

    return run


class DocumentsOfModel:
    """A model's forward, which takes the documents of its mixers besides."""

    def __init__(self, model: Any) -> None:
        self._plain = model.forward
        self.__signature__ = inspect.signature(model.forward)  # generation reads it

    def __call__(self, *args: Any, mixer_documents: Any = None, **kwargs: Any) -> Any:
        with running_documents(mixer_documents):
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
    with running_documents(None):  # what is inside gets the same boundaries
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
    with running_documents(None):  # what is inside runs on whole documents already
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
        raise UserError("a mask of queries by keys cannot be cut into documents")
    if tensor.ndim < 2 or tensor.shape[1] != tokens or tensor.shape[0] not in (1, rows):
        return tensor
    return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1)[index]


def _is_of_tokens(value: Any, size: tuple[int, ...]) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == tuple(size)


def takes_documents(model: torch.nn.Module) -> bool:
    """Return whether mixers were found in a model, or in the base below its adapter."""
    return isinstance(vars(_whole(model)).get("forward"), DocumentsOfModel)


def masks_recurrent_layers(model: torch.nn.Module) -> bool:
    """Return whether a model makes a mask for recurrent layers out of that for its attention."""
    return RECURRENT_MASK in vars(sys.modules[type(_whole(model)).__module__])


def mixer_inputs(
    model: torch.nn.Module,
    document_lengths: Lengths,
    shape: tuple[int, int],
    device: torch.device,
) -> dict[str, Any]:
    """Return the argument of the forward that keeps documents apart in a model's mixers."""
    if not takes_documents(model):
        return {}
    return {ARGUMENT: group_documents(document_lengths, shape, device)}


def _whole(model: torch.nn.Module) -> Any:
    """Return the transformers model inside an adapter: peft calls its `forward`."""
    from transformers import PreTrainedModel

    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def isolate_mixers(
    model: torch.nn.Module,
    device: torch.device,
    inputs_of: Callable[[Lengths, torch.Tensor], dict[str, Any]],
) -> bool:
    """Find a model's mixers and keep documents apart in them; return whether there are any.

    Costs a forward pass of eleven tokens, in which every module runs three times. `inputs_of`
    returns what the forward needs besides `input_ids` for given document lengths.
    """
    import torch

    whole = _whole(model)
    lengths = [list(PROBE)]
    vocab_size = whole.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + sum(PROBE), device=device).unsqueeze(0) % vocab_size
    positions = torch.cat([torch.arange(length, device=device) for length in PROBE])
    documents = group_documents(lengths, (1, sum(PROBE)), device)
    inputs = inputs_of(lengths, ids)
    search = _Search()
    was_training = model.training
    model.eval()
    try:
        search.install(whole)
        with torch.no_grad(), running_documents(documents):
            model(input_ids=ids, position_ids=positions.unsqueeze(0), use_cache=False, **inputs)
    finally:
        search.remove()
        model.train(was_training)
    if search.mixers and not takes_documents(model):
        whole.forward = DocumentsOfModel(whole)
    by_boundaries = {True: set[str](), False: set[str]()}
    for module, takes_boundaries in search.mixers.items():
        by_boundaries[takes_boundaries].add(type(module).__name__)
    for takes, how in ((True, "by the boundaries of documents"), (False, "document by document")):
        if by_boundaries[takes]:
            log.info("packing: %s run %s", " and ".join(sorted(by_boundaries[takes])), how)
    return bool(search.mixers)


class _Search:
    """Tries every module inside of a forward pass, where a strategy has gathered its weights.

    The innermost come first, so that what a mixer is a part of is tried with the mixer isolated.
    """

    def __init__(self) -> None:
        self.mixers: dict[torch.nn.Module, bool] = {}
        """whether kernels of each take the boundaries of documents"""
        self._before: list[tuple[torch.nn.Module, Any]] = []
        self._is_trying = False

    def install(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            own = vars(module).get("forward")
            # A leak of attention is a fault, which is not to be covered up here.
            if isinstance(own, ByDocument) or any(map(_is_attention, module.modules())):
                continue
            self._before.append((module, own))
            module.forward = _Trial(self, module)

    def remove(self) -> None:
        """Restore what each module ran before; those that were found keep running by document."""
        for module, own in self._before:
            del module.forward
            if own is not None:
                module.forward = own
            if module in self.mixers:
                module.forward = ByDocument(module, takes_boundaries=self.mixers[module])

    def run(self, trial: _Trial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, and find out whether it is a mixer."""
        if self._is_trying or (edited := _edits(args, kwargs)) is None:
            return trial.run(*args, **kwargs)
        try:
            output = trial.run(*args, **kwargs)
        except ValueError:
            # So transformers says that only a kernel that is not installed takes boundaries.
            return self._isolate(trial, args, kwargs, edited)
        self._is_trying = True
        first, second = (trial.run(*each[0], **each[1]) for each in edited)
        self._is_trying = False
        if not _leaks(output, first, second):
            return output
        with suppress(UserError):  # this one cannot run by document, and the model is refused
            return self._isolate(trial, args, kwargs, edited)
        return output

    def _isolate(
        self, trial: _Trial, args: tuple[Any, ...], kwargs: dict[str, Any], edited: list[Any]
    ) -> Any:
        by_document = ByDocument(trial.module, trial.forward)
        output = by_document(*args, **kwargs)
        self._is_trying = True
        by_boundaries = ByDocument(trial.module, trial.forward, takes_boundaries=True)
        inputs = [(args, kwargs), *edited]
        takes_boundaries = _is_right(by_boundaries, output, inputs) and _trains_right(
            trial.module, by_boundaries, by_document, inputs
        )
        self._is_trying = False
        trial.run = by_boundaries if takes_boundaries else by_document
        self.mixers[trial.module] = takes_boundaries
        return output


def _is_right(forward: ByDocument, expected: Any, inputs: list[Any]) -> bool:
    """Return whether a mixer's kernels keep documents apart by their boundaries.

    `inputs`: as they are, and with each edit; `expected`: the outputs document by document.
    """
    import torch

    try:
        outputs = [forward(*args, **kwargs) for args, kwargs in inputs]
    except Exception:  # noqa: BLE001  kernels that take no boundaries, and their compilers
        return False
    own, other = (one[0] if isinstance(one, tuple) else one for one in (outputs[0], expected))
    is_whole = isinstance(own, torch.Tensor) and own.shape == other.shape
    if not is_whole or not (own - other).norm() <= TOLERANCE * other.norm():
        return False
    return not _leaks(*outputs)


def _trains_right(
    module: torch.nn.Module, forward: ByDocument, by_document: ByDocument, inputs: list[Any]
) -> bool:
    """Return whether `_is_right` holds in training as well, where other kernels may run.

    Dropout is left out. Gradients of inputs and trained weights are compared, those of the first
    document's outputs and of the second one's: none may reach the other document.
    """
    import torch

    with _in_training(module):
        if not _is_right(forward, by_document(*inputs[0][0], **inputs[0][1]), inputs):
            return False
        try:
            with torch.enable_grad():
                own, expected = (
                    _gradients(module, one, inputs[0]) for one in (forward, by_document)
                )
        except Exception:  # noqa: BLE001  as in the forward pass
            return False
    size = math.hypot(*(one.norm().item() for one in expected))
    limit = torch.finfo(expected[0].dtype).eps * size
    return len(own) == len(expected) and all(
        (one - other).norm() <= TOLERANCE * other.norm() + limit
        for one, other in zip(own, expected, strict=True)
    )


@contextmanager
def _in_training(module: torch.nn.Module) -> Iterator[None]:
    from torch.nn.modules.dropout import _DropoutNd

    before = [(one, one.training) for one in module.modules()]
    for one, _ in before:
        one.training = not isinstance(one, _DropoutNd)
    try:
        yield
    finally:
        for one, was_training in before:
            one.training = was_training


def _gradients(module: torch.nn.Module, forward: ByDocument, inputs: Any) -> list[torch.Tensor]:
    """Return the gradients of each document's outputs, of activations document by document."""
    import torch
    from torch.utils._pytree import tree_map

    activations: list[torch.Tensor] = []

    def lead(value: Any) -> Any:
        if not _is_activation(value):
            return value
        activations.append(value.detach().requires_grad_())
        return activations[-1]

    args, kwargs = tree_map(lead, inputs)
    output = forward(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    # A strategy may have taken the others back already.
    trained = [one for one in module.parameters() if one.requires_grad and one.numel()]
    found: list[torch.Tensor] = []
    for part in output.split(PROBE, 1):
        direction = torch.arange(part.numel(), device=part.device).cos().view_as(part)
        gradients = torch.autograd.grad(
            (part * direction).sum(),
            [*activations, *trained],
            retain_graph=True,
            materialize_grads=True,
        )
        for number, gradient in enumerate(gradients):
            found += gradient.split(PROBE, 1) if number < len(activations) else [gradient]
    return found


def _is_attention(module: torch.nn.Module) -> bool:
    """Return whether a module calls the attention that a model was built with."""
    forward = inspect.unwrap(type(module).forward)
    return ATTENTIONS in getattr(forward, "__code__", forward).co_names


class _Trial:
    """Stands in a module's forward during the search."""

    def __init__(self, search: _Search, module: Any) -> None:
        self._search, self.module = search, module
        self.forward = self.run = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._search.run(self, args, kwargs)


def _edits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments with other activations in the first document, and in the second.

    None where no argument is an activation.
    """
    from torch.utils._pytree import tree_leaves, tree_map

    def edit(value: Any, document: slice) -> Any:
        if not _is_activation(value):
            return value
        edited = value.clone()
        edited[:, document] = -value[:, document].flip(2)
        return edited

    if not any(map(_is_activation, tree_leaves((args, kwargs)))):
        return None
    documents = slice(PROBE[0]), slice(PROBE[0], None)
    return [tree_map(partial(edit, document=one), (args, kwargs)) for one in documents]


def _is_activation(value: Any) -> bool:
    """Return whether an argument is a float [1, tokens, width]."""
    import torch

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and value.ndim == 3 and tuple(value.shape[:2]) == (1, sum(PROBE))


def _leaks(*outputs: Any) -> bool:
    """Return whether an edit of the first document changes the second one's outputs.

    `outputs`: of the module as it is, and after each edit. Rounding is measured on the first
    document when the second one is edited; an edit that changes nothing shows nothing.
    """
    import torch

    found = [output[0] if isinstance(output, tuple) and output else output for output in outputs]
    if not all(isinstance(one, torch.Tensor) and one.shape[:2] == (1, sum(PROBE)) for one in found):
        return False
    eps = torch.finfo(found[0].dtype).eps if found[0].is_floating_point() else 0.0
    plain, first_edited, second_edited = (one.flatten(2)[0].float() for one in found)
    moved = _size(plain - first_edited)[PROBE[0] :].max().item()
    noise = _size(plain - second_edited)[: PROBE[0]].max().item()
    least = max(LEAST_EPS * eps, FLOOR) * _size(plain).max().item()
    return moved > max(4 * noise, least)


def _size(outputs: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each token: [tokens]."""
    return outputs.square().mean(-1).sqrt()
