"""Room on the disk for checkpoints: looked for before a run, told when a save finds none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from app.training.checkpoint import disk

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
            f"{in_units(need)} ({in_units(checkpoint_bytes)} each), {in_units(free)} are free; "
            "make room, type output.dir=FOLDER on another disk, or a smaller "
            "trainer.checkpoint.keep_last"
        )


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written into `folder`, or where it will be made."""
    there = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(there).free


def in_units(num_bytes: int) -> str:
    """Word a number of bytes."""
    gibibytes = num_bytes / (1 << 30)
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{num_bytes / MEBIBYTE:.1f} MiB"
