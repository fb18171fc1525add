"""Selective recompute: a layer's expensive outputs are kept, the others computed again.

A mode around a layer's forward pass keeps outputs, one around its recompute returns them. PyTorch's
own contexts for this expect every operation to run again, also those whose output is kept; what a
model does once for all layers (T5's relative position bias) then fails.

A mode takes the host as long for each operation as launching it takes. What adapters and attention
compute that is expensive says so itself (`product_once`, `attend_once`); a layer in which nothing
else was expensive runs without a mode from then on.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from app.model.recomputed_layer import run_recomputed

ATTENTION_KERNELS = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    "flash_attn::",
    "flash_attn_3::",
)
"""prefixes of operators that are a whole attention, in PyTorch and flash-attn; our own by matrix
products, for the CPU, is recomputed"""
RIGHT_HAND_SIDE = {"aten::mm": 1, "aten::addmm": 2}
"""matrix products, and the index of the right-hand matrix [k, n] in their arguments"""
TRANSPOSED = {
    "mkldnn::_linear_pointwise": 1,
    "bitsandbytes::int8_scaled_mm": 1,
    "bitsandbytes::int8_mixed_scaled_mm": 2,
}
"""products with a matrix [n, k]"""
PACKED = {"bitsandbytes::gemm_4bit": 2}
"""products with a packed matrix, and the index of its shape [n, k]"""


def is_expensive(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether an output is kept: of an attention, or of a product with n <= k.

    Each value of a product with a matrix [k, n] costs k multiplications to recompute. Products with
    n <= k are expensive for the memory they take: an MLP's down projection, attention's own, LoRA's
    A. Those with more outputs than inputs, as an MLP's up projection and LoRA's B, are recomputed.
    """
    return _facts_of(operator).is_expensive(args)


def _never(args: tuple[Any, ...]) -> bool:
    return False


