"""Non-reentrant checkpointing: run a layer again when the backward pass needs its saved tensors.

Works like PyTorch's own, whose bookkeeping costs the host as much per saved tensor as launching a
kernel; here a saved tensor is an index into a list.

Mode `offload`: on a GPU, layer inputs are copied to page-locked host memory on a separate stream
while the next layer runs, and are copied back one layer ahead of the backward pass, so that two of
them are on the device at a time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

log = logging.getLogger(__name__)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""contexts of a layer's forward pass and of its recompute"""
_NO_CONTEXTS: Contexts = (nullcontext(), nullcontext())


def run_recomputed(
    layer: Callable[..., Any],
    *args: Any,
    contexts: Contexts = _NO_CONTEXTS,
    **kwargs: Any,
) -> Any:
    """Run `layer` without saving activations; the backward pass runs it again to get them.

    The recompute uses the arguments, random state and autocast of the forward pass, and stops at
    the last saved tensor.
    """
    if not torch.is_grad_enabled():
        return layer(*args, **kwargs)
    forward, recompute = contexts
    call = _Call(layer, args, kwargs, recompute)
    with saved_tensors_hooks(call.pack, call.unpack), forward:
        return layer(*args, **kwargs)


class _AllRecomputedError(Exception):
    """Raised to stop a recompute once it has all tensors that the forward pass saved."""


class _Call:
    """One forward pass of a layer: shapes of its saved tensors, and the state to recompute them."""

    def __init__(
        self,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any],
    ) -> None:
        self._layer, self._args, self._kwargs, self._context = layer, args, kwargs, context
        self._versions = [arg._version if isinstance(arg, Tensor) else 0 for arg in args]
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        self._random, self._autocasts = RandomState(device), read_autocasts(device.type)
        self._types: list[tuple[torch.Size, torch.dtype]] = []
        """shape and dtype of each tensor that the forward pass saved"""
        self._recomputed: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> int:
        """Replace a saved tensor by its index."""
        self._types.append((tensor.shape, tensor.dtype))
        return len(self._types) - 1

    def unpack(self, index: int) -> Tensor:
        """Return a saved tensor and release it; recompute the layer if necessary."""
        # Also necessary if a second backward pass needs a tensor that was released.
        if not self._recomputed or self._recomputed[index] is None:
            self._recompute()
        tensor, self._recomputed[index] = self._recomputed[index], None
        if tensor is None or self._types[index] != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                "recompute: a layer saved different tensors in its recompute than in its forward "
                "pass; type recompute=none"
            )
        return tensor

    def _pack_recomputed(self, tensor: Tensor) -> None:
        # Detached: its autograd history would keep the graph of the recompute alive.
        self._recomputed.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self._recomputed) == len(self._types):
            raise _AllRecomputedError

    def _recompute(self) -> None:
        for arg, version in zip(self._args, self._versions, strict=True):
            if isinstance(arg, Tensor) and arg._version != version:
                raise RuntimeError(
                    "recompute: the input of a layer was modified in place after the layer ran; "
                    "type recompute=none"
                )
        self._recomputed = []
        with (
            self._random.restored(),
            restored_autocasts(self._autocasts),
            saved_tensors_hooks(self._pack_recomputed, _refuse_unpack),
            torch.enable_grad(),
            suppress(_AllRecomputedError),
            self._context,
        ):
            self._layer(*self._args, **self._kwargs)
        self._recomputed += [None] * (len(self._types) - len(self._recomputed))


def _refuse_unpack(_: None) -> Tensor:
    raise RuntimeError(
        "recompute: a layer computes gradients in its forward pass; type recompute=none"
    )


