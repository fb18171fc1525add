"""Supervise the ranks of a run: name the one that died or hangs, end all, restart the run.

Imports no torch. Of the run it knows the folder, the ranks and the step of the newest good
checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.process.errors import DONE, ENVIRONMENT_ERROR, TRAINING_FAULT, USER_ERROR
from app.process.files import open_no_follow
from app.process.heartbeat import STACKS_FILE
from app.process.launch import STEP_VARIABLE, free_port
from app.process.ranks import GRACE, Rank, Ranks
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


@dataclass(kw_only=True, slots=True)
class SuperviseConfig:
    max_restarts: int = setting(0, ge=0, shown=("train",))
    """restarts of a run that died or hangs, each from its newest good checkpoint; on one machine
    (torchrun has --max-restarts)"""
    hang_minutes: float | None = setting(10.0, gt=0, note="10 is usual")
    """minutes without progress in the training loop, on every rank, after which a run counts as
    hanging (or ten times its longest pause so far, where that is more); null = never. Watched are
    several ranks that this command starts, or one with max_restarts; never those of torchrun or
    srun"""
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
