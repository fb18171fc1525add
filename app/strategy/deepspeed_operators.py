"""Build operators that DeepSpeed compiles on first use: once, on one rank, with a log line."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import UserError

log = logging.getLogger(__name__)

_LOCK = "lock"
"""name of torch's lock file in an operator's build folder; torch waits for it without a timeout"""
STARTUP_SECONDS = 10.0
"""time after which a running build must have started its compiler"""


def prepare_operator(builder: Any, advice: str) -> None:
    """Build one of DeepSpeed's operators unless it exists; UserError if that fails.

    One rank per machine calls this before the others load the operator. `advice`: what to type
    instead, for the error.
    """
    # Private, tested with torch 2.13: the folder also depends on TORCH_EXTENSIONS_DIR and CUDA.
    from torch.utils.cpp_extension import _get_build_directory

    name: str = builder.name
    if not builder.is_compatible(verbose=False):
        raise UserError(
            f"DeepSpeed cannot build its operator {name} on this machine (`python -m "
            f"deepspeed.env_report` lists what is missing); {advice}"
        )
    folder = Path(_get_build_directory(name, verbose=False))
    with _exclusive_lock(folder):
        remove_stale_lock(folder)
        if any(folder.glob("*.so")):
            return
        log.info("building DeepSpeed's %s in %s: takes some minutes, once", name, folder)
        started = time.monotonic()
        try:
            builder.load(verbose=False)
        except Exception as error:  # DeepSpeed raises many types, e.g. for a CUDA mismatch
            reason = str(error).strip() or type(error).__name__
            raise UserError(
                f"DeepSpeed's operator {name} could not be built in {folder}: "
                f"{reason.splitlines()[0]}; {advice}"
            ) from error
        log.info("built %s in %.0f s", name, time.monotonic() - started)


def remove_stale_lock(folder: Path) -> None:
    """Remove the lock of a killed build, for which every later build would wait."""
    lock = folder / _LOCK
    while not _is_in_use(folder):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # no lock, or its build has just ended
            return
        if age > STARTUP_SECONDS:
            lock.unlink(missing_ok=True)
            log.info("removed %s, left behind by a killed build", lock)
            return
        time.sleep(0.5)


def _is_in_use(folder: Path) -> bool:
    """Return whether `folder` is the working directory of a process, such as a compiler."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").resolve() == folder.resolve():
                    return True
            except OSError:  # the process has ended, or belongs to another user
                continue
    return False


@contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock against builds of other runs; the kernel releases it if this run is killed."""
    with (folder / ".in_use").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
