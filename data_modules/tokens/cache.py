"""The cache of prepared data sets: a folder each, found by all that its tokens follow from.

An entry is whole or it is not there: it is written beside its place, sealed, and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_modules import source
from data_modules.messages import DataError

log = logging.getLogger(__name__)

KEY_FILE = "key.json"
_NAME_BYTES = 64
_NO_ROOM = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_NO_LOCK = {errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}
"""what opening a lock ends with where something else is in its place"""
_LABELS = {
    "data": "the data changed",
    "tokenizer": "the tokenizer changed",
    "template": "the chat template changed",
    "settings": "settings changed",
    "code": "the code changed",
    "versions": "library versions changed",
}


@dataclass(frozen=True, slots=True)
class Key:
    """Name a prepared data set: what it is of, and a hash or value of each thing that shapes it.

    `parts` has the entries of `_LABELS`.
    """

    path: str
    split: str
    parts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the folder's name."""
        text = json.dumps([self.path, self.split, self.parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def newest(self) -> str:
        """Return the name of the file that names the newest entry of the same data."""
        text = json.dumps([self.path, self.split])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.newest"


def code_version() -> str:
    """Return a hash of the files that decide what a row's tokens are."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def open_or_make(root: Path, key: Key, make: Callable[[Path], None]) -> tuple[Path, str]:
    """Return the folder of a prepared data set, and whether it was there, in words.

    Where it is not, or not whole, `make(folder)` writes it into an empty folder. Raises DataError
    where the cache's own folder cannot be written.
    """
    folder = root / key.name
    if is_whole(folder):
        return folder, "found in the cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key.name}.lock"):
            if is_whole(folder):
                return folder, "tokenized by another process"
            reason = "the entry was damaged" if os.path.lexists(folder) else _why_missing(root, key)
            _remove_left_over(root, key)
            unfinished = root / f"{key.name}.tmp-{os.getpid()}"
            unfinished.mkdir()
            try:
                make(unfinished)
                _seal(unfinished, key)
                os.replace(unfinished, folder)
                _note_newest(root, key)
                _sync(root)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DataError(
            f"{root}: the prepared data cannot be written: {error.strerror}; give a folder with "
            "room by data.cache_dir=FOLDER"
        ) from error
    return folder, f"tokenized ({reason})"


def _seal(folder: Path, key: Key) -> None:
    """Write what tells a whole folder from a damaged one, when all else is on the disk."""
    sizes = {}
    for file in sorted(folder.iterdir()):
        sizes[file.name] = file.stat().st_size
        _sync(file)
    note = {"path": key.path, "split": key.split, "parts": key.parts, "sizes": sizes}
    (folder / KEY_FILE).write_text(json.dumps(note, indent=2) + "\n")
    _sync(folder / KEY_FILE)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_whole(folder: Path) -> bool:
    """Tell whether a folder holds all that was written into it: files, no links and no pipes."""
    try:
        sizes = read_note(folder / KEY_FILE)["sizes"]
        entries = [((folder / name).lstat(), size) for name, size in sizes.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return all(stat.S_ISREG(entry.st_mode) and entry.st_size == size for entry, size in entries)


def read_note(file: Path) -> Any:
    """Return the JSON in a file of the cache; raises DataError where there is none or a pipe."""
    with source.open_regular(file) as stream:
        return json.load(stream)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    # Neither waits for the other side of a pipe nor writes where a link leads.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a file")
    except OSError as error:
        if error.errno not in _NO_LOCK:
            raise
        raise DataError(
            f"{file}: the cache needs a file to lock there, and finds a link, a folder, a pipe, a "
            "socket or a device; remove it, or give another folder by data.cache_dir=FOLDER"
        ) from error
    with open(descriptor, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("data: another process prepares the same data; waiting for it (%s)", file)
            fcntl.flock(stream, fcntl.LOCK_EX)
        # The system lets go of it when the process ends, however it ends.
        yield


def _remove_left_over(root: Path, key: Key) -> None:
    """Remove what is damaged, or left by a killed process; the lock says that none is at work."""
    for left in (root / key.name, *root.glob(f"{key.name}.tmp-*")):
        _remove(left)


def _remove(left: Path) -> None:
    with contextlib.suppress(OSError):
        # Not by shutil alone: it waits for the other side of a pipe.
        shutil.rmtree(left) if stat.S_ISDIR(left.lstat().st_mode) else left.unlink()


def _note_newest(root: Path, key: Key) -> None:
    unfinished = root / f"{key.newest}.tmp-{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    with unfinished.open("x") as stream:
        stream.write(key.name)
    _remove(root / key.newest)
    os.replace(unfinished, root / key.newest)


def read_newest(root: Path, key: Key) -> str:
    """Return the name of the newest entry of the same data; DataError where there is none."""
    with source.open_regular(root / key.newest) as stream:
        return Path(stream.read(_NAME_BYTES).decode()).name


def _why_missing(root: Path, key: Key) -> str:
    """Say what changed since the newest entry of the same data."""
    try:
        # By its name: to look at every entry would take longer with each one that is kept.
        before = dict(read_note(root / read_newest(root, key) / KEY_FILE)["parts"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "now cached"  # there was none, or it was removed
    changed = [part for part in key.parts if before.get(part) != key.parts[part]]
    return ", ".join(_in_words(part, before.get(part), key.parts[part]) for part in changed)


def _in_words(part: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"{_LABELS[part]}: {', '.join(names)}"
    return _LABELS[part]
