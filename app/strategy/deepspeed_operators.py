"""Operators that DeepSpeed compiles when they are first needed: once, by one rank, and said."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.process.errors import UserError

log = logging.getLogger(__name__)

LOCK = "lock"
"""what torch makes in an operator's folder while it is built, and waits for without end"""
YOUNG = 10.0
"""seconds after which a build that goes on has long started its compiler"""


def prepare_operator(builder: Any, advice: str) -> None:
    """Build one of DeepSpeed's operators, or find it built; UserError where it cannot be.

    One rank of a machine calls this before the others load the same. `advice` is what to type
    instead.
    """
    from torch.utils.cpp_extension import _get_build_directory

    name: str = builder.name
    if not builder.is_compatible(verbose=False):
        raise UserError(
            f"DeepSpeed cannot build its operator {name} here (`python -m deepspeed.env_report` "
            f"says what it lacks); {advice}"
        )
    folder = Path(_get_build_directory(name, verbose=False))
    with _alone(folder):
        remove_stale_lock(folder)
        if any(folder.glob("*.so")):
            return
        log.info("building DeepSpeed's %s into %s: some minutes, once", name, folder)
        started = time.monotonic()
        try:
            builder.load(verbose=False)
        except Exception as error:  # DeepSpeed raises kinds of its own, as for another CUDA
            reason = str(error).strip() or type(error).__name__
            raise UserError(
                f"DeepSpeed's operator {name} could not be built in {folder}: "
                f"{reason.splitlines()[0]}; {advice}"
            ) from error
        log.info("built %s in %.0f s", name, time.monotonic() - started)


def remove_stale_lock(folder: Path) -> None:
    """Remove the lock that a killed build has left, which every later one would wait for."""
    lock = folder / LOCK
    while not _is_worked_in(folder):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # also where its own build has just ended
            return
        if age > YOUNG:
            lock.unlink(missing_ok=True)
            log.info("removed %s, which a build that was killed had left", lock)
            return
        time.sleep(0.5)


def _is_worked_in(folder: Path) -> bool:
    """Say whether a process, such as a compiler, works in `folder`."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").resolve() == folder.resolve():
                    return True
            except OSError:  # it has ended, or is another user's
                continue
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs from building in `folder`; the system frees it when a run is killed."""
    with (folder / ".in_use").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
