"""A checkpoint on disk: every byte is verified before it is used, tensors are read lazily.

It contains nothing executable: tensors are safetensors files, everything else is JSON. A checkpoint
with any other file, or with a file that its manifest does not list, is damaged.

A file of tensors, one per rank, holds full tensors under every strategy, so that any strategy and
any number of ranks can read them by name. Sharded tensors are gathered one at a time, by all ranks
in the same order, and each is written by the rank with the fewest bytes so far. Extra memory: one
block and one gathered tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.heartbeat import refresh_liveness
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint import disk
from app.training.checkpoint.documents import (
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    Json,
    Keys,
    MapOf,
    differences,
    or_null,
)
from common.errors import UserError
from common.untrusted import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

WriteTensors = Callable[[str, Mapping[str, StateTensor]], None]
"""writes tensors to the named file of a checkpoint: `CheckpointStore.add_tensors` of one step"""
_HEADER_MULTIPLE = 8
"""bytes; required by the format, for alignment"""
FORMAT = 1
"""version of the checkpoint format; a higher one is refused when read"""
MARKER, MANIFEST = "COMMITTED", "manifest.json"
TENSORS, DOCUMENT = ".safetensors", ".json"
_KEYS = Keys(
    {
        "format": COUNT,
        "step": COUNT,
        "metric": or_null(NUMBER),
        "details": ANYTHING,
        "versions": ANYTHING,
        "files": MapOf(Keys({"sha256": TEXT, "num_bytes": COUNT})),
    }
)
"""manifest.json, as `commit` writes it"""
_LIBRARIES = ("loft", "torch", "lightning", "transformers", "peft", "safetensors")
_MAX_JSON_BYTES = 64 << 20
"""largest JSON file that is read: the manifest of a thousand ranks has 1 MiB, a year of validations
30 MiB"""
_MAX_DAMAGES = 5
"""most damages listed of one checkpoint"""
_MAX_READERS = 4
"""number of files verified in parallel"""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
    return len(_header(file_order(tensors))) + sum(map(tensor_bytes, tensors.values()))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors, memory-mapped: each is read from disk when it is used."""
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def check_tensors(file: Path) -> None:
    """Raise ValueError if a file is not a complete safetensors file, or has an unexpected dtype."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file.name} is not a safetensors file ({error})") from error
    for name, dtype in dtypes.items():
        if dtype not in SAFETENSORS_DTYPES.values():
            raise ValueError(f"{file.name}: {name!a} has dtype {dtype}, which is never saved")


def file_order(tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Sort by dtype, widest first, so that every tensor is aligned; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def tensor_bytes(tensor: StateTensor) -> int:
    """Return the size of a full tensor in a file, in bytes."""
    return math.prod(tensor.shape) * int(tensor.dtype.itemsize)


def _header(tensors: Mapping[str, StateTensor]) -> bytes:
    import torch

    entries, start = {}, 0
    for name, tensor in tensors.items():
        dtype = SAFETENSORS_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        is_dense = isinstance(tensor, ShardedTensor) or tensor.layout is torch.strided
        if dtype is None or not is_dense:
            raise ValueError(f"{name}: a {tensor.dtype} tensor cannot be saved unless it is dense")
        end = start + tensor_bytes(tensor)
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
        num_rows = max(1, disk.WRITE_BYTES * len(tensor) // tensor_bytes(tensor))
        buffer = torch.empty_like(tensor[:num_rows], memory_format=torch.contiguous_format)
        for rows in tensor.split(num_rows):
            yield from _bytes_of(buffer[: len(rows)].copy_(rows))
        return
    blocks = tensor.contiguous().view(-1).view(torch.uint8).split(disk.WRITE_BYTES)
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
        rank_bytes[rank] += tensor_bytes(tensor)
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
    remaining = deque(
        (key, tensor)
        for key, tensor in file_order(tensors).items()
        if isinstance(tensor, ShardedTensor)
    )

    def gather_up_to(last: str | None) -> Any:
        """Gather in the same order on all ranks, also the tensors that others write."""
        while remaining:
            key, tensor = remaining.popleft()
            full = tensor.gather()
            refresh_liveness()
            if key == last:
                check({key: full})
                return full
            del full
        return None

    share = {
        key: replace(tensor, gather=partial(gather_up_to, key))
        if isinstance(tensor, ShardedTensor)
        else tensor
        for key, tensor in tensors.items()
        if writers[key] == rank
    }
    try:
        if share or rank == 0:
            write(rank_file_name(name, rank), share)
    finally:
        gather_up_to(None)


class DamageError(ValueError):
    """A checkpoint is not as it was written; `damages` describes each damaged file."""

    def __init__(self, damages: Iterable[str]) -> None:
        self.damages = list(damages)
        more = len(self.damages) - _MAX_DAMAGES
        listed = ", ".join(self.damages[:_MAX_DAMAGES])
        super().__init__(f"{listed} and {more:,} more" if more > 0 else listed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def metric(self) -> float | None:
        """Value that `keep_best` ranks by, lower is better; None if it was not measured."""
        return self.manifest["metric"]

    @property
    def details(self) -> Json:
        return self.manifest["details"]

    def names(self) -> list[str]:
        """Return the names of the checkpoint's files, without their suffixes."""
        return sorted(Path(file).stem for file in self.manifest["files"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of `name` from the files of all ranks, memory-mapped.

        KeyError if there is no such file.
        """
        tensors: dict[str, Tensor] = {}
        for file in self._files_of(name):
            tensors |= read_tensors(file)
        return tensors

    def file_of(self, name: str, key: str) -> str:
        """Return the file that contains tensor `key` of `name`; that of rank 0 if none does."""
        from safetensors import safe_open

        files = self._files_of(name)
        for file in files:
            with safe_open(file, framework="numpy") as opened:
                if key in opened.keys():  # noqa: SIM118
                    return file.name
        return files[0].name

    def document(self, name: str) -> Json:
        """Return a JSON document; KeyError if it is missing, ValueError if it is not JSON."""
        return _read_json(_small_file(self._file(name + DOCUMENT)))

    def _files_of(self, name: str) -> list[Path]:
        pattern = re.compile(rf"{re.escape(name)}-rank-\d+")
        others = [other for other in self.names() if pattern.fullmatch(other)]
        return [self._file(each + TENSORS) for each in (name, *others)]

    def _file(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise KeyError(f"{self.folder} has no {name}; it has {', '.join(self.names())}")
        return self.folder / name


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Load the checkpoint in `folder`, of `step` if given, after verifying every byte.

    DamageError names every damaged file. UserError if the checkpoint was written by a newer version
    of this program.
    """
    manifest = load_manifest(folder)
    if step not in (None, manifest["step"]):
        raise DamageError([f"{MANIFEST} belongs to step {manifest['step']}"])
    files = {name: disk.WrittenFile(**written) for name, written in manifest["files"].items()}
    damages = [
        f"{name!r} is not a valid file name"
        for name in files
        if not (FILE_NAME.fullmatch(name) and name.endswith((TENSORS, DOCUMENT)))
    ]
    present = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    unknown = sorted(present - {*files, MANIFEST, MARKER})
    damages += [
        f"{name if FILE_NAME.fullmatch(name) else ascii(name)} is not in the manifest"
        for name in unknown
    ]
    damages = damages or [
        damage for name in files for damage in _check_size(folder / name, files[name])
    ]
    if not damages:
        with ThreadPoolExecutor(max_workers=_MAX_READERS) as readers:
            found = readers.map(_check_content, [folder / name for name in files], files.values())
            damages = [damage for damage in found if damage is not None]
    if damages:
        raise DamageError(damages)
    return Checkpoint(folder=folder, step=manifest["step"], manifest=manifest)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and verify it against its marker."""
    marker, text = _small_file(folder / MARKER), _small_file(folder / MANIFEST)
    if marker != marker_of(hashlib.sha256(text).hexdigest()):
        raise DamageError([f"sha256 of {MANIFEST}"])
    try:
        manifest = _read_json(text)
        file_format = int(manifest["format"])
    except (ValueError, LookupError, TypeError, OverflowError):
        raise DamageError([f"{MANIFEST} is unreadable"]) from None
    if file_format > FORMAT:
        raise UserError(_describe_newer_format(folder, manifest, file_format))
    if any(differences(manifest, _KEYS, "")):
        raise DamageError([f"{MANIFEST} is unreadable"])
    return manifest


def marker_of(manifest_sha256: str) -> bytes:
    return f"{manifest_sha256}\n".encode()


def _read_json(text: bytes) -> Json:
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from None


def _small_file(file: Path) -> bytes:
    """Read a whole file; DamageError unless it is a regular file of at most _MAX_JSON_BYTES."""
    try:
        # Opening a FIFO would block, and a link may point to one.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamageError([f"{file.name} is not a regular file"])
            content = stream.read(_MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise DamageError([f"{file.name} is missing"]) from None
    except OSError as error:
        raise DamageError([f"{file.name} cannot be read: {error.strerror}"]) from None
    if len(content) > _MAX_JSON_BYTES:
        raise DamageError([f"{file.name} is larger than {_MAX_JSON_BYTES >> 20} MiB"])
    return content


def _describe_newer_format(folder: Path, manifest: Mapping[str, Any], file_format: int) -> str:
    written_by = manifest.get("versions")
    version = written_by.get("loft") if isinstance(written_by, dict) else None
    if not (isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,40}", version, re.ASCII)):
        version = "(of unknown version)"
    return (
        f"{folder / MANIFEST}: written by loft {version} as format {file_format}; "
        f"this is loft {versions().get('loft')}, which reads up to format {FORMAT}; upgrade loft, "
        "or resume from an older checkpoint with resume=FOLDER"
    )


def _check_size(file: Path, expected: disk.WrittenFile) -> Iterator[str]:
    """Yield what is wrong with a file, without reading it."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        yield f"{file.name} is not a regular file"
    elif not file.exists():
        yield f"{file.name} is missing"
    elif (size := file.stat().st_size) != expected.num_bytes:
        yield f"{file.name} has {size} of {expected.num_bytes} bytes"


def _check_content(file: Path, expected: disk.WrittenFile) -> str | None:
    try:
        if disk.read_hash(file) != expected.sha256:
            return f"sha256 of {file.name}"
        if file.suffix == TENSORS:
            check_tensors(file)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that the content of a checkpoint may depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):  # run from a checkout that was not installed
            found[name] = version(name)
    return found
