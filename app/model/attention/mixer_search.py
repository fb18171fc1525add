"""Find a model's mixers: modules in which editing one document of a pack changes another's outputs.

The search also tests whether a mixer's kernels keep documents apart if they get their boundaries,
in evaluation and in training.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

from app.model.attention.documents import Lengths, group_documents
from app.model.attention.mixers import (
    ForwardWithDocuments,
    MixerForward,
    has_isolated_mixers,
    transformers_model,
    use_documents,
)
from app.model.layers import eval_mode, replaced
from common.errors import UserError
from common.installation import install_extra

log = logging.getLogger(__name__)

FIRST_ID = 3
"""first token id of a probe: lower ids are special tokens, and padding to some models"""
_PROBE = (5, 6)
"""lengths of the two documents of the search, in tokens"""
_ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""name of the registry in which transformers' layers look up their attention"""
_TOLERANCE = 2.0**-5
"""largest norm of a difference between kernels with boundaries and runs document by document, as a
share of the norm"""
MIN_LEAK_EPS, MIN_LEAK_SHARE = 4, 1e-4
"""smallest change that is a leak: in eps of the outputs' dtype, and as a share of their size"""

_KERNELS = {
    "mamba_selective_scan": ("", ""),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba"),
    "torch_chunk_gated_delta_rule": ("fla", "hybrid"),
    "chunk_kimi_delta_attention": ("fla", "hybrid"),
    "causal_conv1d_fn": ("fla", "hybrid"),
}
"""function of a mixer -> package that computes it on a GPU with document boundaries, and the extra
that installs it; none computes Mamba 1. The first one that a mixer calls decides"""


