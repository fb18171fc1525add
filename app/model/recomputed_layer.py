"""Layers that run again in the backward pass, when it asks for the first tensor that one saved.

As PyTorch's own non-reentrant checkpoint, whose bookkeeping for each saved tensor takes the host as
long as launching a kernel does: here it is a place in a list.

`offload`: on a GPU the inputs are copied on a stream of their own while the next layer runs, into
page-locked memory, and come back one layer ahead of the backward pass: two are on the device at a
time.
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
"""what a layer's forward pass runs in, and what its recompute does"""
AS_IT_IS: Contexts = (nullcontext(), nullcontext())


def run_recomputed(
    layer: Callable[..., Any],
    *args: Any,
    contexts: Contexts = AS_IT_IS,
    **kwargs: Any,
) -> Any:
    """Run `layer`, and again in the backward pass, up to the last tensor that it saves.

    The recompute has the forward pass's arguments, random numbers and autocast.
    """
    if not torch.is_grad_enabled():
        return layer(*args, **kwargs)
    forward, recompute = contexts
    call = _Call(layer, args, kwargs, recompute)
    with saved_tensors_hooks(call.pack, call.unpack), forward:
        return layer(*args, **kwargs)


class _EverythingFoundError(Exception):
    """The recompute has all that the forward pass saved."""


class _Call:
    """One run of a layer: the places of its saved tensors, and what it takes to compute them."""

    def __init__(
        self,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any],
    ) -> None:
        self._layer, self._args, self._kwargs, self._context = layer, args, kwargs, context
        self._versions = [one._version if isinstance(one, Tensor) else 0 for one in args]
        device = next((one.device for one in args if isinstance(one, Tensor)), torch.device("cpu"))
        self._random, self._autocasts = _RandomState(device), _autocasts(device.type)
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._found: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> int:
        """Remember what is saved by its place alone."""
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def unpack(self, place: int) -> Tensor:
        """Return a saved tensor, which is not held any longer."""
        # Empty at first, and again where a backward pass runs a second time.
        if not self._found or self._found[place] is None:
            self._recompute()
        tensor, self._found[place] = self._found[place], None
        if tensor is None or self._kinds[place] != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                "recompute: a layer saved other tensors for the backward pass when it ran again; "
                "type recompute=none"
            )
        return tensor

    def _find(self, tensor: Tensor) -> None:
        # Without its history, which would hold this recompute's graph.
        self._found.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self._found) == len(self._kinds):
            raise _EverythingFoundError

    def _recompute(self) -> None:
        for arg, version in zip(self._args, self._versions, strict=True):
            if isinstance(arg, Tensor) and arg._version != version:
                raise RuntimeError(
                    "recompute: the input of a layer was changed in place after it ran; "
                    "type recompute=none"
                )
        self._found = []
        with (
            self._random.restored(),
            _in_autocasts(self._autocasts),
            saved_tensors_hooks(self._find, _unpack_none),
            torch.enable_grad(),
            suppress(_EverythingFoundError),
            self._context,
        ):
            self._layer(*self._args, **self._kwargs)
        self._found += [None] * (len(self._kinds) - len(self._found))


def _unpack_none(_: None) -> Tensor:
    raise RuntimeError("recompute: a layer takes gradients while it runs; type recompute=none")


class _RandomState:
    """The state of the generators that a layer may draw from, when it is made."""

    def __init__(self, device: torch.device) -> None:
        # To ask a GPU's generator for its state would make a context where there is none.
        uses_gpu = device.type == "cuda" and torch.cuda.is_initialized()
        self._gpu = device if uses_gpu else None
        self._states = self._read()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from this state on; the generators then go on as if nothing was drawn."""
        before = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        own = torch.get_rng_state()
        return own, None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)

    def _write(self, states: tuple[Tensor, Tensor | None]) -> None:
        of_cpu, of_gpu = states
        torch.set_rng_state(of_cpu)
        if self._gpu is not None and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, self._gpu)


Autocasts = list[tuple[str, bool, torch.dtype, bool]]
"""device, whether products are cast there, to what, and whether weights are cast once"""


def _autocasts(device: str) -> Autocasts:
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
def _in_autocasts(autocasts: Autocasts) -> Iterator[None]:
    """Cast as then: a backward pass runs outside of autocast, or in a thread that has none."""
    with ExitStack() as stack:
        for device, is_enabled, dtype, caches in autocasts:
            if is_enabled or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=is_enabled, cache_enabled=caches)
                )
        yield


class OffloadedInputs:
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
            return run_recomputed(layer, *args, **kwargs)
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        kept = LayerInput(hidden, self._stream, self._newest)

        # Arguments are kept for the recompute, so the hidden state is not one of them. The empty
        # tensor tells which device's random state to keep.
        def run(_: Tensor, *rest: Any, **named: Any) -> Any:
            return layer(kept.take(), *rest, **named)

        output = run_recomputed(run, hidden.new_empty(0), *others, **kwargs)
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
