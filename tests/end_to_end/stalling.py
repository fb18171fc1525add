"""Run a verb in which one function stalls: `VERB MODULE:NAME HOW FOLDER CALLS WORDS...`.

It stalls after `CALLS` calls: in a system call that a signal interrupts (HOW=sleeps), in library
code that no signal interrupts (HOW=hangs), or until a signal has been received (HOW=waits). The
file `stalls` in FOLDER is created at that moment.
"""

from __future__ import annotations

import ctypes
import importlib
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from app.process.signals import signal_received


def stall(place: str, how: str, folder: str, calls: int) -> None:
    """Replace the function at `place` by one that stalls."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    plain, left = getattr(owner, name), iter(range(calls))

    def stalling(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            return plain(*args, **kwargs)
        (Path(folder) / "stalls").touch()
        if how == "waits":
            while signal_received() is None:
                time.sleep(0.05)
            return plain(*args, **kwargs)
        time.sleep(300) if how == "sleeps" else hang()

    setattr(owner, name, stalling)


def hang() -> None:
    """Deadlock in C by locking a mutex twice."""
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


if __name__ == "__main__":
    verb, place, how, folder, calls, *words = sys.argv[1:]
    stall(place, how, folder, int(calls))
    if "data.num_proc=2" in words:
        importlib.import_module("data_modules.tokens.encode").CHUNKS_IN_PROCESS = 0
    sys.argv = [verb, *words]
    sys.modules.pop(f"app.{verb}", None)  # it becomes __main__
    runpy.run_module(f"app.{verb}", run_name="__main__", alter_sys=True)
