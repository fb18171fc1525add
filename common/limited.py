"""Run work that may never end, or fill the memory, with limits.

In a process of its own what is interpreted of files that others wrote, such as chat templates; in a
thread what waits for the network.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE = 3
"""ratio of the time that is waited for to the limit, which is of a processor: others may be busy"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """The processor's time and the memory that work in a process of its own may take."""

    seconds: float = 10.0
    memory_mb: int = 1024


class LimitError(Exception):
    """Which limit was exceeded."""


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises; LimitError after `seconds`.

    It runs in a separate thread, which is abandoned after that time: a library's call that waits
    for the network cannot be interrupted.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            outcome.put((None, error))

    threading.Thread(target=run, name="limited", daemon=True).start()
    try:
        answer, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise LimitError(f"within {seconds:g} s") from None
    if error is not None:
        raise error
    found: T = answer
    return found


def run_limited(work: Callable[[], T], limits: ProcessLimits) -> T:
    """Return the result of `work`, run in a forked process; raise LimitError if it takes too much.

    Without `fork`, `work` runs in this process, without limits.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(work, sender, limits), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork while other threads run; the child never waits for those.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(_PATIENCE * limits.seconds):
            raise LimitError(f"within {limits.seconds:g} s")
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            raise LimitError(f"within {limits.seconds:g} s") from None
        if process.exitcode and process.exitcode > 0:
            raise RuntimeError(
                "a process with limited time and memory failed; its error is printed above"
            ) from None
        raise LimitError(f"within {limits.memory_mb:,} MB") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not is_done:
        raise LimitError(f"within {limits.memory_mb:,} MB")
    value: T = result
    return value


def _run_in_child(work: Callable[[], object], sender: Connection, limits: ProcessLimits) -> None:
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    _lower_limit(resource.RLIMIT_CPU, int(limits.seconds) + 1)
    statm = Path("/proc/self/statm")
    if statm.is_file():  # Linux: RLIMIT_AS includes the memory that is mapped already
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _lower_limit(resource.RLIMIT_AS, mapped + limits.memory_mb * 2**20)
    try:
        sender.send((True, work()))
    except MemoryError:
        sender.send((False, None))


def _lower_limit(kind: int, most: int) -> None:
    """Set a soft resource limit of this process to at most `most`; never raise it."""
    import resource

    soft, hard = resource.getrlimit(kind)
    finite = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *finite]), hard))
