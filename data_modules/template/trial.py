"""Run what a template says first in a process that can be killed: it may loop, or take all memory.

Decides what a process may take. The process is a fork, which has all that is imported already, and
touches no device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Say what a template may take for some 30 chats of a few turns."""

    seconds: float = 10.0
    memory_mb: int = 1024


class LimitError(Exception):
    """Say which limit was reached."""


def attempt(work: Callable[[], T], limits: Limits) -> T:
    """Return what `work` returns in a process of its own; LimitError where that takes too much.

    Where processes cannot be forked, `work` runs in this one, without limits.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sender, limits), daemon=True)
    with warnings.catch_warnings():
        # From Python 3.12 on, where other threads run: none of theirs is waited for here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(limits.seconds):
            raise LimitError(f"within {limits.seconds:g} s")
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            raise LimitError(f"within {limits.seconds:g} s") from None
        if process.exitcode and process.exitcode > 0:
            raise RuntimeError("what a process did first failed; its error stands above") from None
        raise LimitError(f"within {limits.memory_mb:,} MB") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not is_done:
        raise LimitError(f"within {limits.memory_mb:,} MB")
    value: T = result
    return value


def _work(work: Callable[[], object], sender: Connection, limits: Limits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
    _limit(limits)
    try:
        sender.send((True, work()))
    except MemoryError:
        sender.send((False, None))


def _limit(limits: Limits) -> None:
    import resource

    seconds = int(limits.seconds) + 1
    _lower(resource.RLIMIT_CPU, seconds)
    statm = Path("/proc/self/statm")
    if statm.is_file():  # what is mapped already counts, on Linux
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + limits.memory_mb * 2**20)


def _lower(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    import resource

    soft, hard = resource.getrlimit(kind)
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *known]), hard))
