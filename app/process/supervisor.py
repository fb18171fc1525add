"""Start and supervise the ranks of a run: name the one that died or hangs, end all, restart it.

Imports no torch. Of the run it knows the folder, the ranks and the step of the newest good
checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.process.errors import DONE, ENVIRONMENT_ERROR, TRAINING_FAULT, USER_ERROR
from app.process.files import open_no_follow
from app.process.heartbeat import BEAT, ENDED, LOST, PORT_TAKEN, STACKS_FILE
from app.process.launch import PARENT_VARIABLE, PIPE_VARIABLE, STEP_VARIABLE, free_port
from app.process.reporting import REASON_FILE
from app.process.signals import EXITS_WITHIN, HANDLED, signal_received, wait_for_step
from data_modules import redact, setting

POLL_SECONDS = 0.1
MAX_PORTS = 5
"""ports to try, one after the other"""
FINAL_CODES = (USER_ERROR, TRAINING_FAULT)
"""exit codes after which a restart would fail again"""
REPORTED_CODES = (*FINAL_CODES, ENVIRONMENT_ERROR)
"""exit codes of ranks that report their error themselves"""
STACK_LINES = 12
STACK_SECONDS = 2.0
"""that ranks have to dump their stacks"""
CODES_OF_SIGNALS = {128 + signum for signum in HANDLED}
"""exit codes of ranks that a signal has ended"""
PREFIX = "error (the environment): "
OUT_OF_MEMORY = "often for lack of memory; the system's log says so"
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
class SuperviseConfig:
    max_restarts: int = setting(0, ge=0, shown=("train",))
    """restarts of a run that died or hangs, from its newest checkpoint; on one machine (torchrun
    has --max-restarts)"""
    hang_minutes: float | None = setting(10.0, gt=0, note="10 is usual")
    """minutes without progress in the training loop, on every rank, after which a run counts as
    hanging (or ten times its longest pause so far, where that is more); null = never. Watched are
    several ranks, whatever has started them, or one with max_restarts"""
    requeue: bool = False
    """put a SLURM job back into its queue after SIGUSR1 (--signal=USR1@120) has let the run save
    itself; with resume=auto it then goes on"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the ranks of a run ended."""

    code: int
    message: str = ""
    """which rank failed first and how, where no rank has reported it"""
    step: int | None = None
    """optimizer steps that the rank had done which failed first"""
    is_of_signal: bool = False
    """whether a signal ended the run"""
    port_is_taken: bool = False


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """Runs the ranks of one run until it is done or cannot be restarted."""

    command: Sequence[str]
    """command line of every rank"""
    folder: Path
    config: SuperviseConfig
    step: int
    """step of the checkpoint to resume from, 0 for none"""
    newest_step: Callable[[], int]
    """finds the step of the newest good checkpoint"""
    of_rank: Sequence[Mapping[str, str]]
    """variables of each rank"""
    chooses_port: bool = True
    """whether all ranks are on this machine"""

    def run(self) -> int:
        """Start the ranks, restart them up to `max_restarts` times; return the exit code."""
        wait_for_step(True)  # signals are forwarded to the ranks
        num_restarts, last = 0, None
        while True:
            ending = self._run_once()
            if ending.message:
                self._report(ending.message)
            if ending.code == DONE or ending.is_of_signal or ending.code in FINAL_CODES:
                return ending.code
            if last is not None and ending.step == last.step:
                say(f"supervise: it has failed twice {_after(ending.step)}: not started again")
                return ending.code
            if num_restarts == self.config.max_restarts:
                return ending.code
            num_restarts, last = num_restarts + 1, ending
            wait_for_step(False)  # verifying checkpoints may take minutes
            self.step = self.newest_step()
            wait_for_step(True)
            where = f"from step {self.step}" if self.step else "from the start"
            say(f"supervise: restart {num_restarts} of {self.config.max_restarts}, {where}")

    def _run_once(self) -> Ending:
        for _ in range(MAX_PORTS):
            environment = {STEP_VARIABLE: str(self.step)}
            (self.folder / REASON_FILE).unlink(missing_ok=True)
            if self.chooses_port:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            ranks = Ranks(command=self.command, environment=environment, folder=self.folder)
            try:
                ranks.start(self.of_rank)
                ending = self._watch(ranks)
            finally:
                ranks.close()
            if not (ending.port_is_taken and self.chooses_port):
                break
        return ending

    def _watch(self, ranks: Ranks) -> Ending:
        """Wait until all ranks have ended or one has failed; then end them all."""
        sent, sent_at = None, 0.0
        grace = GRACE
        while True:
            ranks.poll()
            codes = [rank.code for rank in ranks.ranks]
            if all(code is not None for code in codes) or any(codes):
                break
            if sent is None and (sent := signal_received()) is not None:
                ranks.send(sent)
                sent_at = time.monotonic()
            is_late = sent is not None and time.monotonic() - sent_at > EXITS_WITHIN
            if is_late and not ranks.are_training():  # they should have ended by now
                grace = 0.0
                break
            if (hanging := self._find_hanging(ranks)) is not None:
                return hanging
            time.sleep(POLL_SECONDS)
        ranks.end(grace)
        return self._judge(ranks, sent)

    def _judge(self, ranks: Ranks, sent: int | None) -> Ending:
        """Name the rank that failed first: the others were ended or lost it."""
        failed = [rank for rank in ranks.ranks if rank.code != DONE]
        if not failed:
            return Ending(code=DONE)
        by_signal = [rank.code for rank in failed if rank.code in CODES_OF_SIGNALS]
        if sent is not None or by_signal:
            for rank in failed:  # a scheduler must not take it for a saved run
                if rank.code in REPORTED_CODES and not rank.was_killed and rank.lost is None:
                    return Ending(code=rank.code, is_of_signal=True)
            return Ending(code=by_signal[0] if by_signal else 128 + (sent or 0), is_of_signal=True)
        first = min(failed, key=_blame)
        is_reported = (self.folder / REASON_FILE).exists()
        is_known = first.code in REPORTED_CODES
        return Ending(
            code=first.code if is_known and first.code else ENVIRONMENT_ERROR,
            message="" if is_reported else self._describe(first),
            step=first.step,
            port_is_taken=any(rank.port_is_taken for rank in failed),
        )

    def _find_hanging(self, ranks: Ranks) -> Ending | None:
        """End the ranks if one of them hangs; None if none does."""
        if self.config.hang_minutes is None:
            return None
        least = 60 * self.config.hang_minutes
        if not ranks.hang(least):
            return None
        ranks.request_stacks()
        time.sleep(STACK_SECONDS)
        ranks.poll()
        if not ranks.hang(least):  # it has made progress in the meantime
            return None
        # Those that wait for it are as idle: it was stopped, or is the one with fewer steps.
        running = [rank for rank in ranks.ranks if rank.code is None]
        first = min(running, key=lambda rank: (not rank.is_stopped(), rank.num_beats))
        how = "is stopped (SIGSTOP)" if first.is_stopped() else "hangs"
        message = f"rank {first.number} {how} {_after(first.step)}, for {first.pause:.0f} s"
        if stack := ranks.stack_of(first, STACK_LINES):
            file = self.folder / STACKS_FILE.format(first.number)
            message = "\n  ".join([f"{message}; {file}:", *stack])
        ranks.end(0)
        return Ending(code=ENVIRONMENT_ERROR, message=message, step=first.step)

    def _describe(self, rank: Rank) -> str:
        """Describe how a rank ended that has not reported it itself."""
        if rank.lost is not None:
            return rank.lost.removeprefix(PREFIX)
        assert rank.code is not None
        if rank.code < 0:
            name = signal.Signals(-rank.code).name
            why = f" ({OUT_OF_MEMORY})" if -rank.code == signal.SIGKILL else ""
            ended = f"rank {rank.number} was killed by {name}{why} {_after(rank.step)}"
        else:
            ended = f"rank {rank.number} ended with exit code {rank.code} {_after(rank.step)}"
        return "\n  ".join([f"{ended}; its last lines:", *rank.lines]) if rank.lines else ended

    def _report(self, message: str) -> None:
        say(f"{PREFIX}{message}")
        with contextlib.suppress(OSError):  # the message may be about this disk
            reason = self.folder / REASON_FILE
            with open_no_follow(reason, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(redact(f"{PREFIX}{message}\n"))


def say(message: str) -> None:
    """Print a line on stderr, if it is still open."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _blame(rank: Rank) -> tuple[bool, bool, float]:
    return rank.was_killed, rank.lost is not None, rank.died_at or 0.0


def _after(step: int | None) -> str:
    return f"after step {step}" if step else "before its first step"


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
