"""One checkpoint on the disk: read lazily, and checked byte by byte before it is.

Nothing in it can run: tensors are safetensors files, the rest is JSON, and a file that is neither,
or that its manifest does not tell of, makes the checkpoint a damaged one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import UserError
from app.training.checkpoint import disk
from app.training.checkpoint.tensors import check_tensors, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""number of the layout; a reader refuses a higher one"""
MARKER, MANIFEST = "COMMITTED", "manifest.json"
TENSORS, DOCUMENT = ".safetensors", ".json"
KEYS = {"format", "step", "metric", "details", "versions", "files"}
WRITTEN_KEYS = {"sha256", "num_bytes"}
LIBRARIES = ("loft", "torch", "lightning", "transformers", "peft", "safetensors")
MAX_READERS = 4
"""files that are read at once when a checkpoint is checked"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Json = Any
"""what JSON can hold"""


class DamageError(ValueError):
    """A checkpoint is not what was written: `damages` says each, with its file."""

    def __init__(self, damages: Iterable[str]) -> None:
        self.damages = list(damages)
        super().__init__(", ".join(self.damages))


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One whole checkpoint on the disk."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def metric(self) -> float | None:
        """What `keep_best` goes by; lower is better."""
        return self.manifest["metric"]

    @property
    def details(self) -> Json:
        """What was handed to `commit`."""
        return self.manifest["details"]

    def names(self) -> list[str]:
        """Name everything in it, without the files' endings."""
        return sorted(Path(file).stem for file in self.manifest["files"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Map tensors into memory, of every rank's file; each is read when it is used.

        KeyError where there are none.
        """
        tensors = read_tensors(self._file(name + TENSORS))
        for other in self.names():
            if re.fullmatch(rf"{re.escape(name)}-rank-\d+", other):
                tensors |= read_tensors(self._file(other + TENSORS))
        return tensors

    def document(self, name: str) -> Json:
        """Read what `add_document` was given. KeyError where there is none."""
        return json.loads(self._file(name + DOCUMENT).read_text(encoding="utf-8"))

    def _file(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise KeyError(f"{self.folder} holds no {name}; it holds {', '.join(self.names())}")
        return self.folder / name


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Check every byte of the checkpoint in `folder`, of `step` if that is known.

    DamageError names every file that is not as it was written; UserError where the checkpoint was
    written by a newer version of this program.
    """
    manifest = read_manifest(folder)
    if step not in (None, manifest["step"]):
        raise DamageError([f"{MANIFEST} is of step {manifest['step']}"])
    files = {name: disk.Written(**written) for name, written in manifest["files"].items()}
    damages = [f"{name!r} is no name of a file of a checkpoint" for name in files if _is_odd(name)]
    there = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    unknown = sorted(there - {*files, MANIFEST, MARKER})
    damages += [f"{name} is not in the manifest" for name in unknown]
    damages = damages or [damage for name in files for damage in _seen(folder / name, files[name])]
    if not damages:
        with ThreadPoolExecutor(max_workers=MAX_READERS) as readers:
            found = readers.map(_read, [folder / name for name in files], files.values())
            damages = [damage for damage in found if damage is not None]
    if damages:
        raise DamageError(damages)
    return Checkpoint(folder=folder, step=manifest["step"], manifest=manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a checkpoint's manifest against its marker."""
    marked, text = _small_file(folder / MARKER), _small_file(folder / MANIFEST)
    if marked != marker_of(hashlib.sha256(text).hexdigest()):
        raise DamageError([f"sha256 of {MANIFEST}"])
    try:
        manifest = json.loads(text)
        written_as = int(manifest["format"])
    except (ValueError, LookupError, TypeError):
        raise DamageError([f"{MANIFEST} is unreadable"]) from None
    if written_as > FORMAT:
        raise UserError(_is_newer(folder, manifest, written_as))
    if not _is_sound(manifest):
        raise DamageError([f"{MANIFEST} is unreadable"])
    return manifest


def marker_of(manifest_sha256: str) -> bytes:
    """Return what the marker of a checkpoint holds."""
    return f"{manifest_sha256}\n".encode()


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest says what `commit` writes."""
    files = manifest.get("files")
    return (
        set(manifest) == KEYS
        and isinstance(manifest["step"], int)
        and isinstance(manifest["metric"], (int, float, type(None)))
        and isinstance(files, dict)
        and all(isinstance(one, dict) and set(one) == WRITTEN_KEYS for one in files.values())
    )


def _small_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise DamageError([f"{file.name} is missing"]) from None
    except OSError as error:
        raise DamageError([f"{file.name} cannot be read: {error.strerror}"]) from None


def _is_newer(folder: Path, manifest: Mapping[str, Any], written_as: int) -> str:
    told = manifest.get("versions")
    theirs = told.get("loft") if isinstance(told, dict) else None
    return (
        f"{folder}: written by loft {theirs or '(of unknown version)'} as format {written_as}; "
        f"this is loft {versions().get('loft')}, which reads up to format {FORMAT}; upgrade loft, "
        "or go on from an older checkpoint by resume=FOLDER"
    )


def _seen(file: Path, told: disk.Written) -> Iterator[str]:
    """Say what is wrong with a file as far as it shows without reading it."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        yield f"{file.name} is no file"
    elif not file.exists():
        yield f"{file.name} is missing"
    elif (size := file.stat().st_size) != told.num_bytes:
        yield f"{file.name} has {size} of {told.num_bytes} bytes"


def _read(file: Path, told: disk.Written) -> str | None:
    """Say what is wrong with a file's bytes."""
    try:
        if disk.read_hash(file) != told.sha256:
            return f"sha256 of {file.name}"
        if file.suffix == TENSORS:
            check_tensors(file)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def _is_odd(name: str) -> bool:
    return NAME.fullmatch(name) is None or not name.endswith((TENSORS, DOCUMENT))


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that a checkpoint's content may depend on."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):  # run from a checkout that was not installed
            found[name] = version(name)
    return found
