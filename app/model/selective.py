"""Recompute that keeps what is dear to compute and small: a mode around a layer's forward pass,
and one around its recompute.

PyTorch's own contexts for this want every operation to come again, also those that are not kept;
what a model does once for all layers (T5's bias by distance) then breaks them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ATTENTION_KERNELS = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    "flash_attn::",
    "flash_attn_3::",
)
"""how the names of operators begin that are a whole attention, in PyTorch and in flash-attn;
our own by matrix products, for the CPU, is none: it is computed again"""
RIGHT_HAND_SIDE = {"aten::mm": 1, "aten::addmm": 2}
"""matrix products, and which of their arguments is the right-hand matrix"""
ONEDNN = "mkldnn::_linear_pointwise"
"""a product with its second argument transposed"""


def is_dear(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Say whether an output is kept: an attention's, or a product's with a matrix that narrows.

    Each value of a product with a matrix [k, n] costs k multiplications to compute again. Those
    with n <= k are dear for the memory they take: an MLP's last, attention's own, a LoRA's A. Those
    that give more values than they read, as an MLP's first and a LoRA's B, are recomputed.
    """
    name = operator.name()
    if name == ONEDNN:
        width, height = args[1].shape
        return bool(width <= height)
    if name in RIGHT_HAND_SIDE:
        height, width = args[RIGHT_HAND_SIDE[name]].shape
        return bool(width <= height)
    return name.startswith(ATTENTION_KERNELS)


def keep_what_is_dear() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of one layer: of its forward pass, and of its recompute."""
    kept: list[Any] = []
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):
    """Keep dear outputs in the order they come."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            self._check_change(func, args)
        output = func(*args, **(kwargs or {}))
        if is_dear(func, args):
            # Not the tensor itself, which autograd is about to give a history.
            self._kept.append(tree_map_only(Tensor, Tensor.detach, output))
        return output

    def _check_change(self, func: Any, args: tuple[Any, ...]) -> None:
        kept = {tensor.data_ptr() for tensor in tree_leaves(self._kept) if _is_tensor(tensor)}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and _is_tensor(value) and value.data_ptr() in kept:
                raise RuntimeError(
                    f"recompute=selective: {func.name()} of a layer changes what was kept of it; "
                    "type recompute=full"
                )


class _Reuse(TorchDispatchMode):
    """Give dear outputs back in the order they came."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not is_dear(func, args):
            return func(*args, **(kwargs or {}))
        self._next += 1
        return tree_map_only(Tensor, Tensor.detach, self._kept[self._next - 1])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
