"""Find a model's mixers: run each module twice on a pack, and see what another document changes.

One whose outputs of a document change with another document is a mixer. Whether its kernels take
the boundaries of documents is proven by the same search, in training too.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.attention.documents import Lengths, group_documents
from app.model.attention.mixers import (
    ByDocument,
    DocumentsOfModel,
    has_isolated_mixers,
    transformers_model,
    use_documents,
)
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PROBE = (5, 6)
"""tokens of the two documents of the search"""
ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"
"""name under which transformers' layers look up their attention"""
TOLERANCE = 2.0**-5
"""largest difference of a kernel's outputs from those document by document, over their norm"""
LEAST_EPS, FLOOR = 4, 1e-4
"""least change that is a leak: in eps of the outputs' dtype, and as a share of their size"""


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

    whole = transformers_model(model)
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
        with torch.no_grad(), use_documents(documents):
            model(input_ids=ids, position_ids=positions.unsqueeze(0), use_cache=False, **inputs)
    finally:
        search.remove()
        model.train(was_training)
    if search.mixers and not has_isolated_mixers(model):
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
        from torch.utils._pytree import tree_leaves

        hidden = next(filter(_is_activation, tree_leaves((args, kwargs))))
        if hidden.device.type == "cpu":
            from app.model.cpu.packed_mixers import install_cpu_kernels

            install_cpu_kernels(type(trial.module).forward)
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
