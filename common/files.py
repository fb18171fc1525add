"""Files of a run: opened without following links, written atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """Name what a mode of `stat` is of, if not of a regular file; "" of one."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees either the old content or the new one."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(file.parent)


def sync(path: Path) -> None:
    """Flush the bytes of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some network mounts
            raise
    finally:
        os.close(descriptor)


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that has `folder`, which need not exist yet.

    Such as ext4, tmpfs or nfs4; empty if this system does not list its mounts.
    """
    place, found = folder.resolve(), (-1, "")
    if not mounts.exists():
        return ""
    for line in mounts.read_text(errors="replace").splitlines():
        mount, _, rest = line.partition(" - ")
        # Spaces, tabs, newlines and backslashes in a path are written as octal numbers.
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount.split()[4])
        if place.is_relative_to(point):
            found = max(found, (len(point), rest.split()[0]), key=lambda each: each[0])
    return found[1]


def open_no_follow(file: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file as `open` does; raises OSError if it is a link."""
    return open(file, mode, opener=_no_follow, **options)


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def special_entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the entries below `folder` that are neither files nor folders, with their kind."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_file(follow_symlinks=False):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from special_entries(Path(entry.path))
                continue
            with contextlib.suppress(FileNotFoundError):  # removed by the run in the meantime
                yield Path(entry.path), kind_of(entry.stat(follow_symlinks=False).st_mode)
