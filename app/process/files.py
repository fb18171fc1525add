"""Files written whole or not at all, and kept when the machine loses power."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a file of a run's folder so that it is the old or the new one whenever it is read."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts know no such
            raise
    finally:
        os.close(descriptor)
