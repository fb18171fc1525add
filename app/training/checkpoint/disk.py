"""File operations of a save; `app.process.faults` can inject a failure into each of them.

Written bytes are synced to disk when a function returns; `sync_folder` syncs folder entries.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.process import faults
from app.process.heartbeat import refresh_liveness
from common import files

WRITE_BYTES = 4 << 20
"""size of one read or write"""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    sha256: str
    num_bytes: int


def make_folder(folder: Path) -> None:
    """Create a folder, whose parent must exist."""
    faults.fault_point("disk.mkdir")
    folder.mkdir()


def write_file(file: Path, blocks: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write, hash and sync a new file from `blocks` of bytes."""
    digest, num_bytes = hashlib.sha256(), 0
    faults.fault_point("disk.create")
    with file.open("xb", buffering=0) as stream:
        for block in blocks:
            digest.update(block)
            rest = memoryview(block)
            num_bytes += rest.nbytes
            while rest.nbytes:
                faults.fault_point("disk.write")
                rest = rest[stream.write(rest) or 0 :]
            del block, rest  # a view of a gathered tensor, which is freed before the next is there
            refresh_liveness()
        faults.fault_point("disk.fsync")
        os.fsync(stream.fileno())
    return WrittenFile(sha256=digest.hexdigest(), num_bytes=num_bytes)


def read_hash(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(WRITE_BYTES))
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    faults.fault_point("disk.fsync")
    files.sync(folder)


def replace(source: Path, target: Path) -> None:
    """Rename a file or a folder; the target of a folder must be empty or missing."""
    faults.fault_point("disk.replace")
    os.replace(source, target)


def remove_file(file: Path) -> None:
    faults.fault_point("disk.unlink")
    file.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content, without following links."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        else:
            remove_file(entry)
    faults.fault_point("disk.rmdir")
    folder.rmdir()


class SaveError(OSError):
    """A checkpoint or a metrics file could not be written; earlier checkpoints are intact."""


def check_space(folder: Path, checkpoint_bytes: int, copies: int) -> None:
    """Raise SaveError unless `folder` is writable and has room for `copies` + 1 checkpoints.

    The space of existing checkpoints counts as free, since they are removed in time.
    """
    probe = folder / f"probe-{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.unlink(missing_ok=True)
            write_file(probe, [bytes(min(checkpoint_bytes, _MEBIBYTE))])
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        is_full = error.errno in DISK_FULL
        lacks = f"; {describe_shortage(folder, format_bytes(_MEBIBYTE))}" if is_full else ""
        raise SaveError(
            f"{folder}: checkpoints cannot be written here: {error.strerror}{lacks}; type "
            "output.dir=FOLDER with a writable folder that has room"
        ) from error
    existing = sum(file.stat().st_size for file in folder.glob("step-*/*") if file.is_file())
    need, free = checkpoint_bytes * (copies + 1), free_bytes(folder) + existing
    if need > free:
        raise SaveError(
            f"{folder}: {copies} checkpoints and the one being written need "
            f"{format_bytes(need)} ({format_bytes(checkpoint_bytes)} each), but "
            f"{format_bytes(free)} are free; free disk space, or type output.dir=FOLDER on another "
            "disk or a smaller trainer.checkpoint.keep_last"
        )


def describe_shortage(folder: Path, need: str) -> str:
    """Say what the full disk of `folder` lacks for `need`, formatted bytes: room, or inodes."""
    free, existing = format_bytes(free_bytes(folder)), _existing(folder)
    disk = os.statvfs(existing)
    if disk.f_files > disk.f_favail == 0:
        return (
            f"all {disk.f_files:,} inodes of its disk are used, so it takes no more files although "
            f"{free} are free"
        )
    return f"it needs {need}, but {free} are free"


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def format_bytes(num_bytes: int) -> str:
    gibibytes = num_bytes / (1 << 30)
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{num_bytes / _MEBIBYTE:.1f} MiB"
