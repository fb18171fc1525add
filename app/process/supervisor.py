"""Start and supervise the ranks of a run: name a rank that died or hangs, end all, restart the run.

Never imports torch. The supervisor knows only the run's folder, its ranks and the step of its
newest good checkpoint.
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

from app.process import heartbeat
from app.process.heartbeat import Pauses, format_progress
from app.process.launch import PARENT_VARIABLE, PIPE_VARIABLE, STEP_VARIABLE, free_port
from app.process.reporting import REASON_FILE
from app.process.signals import EXITS_WITHIN, HANDLED, defer_signals, signal_received
from app.process.status import FAILED, end_status, restart_status
from common.errors import DONE, ENVIRONMENT_ERROR, TRAINING_FAULT, USER_ERROR
from common.facts import setting
from common.files import open_no_follow
from common.redaction import redact

_POLL_SECONDS = 0.1
_MAX_PORTS = 5
"""number of ports to try"""
_FINAL_CODES = (USER_ERROR, TRAINING_FAULT)
"""exit codes after which a restart would fail in the same way"""
_REPORTED_CODES = (*_FINAL_CODES, ENVIRONMENT_ERROR)
"""exit codes of ranks that have reported their own error"""
_MAX_STACK_LINES = 12
"""number of lines of a hanging rank's stack in the message"""
STACK_SECONDS = 2.0
"""time for the ranks to dump their stacks"""
SIGNAL_EXIT_CODES = {128 + signum for signum in HANDLED}
"""exit codes of ranks ended by a signal"""
_PREFIX = "error (the environment): "
_OUT_OF_MEMORY = "often for lack of memory; see the system's log"
_NUM_LAST_LINES = 8
"""number of lines of a rank's stderr kept for the message about its death"""
_MAX_LINE_CHARS = 400
GRACE_SECONDS = 3.0
"""time for the other ranks to end by themselves after one has failed"""
_DRAIN_SECONDS = 1.0
"""time to forward the rest of the stderr of ended ranks, which an orphan may hold open"""