class RandomState:
    """State of the random generators of the CPU and a layer's GPU at construction."""

    def __init__(self, device: torch.device) -> None:
        # Reading a GPU generator's state would create a CUDA context if there is none.
        uses_gpu = device.type == "cuda" and torch.cuda.is_initialized()
        self._gpu = device if uses_gpu else None
        self._states = self._read()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the generators to this state in the context, and reset them at its end."""
        before = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        cpu_state = torch.get_rng_state()
        return cpu_state, None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)

    def _write(self, states: tuple[Tensor, Tensor | None]) -> None:
        cpu_state, gpu_state = states
        torch.set_rng_state(cpu_state)
        if self._gpu is not None and gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, self._gpu)


Autocasts = list[tuple[str, bool, torch.dtype, bool]]
"""per device type: its name, whether autocast is enabled, the dtype, whether weights are cached"""


def read_autocasts(device: str) -> Autocasts:
    """Return the autocast of a device type, and of the CPU."""
    return [
        (
            each,
            torch.is_autocast_enabled(each),
            torch.get_autocast_dtype(each),
            torch.is_autocast_cache_enabled(),
        )
        for each in dict.fromkeys((device, "cpu"))
        if torch.amp.is_autocast_available(each)
    ]


@contextmanager
def restored_autocasts(autocasts: Autocasts) -> Iterator[None]:
    """Apply the forward pass's autocast, which is not active in the backward pass or its thread."""
    with ExitStack() as stack:
        for device, is_enabled, dtype, caches in autocasts:
            if is_enabled or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=is_enabled, cache_enabled=caches)
                )
        yield


class OffloadedInputs:
    """Runs a model's layers with their inputs in host memory from forward to backward pass."""

    def __init__(self) -> None:
        self._newest: weakref.ref[LayerInput] | None = None
        self._stream: Any = None
        self._is_logged = False

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on a hidden state [rows, tokens, width] and further arguments.

        The backward pass recomputes the layer from the copy in host memory.
        """
        hidden, *others = args
        if is_on_host(hidden):
            self._log_no_offload()
            return run_recomputed(layer, *args, **kwargs)
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        layer_input = LayerInput(hidden, self._stream, self._newest)

        # `run_recomputed` keeps its arguments, so the hidden state must not be one of them. The
        # empty tensor determines the device whose random state is restored.
        def run(_: Tensor, *rest: Any, **named: Any) -> Any:
            return layer(layer_input.read(), *rest, **named)

        output = run_recomputed(run, hidden.new_empty(0), *others, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:  # otherwise no backward pass reaches this layer
            layer_input.start_offload()
            self._newest = weakref.ref(layer_input)
        return output

    def _log_no_offload(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.info("recompute: offload has no effect on the CPU, and runs as full")


def is_on_host(hidden: Tensor) -> bool:
    """Return whether a layer's input is in host memory already."""
    return hidden.device.type == "cpu"


class LayerInput:
    """A layer's input: on the device in the forward pass, then on the host, then back.

    `stream` runs the copies; `previous` is the input of the previous layer, which the backward pass
    needs next. Streams wait for each other instead of using `record_stream`, which frees memory
    late if the host runs ahead.
    """

    def __init__(
        self, hidden: Tensor, stream: Any, previous: weakref.ref[LayerInput] | None
    ) -> None:
        self._on_device: Tensor | None = hidden
        self._on_host: Tensor | None = None
        self._needs_grad = hidden.requires_grad
        self._device, self._stream, self._previous = hidden.device, stream, previous
        # The copy waits for the kernel that computes the input, not for the layer that reads it.
        self._computed = torch.cuda.current_stream(self._device).record_event()
        self._copied: Any = None

    def start_offload(self) -> None:
        """Start the copy to the host; release the device memory of the previous layer's input."""
        source = self._device_tensor().detach()
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            self._on_host = self._copy_to_host(source)
            self._copied = self._stream.record_event()
        if (previous := self._find_previous()) is not None:
            previous.release()

    def release(self) -> None:
        """Release the device memory, for reuse after the copy to the host."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = None

    def start_reload(self) -> None:
        """Start the copy back to the device, into memory that other layers no longer use."""
        if self._on_device is not None or self._on_host is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._on_device = self._on_host.to(self._device, non_blocking=True)
            self._copied = self._stream.record_event()

    def read(self) -> Tensor:
        """Return the input; in the backward pass its copy, and prefetch the previous layer's."""
        if self._on_host is None:
            return self._device_tensor()
        self.start_reload()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        hidden, self._on_device = self._device_tensor().detach(), None
        if (previous := self._find_previous()) is not None:
            previous.start_reload()
        return hidden.requires_grad_(self._needs_grad)

    def _device_tensor(self) -> Tensor:
        if self._on_device is None:
            raise RuntimeError("a layer's input was released before it was copied")
        return self._on_device

    def _find_previous(self) -> LayerInput | None:
        return None if self._previous is None else self._previous()

    @staticmethod
    def _copy_to_host(source: Tensor) -> Tensor:
        """Copy to page-locked memory; from pageable memory the copy would not be asynchronous."""
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        return host.copy_(source, non_blocking=True)
