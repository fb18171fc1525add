"""Stream the frozen matrices of layers to the device, one layer ahead, from host memory or files.

Two buffers on the device hold the layer that runs, and the one that runs next: the layer after it
in a forward pass, the one before it in a backward pass. Layers with an even number use one buffer
and the others the other one, so that a weight that autograd has saved is valid again as soon as its
layer is back. Nothing is copied back. Everything else stays on the device: embedding, head, vectors
and whatever trains.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.model.adapter.wrap import ADAPTER_PARTS
from app.model.layers import decoder_layers
from common.errors import UserError

log = logging.getLogger(__name__)

WEIGHT_ALIGNMENT = 512
"""bytes that each weight is aligned to, as by PyTorch's allocator for GPUs"""
_PINNED_BYTES = 64 << 20
"""bytes of a piece of pinned memory, which PyTorch's allocator rounds up to a power of two"""
MEASURED_BYTES = 64 << 20
"""bytes by which the speed of a disk is measured"""
_GIB = 1 << 30


class _Piece(NamedTuple):
    """Bytes of a layer in host memory or in a mapped file, and where its buffer has them."""

    offset: int
    values: Tensor
    """uint8 [bytes]"""


class _Weight(NamedTuple):
    """A matrix of a layer, or the scales of one, and how it is replaced."""

    name: str
    values: Tensor
    replace: Callable[[Tensor], None]


def stream_layers(model: Any, source: str, device: torch.device) -> LayerStream:
    """Move a model to `device`, except frozen matrices of its layers, which stay on the host.

    `source`: host (copied to memory that is pinned for a GPU), or disk (read from the mapped files
    that the model was loaded from). From then on a layer has its matrices while it runs only.
    UserError if there are none, or if those for `disk` were converted while they were loaded.
    """
    layers = [model.get_submodule(name) for name in decoder_layers(model, "model.stream=null")]
    owners = Counter(id(weight) for module in model.modules() for weight in _parameters(module))
    weights = [list(_frozen_matrices(layer, owners)) for layer in layers]
    if not any(weights):
        raise UserError(
            f"model.stream={source}: the layers of this {model.config.model_type} model have no "
            "frozen matrices; type model.stream=null"
        )
    where, rate = "host memory", 0.0
    if source == "disk":
        where = _mapped_file(weight for layer in weights for weight in layer)
        with open(where, "rb", buffering=0) as file:
            rate = read_mb_per_second(file)
    size = max(sum(_padded(each.values.nbytes) for each in own) for own in weights)
    stream = LayerStream(size, device, reads_files=source == "disk")
    for layer, own in zip(layers, weights, strict=True):
        stream.add(layer, own)
        own.clear()  # its memory is free before the next layer is copied
    model.to(device)
    if rate:
        seconds = stream.num_bytes / 1e6 / rate
        where += f" (its disk reads {rate:.0f} MB/s: {seconds:.3g} s a pass, less what is cached)"
    log.info(
        "weights: %.3g GiB of %d layers are streamed from %s, %.3g GiB at a time on %s",
        stream.num_bytes / _GIB,
        len(layers),
        where,
        len(stream.slots) * stream.slots[0].buffer.nbytes / _GIB,
        device,
    )
    return stream


@dataclass(slots=True)
class Slot:
    """A buffer on the device, and the layer whose weights it has or gets."""

    buffer: Tensor
    """uint8 [bytes of the largest layer]"""
    staging: Tensor | None = None
    """the same in pinned memory, through which a GPU gets what is read from a file"""
    layer: int | None = None
    copied: Any = None
    """the event of the newest copy to a GPU"""
    reading: Future[None] | None = None