@dataclass(kw_only=True, slots=True)
class SuperviseConfig:
    max_restarts: int = setting(0, ge=0)
    """restarts of a run that died or hangs, on one machine (torchrun has --max-restarts)"""
    hang_minutes: float | None = setting(10.0, gt=0, note="10 is usual")
    """minutes without progress on any rank in the training loop after which the run counts as
    hanging (ten times its longest pause so far, if that is longer); null = never. Applies to runs
    of several ranks, however they were started, and to single ranks with max_restarts"""
    requeue: bool = False
    """requeue the SLURM job after the run has saved a checkpoint on SIGUSR1 (--signal=USR1@120);
    the requeued job continues the run if resume=auto"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitStatus:
    """How the ranks of a run ended."""

    code: int
    message: str = ""
    """which rank failed first and how; empty if a rank has reported it"""
    step: int | None = None
    """number of optimizer steps done by the rank that failed first"""
    by_signal: bool = False
    """whether a signal ended the run"""
    port_is_taken: bool = False
    """whether a rank found the run's port in use"""


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """Runs the ranks of one run until the run is done or cannot be restarted."""

    command: Sequence[str]
    """command line of every rank"""
    folder: Path
    config: SuperviseConfig
    resume_step: int
    """step of the checkpoint to resume from, 0 for none"""
    find_newest_step: Callable[[], int]
    """returns the step of the newest good checkpoint, 0 for none"""
    rank_variables: Sequence[Mapping[str, str]]
    """environment variables of each rank"""
    chooses_port: bool = True
    """whether to choose the port of the process group: all ranks are on this machine"""

    def run(self) -> int:
        """Start the ranks, restart them up to `max_restarts` times; return the exit code."""
        defer_signals(True)  # signals are forwarded to the ranks
        num_restarts, last = 0, None
        while True:
            ending = self._run_once()
            if ending.message:
                self._report(ending.message, ending.code)
            if ending.code == DONE or ending.by_signal or ending.code in _FINAL_CODES:
                return ending.code
            if last is not None and ending.step == last.step:
                print_to_stderr(
                    f"supervise: the run failed twice {format_progress(ending.step)}: not restarted"
                )
                return ending.code
            if num_restarts == self.config.max_restarts:
                return ending.code
            num_restarts, last = num_restarts + 1, ending
            defer_signals(False)  # verifying checkpoints may take minutes
            self.resume_step = self.find_newest_step()
            defer_signals(True)
            start = f"from step {self.resume_step}" if self.resume_step else "from the start"
            print_to_stderr(
                f"supervise: restart {num_restarts} of {self.config.max_restarts}, {start}"
            )

    def _run_once(self) -> ExitStatus:
        for _ in range(_MAX_PORTS):
            environment = {STEP_VARIABLE: str(self.resume_step)}
            (self.folder / REASON_FILE).unlink(missing_ok=True)
            restart_status(self.folder, self.resume_step)
            if self.chooses_port:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            ranks = Ranks(command=self.command, environment=environment, folder=self.folder)
            try:
                ranks.start(self.rank_variables)
                ending = self._watch(ranks)
            finally:
                ranks.close()
            if not (ending.port_is_taken and self.chooses_port):
                break
        return ending

    def _watch(self, ranks: Ranks) -> ExitStatus:
        """Wait until all ranks have ended or one has failed; then end them all."""
        sent, sent_at = None, 0.0
        grace_seconds = GRACE_SECONDS
        while True:
            ranks.poll()
            codes = [rank.code for rank in ranks.ranks]
            if all(code is not None for code in codes) or any(codes):
                break
            if sent is None and (sent := signal_received()) is not None:
                ranks.send(sent)
                sent_at = time.monotonic()
            is_late = sent is not None and time.monotonic() - sent_at > EXITS_WITHIN
            if is_late and not any(rank.is_training for rank in ranks.ranks):  # must have ended
                grace_seconds = 0.0
                break
            if (hang := self._end_hanging(ranks)) is not None:
                return hang
            time.sleep(_POLL_SECONDS)
        ranks.end(grace_seconds)
        return self._find_ending(ranks, sent)

    def _find_ending(self, ranks: Ranks, sent: int | None) -> ExitStatus:
        """Find the rank that failed first: the others were ended or lost it.

        `sent`: the signal that was forwarded to the ranks, None if none was.
        """
        failed = [rank for rank in ranks.ranks if rank.code != DONE]
        if not failed:
            return ExitStatus(code=DONE)
        signal_codes = [rank.code for rank in failed if rank.code in SIGNAL_EXIT_CODES]
        if sent is not None or signal_codes:
            for rank in failed:  # a scheduler must not mistake a failed save for a saved run
                if rank.code in _REPORTED_CODES and not rank.was_killed and rank.lost is None:
                    return ExitStatus(code=rank.code, by_signal=True)
            code = signal_codes[0] if signal_codes else 128 + (sent or 0)
            return ExitStatus(code=code, by_signal=True)
        # Of several, the first that was neither killed by the supervisor nor lost a peer.
        first = min(
            failed, key=lambda rank: (rank.was_killed, rank.lost is not None, rank.died_at or 0.0)
        )
        is_reported = (self.folder / REASON_FILE).exists()
        has_own_code = first.code in _REPORTED_CODES
        return ExitStatus(
            code=first.code if has_own_code and first.code else ENVIRONMENT_ERROR,
            message="" if is_reported else self._describe(first),
            step=first.step,
            port_is_taken=any(rank.port_is_taken for rank in failed),
        )

    def _end_hanging(self, ranks: Ranks) -> ExitStatus | None:
        if self.config.hang_minutes is None:
            return None
        min_seconds = 60 * self.config.hang_minutes
        if not ranks.hang(min_seconds):
            return None
        ranks.request_stacks()
        time.sleep(STACK_SECONDS)
        ranks.poll()
        if not ranks.hang(min_seconds):  # a rank has made progress in the meantime
            return None
        # The ranks that wait for the hanging one are idle too, but it was stopped or has done fewer
        # steps.
        running = [rank for rank in ranks.ranks if rank.code is None]
        hanging = min(running, key=lambda rank: (not rank.is_stopped(), rank.num_beats))
        state = "is stopped (SIGSTOP)" if hanging.is_stopped() else "hangs"
        message = (
            f"rank {hanging.number} {state} {format_progress(hanging.step)}, for "
            f"{hanging.pauses.seconds:.0f} s"
        )
        if stack := ranks.read_stack(hanging):
            message = "\n  ".join([f"{message}; {ranks.stacks_file(hanging)}:", *stack])
        ranks.end(0)
        return ExitStatus(code=ENVIRONMENT_ERROR, message=message, step=hanging.step)

    def _describe(self, rank: Rank) -> str:
        if rank.lost is not None:
            return rank.lost.removeprefix(_PREFIX)
        assert rank.code is not None
        if rank.code < 0:
            name = signal.Signals(-rank.code).name
            cause = f" ({_OUT_OF_MEMORY})" if -rank.code == signal.SIGKILL else ""
            ended = f"was killed by {name}{cause}"
        else:
            ended = f"ended with exit code {rank.code}"
        message = f"rank {rank.number} {ended} {format_progress(rank.step)}"
        if not rank.last_lines:
            return message
        return "\n  ".join([f"{message}; its last lines:", *rank.last_lines])

    def _report(self, message: str, code: int) -> None:
        print_to_stderr(f"{_PREFIX}{message}")
        end_status(self.folder, FAILED, code, redact(f"{_PREFIX}{message}"))
        with contextlib.suppress(OSError):  # the message may be about this disk
            reason = self.folder / REASON_FILE
            with open_no_follow(reason, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(redact(f"{_PREFIX}{message}\n"))


def print_to_stderr(message: str) -> None:
    """Print a line to stderr, if it is still open."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


@dataclass(kw_only=True, slots=True)
class Rank:
    """One rank's process, and what it has reported."""

    number: int
    """local rank on this machine"""
    process: subprocess.Popen[bytes]
    pipe: int
    """file descriptor to read the rank's messages from"""
    last_lines: deque[str]
    """last lines of the rank's stderr"""
    forwarder: threading.Thread
    """forwards the rank's stderr until the last process that holds it has ended"""
    num_beats: int = 0
    step: int | None = None
    """optimizer steps done, None before the training loop"""
    has_ended: bool = False
    """whether the rank has left the training loop"""
    lost: str | None = None
    """error that the rank reported about a lost peer"""
    port_is_taken: bool = False
    """whether the rank found the run's port in use"""
    pauses: Pauses = field(default_factory=Pauses)
    """between signs of life in the training loop"""
    died_at: float | None = None
    """when the process was found to have ended, by the monotonic clock"""
    was_killed: bool = False
    """whether the supervisor killed the process"""
    _partial_line: bytes = b""

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        code = self.process.poll()
        if code is not None and self.died_at is None:
            self.died_at = time.monotonic()
        return code

    def read_messages(self, elapsed: float) -> None:
        """Read the messages of the last `elapsed` seconds."""
        is_alive = False
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 65536):
                *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
                is_alive = True
                for line in lines:
                    self._handle(*line.decode(errors="replace").partition(" ")[::2])
        if is_alive or self.is_training:
            self.pauses.poll(elapsed, is_alive=is_alive)

    def _handle(self, kind: str, content: str) -> None:
        if kind == heartbeat.BEAT:
            self.num_beats, self.step = map(int, content.split())
        elif kind == heartbeat.ENDED:
            self.has_ended = True
        elif kind == heartbeat.PEER_LOST:
            self.lost = content
        elif kind == heartbeat.PORT_TAKEN:
            self.port_is_taken = True

    @property
    def is_training(self) -> bool:
        return self.step is not None and not self.has_ended

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, as Ctrl-Z does."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


