"""The ranks of one run on this machine: how they start, what they report, how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.process.heartbeat import BEAT, ENDED, LOST, PORT_TAKEN, STACKS_FILE
from app.process.launch import PARENT_VARIABLE, PIPE_VARIABLE

LAST_LINES = 8
"""of a rank's stderr, kept for the report of its death"""
MAX_LINE_CHARS = 400
GRACE = 3.0
"""seconds that the other ranks have to end by themselves once one has ended"""
DRAIN_SECONDS = 1.0
"""to forward the rest of their stderr once they have ended: an orphan may hold it open"""
PAUSE_FACTOR = 10
"""a rank may pause for so many times its longest pause so far"""
LONGEST_POLL = 1.0
"""seconds counted between two polls: this process may have been stopped itself"""


@dataclass(kw_only=True, slots=True)
class Rank:
    """One rank's process, and what it reported."""

    number: int
    """on this machine"""
    process: subprocess.Popen[bytes]
    pipe: int
    lines: deque[str]
    forwarder: threading.Thread
    """forwards its stderr until the last process that holds it has ended"""
    num_beats: int = 0
    step: int | None = None
    """optimizer steps done, None before the training loop"""
    has_ended: bool = False
    """whether it has left the training loop"""
    lost: str | None = None
    """the error it reported about a lost peer"""
    port_is_taken: bool = False
    pause: float = 0.0
    """seconds since its last beat"""
    longest_pause: float = 0.0
    died_at: float | None = None
    """when it was found to have ended, by the monotonic clock"""
    was_killed: bool = False
    """whether the supervisor killed it"""
    _rest: bytes = b""

    @property
    def code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        code = self.process.poll()
        if code is not None and self.died_at is None:
            self.died_at = time.monotonic()
        return code

    def read_messages(self, elapsed: float) -> None:
        """Read what it reported in the last `elapsed` seconds."""
        is_alive = False
        while chunk := _read(self.pipe):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            is_alive = True
            for line in lines:
                self._handle(*line.decode(errors="replace").partition(" ")[::2])
        if is_alive:
            self.longest_pause = max(self.longest_pause, self.pause)
            self.pause = 0.0
        elif self.step is not None and not self.has_ended:
            self.pause += min(elapsed, LONGEST_POLL)

    def _handle(self, word: str, rest: str) -> None:
        if word == BEAT:
            self.num_beats, self.step = map(int, rest.split())
        elif word == ENDED:
            self.has_ended = True
        elif word == LOST:
            self.lost = rest
        elif word == PORT_TAKEN:
            self.port_is_taken = True

    def hangs(self, least: float) -> bool:
        """Tell whether it has paused for `least` seconds, and for longer than ever before."""
        is_long = self.pause > max(least, PAUSE_FACTOR * self.longest_pause)
        return is_long and self.code is None

    def works(self, least: float) -> bool:
        """Tell whether it is in the training loop and has not paused for `least` seconds."""
        is_training = self.step is not None and not self.has_ended and self.code is None
        return is_training and self.pause <= least

    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped it, as Ctrl-Z does."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return b""


@dataclass(kw_only=True, slots=True)
class Ranks:
    """All ranks of a run that run on this machine."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """variables of all ranks, beside this process's own"""
    folder: Path
    """the run's"""
    ranks: list[Rank] = field(default_factory=list)
    _polled_at: float = 0.0

    def start(self, of_rank: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each element of `of_rank`, with its variables."""
        self._polled_at = time.monotonic()
        self.ranks = [self._start(number, of_one) for number, of_one in enumerate(of_rank)]

    def _start(self, number: int, of_one: Mapping[str, str]) -> Rank:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        own = {PIPE_VARIABLE: str(writer), PARENT_VARIABLE: str(os.getpid())}
        process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment, **of_one, **own},
            stderr=subprocess.PIPE,
            pass_fds=[writer],
        )
        os.close(writer)
        lines: deque[str] = deque(maxlen=LAST_LINES)
        forwarder = threading.Thread(target=_forward_stderr, args=(process, lines), daemon=True)
        forwarder.start()
        return Rank(number=number, process=process, pipe=reader, lines=lines, forwarder=forwarder)

    def poll(self) -> None:
        """Read what all ranks reported since the last poll."""
        now = time.monotonic()
        elapsed, self._polled_at = now - self._polled_at, now
        for rank in self.ranks:
            rank.read_messages(elapsed)

    def hang(self, least: float) -> bool:
        """Tell whether one hangs and none works: the others may be waiting for its long save."""
        ranks = self.ranks
        return any(one.hangs(least) for one in ranks) and not any(one.works(least) for one in ranks)

    def are_training(self) -> bool:
        """Tell whether any is in the training loop, where a signal waits for the step."""
        return any(rank.step is not None and not rank.has_ended for rank in self.ranks)

    def send(self, signum: int) -> None:
        """Send a signal to all running ranks."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(signum)

    def end(self, seconds: float) -> None:
        """Kill the ranks that have not ended by themselves in `seconds`."""
        until = time.monotonic() + seconds
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < until:
            self.poll()
            time.sleep(0.05)
        for rank in self.ranks:
            if rank.code is None:
                rank.was_killed = True
                rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
        until = time.monotonic() + DRAIN_SECONDS
        for rank in self.ranks:
            rank.forwarder.join(max(0.0, until - time.monotonic()))
        self.poll()

    def close(self) -> None:
        """Kill the running ranks and close their pipes."""
        self.end(0)
        for rank in self.ranks:
            os.close(rank.pipe)
            file = self._stacks_of(rank)
            if file.exists() and file.stat().st_size == 0:
                file.unlink()

    def request_stacks(self) -> None:
        """Have every rank dump the stacks of its threads into the run's folder."""
        for rank in self.ranks:
            if rank.step is not None and rank.code is None:  # earlier it would be killed by it
                rank.process.send_signal(signal.SIGUSR2)

    def stack_of(self, rank: Rank, num_lines: int) -> list[str]:
        """Return the top frames of a rank's main thread, innermost first."""
        try:
            text = self._stacks_of(rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        # One paragraph a thread, the main one last.
        return text.strip().split("\n\n")[-1].splitlines()[:num_lines]

    def _stacks_of(self, rank: Rank) -> Path:
        return self.folder / STACKS_FILE.format(rank.number)


def _forward_stderr(process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Forward a rank's stderr, and keep its last lines."""
    assert process.stderr is not None
    descriptor, rest = process.stderr.fileno(), b""
    while chunk := os.read(descriptor, 65536):
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            _keep(line, lines)
    _keep(rest, lines)


def _keep(line: bytes, lines: deque[str]) -> None:
    if text := line.decode(errors="replace").strip():
        lines.append(text[:MAX_LINE_CHARS])