def _always(args: tuple[Any, ...]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides what is kept of an operator's calls."""

    is_expensive: Callable[[tuple[Any, ...]], bool]
    written: tuple[int, ...]
    """places of the arguments that it changes"""
    is_plain: bool
    """changes nothing and is never kept: most calls, of which a mode must cost little"""


_facts: dict[int, _Facts] = {}


def _facts_of(operator: torch._ops.OpOverload) -> _Facts:
    # By identity: operators live as long as the process, and their own hash is slow.
    if (facts := _facts.get(id(operator))) is None:
        arguments = enumerate(operator._schema.arguments)
        written = tuple(n for n, one in arguments if one.alias_info and one.alias_info.is_write)
        rule = _rule_of(operator.name())
        facts = _facts[id(operator)] = _Facts(rule, written, not written and rule is _never)
    return facts


def _rule_of(name: str) -> Callable[[tuple[Any, ...]], bool]:
    """Return what tells from an operator's arguments whether its output is kept."""
    if name in RIGHT_HAND_SIDE:
        right = RIGHT_HAND_SIDE[name]
        return lambda args: bool(args[right].shape[1] <= args[right].shape[0])
    if name in TRANSPOSED:
        turned = TRANSPOSED[name]
        return lambda args: bool(args[turned].shape[0] <= args[turned].shape[1])
    if name in PACKED:
        shape = PACKED[name]
        return lambda args: bool(args[shape][0] <= args[shape][1])
    return _always if name.startswith(ATTENTION_KERNELS) else _never


class SelectiveLayers:
    """The layers of a model, each with a mode around it until it is seen to need none."""

    def __init__(self) -> None:
        self._without_mode: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on its arguments; the backward pass recomputes what is not expensive."""
        module = _module_of(layer)
        has_mode = module not in self._without_mode
        forward, recompute = selective_contexts(has_mode=has_mode)
        output = run_recomputed(layer, *args, contexts=(forward, recompute), **kwargs)
        if has_mode and module is not None and forward.mode.names_all_it_keeps:
            self._without_mode.add(module)
        return output


def _module_of(layer: Callable[..., Any]) -> torch.nn.Module | None:
    """Return the module of a forward that transformers bound; None for a compiled one's."""
    bound = inspect.unwrap(layer)
    if not isinstance(bound, partial):
        return None
    # A function of which the module is the first argument; in transformers 5.17 its method.
    first = bound.args[0] if bound.args else getattr(bound.func, "__self__", None)
    return first if isinstance(first, torch.nn.Module) else None


def selective_contexts(*, has_mode: bool = True) -> tuple[LayerPass, LayerPass]:
    """Return the contexts of a layer's forward pass and of its recompute.

    Without a mode only what says that it is expensive is kept.
    """
    kept: list[tuple[Any, int | None]] = []
    return LayerPass(_Keep(kept), has_mode), LayerPass(_Reuse(kept), has_mode)


class _Running:
    """The layer's pass that runs now.

    Not a context variable: a backward pass that recomputes a layer may be in a thread of autograd.
    """

    mode: _LayerMode | None = None


def product_once(outputs: int, inputs: int, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return compute(*args), a product from `inputs` to `outputs` features.

    One that does not widen is expensive: a recompute takes it from the forward pass, without a
    history. For the forward of autograd functions, where nothing has one.
    """
    mode = _Running.mode
    if mode is None or outputs > inputs:
        return compute(*args)
    return mode.compute_once(compute, args)


def attend_once(attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return attend(*args, **kwargs), of whose operators one is an attention, which is expensive.

    Its gradients are its own.
    """
    mode = _Running.mode
    return attend(*args, **kwargs) if mode is None else mode.attend(attend, args, kwargs)


class LayerPass:
    """The context of a layer's forward pass, or of its recompute."""

    def __init__(self, mode: _LayerMode, has_mode: bool) -> None:
        self.mode = mode
        self._has_mode = has_mode
        self._before: _LayerMode | None = None

    def __enter__(self) -> None:
        self._before, _Running.mode = _Running.mode, self.mode
        self.mode.restart()
        if self._has_mode:
            self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._has_mode:
            self.mode.__exit__(*error)
        _Running.mode = self._before


class _LayerMode(TorchDispatchMode):
    """A mode around a layer that is not compiled: each operation pays only for the mode itself."""

    def __init__(self, kept: list[tuple[Any, int | None]]) -> None:
        super().__init__()
        self._kept = kept
        """outputs, and the version of those whose changes are not seen by the mode"""
        self.names_all_it_keeps = False
        self._is_on = False
        self._is_named = False
        """while a function runs that says what of it is expensive"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this PyTorch wraps every call to keep the compiler away, at several times the
        cost of the call."""
        return False

    def __enter__(self) -> Any:
        self._is_on = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_on = False

    def restart(self) -> None:
        """Begin a pass of the layer."""
        raise NotImplementedError

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return an expensive output, computed or kept."""
        raise NotImplementedError

    def attend(
        self, attend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention in the mode, where it is not on already."""
        self._is_named = True
        try:
            if self._is_on:
                return attend(*args, **kwargs)
            with self:
                return attend(*args, **kwargs)
        finally:
            self._is_named = False


class _Keep(_LayerMode):
    """Keep expensive outputs in the order they are computed."""

    def __init__(self, kept: list[tuple[Any, int | None]]) -> None:
        super().__init__(kept)
        self._computes = False
        self._storages: set[int] = set()

    def restart(self) -> None:
        """Begin a forward pass."""
        self.names_all_it_keeps = True

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Keep an output whose changes its version tells."""
        self._computes = True
        try:
            output = compute(*args)
        finally:
            self._computes = False
        self._keep(output, output._version)
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = _facts.get(id(func)) or _facts_of(func)
        if facts.is_plain or self._computes:
            return func(*args, **kwargs) if kwargs else func(*args)
        if facts.written:
            self._check_change(func, args, facts.written)
        output = func(*args, **(kwargs or {}))
        if facts.is_expensive(args):
            self._keep(output, None)
            self.names_all_it_keeps &= self._is_named
        return output

    def _keep(self, output: Any, version: int | None) -> None:
        # Detached: autograd is about to attach a history to the tensor itself.
        kept = _detached(output)
        self._kept.append((kept, version))
        if self._is_on:
            tensors = filter(_is_tensor, tree_leaves(kept))
            self._storages.update(map(_storage_of, tensors))

    def _check_change(self, func: Any, args: tuple[Any, ...], written: tuple[int, ...]) -> None:
        changed = filter(_is_tensor, (args[place] for place in written if place < len(args)))
        if not self._storages.isdisjoint(map(_storage_of, changed)):
            raise _changed_output(func.name())


class _Reuse(_LayerMode):
    """Return the kept outputs in the same order."""

    _next = 0

    def restart(self) -> None:
        """Begin a recompute."""
        self._next = 0

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return what was kept."""
        output: Tensor = self._take()
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = _facts.get(id(func)) or _facts_of(func)
        if facts.is_plain or not facts.is_expensive(args):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._take()

    def _take(self) -> Any:
        kept, version = self._kept[self._next]
        self._next += 1
        if version is not None and kept._version != version:
            raise _changed_output("an operator")
        return _detached(kept)


def _changed_output(operator: str) -> RuntimeError:
    return RuntimeError(
        f"recompute=selective: {operator} of a layer changes a kept output; type recompute=full"
    )


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return tree_map_only(Tensor, Tensor.detach, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage_of(tensor: Tensor) -> int:
    """Return what a tensor has in common with its views; known of fake tensors, too."""
    return int(tensor.untyped_storage()._cdata)
