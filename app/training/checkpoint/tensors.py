"""Named tensors in safetensors files, one file per rank: streamed to disk, read lazily.

A file holds full tensors under every strategy, so that any strategy and any number of ranks can
read them by name. Sharded tensors are gathered one at a time, by all ranks in the same order, and
each is written by the rank with the fewest bytes so far. Extra memory: one block and one gathered
tensor.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.process.heartbeat import refresh_liveness
from app.strategy.state import ShardedTensor, StateTensor
from app.training.checkpoint import disk

if TYPE_CHECKING:
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
"""the dtypes that the format supports: torch's name -> safetensors' name"""
WriteTensors = Callable[[str, Mapping[str, StateTensor]], None]
"""writes tensors to the named file of a checkpoint: `CheckpointStore.add_tensors` of one step"""
_HEADER_MULTIPLE = 8
"""bytes; required by the format, for alignment"""


def write_tensors(file: Path, tensors: Mapping[str, StateTensor]) -> disk.WrittenFile:
    """Write `tensors`, which may be on any device, to a new file.

    ValueError for a dtype that the format does not support, or a tensor that is not dense.
    """
    tensors = file_order(tensors)
    header = _header(tensors)

    def blocks() -> Iterator[bytes | memoryview]:
        yield header
        for tensor in tensors.values():
            yield from _bytes_of(tensor.gather() if isinstance(tensor, ShardedTensor) else tensor)

    return disk.write_file(file, blocks())


def file_bytes(tensors: Mapping[str, StateTensor]) -> int:
    """Return the size of the file that `write_tensors` would write."""
    return len(_header(file_order(tensors))) + sum(map(num_bytes, tensors.values()))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors, memory-mapped: each is read from disk when it is used."""
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def names_in(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())


def check_tensors(file: Path) -> None:
    """Raise ValueError if a file is not a complete safetensors file, or has an unexpected dtype."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file.name} is not a safetensors file ({error})") from error
    for name, dtype in dtypes.items():
        if dtype not in DTYPES.values():
            raise ValueError(f"{file.name}: {name!a} has dtype {dtype}, which is never saved")


def file_order(tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Sort by dtype, widest first, so that every tensor is aligned; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def num_bytes(tensor: StateTensor) -> int:
    """Return the size of a full tensor in a file, in bytes."""
    return math.prod(tensor.shape) * int(tensor.dtype.itemsize)


def _header(tensors: Mapping[str, StateTensor]) -> bytes:
    import torch

    entries, start = {}, 0
    for name, tensor in tensors.items():
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        is_dense = isinstance(tensor, ShardedTensor) or tensor.layout is torch.strided
        if dtype is None or not is_dense:
            raise ValueError(f"{name}: a {tensor.dtype} tensor cannot be saved unless it is dense")
        end = start + num_bytes(tensor)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = math.ceil(len(text) / _HEADER_MULTIPLE) * _HEADER_MULTIPLE
    return length.to_bytes(8, "little") + text.ljust(length)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in logical order, in blocks; a block is valid until the next one."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return
    if not tensor.is_contiguous() and len(tensor) > 1:
        # Row by row through one buffer: contiguous() would copy the whole tensor.
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


def rank_file_name(name: str, rank: int) -> str:
    """Return the file name for a rank's tensors; that of rank 0 has no suffix."""
    return f"{name}-rank-{rank}" if rank else name


def writer_ranks(tensors: Mapping[str, StateTensor], num_ranks: int) -> dict[str, int]:
    """Return the rank that writes each tensor.

    Rank 0 writes replicated tensors; sharded ones are spread so that ranks write equal amounts.
    """
    rank_bytes, writers = [0] * num_ranks, {}
    for name, tensor in file_order(tensors).items():
        rank = rank_bytes.index(min(rank_bytes)) if isinstance(tensor, ShardedTensor) else 0
        writers[name] = rank
        rank_bytes[rank] += num_bytes(tensor)
    return writers


def write_share(
    write: WriteTensors,
    name: str,
    tensors: Mapping[str, StateTensor],
    check: Callable[[Mapping[str, Tensor]], None],
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Write this rank's share of `tensors`; all ranks must call this with the same names.

    `check` is called with each gathered tensor before it is written. A rank that fails takes part
    in the remaining gathers before it raises.
    """
    writers = writer_ranks(tensors, num_ranks)
    gathers = _OrderedGather(tensors, check)
    share = {
        key: gathers.in_turn(key, tensor) for key, tensor in tensors.items() if writers[key] == rank
    }
    try:
        if share or rank == 0:
            write(rank_file_name(name, rank), share)
    finally:
        gathers.finish()


class _OrderedGather:
    """Gather sharded tensors in the same order on all ranks."""

    def __init__(
        self, tensors: Mapping[str, StateTensor], check: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        self._check = check
        self._remaining = deque(
            (name, tensor)
            for name, tensor in file_order(tensors).items()
            if isinstance(tensor, ShardedTensor)
        )

    def in_turn(self, name: str, tensor: StateTensor) -> StateTensor:
        """Return a copy of `tensor` whose gather first gathers all tensors before it."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        return replace(tensor, gather=lambda: self._gather(name))

    def _gather(self, name: str) -> Tensor:
        while self._remaining:
            key, tensor = self._remaining.popleft()
            full = tensor.gather()
            refresh_liveness()
            if key == name:
                self._check({name: full})
                return full
        raise RuntimeError(f"{name} has been gathered already")

    def finish(self) -> None:
        """Gather the remaining tensors, for the ranks that write them."""
        while self._remaining:
            self._remaining.popleft()[1].gather()
            refresh_liveness()
