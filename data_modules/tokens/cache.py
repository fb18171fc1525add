"""Keep what was tokenized for the next run, under a name made of all that shapes the tokens.

Decides when a prepared data set may be used again. A folder appears under its final name only when
it is complete; who prepares holds a lock, so that a second process waits and then finds it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_modules.messages import DataError

KEY_FILE = "key.json"
_NO_ROOM = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}

log = logging.getLogger(__name__)

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
    if _is_whole(folder):
        return folder, "found in the cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key.name}.lock"):
            if _is_whole(folder):
                return folder, "tokenized by another process"
            reason = "the entry was damaged" if folder.exists() else _why_missing(root, key)
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


def _is_whole(folder: Path) -> bool:
    """Tell whether a folder holds all that was written into it."""
    try:
        sizes = json.loads((folder / KEY_FILE).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    with file.open("w") as stream:
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
        shutil.rmtree(left, ignore_errors=True)


def _note_newest(root: Path, key: Key) -> None:
    unfinished = root / f"{key.newest}.tmp-{os.getpid()}"
    unfinished.write_text(key.name)
    os.replace(unfinished, root / key.newest)


def _why_missing(root: Path, key: Key) -> str:
    """Say what changed since the newest entry of the same data."""
    try:
        # By its name: to look at every entry would take longer with each one that is kept.
        newest = Path((root / key.newest).read_text()).name
        before = json.loads((root / newest / KEY_FILE).read_text())["parts"]
    except (OSError, ValueError, LookupError):
        return "now cached"  # there was none, or it was removed
    changed = [part for part in key.parts if before.get(part) != key.parts[part]]
    return ", ".join(_in_words(part, before.get(part), key.parts[part]) for part in changed)


def _in_words(part: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"{_LABELS[part]}: {', '.join(names)}"
    return _LABELS[part]