@dataclass(kw_only=True, slots=True)
class Ranks:
    """The ranks of a run on this machine."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """environment variables of all ranks, added to those of this process"""
    folder: Path
    """the run's folder"""
    ranks: list[Rank] = field(default_factory=list)
    _polled_at: float = 0.0

    def start(self, rank_variables: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each element of `rank_variables`, its environment variables."""
        self._polled_at = time.monotonic()
        self.ranks = [
            self._start(number, variables) for number, variables in enumerate(rank_variables)
        ]

    def _start(self, number: int, variables: Mapping[str, str]) -> Rank:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        own = {PIPE_VARIABLE: str(writer), PARENT_VARIABLE: str(os.getpid())}
        process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment, **variables, **own},
            stderr=subprocess.PIPE,
            pass_fds=[writer],
        )
        os.close(writer)
        lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        forwarder = threading.Thread(target=_forward_stderr, args=(process, lines), daemon=True)
        forwarder.start()
        return Rank(
            number=number, process=process, pipe=reader, last_lines=lines, forwarder=forwarder
        )

    def poll(self) -> None:
        """Read the messages of all ranks since the last poll."""
        now = time.monotonic()
        elapsed, self._polled_at = now - self._polled_at, now
        for rank in self.ranks:
            rank.read_messages(elapsed)

    def hang(self, min_seconds: float) -> bool:
        """Whether a rank hangs and none makes progress, for which the others may be waiting."""
        running = [rank for rank in self.ranks if rank.code is None]
        if any(rank.is_training and rank.pauses.seconds <= min_seconds for rank in running):
            return False
        return any(rank.pauses.is_hang(min_seconds) for rank in running)

    def send(self, signum: int) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(signum)

    def end(self, seconds: float) -> None:
        """Kill the ranks that have not ended by themselves in `seconds`."""
        deadline = time.monotonic() + seconds
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.05)
        for rank in self.ranks:
            if rank.code is None:
                rank.was_killed = True
                rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for rank in self.ranks:
            rank.forwarder.join(max(0.0, deadline - time.monotonic()))
        self.poll()

    def close(self) -> None:
        """Kill the running ranks, close their pipes and remove empty stack files."""
        self.end(0)
        for rank in self.ranks:
            os.close(rank.pipe)
            file = self.stacks_file(rank)
            if file.exists() and file.stat().st_size == 0:
                file.unlink()

    def request_stacks(self) -> None:
        """Make every rank dump the stacks of its threads into the run's folder."""
        for rank in self.ranks:
            # Before its first heartbeat a rank has no handler: the signal would kill it.
            if rank.step is not None and rank.code is None:
                rank.process.send_signal(signal.SIGUSR2)

    def stacks_file(self, rank: Rank) -> Path:
        return self.folder / heartbeat.STACKS_FILE.format(rank.number)

    def read_stack(self, rank: Rank) -> list[str]:
        """Return the top frames of a rank's main thread, innermost first."""
        try:
            text = self.stacks_file(rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        # One paragraph per thread, the main thread last.
        return text.strip().split("\n\n")[-1].splitlines()[:_MAX_STACK_LINES]


def _forward_stderr(process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Forward a rank's stderr to this process's own, and keep its last lines in `lines`."""
    assert process.stderr is not None
    descriptor, partial_line = process.stderr.fileno(), b""
    while chunk := os.read(descriptor, 65536):
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *whole_lines, partial_line = (partial_line + chunk).split(b"\n")
        for line in whole_lines:
            _append_line(line, lines)
    _append_line(partial_line, lines)


def _append_line(line: bytes, lines: deque[str]) -> None:
    if text := line.decode(errors="replace").strip():
        lines.append(text[:_MAX_LINE_CHARS])
