"""Recompute with each layer's input in host memory: what a layer was given waits there.

On a GPU the inputs leave on a stream of their own while the next layer runs, into page-locked
memory, and come back one layer ahead of the backward pass: two are on the device at a time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
