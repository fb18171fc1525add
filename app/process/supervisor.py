"""Watch over the ranks of a run: who died or hangs is named, all end, and the run is started again.

Imports no torch and reads no batch: of the run it knows its folder, its ranks, and the step of its
newest good checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.process.errors import DONE, ENVIRONMENT_ERROR, REASON_FILE, TRAINING_FAULT, USER_ERROR
from app.process.files import open_no_follow
from app.process.heartbeat import STACKS_FILE
from app.process.launch import STEP_VARIABLE, free_port
from app.process.ranks import GRACE, Rank, Ranks
from app.process.signals import HANDLED, LEAVES_WITHIN, signal_received, wait_for_step
from data_modules import redact, setting


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


LOOK_EVERY = 0.1
"""seconds between two looks at the ranks"""
MAX_PORTS = 5
"""ports that are tried, one after the other"""
ENDS_FOR_GOOD = (USER_ERROR, TRAINING_FAULT)
"""exit codes after which the same would happen again"""
FAULTS = (*ENDS_FOR_GOOD, ENVIRONMENT_ERROR)
"""exit codes of ranks that say themselves what is wrong"""
STACK_LINES = 12
TIME_FOR_STACKS = 2.0
"""seconds"""
CODES_OF_SIGNALS = {128 + signum for signum in HANDLED}
"""of ranks that a signal has asked to end"""
PREFIX = "error (the environment): "
OUT_OF_MEMORY = "often for lack of memory; the system's log says so"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the ranks of a run ended."""

    code: int
    said: str = ""
    """who was to blame, where no rank has said why itself"""
    step: int | None = None
    """steps that whoever was to blame had done"""
    is_of_signal: bool = False
    """whether a signal has asked the run to end"""
    port_is_taken: bool = False


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """Runs the ranks of one run until it is done, or cannot go on."""

    command: Sequence[str]
    """what a person typed, by which every rank is started"""
    folder: Path
    config: SuperviseConfig
    step: int
    """of the checkpoint that they go on from, 0 for none"""
    newest_step: Callable[[], int]
    """looks for the newest good checkpoint"""
    of_rank: Sequence[Mapping[str, str]]
    """each rank's own variables"""
    chooses_port: bool = True
    """whether the ranks meet on this machine alone"""

    def run(self) -> int:
        """Start the ranks, and again as often as it is allowed; return the exit code."""
        wait_for_step(True)  # a signal is passed on to them
        num_restarts, last = 0, None
        while True:
            ending = self._run_once()
            if ending.said:
                self._say(ending.said)
            if ending.code == DONE or ending.is_of_signal or ending.code in ENDS_FOR_GOOD:
                return ending.code
            if last is not None and ending.step == last.step:
                say(f"supervise: it has failed twice {_after(ending.step)}: not started again")
                return ending.code
            if num_restarts == self.config.max_restarts:
                return ending.code
            num_restarts, last = num_restarts + 1, ending
            wait_for_step(False)  # to find it may mean to read for minutes
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
        """Wait for the ranks to end, all of them or one with a fault; then end them all."""
        sent, sent_at = None, 0.0
        grace = GRACE
        while True:
            ranks.look()
            codes = [rank.code for rank in ranks.ranks]
            if all(code is not None for code in codes) or any(codes):
                break
            if sent is None and (sent := signal_received()) is not None:
                ranks.send(sent)
                sent_at = time.monotonic()
            is_late = sent is not None and time.monotonic() - sent_at > LEAVES_WITHIN
            if is_late and not ranks.train():  # they should have ended by themselves
                grace = 0.0
                break
            if (hanging := self._find_hanging(ranks)) is not None:
                return hanging
            time.sleep(LOOK_EVERY)
        ranks.end(grace)
        return self._judge(ranks, sent)

    def _judge(self, ranks: Ranks, sent: int | None) -> Ending:
        """Name the one that ended first of itself: others were ended for it, or lost it."""
        failed = [rank for rank in ranks.ranks if rank.code != DONE]
        if not failed:
            return Ending(code=DONE)
        asked = [rank.code for rank in failed if rank.code in CODES_OF_SIGNALS]
        if sent is not None or asked:
            for rank in failed:  # a scheduler must not believe that it has saved itself
                if rank.code in FAULTS and not rank.was_killed and rank.lost is None:
                    return Ending(code=rank.code, is_of_signal=True)
            return Ending(code=asked[0] if asked else 128 + (sent or 0), is_of_signal=True)
        first = min(failed, key=_blame)
        has_said = (self.folder / REASON_FILE).exists()
        is_known = first.code in FAULTS
        return Ending(
            code=first.code if is_known and first.code else ENVIRONMENT_ERROR,
            said="" if has_said else self._word(first),
            step=first.step,
            port_is_taken=any(rank.port_is_taken for rank in failed),
        )

    def _find_hanging(self, ranks: Ranks) -> Ending | None:
        """End the ranks where one of them hangs; None where none does."""
        if self.config.hang_minutes is None:
            return None
        least = 60 * self.config.hang_minutes
        if not ranks.hang(least):
            return None
        ranks.ask_for_stacks()
        time.sleep(TIME_FOR_STACKS)
        ranks.look()
        if not ranks.hang(least):  # it has gone on in the meantime
            return None
        # Those that wait for it are as idle: it was stopped, or is the one that came less far.
        running = [rank for rank in ranks.ranks if rank.code is None]
        first = min(running, key=lambda rank: (not rank.is_stopped(), rank.num_beats))
        how = "is stopped (SIGSTOP)" if first.is_stopped() else "hangs"
        said = f"rank {first.number} {how} {_after(first.step)}, for {first.pause:.0f} s"
        if stack := ranks.stack_of(first, STACK_LINES):
            file = self.folder / STACKS_FILE.format(first.number)
            said = "\n  ".join([f"{said}; {file}:", *stack])
        ranks.end(0)
        return Ending(code=ENVIRONMENT_ERROR, said=said, step=first.step)

    def _word(self, rank: Rank) -> str:
        """Say how a rank ended that has not said it itself."""
        if rank.lost is not None:
            return rank.lost.removeprefix(PREFIX)
        assert rank.code is not None
        if rank.code < 0:
            name = signal.Signals(-rank.code).name
            why = f" ({OUT_OF_MEMORY})" if -rank.code == signal.SIGKILL else ""
            said = f"rank {rank.number} was killed by {name}{why} {_after(rank.step)}"
        else:
            said = f"rank {rank.number} ended with exit code {rank.code} {_after(rank.step)}"
        return "\n  ".join([f"{said}; its last lines:", *rank.lines]) if rank.lines else said

    def _say(self, message: str) -> None:
        say(f"{PREFIX}{message}")
        with contextlib.suppress(OSError):  # the disk may be what it is about
            reason = self.folder / REASON_FILE
            with open_no_follow(reason, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(redact(f"{PREFIX}{message}\n"))


def say(message: str) -> None:
    """Print a line on stderr, if there is anyone to read it."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _blame(rank: Rank) -> tuple[bool, bool, float]:
    return rank.was_killed, rank.lost is not None, rank.died_at or 0.0


def _after(step: int | None) -> str:
    return f"after step {step}" if step else "before its first step"
