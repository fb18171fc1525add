"""Trade time for memory: which activations are computed again in the backward pass."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


log = logging.getLogger(__name__)


class HostInputs:
    """The inputs of one model's layers, from their forward to their backward pass."""

    def __init__(self) -> None:
        self._newest: weakref.ref[LayerInput] | None = None
        self._stream: Any = None
        self._is_said = False

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on a hidden state [rows, tokens, width] and its further arguments.

        In the backward pass it runs again, on what then comes back from host memory.
        """
        hidden, *others = args
        if is_on_host(hidden):
            self._say_that_nothing_moves()
            return checkpoint(layer, *args, use_reentrant=False, **kwargs)
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        kept = LayerInput(hidden, self._stream, self._newest)

        # A checkpoint keeps the tensors it is given, which is why it is not given this one. From
        # the empty one it knows whose random state to keep.
        def run(_: Tensor, *rest: Any, **named: Any) -> Any:
            return layer(kept.take(), *rest, **named)

        output = checkpoint(run, hidden.new_empty(0), *others, use_reentrant=False, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:  # else the backward pass does not come here
            kept.send()
            self._newest = weakref.ref(kept)
        return output

    def _say_that_nothing_moves(self) -> None:
        if not self._is_said:
            self._is_said = True
            log.info("recompute: offload moves nothing on the CPU; it runs as full")


def is_on_host(hidden: Tensor) -> bool:
    """Say whether there is nothing to move."""
    return hidden.device.type == "cpu"


class LayerInput:
    """One layer's input: on the device in the forward pass, then on the host, then back.

    `stream` carries the copies; `before` is the input of the layer that ran before this one, whose
    turn comes next in the backward pass. No memory is handed between streams by `record_stream`,
    which frees late when the host runs ahead: each stream waits for the other instead.
    """

    def __init__(self, hidden: Tensor, stream: Any, before: weakref.ref[LayerInput] | None) -> None:
        self._on_device: Tensor | None = hidden
        self._on_host: Tensor | None = None
        self._needs_grad = hidden.requires_grad
        self._device, self._stream, self._before = hidden.device, stream, before
        # The copy waits for what made the input, not for the layer that reads it.
        self._made = torch.cuda.current_stream(self._device).record_event()
        self._copied: Any = None

    def send(self) -> None:
        """Start the copy to the host; the input before this one leaves the device."""
        source = self._given().detach()
        self._stream.wait_event(self._made)
        with torch.cuda.stream(self._stream):
            self._on_host = self._copy_to_host(source)
            self._copied = self._stream.record_event()
        if (before := self._find_before()) is not None:
            before.leave()

    def leave(self) -> None:
        """Let go of the device's memory, which is used anew behind the copy to the host."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = None

    def fetch(self) -> None:
        """Start the copy back, if it is not there; it takes memory that earlier layers are done
        with."""
        if self._on_device is not None or self._on_host is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._on_device = self._on_host.to(self._device, non_blocking=True)
            self._copied = self._stream.record_event()

    def take(self) -> Tensor:
        """Return the input: as it was given in the forward pass, and a copy of it on the way back.

        Then the next input to be taken starts to come, while this one is computed with.
        """
        if self._on_host is None:
            return self._given()
        self.fetch()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        taken, self._on_device = self._given().detach(), None
        if (before := self._find_before()) is not None:
            before.fetch()
        return taken.requires_grad_(self._needs_grad)

    def _given(self) -> Tensor:
        if self._on_device is None:
            raise RuntimeError("a layer's input was let go of before it was sent")
        return self._on_device

    def _find_before(self) -> LayerInput | None:
        return None if self._before is None else self._before()

    @staticmethod
    def _copy_to_host(source: Tensor) -> Tensor:
        """Copy to page-locked memory, which alone is copied to while the device computes."""
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        return host.copy_(source, non_blocking=True)


MODES = ("none", "full", "selective", "offload")


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: str = "none"
    """none: keep all activations; full: only each layer's input (least memory, slowest);
    selective: also attention and narrow matrix products; offload: as full, inputs in host memory"""
    every: int = 1
    """every n-th layer recomputes, the others keep all (more memory, faster)"""


def apply_recompute(model: PreTrainedModel, config: RecomputeConfig) -> None:
    """Switch non-reentrant checkpointing on for every n-th layer, encoder's and decoder's alike."""
    if config.mode == "none":
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reentrant checkpointing loses the gradients of adapters whose layer input is frozen. It alone
    # needs gradients to flow into the first layer; with them the backward pass would go below the
    # lowest layer that trains. T5's attention asks for them once more, by its own switch.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    run_layer = _build_checkpoint(config.mode)
    num_layers = 0
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = run_layer
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = num_layers % config.every == 0
            num_layers += 1
            for inner in module.modules():
                if inner is not module and "gradient_checkpointing" in vars(inner):
                    inner.gradient_checkpointing = False


def _build_checkpoint(mode: str) -> Callable[..., Any]:
    """Return what runs a layer: takes the layer and its arguments, returns its output."""
    from torch.utils.checkpoint import checkpoint

    if mode == "offload":
        return HostInputs().run_layer
    if mode == "selective":
        return partial(checkpoint, use_reentrant=False, context_fn=keep_what_is_dear)
    return partial(checkpoint, use_reentrant=False)
