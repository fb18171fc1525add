"""One checkpoint on the disk: read lazily, and checked byte by byte before it is.

Nothing in it can run: tensors are safetensors files, the rest is JSON, and a file that is neither,
or that its manifest does not tell of, makes the checkpoint a damaged one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError
from app.training.checkpoint import disk
from app.training.checkpoint.tensors import check_tensors, names_in, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""number of the layout; a reader refuses a higher one"""
MARKER, MANIFEST = "COMMITTED", "manifest.json"
TENSORS, DOCUMENT = ".safetensors", ".json"
KEYS = {"format", "step", "metric", "details", "versions", "files"}
WRITTEN_KEYS = {"sha256", "num_bytes"}
LIBRARIES = ("loft", "torch", "lightning", "transformers", "peft", "safetensors")
MAX_JSON_BYTES = 64 << 20
"""a manifest of a thousand ranks takes 1 MiB, a year of validations 30"""
MAX_DAMAGES = 5
"""that are said of one checkpoint"""
MAX_READERS = 4
"""files that are read at once when a checkpoint is checked"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Json = Any
"""what JSON can hold"""


class DamageError(ValueError):
    """A checkpoint is not what was written: `damages` says each, with its file."""

    def __init__(self, damages: Iterable[str]) -> None:
        self.damages = list(damages)
        more = len(self.damages) - MAX_DAMAGES
        said = ", ".join(self.damages[:MAX_DAMAGES])
        super().__init__(f"{said} and {more:,} more" if more > 0 else said)


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
        tensors: dict[str, Tensor] = {}
        for file in self._files_of(name):
            tensors |= read_tensors(file)
        return tensors

    def file_of(self, name: str, key: str) -> str:
        """Name the file that holds tensor `key` of `name`; the first rank's where none does."""
        files = self._files_of(name)
        return next((file.name for file in files if key in names_in(file)), files[0].name)

    def document(self, name: str) -> Json:
        """Read what `add_document` was given. KeyError where there is none, ValueError where it is
        not JSON that a checkpoint may hold."""
        return read_json(_small_file(self._file(name + DOCUMENT)))

    def _files_of(self, name: str) -> list[Path]:
        """Return the files of `name`, the first rank's first."""
        of_ranks = re.compile(rf"{re.escape(name)}-rank-\d+")
        others = [other for other in self.names() if of_ranks.fullmatch(other)]
        return [self._file(each + TENSORS) for each in (name, *others)]

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
    damages += [f"{_printable(name)} is not in the manifest" for name in unknown]
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
        manifest = read_json(text)
        written_as = int(manifest["format"])
    except (ValueError, LookupError, TypeError, OverflowError):
        raise DamageError([f"{MANIFEST} is unreadable"]) from None
    if written_as > FORMAT:
        raise UserError(_is_newer(folder, manifest, written_as))
    if not _is_sound(manifest):
        raise DamageError([f"{MANIFEST} is unreadable"])
    return manifest


def marker_of(manifest_sha256: str) -> bytes:
    """Return what the marker of a checkpoint holds."""
    return f"{manifest_sha256}\n".encode()


def read_json(text: bytes) -> Json:
    """Read a document of a checkpoint; ValueError says what is wrong with it."""
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from None


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest says what `commit` writes."""
    files = manifest.get("files")
    return (
        set(manifest) == KEYS
        and type(manifest["step"]) is int
        and manifest["step"] >= 0
        and (manifest["metric"] is None or _is_finite(manifest["metric"]))
        and isinstance(files, dict)
        and all(isinstance(one, dict) and set(one) == WRITTEN_KEYS for one in files.values())
        and all(type(one["num_bytes"]) is int for one in files.values())
        and all(type(one["sha256"]) is str for one in files.values())
    )


def _is_finite(value: Json) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _printable(name: str) -> str:
    return name if NAME.fullmatch(name) else ascii(name)


def _small_file(file: Path) -> bytes:
    """Read a document whole: a regular file, of a size that one may have."""
    try:
        # A FIFO would be waited for, and a link may lead to one.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamageError([f"{file.name} is not a file"])
            content = stream.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise DamageError([f"{file.name} is missing"]) from None
    except OSError as error:
        raise DamageError([f"{file.name} cannot be read: {error.strerror}"]) from None
    if len(content) > MAX_JSON_BYTES:
        raise DamageError([f"{file.name} is larger than {MAX_JSON_BYTES >> 20} MiB"])
    return content


def _is_newer(folder: Path, manifest: Mapping[str, Any], written_as: int) -> str:
    told = manifest.get("versions")
    theirs = told.get("loft") if isinstance(told, dict) else None
    if not (isinstance(theirs, str) and re.fullmatch(r"[\w.+-]{1,40}", theirs, re.ASCII)):
        theirs = "(of unknown version)"
    return (
        f"{folder / MANIFEST}: written by loft {theirs} as format {written_as}; "
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
