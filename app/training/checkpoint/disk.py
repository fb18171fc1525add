"""Every file operation of a save, each announced to `app.process.faults` before it is done.

What is written is on the disk when a function returns: its bytes are synced, and `sync_folder`
syncs the names.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.process import faults, files
from app.process.heartbeat import beat_again
from app.training.checkpoint import disk

BLOCK_BYTES = 4 << 20
"""read or written at once"""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a file holds, as told by who wrote it."""

    sha256: str
    num_bytes: int


def make_folder(folder: Path) -> None:
    """Make one folder."""
    faults.reach("disk.mkdir")
    folder.mkdir()


def write_file(file: Path, blocks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file from `blocks` of bytes, hash it on the way and sync it."""
    digest, num_bytes = hashlib.sha256(), 0
    faults.reach("disk.create")
    with file.open("xb", buffering=0) as stream:
        for block in blocks:
            digest.update(block)
            rest = memoryview(block)
            num_bytes += rest.nbytes
            while rest.nbytes:
                faults.reach("disk.write")
                rest = rest[stream.write(rest) or 0 :]
            beat_again()
        faults.reach("disk.fsync")
        os.fsync(stream.fileno())
    return Written(sha256=digest.hexdigest(), num_bytes=num_bytes)


def read_hash(file: Path) -> str:
    """Return the sha256 of a file's bytes."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    faults.reach("disk.fsync")
    files.sync_folder(folder)


def replace(source: Path, target: Path) -> None:
    """Rename a file or a folder; a folder's target must be empty or missing."""
    faults.reach("disk.replace")
    os.replace(source, target)


def remove_file(file: Path) -> None:
    """Remove one file."""
    faults.reach("disk.unlink")
    file.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder and all that is in it; what links lead to stays."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        else:
            remove_file(entry)
    faults.reach("disk.rmdir")
    folder.rmdir()


MEBIBYTE = 1 << 20


class SaveError(OSError):
    """A checkpoint could not be written; those that were there still are."""


def check_space(folder: Path, checkpoint_bytes: int, copies: int) -> None:
    """Make sure that `folder` takes checkpoints and has room for `copies` of them and one more.

    Before a run starts. What older ones occupy counts as room: they go when their turn comes.
    SaveError where it does not.
    """
    probe = folder / f"probe-{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.unlink(missing_ok=True)
            disk.write_file(probe, [bytes(min(checkpoint_bytes, MEBIBYTE))])
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise SaveError(
            f"{folder}: checkpoints cannot be written here: {error.strerror}; give a "
            "folder of your own with room by output.dir=FOLDER"
        ) from error
    there = sum(file.stat().st_size for file in folder.glob("step-*/*") if file.is_file())
    need, free = checkpoint_bytes * (copies + 1), free_bytes(folder) + there
    if need > free:
        raise SaveError(
            f"{folder}: {copies} checkpoints and the one that is being written need "
            f"{format_bytes(need)} ({format_bytes(checkpoint_bytes)} each), {format_bytes(free)} are free; "
            "make room, type output.dir=FOLDER on another disk, or a smaller "
            "trainer.checkpoint.keep_last"
        )


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written into `folder`, or where it will be made."""
    there = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(there).free


def format_bytes(num_bytes: int) -> str:
    """Word a number of bytes."""
    gibibytes = num_bytes / (1 << 30)
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{num_bytes / MEBIBYTE:.1f} MiB"
