"""Fingerprints of a base model, saved with runs and adapters to recognize it later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from app.model.base import ModelConfig
from common.untrusted import limits

WHOLE_BYTES = 256 << 20
"""weights of up to this size are read whole, in about half a second"""
BLOCK_BYTES = 4096
"""bytes read at the start, in the middle and at the end of each tensor of a larger folder"""


def describe_base(model: ModelConfig) -> dict[str, str | None]:
    """Describe a base by its path, its revision, and two fingerprints of a folder's files.

    `fingerprint` covers config.json and the safetensors headers (names, shapes and dtypes): it
    distinguishes models, but not two training runs of one model. `weights` covers the bytes of all
    tensors (blocks of each tensor in a large folder), and distinguishes those, too.
    """
    fingerprint = weights = None
    if model.path is not None and (folder := Path(model.path)).is_dir():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        digest, sample = hashlib.sha256(), hashlib.sha256()
        for file in (folder / "config.json", *files):
            if file.is_file():
                digest.update(_start_of(file))
        # The size of all files together: a large model may be split into many small files.
        is_small = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
        for file in files:
            state = file.stat()
            stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
            sample.update(_digest_of(file, stamp, is_whole=is_small))
        fingerprint, weights = digest.hexdigest(), sample.hexdigest()
    return {
        "path": model.path,
        "revision": model.revision,
        "fingerprint": fingerprint,
        "weights": weights,
    }


@cache
def _digest_of(file: Path, stamp: tuple[int, ...], *, is_whole: bool) -> bytes:
    """Return the digest of a safetensors file; cached until the file changes."""
    digest = hashlib.sha256()
    for block in _read_whole(file) if is_whole else _read_parts(file):
        digest.update(block)
    return digest.digest()


def _read_whole(file: Path) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            yield block


def _read_parts(file: Path) -> Iterator[bytes]:
    """Read a safetensors file's size, its header and three blocks of each tensor."""
    size, header = file.stat().st_size, _start_of(file)
    yield size.to_bytes(8, "little")
    yield header
    with file.open("rb", buffering=0) as stream:
        for begin, end in _ranges_of(header, size):
            last = max(end - BLOCK_BYTES, begin)
            for offset in sorted({begin, (begin + last) // 2, last}):
                stream.seek(offset)
                yield stream.read(BLOCK_BYTES)


def _ranges_of(header: bytes, size: int) -> list[tuple[int, int]]:
    """Return the byte range of each tensor in a file, clipped to the file's size."""
    start = len(header)
    try:
        tensors = [t for name, t in json.loads(header[8:]).items() if name != "__metadata__"]
        ranges = [(int(begin), int(end)) for begin, end in (t["data_offsets"] for t in tensors)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return [(0, size)]  # damaged: `base_model` reports it

    def clip(offset: int) -> int:
        return min(max(offset, 0), size)

    return [(clip(start + begin), clip(start + end)) for begin, end in ranges]


def _start_of(file: Path) -> bytes:
    """Return the whole of a JSON file, or the header of a safetensors file."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = stream.read(8)
        return length + stream.read(
            min(int.from_bytes(length, "little"), limits().header_mib << 20)
        )
