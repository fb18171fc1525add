"""Which base this is: what is kept of it with a run and beside an adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from app.model.base import ModelConfig
from app.preflight.base_model import MAX_HEADER_BYTES

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
"""read of each file's tensors"""


def describe_base(model: ModelConfig) -> dict[str, str | None]:
    """Say which base this is: path, revision, and two fingerprints of a folder's files.

    `fingerprint` is of config.json and of the safetensors' headers, which is names, shapes, types
    and sizes: it tells models apart, not two trainings of one. `weights` is of blocks of bytes
    spread over the tensors, which does.
    """
    fingerprint = weights = None
    if model.path is not None and (folder := Path(model.path)).is_dir():
        files = sorted(folder.glob("*.safetensors"))
        digest, sample = hashlib.sha256(), hashlib.sha256()
        for file in (folder / "config.json", *files):
            if file.exists():
                digest.update(_start_of(file))
        for file in files:
            for block in _blocks_of(file):
                sample.update(block)
        fingerprint, weights = digest.hexdigest(), sample.hexdigest()
    return {
        "path": model.path,
        "revision": model.revision,
        "fingerprint": fingerprint,
        "weights": weights,
    }


def _blocks_of(file: Path) -> Iterator[bytes]:
    """Read up to NUM_BLOCKS blocks of a safetensors file's tensors, evenly spread to its end."""
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        last = max(file.stat().st_size - start - BLOCK_BYTES, 0)
        for offset in sorted({last * index // (NUM_BLOCKS - 1) for index in range(NUM_BLOCKS)}):
            stream.seek(start + offset)
            yield stream.read(BLOCK_BYTES)


def _start_of(file: Path) -> bytes:
    """Return a JSON file whole, of a safetensors file its header."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = stream.read(8)
        return length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