class LayerStream:
    """Copies layers to the device in the order in which they run."""

    def __init__(self, num_bytes: int, device: torch.device, *, reads_files: bool) -> None:
        self.device, self._is_gpu = device, device.type == "cuda"
        self.slots = [Slot(_empty(num_bytes, device)) for _ in range(2)]
        self.num_copied = 0
        """bytes that were copied to the device so far"""
        self._layers: list[list[_Piece]] = []
        self._running: int | None = None
        self._copies = torch.cuda.Stream(device) if self._is_gpu else None
        self._reader = ThreadPoolExecutor(1, "stream") if reads_files else None
        if self._is_gpu and reads_files:
            for slot in self.slots:
                slot.staging = _empty(num_bytes).pin_memory()

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self._layers))

    def add(self, layer: torch.nn.Module, weights: Sequence[_Weight]) -> None:
        """Give the next layer's weights their places in its buffer; keep their values on the host.

        `weights` must not be used any more.
        """
        number = len(self._layers)
        buffer, pieces = self.slots[number % 2].buffer, []
        sizes = (_padded(weight.values.nbytes) for weight in weights)
        for weight, offset in zip(weights, accumulate(sizes, initial=0), strict=False):
            values = weight.values.contiguous()
            pieces.append(_Piece(offset, values.view(-1).view(torch.uint8)))
            place = buffer[offset : offset + values.nbytes].view(values.dtype).view(values.shape)
            # `.data`: copies into the buffer must not count as changes of what autograd saved.
            weight.replace(place.data)
        self._layers.append(pieces if self._reader else self._pinned(pieces))
        layer.register_forward_pre_hook(lambda *_: self.enter(number))
        layer.register_forward_hook(partial(self._enter_in_backward, number))

    def _pinned(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Copy a layer to as few pieces of pinned memory as possible; to one for a CPU."""
        whole = _empty(sum(_padded(piece.values.nbytes) for piece in pieces))
        for offset, values in pieces:
            whole[offset : offset + len(values)] = values
        if not self._is_gpu:
            return [_Piece(0, whole)]
        parts = whole.split(_PINNED_BYTES)
        return [_Piece(n * _PINNED_BYTES, part.pin_memory()) for n, part in enumerate(parts)]

    def _enter_in_backward(self, number: int, layer: Any, given: Any, output: Any) -> None:
        """Have the backward pass enter the layer when it has the gradient of its output."""
        for each in output if isinstance(output, tuple) else (output,):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: self.enter(number))

    def enter(self, number: int) -> None:
        """Wait for the weights of a layer that now runs, and start to copy those of the next one.

        All kernels of the layer before it must have been launched.
        """
        if number == self._running:  # its recompute, or the start of a backward pass
            return
        is_backward = self._running is not None and number == self._running - 1
        self._running = number
        self._start_copy(number)
        slot = self.slots[number % 2]
        if slot.reading is not None:
            slot.reading.result()
        if self._is_gpu:
            torch.cuda.current_stream(self.device).wait_event(slot.copied)
        self._start_copy(number - 1 if is_backward else number + 1)

    def _start_copy(self, number: int) -> None:
        slot = self.slots[number % 2]
        if not 0 <= number < len(self._layers) or slot.layer == number:
            return
        slot.layer, computed = number, None
        self.num_copied += _num_bytes(self._layers[number])
        if self._is_gpu:  # the kernels that read the layer whose place this one takes
            computed = torch.cuda.current_stream(self.device).record_event()
        if self._reader is None:
            self._copy(slot, self._layers[number], computed)
        else:
            slot.reading = self._reader.submit(self._read, slot, self._layers[number], computed)

    def _read(self, slot: Slot, pieces: Sequence[_Piece], computed: Any) -> None:
        """Copy a layer from its file; runs in the reader's thread."""
        if slot.staging is not None:
            if slot.copied is not None:
                slot.copied.synchronize()
            for offset, values in pieces:
                slot.staging[offset : offset + len(values)] = values
            size = pieces[-1].offset + len(pieces[-1].values) if pieces else 0
            pieces = [_Piece(0, slot.staging[:size])]
        self._copy(slot, pieces, computed)

    def _copy(self, slot: Slot, pieces: Sequence[_Piece], computed: Any) -> None:
        """Copy a layer to its buffer; on a GPU after `computed`, while kernels run."""
        if self._copies is None:
            _fill(slot.buffer, pieces)
            return
        self._copies.wait_event(computed)
        with torch.cuda.stream(self._copies):
            _fill(slot.buffer, pieces)
            slot.copied = self._copies.record_event()


def _fill(buffer: Tensor, pieces: Sequence[_Piece]) -> None:
    for offset, values in pieces:
        buffer[offset : offset + len(values)].copy_(values, non_blocking=True)


def _parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (weight for weight in module._parameters.values() if weight is not None)


def _frozen_matrices(layer: torch.nn.Module, owners: Counter[int]) -> Iterator[_Weight]:
    """Yield the frozen matrices of a layer and the scales of 4-bit ones.

    An adapter's are left out, and those that several modules share: some may be outside of layers.
    """
    for name, module in layer.named_modules():
        if not ADAPTER_PARTS.keys().isdisjoint(name.split(".")):
            continue
        for weight in _parameters(module):
            if weight.requires_grad or weight.ndim < 2 or owners[id(weight)] > 1:
                continue
            if type(weight).__name__ == "Int8Params":
                raise UserError(
                    "model.stream: the weights of the base are stored in int8, whose layers keep "
                    "copies of them; type model.stream=null, or a base in nf4 or 16 bits"
                )
            yield _Weight(name, weight.data, partial(setattr, weight, "data"))
            # Not the nested scales, one for 16,384 weights.
            if (state := vars(weight).get("quant_state")) is not None:
                yield _Weight(name, state.absmax, partial(setattr, state, "absmax"))


def read_mb_per_second(file: FileIO, num_bytes: int = MEASURED_BYTES) -> float:
    """Return the MB/s at which a disk reads the start of a file, without the page cache."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    start = time.perf_counter()
    size = file.readinto(bytearray(num_bytes))
    return size / 1e6 / (time.perf_counter() - start)


def _mapped_file(weights: Iterator[_Weight]) -> str:
    """Return the mapped file of the last weight; UserError unless all are in files of the base."""
    file = ""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = []
    for line in lines:
        if len(line) == 6 and line[5].startswith(os.sep):
            low, high = (int(end, 16) for end in line[0].split("-"))
            mapped.append((low, high, line[5]))
    for weight in weights:
        start = weight.values.data_ptr()
        file = next((name for low, high, name in mapped if low <= start < high), "")
        if not file:
            raise UserError(
                "model.stream=disk reads weights as the files of model.path have them, but those "
                f"of {weight.name} were converted to {weight.values.dtype} while they were loaded; "
                "type model.stream=host, or a trainer.precision in the dtype of the files"
            )
    return file


def _empty(num_bytes: int, device: torch.device | None = None) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT


def _num_bytes(pieces: Sequence[_Piece]) -> int:
    return sum(piece.values.nbytes for piece in pieces)
