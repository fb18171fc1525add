"""Fingerprints of a base, kept with a run and beside an adapter to recognize it by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from app.model.base import ModelConfig
from app.process.untrusted import limits

WHOLE_BYTES = 256 << 20
"""a folder with no more weights is read whole, in about half a second"""
BLOCK_BYTES = 4096
"""read at the start, in the middle and at the end of each tensor of a larger folder"""
WEIGHTS_FORM = "all bytes or blocks of every tensor"
"""what the fingerprint `weights` covers; only fingerprints that cover the same are compared"""
EARLIER_FORM = "blocks of each file"
"""what it covers in runs and adapters that do not say"""


def describe_base(model: ModelConfig) -> dict[str, str | None]:
    """Describe a base by its path, its revision, and two fingerprints of a folder's files.

    `fingerprint` covers config.json and the safetensors' headers, which have names, shapes and
    dtypes: it tells models apart, but not two trainings of one. `weights` covers the bytes of all
    tensors, in a large folder some of each, and tells those apart too.
    """
    fingerprint = weights = None
    if model.path is not None and (folder := Path(model.path)).is_dir():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        digest, sample = hashlib.sha256(), hashlib.sha256()
        for file in (folder / "config.json", *files):
            if file.is_file():
                digest.update(_start_of(file))
        # By the folder, for a large model may lie in many small files.
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
        "weights_form": None if weights is None else WEIGHTS_FORM,
    }


def same_form(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the `weights` of two descriptions cover the same, or one has none."""
    has_none = one.get("weights") is None or other.get("weights") is None
    return has_none or one.get("weights_form") == other.get("weights_form")


@cache
def _digest_of(file: Path, stamp: tuple[int, ...], *, is_whole: bool) -> bytes:
    """Digest a safetensors file, once in a process."""
    digest = hashlib.sha256()
    for block in _read_whole(file) if is_whole else _read_parts(file):
        digest.update(block)
    return digest.digest()


def _read_whole(file: Path) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            yield block


def _read_parts(file: Path) -> Iterator[bytes]:
    """Read a safetensors file's size, its header and some blocks of each tensor."""
    size, header = file.stat().st_size, _start_of(file)
    yield size.to_bytes(8, "little")
    yield header
    with file.open("rb", buffering=0) as stream:
        for begin, end in _places_of(header, size):
            for offset in _offsets(begin, end):
                stream.seek(offset)
                yield stream.read(BLOCK_BYTES)


def _places_of(header: bytes, size: int) -> list[tuple[int, int]]:
    """Return the first and last byte of each tensor in a file, by the file's header."""
    start = len(header)
    try:
        tensors = [t for name, t in json.loads(header[8:]).items() if name != "__metadata__"]
        places = [(int(begin), int(end)) for begin, end in (t["data_offsets"] for t in tensors)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return [(0, size)]  # damaged: `base_model` reports how
    return [(_within(start + begin, size), _within(start + end, size)) for begin, end in places]


def _within(place: int, size: int) -> int:
    return min(max(place, 0), size)


def _offsets(begin: int, end: int) -> list[int]:
    """Return where the first, the middle and the last block of a tensor begin."""
    last = max(end - BLOCK_BYTES, begin)
    return sorted({begin, (begin + last) // 2, last})


def _start_of(file: Path) -> bytes:
    """Return all of a JSON file, the header of a safetensors file."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = stream.read(8)
        return length + stream.read(
            min(int.from_bytes(length, "little"), limits().header_mib << 20)
        )
