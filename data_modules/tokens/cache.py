"""The cache of tokenized data sets: a folder each, keyed by everything that determines the tokens.

Entries are atomic: each is written to a temporary folder, sealed and renamed.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import DataError, DiskError
from data_modules import source

log = logging.getLogger(__name__)

KEY_FILE = "key.json"
_BLOCK_BYTES = 1 << 20
_NAME_BYTES = 64
_DISK_FULL = {errno.EDQUOT, errno.ENOSPC}
_NO_ROOM = {
    *_DISK_FULL,
    errno.EACCES,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_NO_LOCK = {errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}
"""errors of opening a lock file if something else is in its place"""
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
    """The identity of a tokenized data set; `parts` has a hash or value for each of `_LABELS`."""

    path: str
    split: str
    parts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the entry's folder."""
        text = json.dumps([self.path, self.split, self.parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def newest(self) -> str:
        """Return the name of the file that names the newest entry of the same data."""
        text = json.dumps([self.path, self.split])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.newest"


def code_version() -> str:
    """Return a hash of the source files that determine a row's tokens."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    files = [*package.rglob("*.py"), *package.rglob("*.jinja"), *package.parent.glob("common/*.py")]
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def open_or_make(root: Path, key: Key, make: Callable[[Path], None]) -> tuple[Path, str]:
    """Return the folder of an entry, and in words whether it was found or made.

    If it is missing or damaged, `make(folder)` writes it into an empty folder. Raises DataError if
    the cache cannot be written.
    """
    folder = root / key.name
    if is_whole(folder):
        return folder, "found in the cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key.name}.lock"):
            if is_whole(folder):
                return folder, "tokenized by another process"
            if os.path.lexists(folder):
                reason = "the entry was damaged"
                log.warning("data: %s is damaged; its data is tokenized again", folder)
            else:
                reason = _describe_change(root, key)
            _remove_leftovers(root, key)
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
        kind = DiskError if error.errno in _DISK_FULL else DataError
        raise kind(
            f"{root}: cannot write the tokenized data: {os.strerror(error.errno)}"
            f"{_inode_error(root, error)}; set data.cache_dir=FOLDER to a writable folder with "
            "free space"
        ) from error
    return folder, f"tokenized ({reason})"


def _inode_error(root: Path, error: OSError) -> str:
    """Return in words what a full disk lacks, if it is not bytes."""
    if error.errno not in _DISK_FULL or not root.is_dir():
        return ""
    disk = os.statvfs(root)
    return (
        f" (all its {disk.f_files:,} inodes are used)" if disk.f_files > disk.f_favail == 0 else ""
    )


def _seal(folder: Path, key: Key) -> None:
    """Sync the files of a folder, then write the key file by which damage is detected."""
    digests = {}
    for file in sorted(folder.iterdir()):
        digests[file.name] = _digest_of(file)
        _sync(file)
    note = {"path": key.path, "split": key.split, "parts": key.parts, "digests": digests}
    (folder / KEY_FILE).write_text(json.dumps(note, indent=2) + "\n")
    _sync(folder / KEY_FILE)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_whole(folder: Path, names: Iterable[str] | None = None) -> bool:
    """Return whether a folder has all files that were written into it, and no links or pipes.

    The bytes of the files `names` (None: of all) are compared with their digests. The key file is
    right if it makes the folder's name.
    """
    try:
        note = read_note(folder / KEY_FILE)
        if Key(note["path"], note["split"], note["parts"]).name != folder.name:
            return False
        digests = dict[str, str](note["digests"])
        if not all(stat.S_ISREG((folder / name).lstat().st_mode) for name in digests):
            return False
        read = digests if names is None else names
        return all(_digest_of(folder / name) == digests[name] for name in read)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _digest_of(file: Path) -> str:
    """Return a hash of a file's bytes, as fast as memory: it detects damage, not malice."""
    import xxhash

    digest = xxhash.xxh3_128()
    with source.open_regular(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_note(file: Path) -> Any:
    """Return the JSON of a file in the cache; DataError if it is missing or not a regular file."""
    with source.open_regular(file) as stream:
        return json.load(stream)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    # Neither follows a link nor blocks on a pipe.
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
            f"{file}: the cache needs a regular file there as a lock, and found a link, a folder, "
            "a pipe, a socket or a device; remove it, or set data.cache_dir to another folder"
        ) from error
    with open(descriptor, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("data: another process prepares the same data; waiting for it (%s)", file)
            fcntl.flock(stream, fcntl.LOCK_EX)
        # Released by the kernel when the process ends, however it ends.
        yield


def _remove_leftovers(root: Path, key: Key) -> None:
    """Remove what is damaged or left over from a killed process; the caller holds the lock."""
    for path in (root / key.name, *root.glob(f"{key.name}.tmp-*")):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        # Not by shutil alone, which blocks on a pipe.
        shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()


def _note_newest(root: Path, key: Key) -> None:
    unfinished = root / f"{key.newest}.tmp-{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    with unfinished.open("x") as stream:
        stream.write(key.name)
    _remove(root / key.newest)
    os.replace(unfinished, root / key.newest)


def read_newest(root: Path, key: Key) -> str:
    """Return the name of the newest entry of the same data; DataError if there is none."""
    with source.open_regular(root / key.newest) as stream:
        return Path(stream.read(_NAME_BYTES).decode()).name


def _describe_change(root: Path, key: Key) -> str:
    """Describe what changed since the newest entry of the same data."""
    try:
        # Looked up by name: scanning all entries would take longer with each one.
        before = dict(read_note(root / read_newest(root, key) / KEY_FILE)["parts"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "now cached"  # there was no entry, or it was removed
    changed = [part for part in key.parts if before.get(part) != key.parts[part]]
    return ", ".join(_describe(part, before.get(part), key.parts[part]) for part in changed)


def _describe(part: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"{_LABELS[part]}: {', '.join(names)}"
    return _LABELS[part]