def probe_ids(model: Any, first: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return the token ids from `first` to `stop` that a probe reads, [1, tokens]."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.arange(first, stop, device=device).unsqueeze(0) % vocab_size


def isolate_mixers(
    model: torch.nn.Module,
    device: torch.device,
    inputs_of: Callable[[Lengths, torch.Tensor], dict[str, Any]],
) -> bool:
    """Find a model's mixers and make them keep documents apart; return whether there are any.

    Costs a forward pass of eleven tokens, in which every module runs three times. `inputs_of`
    returns the forward's further arguments for document lengths and `input_ids`.
    """
    base = transformers_model(model)
    lengths = [list(_PROBE)]
    ids = probe_ids(base, FIRST_ID, FIRST_ID + sum(_PROBE), device)
    positions = torch.cat([torch.arange(length, device=device) for length in _PROBE])
    documents = group_documents(lengths, (1, sum(_PROBE)), device)
    inputs = inputs_of(lengths, ids)
    search = _Search()
    try:
        search.install(base)
        with eval_mode(model), use_documents(documents):
            model(input_ids=ids, position_ids=positions.unsqueeze(0), use_cache=False, **inputs)
    finally:
        search.remove()
    if search.mixers and not has_isolated_mixers(model):
        base.forward = ForwardWithDocuments(base)
    for takes, how in ((True, "with document boundaries"), (False, "document by document")):
        kinds = {type(mixer) for mixer, value in search.mixers.items() if value == takes}
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        missing = "" if takes or device.type == "cpu" else missing_kernels(kinds)
        if missing:
            log.warning("packing: %s run %s; %s for faster kernels", names, how, missing)
        elif names:
            log.info("packing: %s run %s", names, how)
    return bool(search.mixers)


def missing_kernels(mixers: Iterable[type[torch.nn.Module]]) -> str:
    """Return how to install kernels that support document boundaries; empty if nothing is missing.

    `mixers`: classes of mixers without such kernels.
    """
    for mixer in mixers:
        names = inspect.unwrap(mixer.forward).__globals__
        package, extra = next((row for name, row in _KERNELS.items() if name in names), ("", ""))
        if package and find_spec(package) is None:
            return f"type {install_extra(extra)}"
    return ""


class _Search:
    """Tests every module during a forward pass, in which a strategy has gathered its weights.

    Inner modules are tested first, so that a module that contains a mixer is tested with the mixer
    isolated.
    """

    def __init__(self) -> None:
        self.mixers: dict[torch.nn.Module, bool] = {}
        """mixer -> whether its kernels support document boundaries"""
        self._originals: list[tuple[torch.nn.Module, Any]] = []
        self._is_testing = False

    def install(self, model: torch.nn.Module) -> None:
        """Replace the forward of every module, except those that contain attention.

        A leak through attention is a fault, which must not be covered up here.
        """
        for module in model.modules():
            original = vars(module).get("forward")
            if isinstance(original, MixerForward) or any(map(_is_attention, module.modules())):
                continue
            self._originals.append((module, original))
            module.forward = _TestedForward(self, module)

    def remove(self) -> None:
        """Restore the forward of each module; the mixers found keep their `MixerForward`."""
        for module, original in self._originals:
            del module.forward
            if original is not None:
                module.forward = original
            if module in self.mixers:
                module.forward = MixerForward(module, takes_boundaries=self.mixers[module])

    def run(self, tested: _TestedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, and isolate its documents if it turns out to be a mixer."""
        if self._is_testing or (edited := _edit_arguments(args, kwargs)) is None:
            return tested.run(*args, **kwargs)
        try:
            output = tested.run(*args, **kwargs)
        except ValueError:
            # transformers raises it if the kernel that supports boundaries is not installed.
            return self._isolate(tested, args, kwargs, edited)
        self._is_testing = True
        first, second = (
            tested.run(*edited_args, **edited_kwargs) for edited_args, edited_kwargs in edited
        )
        self._is_testing = False
        if not _leaks(output, first, second):
            return output
        with suppress(UserError):  # it cannot run by document; `check_isolation` refuses the model
            return self._isolate(tested, args, kwargs, edited)
        return output

    def _isolate(
        self,
        tested: _TestedForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        edited: list[Any],
    ) -> Any:
        """Choose how a mixer runs from now on, and return its output for these arguments."""
        from app.model.attention.mixers import install_kernels

        install_kernels(type(tested.module).forward)
        by_document = MixerForward(tested.module, tested.forward)
        output = by_document(*args, **kwargs)
        self._is_testing = True
        by_boundaries = MixerForward(tested.module, tested.forward, takes_boundaries=True)
        inputs = [(args, kwargs), *edited]
        takes_boundaries = _isolates(by_boundaries, output, inputs) and _isolates_in_training(
            tested.module, by_boundaries, by_document, inputs
        )
        self._is_testing = False
        tested.run = by_boundaries if takes_boundaries else by_document
        self.mixers[tested.module] = takes_boundaries
        return output


def _isolates(forward: MixerForward, expected: Any, inputs: list[Any]) -> bool:
    """Return whether a mixer's kernels keep documents apart if they get boundaries.

    `inputs`: the arguments, original and with each edit; `expected`: the output of a run document
    by document.
    """
    try:
        outputs = [forward(*args, **kwargs) for args, kwargs in inputs]
    except Exception:  # noqa: BLE001  of kernels without boundaries, and of kernel compilers
        return False
    actual, expected = _first_output(outputs[0]), _first_output(expected)
    is_same_shape = isinstance(actual, torch.Tensor) and actual.shape == expected.shape
    if not is_same_shape or not (actual - expected).norm() <= _TOLERANCE * expected.norm():
        return False
    return not _leaks(*outputs)


def _isolates_in_training(
    module: torch.nn.Module, forward: MixerForward, by_document: MixerForward, inputs: list[Any]
) -> bool:
    """Return whether documents stay apart in training too, where other kernels may run.

    Compares outputs, and the gradients of inputs and trainable weights: those of the first
    document's outputs, and of the second's. Dropout is disabled.
    """
    with replaced(
        (part, "training", not isinstance(part, _DropoutNd)) for part in module.modules()
    ):
        if not _isolates(forward, by_document(*inputs[0][0], **inputs[0][1]), inputs):
            return False
        try:
            with torch.enable_grad():
                actual, expected = (
                    _gradients(module, run, inputs[0]) for run in (forward, by_document)
                )
        except Exception:  # noqa: BLE001  as in the forward pass
            return False
    total_norm = math.hypot(*(gradient.norm().item() for gradient in expected))
    rounding = torch.finfo(expected[0].dtype).eps * total_norm
    return len(actual) == len(expected) and all(
        (gradient - other).norm() <= _TOLERANCE * other.norm() + rounding
        for gradient, other in zip(actual, expected, strict=True)
    )


def _gradients(module: torch.nn.Module, forward: MixerForward, inputs: Any) -> list[torch.Tensor]:
    """Return the gradients of each document's outputs, those of activations by document."""
    activations: list[torch.Tensor] = []

    def make_leaf(value: Any) -> Any:
        if not _is_activation(value):
            return value
        activations.append(value.detach().requires_grad_())
        return activations[-1]

    args, kwargs = tree_map(make_leaf, inputs)
    output = _first_output(forward(*args, **kwargs))
    # A strategy may have released inner modules' weights again, which are then empty.
    weights = [weight for weight in module.parameters() if weight.requires_grad and weight.numel()]
    found: list[torch.Tensor] = []
    for part in output.split(_PROBE, 1):
        direction = torch.arange(part.numel(), device=part.device).cos().view_as(part)
        gradients = torch.autograd.grad(
            (part * direction).sum(),
            [*activations, *weights],
            retain_graph=True,
            materialize_grads=True,
        )
        for number, gradient in enumerate(gradients):
            found += gradient.split(_PROBE, 1) if number < len(activations) else [gradient]
    return found


def _is_attention(module: torch.nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return _ATTENTION_REGISTRY in getattr(forward, "__code__", forward).co_names


class _TestedForward:
    """Replaces a module's forward during the search."""

    def __init__(self, search: _Search, module: Any) -> None:
        self._search, self.module = search, module
        self.forward = self.run = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._search.run(self, args, kwargs)


def _edit_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return two copies of the arguments, with edited activations in the first or second document.

    None if no argument is an activation.
    """

    def edit(value: Any, document: slice) -> Any:
        if not _is_activation(value):
            return value
        edited = value.clone()
        edited[:, document] = -value[:, document].flip(2)
        return edited

    if not any(map(_is_activation, tree_leaves((args, kwargs)))):
        return None
    documents = slice(_PROBE[0]), slice(_PROBE[0], None)
    return [tree_map(partial(edit, document=document), (args, kwargs)) for document in documents]


def _is_activation(value: Any) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and value.ndim == 3 and tuple(value.shape[:2]) == (1, sum(_PROBE))


def _leaks(*outputs: Any) -> bool:
    """Return whether an edit of the first document changes the second one's outputs.

    `outputs`: a module's, for the original arguments and for each edit. Rounding is measured by how
    far an edit of the second document moves the first, whose tokens all come before it.
    """
    found = [_first_output(output) for output in outputs]
    shape = 1, sum(_PROBE)
    if not all(isinstance(output, torch.Tensor) and output.shape[:2] == shape for output in found):
        return False
    eps = torch.finfo(found[0].dtype).eps if found[0].is_floating_point() else 0.0
    original, first_edited, second_edited = (output.flatten(2)[0].float() for output in found)
    change = _rms(original - first_edited)[_PROBE[0] :].max().item()
    noise = _rms(original - second_edited)[: _PROBE[0]].max().item()
    smallest = max(MIN_LEAK_EPS * eps, MIN_LEAK_SHARE) * _rms(original).max().item()
    return change > max(4 * noise, smallest)


def _first_output(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _rms(outputs: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each token, [tokens]."""
    return outputs.square().mean(-1).sqrt()
