"""What recompute keeps of a layer: its input in host memory, or its expensive outputs.

`offload`: on a GPU the inputs are copied on a stream of their own while the next layer runs, into
page-locked memory, and come back one layer ahead of the backward pass: two are on the device at a
time.

`selective`: a mode around a layer's forward pass keeps outputs, one around its recompute returns
them. PyTorch's own contexts for this expect every operation to run again, also those whose output
is kept; what a model does once for all layers (T5's relative position bias) then fails.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)

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


class _LayerMode(TorchDispatchMode):
    """A mode around a layer that is not compiled: each operation pays only for the mode itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this PyTorch wraps every call to keep the compiler away, at several times the
        cost of the call."""
        return False


def keep_expensive() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its recompute."""
    kept: list[Any] = []
    return _Keep(kept), _Reuse(kept)


class _Keep(_LayerMode):
    """Keep expensive outputs in the order they are computed."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = _facts.get(id(func)) or _facts_of(func)
        if facts.is_plain:
            return func(*args, **kwargs) if kwargs else func(*args)
        if facts.written:
            self._check_change(func, args, facts.written)
        output = func(*args, **(kwargs or {}))
        if facts.is_expensive(args):
            # Detached: autograd is about to attach a history to the tensor itself.
            kept = _detached(output)
            self._kept.append(kept)
            tensors = filter(_is_tensor, tree_leaves(kept))
            self._storages.update(map(_storage_of, tensors))
        return output

    def _check_change(self, func: Any, args: tuple[Any, ...], written: tuple[int, ...]) -> None:
        changed = filter(_is_tensor, (args[place] for place in written if place < len(args)))
        if not self._storages.isdisjoint(map(_storage_of, changed)):
            raise RuntimeError(
                f"recompute=selective: {func.name()} of a layer changes a kept output; "
                "type recompute=full"
            )


class _Reuse(_LayerMode):
    """Return the kept outputs in the same order."""

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
        facts = _facts.get(id(func)) or _facts_of(func)
        if facts.is_plain or not facts.is_expensive(args):
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next += 1
        return _detached(self._kept[self._next - 1])


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return tree_map_only(Tensor, Tensor.detach, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage_of(tensor: Tensor) -> int:
    """Return what a tensor has in common with its views; known of fake tensors, too."""
    return int(tensor.untyped_storage()._cdata)


class HostInputs:
    """The inputs of a model's layers, from forward to backward pass."""

    def __init__(self) -> None:
        self._newest: weakref.ref[LayerInput] | None = None
        self._stream: Any = None
        self._is_logged = False

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on a hidden state [rows, tokens, width] and further arguments.

        The backward pass recomputes it from the copy in host memory.
        """
        hidden, *others = args
        if is_on_host(hidden):
            self._log_no_offload()
            return checkpoint(layer, *args, use_reentrant=False, **kwargs)
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        kept = LayerInput(hidden, self._stream, self._newest)

        # A checkpoint keeps the tensors it is given, so the hidden state is not an argument of it.
        # The empty tensor tells it which device's random state to keep.
        def run(_: Tensor, *rest: Any, **named: Any) -> Any:
            return layer(kept.take(), *rest, **named)

        output = checkpoint(run, hidden.new_empty(0), *others, use_reentrant=False, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:  # else no backward pass reaches this layer
            kept.send()
            self._newest = weakref.ref(kept)
        return output

    def _log_no_offload(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.info("recompute: offload has no effect on the CPU, and runs as full")


def is_on_host(hidden: Tensor) -> bool:
    """Return whether the input is in host memory already."""
    return hidden.device.type == "cpu"


class LayerInput:
    """A layer's input: on the device in the forward pass, then on the host, then back.

    `stream` runs the copies; `before` is the input of the layer before this one, which the backward
    pass needs next. Streams wait for each other instead of using `record_stream`, which frees
    memory late when the host runs ahead.
    """

    def __init__(self, hidden: Tensor, stream: Any, before: weakref.ref[LayerInput] | None) -> None:
        self._on_device: Tensor | None = hidden
        self._on_host: Tensor | None = None
        self._needs_grad = hidden.requires_grad
        self._device, self._stream, self._before = hidden.device, stream, before
        # The copy waits for the kernel that made the input, not for the layer that reads it.
        self._made = torch.cuda.current_stream(self._device).record_event()
        self._copied: Any = None

    def send(self) -> None:
        """Start the copy to the host; release the device memory of the input before."""
        source = self._given().detach()
        self._stream.wait_event(self._made)
        with torch.cuda.stream(self._stream):
            self._on_host = self._copy_to_host(source)
            self._copied = self._stream.record_event()
        if (before := self._find_before()) is not None:
            before.release()

    def release(self) -> None:
        """Release the device memory, to be reused after the copy to the host."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = None

    def fetch(self) -> None:
        """Start the copy back to the device, into memory that earlier layers no longer use."""
        if self._on_device is not None or self._on_host is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._on_device = self._on_host.to(self._device, non_blocking=True)
            self._copied = self._stream.record_event()

    def take(self) -> Tensor:
        """Return the input, in the backward pass the copy of it, and prefetch the next one."""
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
            raise RuntimeError("a layer's input was released before it was copied")
        return self._on_device

    def _find_before(self) -> LayerInput | None:
        return None if self._before is None else self._before()

    @staticmethod
    def _copy_to_host(source: Tensor) -> Tensor:
        """Copy to page-locked memory, without which the copy would block the device."""
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        return host.copy_(source, non_blocking=True)
