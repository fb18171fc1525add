"""The ranks of one run on this machine: how they are started, what they tell, how they end."""

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
"""of what a rank has printed on stderr, kept for when it dies"""
LONGEST_LINE = 400
"""characters"""
GRACE = 3.0
"""seconds that ranks have to end by themselves once one of them has"""
LAST_WORDS = 1.0
"""seconds in which all that ranks have printed is passed on once they have ended: a process that
they have left behind may hold their stderr open"""
LONGER_THAN_EVER = 10
"""times the longest pause of a rank so far, that it may pause"""
LONGEST_POLL = 1.0
"""seconds counted between two looks: this process may have been stopped itself"""


@dataclass(kw_only=True, slots=True)
class Rank:
    """One rank's process, and what it told."""

    number: int
    """on this machine"""
    process: subprocess.Popen[bytes]
    pipe: int
    lines: deque[str]
    listener: threading.Thread
    """passes on what it prints on stderr, until the last process that can is gone"""
    num_beats: int = 0
    step: int | None = None
    """optimizer steps done, None before the training loop"""
    has_ended: bool = False
    """whether it has left the training loop"""
    lost: str | None = None
    """its words for that another rank is gone"""
    port_is_taken: bool = False
    pause: float = 0.0
    """seconds since its last beat"""
    longest_pause: float = 0.0
    died_at: float | None = None
    """when its end was seen, by the monotonic clock"""
    was_killed: bool = False
    """whether it was ended from here"""
    _rest: bytes = b""

    @property
    def code(self) -> int | None:
        """Return its exit code, negative for a signal; None as long as it runs."""
        code = self.process.poll()
        if code is not None and self.died_at is None:
            self.died_at = time.monotonic()
        return code

    def listen(self, elapsed: float) -> None:
        """Read what it told in the last `elapsed` seconds."""
        is_alive = False
        while chunk := _read(self.pipe):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            is_alive = True
            for line in lines:
                self._hear(*line.decode(errors="replace").partition(" ")[::2])
        if is_alive:
            self.longest_pause = max(self.longest_pause, self.pause)
            self.pause = 0.0
        elif self.step is not None and not self.has_ended:
            self.pause += min(elapsed, LONGEST_POLL)

    def _hear(self, word: str, rest: str) -> None:
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
        is_long = self.pause > max(least, LONGER_THAN_EVER * self.longest_pause)
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
    """what all of them find besides this process's own"""
    folder: Path
    """the run's"""
    ranks: list[Rank] = field(default_factory=list)
    _looked_at: float = 0.0

    def start(self, of_rank: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each element of `of_rank`, with its variables."""
        self._looked_at = time.monotonic()
        self.ranks = [self._start(number, of_one) for number, of_one in enumerate(of_rank)]

    def _start(self, number: int, of_one: Mapping[str, str]) -> Rank:
        listens, tells = os.pipe()
        os.set_blocking(listens, False)
        own = {PIPE_VARIABLE: str(tells), PARENT_VARIABLE: str(os.getpid())}
        process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment, **of_one, **own},
            stderr=subprocess.PIPE,
            pass_fds=[tells],
        )
        os.close(tells)
        lines: deque[str] = deque(maxlen=LAST_LINES)
        listener = threading.Thread(target=_pass_on, args=(process, lines), daemon=True)
        listener.start()
        return Rank(number=number, process=process, pipe=listens, lines=lines, listener=listener)

    def look(self) -> None:
        """Hear what all ranks told since the last look."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        for rank in self.ranks:
            rank.listen(elapsed)

    def hang(self, least: float) -> bool:
        """Tell whether one of them hangs, and none works: the others may wait for its long save."""
        ranks = self.ranks
        return any(one.hangs(least) for one in ranks) and not any(one.works(least) for one in ranks)

    def train(self) -> bool:
        """Tell whether they are in the training loop, where a signal waits for its step."""
        return any(rank.step is not None and not rank.has_ended for rank in self.ranks)

    def send(self, signum: int) -> None:
        """Send a signal to all that run."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(signum)

    def end(self, seconds: float) -> None:
        """Give all of them `seconds` to end, then kill them."""
        until = time.monotonic() + seconds
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < until:
            self.look()
            time.sleep(0.05)
        for rank in self.ranks:
            if rank.code is None:
                rank.was_killed = True
                rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
        until = time.monotonic() + LAST_WORDS
        for rank in self.ranks:
            rank.listener.join(max(0.0, until - time.monotonic()))
        self.look()

    def close(self) -> None:
        """Kill those that run, and forget all of them."""
        self.end(0)
        for rank in self.ranks:
            os.close(rank.pipe)
            file = self._stacks_of(rank)
            if file.exists() and file.stat().st_size == 0:
                file.unlink()

    def ask_for_stacks(self) -> None:
        """Let every rank write where its threads stand into the run's folder."""
        for rank in self.ranks:
            if rank.step is not None and rank.code is None:  # before, it would die of it
                rank.process.send_signal(signal.SIGUSR2)

    def stack_of(self, rank: Rank, num_lines: int) -> list[str]:
        """Return the top of what a rank's main thread was in, innermost first."""
        try:
            text = self._stacks_of(rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        # A thread a paragraph, and the main one last.
        return text.strip().split("\n\n")[-1].splitlines()[:num_lines]

    def _stacks_of(self, rank: Rank) -> Path:
        return self.folder / STACKS_FILE.format(rank.number)


def _pass_on(process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Print what a rank prints on stderr, and keep its last lines."""
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
        lines.append(text[:LONGEST_LINE])
