"""Tensors by name as safetensors files, one per rank: written as a stream, read lazily.

A file holds whole tensors, whatever strategy trains, so that any other strategy or number of ranks
reads them by name. Sharded tensors are gathered one at a time, by all ranks in one order, and
written by the rank with the least to write so far. Memory beside the tensors: one block, and one
gathered tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.process.heartbeat import refresh_liveness
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint import disk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's names of the dtypes that the format has, and its own"""
Write = Callable[[str, Mapping[str, StateTensor]], None]
"""writes a file of a checkpoint by its name: `CheckpointStore.add_tensors` of a step"""
HEADER_MULTIPLE = 8
"""bytes; required by the format, for alignment"""


def write_tensors(file: Path, tensors: Mapping[str, StateTensor]) -> disk.Written:
    """Write a new file of `tensors`, from any device.

    ValueError for a dtype that the format does not have, or a tensor that is not dense.
    """
    tensors = in_order(tensors)
    header = _header(tensors)

    def blocks() -> Iterator[bytes | memoryview]:
        yield header
        for tensor in tensors.values():
            yield from _bytes_of(tensor.gather() if isinstance(tensor, ShardedTensor) else tensor)

    return disk.write_file(file, blocks())


def file_bytes(tensors: Mapping[str, StateTensor]) -> int:
    """Return the size of the file that `write_tensors` makes."""
    return len(_header(in_order(tensors))) + sum(map(num_bytes, tensors.values()))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors, memory-mapped: each is read from the disk when it is used."""
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def names_in(file: Path) -> list[str]:
    """Return the names of a file's tensors."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())


def check_tensors(file: Path) -> None:
    """Check a file's header; ValueError if it is not a safetensors file of this size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file.name} is not a safetensors file ({error})") from error
    for name, dtype in dtypes.items():
        if dtype not in DTYPES.values():
            raise ValueError(f"{file.name}: {name!a} is of type {dtype}, which is never saved")


def in_order(tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Sort by width, the widest dtypes first, so that every tensor is aligned; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def num_bytes(tensor: StateTensor) -> int:
    """Return the bytes that a tensor takes in a file."""
    return math.prod(tensor.shape) * int(tensor.dtype.itemsize)


def _header(tensors: Mapping[str, StateTensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        is_dense = isinstance(tensor, ShardedTensor) or tensor.layout is _strided()
        if dtype is None or not is_dense:
            raise ValueError(f"{name}: a {tensor.dtype} tensor cannot be saved unless it is dense")
        end = start + num_bytes(tensor)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = math.ceil(len(text) / HEADER_MULTIPLE) * HEADER_MULTIPLE
    return length.to_bytes(8, "little") + text.ljust(length)


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in logical order, in blocks; each is valid until the next."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return
    if not tensor.is_contiguous() and len(tensor) > 1:
        # By rows, through one buffer: contiguous() would copy all of it.
        num_rows = max(1, disk.BLOCK_BYTES * len(tensor) // num_bytes(tensor))
        buffer = torch.empty_like(tensor[:num_rows], memory_format=torch.contiguous_format)
        for rows in tensor.split(num_rows):
            yield from _bytes_of(buffer[: len(rows)].copy_(rows))
        return
    blocks = tensor.contiguous().view(-1).view(torch.uint8).split(disk.BLOCK_BYTES)
    if tensor.device.type == "cpu":
        yield from (memoryview(block.numpy()) for block in blocks)
        return
    host = torch.empty(len(blocks[0]), dtype=torch.uint8, pin_memory=tensor.is_cuda)
    for block in blocks:
        yield memoryview(host[: len(block)].copy_(block).numpy())


def file_of(name: str, rank: int) -> str:
    """Return the name of a rank's file; rank 0's has no suffix, as a single process's."""
    return f"{name}-rank-{rank}" if rank else name


def owners(tensors: Mapping[str, StateTensor], num_ranks: int) -> dict[str, int]:
    """Return which rank writes each tensor: rank 0 replicated ones, all ranks sharded ones."""
    shares, owner = [0] * num_ranks, {}
    for name, tensor in in_order(tensors).items():
        rank = shares.index(min(shares)) if isinstance(tensor, ShardedTensor) else 0
        owner[name] = rank
        shares[rank] += num_bytes(tensor)
    return owner


def write_share(
    write: Write,
    name: str,
    tensors: Mapping[str, StateTensor],
    check: Callable[[Mapping[str, Tensor]], None],
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Write this rank's share of `tensors`; all ranks call it, each with the same names.

    `check` is called with each gathered tensor before it is written. A rank that fails still
    gathers for the others before it raises.
    """
    owner = owners(tensors, num_ranks)
    order = _OrderedGather(tensors, check)
    own = {name: order.own(name, tensor) for name, tensor in tensors.items() if owner[name] == rank}
    try:
        if own or rank == 0:
            write(file_of(name, rank), own)
    finally:
        order.finish()


class _OrderedGather:
    """Gather sharded tensors in the order that all ranks share."""

    def __init__(
        self, tensors: Mapping[str, StateTensor], check: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        self._check = check
        self._remaining = [
            (name, tensor)
            for name, tensor in in_order(tensors).items()
            if isinstance(tensor, ShardedTensor)
        ]
        self._remaining.reverse()

    def own(self, name: str, tensor: StateTensor) -> StateTensor:
        """Return `tensor` so that gathering it first gathers all that come before it."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        return replace(tensor, gather=lambda: self._gather(name))

    def _gather(self, name: str) -> Tensor:
        while self._remaining:
            key, tensor = self._remaining.pop()
            full = tensor.gather()
            refresh_liveness()
            if key == name:
                self._check({name: full})
                return full
        raise RuntimeError(f"{name} was gathered before")

    def finish(self) -> None:
        """Gather the rest, for the ranks that write it."""
        while self._remaining:
            self._remaining.pop()[1].gather()
            refresh_liveness()
