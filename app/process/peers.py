"""Peer-to-peer liveness checks, used when no supervisor watches the ranks.

Under torchrun and srun a thread of each rank writes a progress report to a store hosted by rank 0,
once a second. A rank that has made no progress for too long reads the reports of the others: a rank
that stopped reporting is lost, with its host or the link to it; one that still reports but has done
fewer steps than the others hangs. Each rank then saves the name of that rank, the stacks of its own
threads and the command that resumes the run, and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.process.heartbeat import STACKS_FILE, Pauses, format_progress, progress
from app.process.launch import is_first_on_machine, read_launch
from app.process.signals import kill_workers, signal_received
from app.process.status import update_status
from common.errors import ENVIRONMENT_ERROR
from common.files import open_no_follow

if TYPE_CHECKING:
    from torch.distributed import TCPStore

REPORT_SECONDS = 1.0
"""interval between two reports of a rank, in seconds"""
CHECK_SECONDS = 4.0
"""minimum time between two snapshots of the reports, in which every live rank has reported"""
_CONNECT_SECONDS = 60.0
"""timeout of the first connection to the store, in seconds"""
VERDICT_SECONDS = 2.0
"""time for the other ranks to read the verdict: the store may end with this rank"""
LATE_SECONDS = 20.0
"""time without progress after which a rank that others wait for is named in the run's status"""
EXIT_SECONDS = 5.0
"""longest wait at exit for an exchange with the store to end"""
_DUMP_SECONDS = 10.0
"""time to write the stacks to disk before the process is ended anyway: the disk may hang"""
_MAX_NAMED = 4
"""hosts with lost ranks that are named; further ones are counted"""
STARTS, TRAINS, ENDS = "starts", "trains", "done"
"""states of a rank: before the end of its first batch, which may compile; in the training loop;
after the loop or after a signal, when the rank may stop reporting"""
_VERDICT_KEY = "loft/verdict"
"""store key of the reason why the run ends"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's progress report."""

    rank: int
    sequence_number: int = 0
    """number of this report; increases while the rank is alive"""
    num_beats: int = 0
    step: int = 0
    pause_seconds: float
    """time since the rank last made progress"""
    state: str
    host: str


def find_lost(before: Sequence[RankReport], now: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks that sent no report between two snapshots."""
    numbers = {report.rank: report.sequence_number for report in before}
    return [
        report
        for report in now
        if report.state != ENDS and report.sequence_number == numbers.get(report.rank)
    ]


def find_hanging(now: Sequence[RankReport], min_seconds: float) -> RankReport | None:
    """Return the rank with the fewest beats; None while any rank starts or makes progress."""
    running = [report for report in now if report.state != ENDS]
    if not running or any(
        report.state == STARTS or report.pause_seconds <= min_seconds for report in running
    ):
        return None
    return min(running, key=lambda report: (report.num_beats, report.rank))


def find_late(now: Sequence[RankReport]) -> RankReport | None:
    """Return the rank that others have waited for longer than LATE_SECONDS, or None."""
    running = [report for report in now if report.state == TRAINS]
    if len(running) < 2:
        return None
    late, *others = sorted(running, key=lambda report: (report.num_beats, report.rank))
    # A rank whose host is down no longer reports how long it has paused.
    waits = all(report.pause_seconds > LATE_SECONDS for report in others)
    return late if waits and late.num_beats < others[-1].num_beats else None


def describe_lost(lost: Sequence[RankReport]) -> str:
    """Name the lost ranks, grouped by host."""
    by_host: dict[str, list[int]] = {}
    for report in lost:
        by_host.setdefault(report.host, []).append(report.rank)
    parts = []
    for host, ranks in by_host.items():
        shown = " and ".join(map(str, ranks)) if len(ranks) <= 2 else f"{ranks[0]} to {ranks[-1]}"
        named = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
        parts.append(f"{named} on host {host}")
    more = f" and {len(parts) - _MAX_NAMED} more hosts" if len(parts) > _MAX_NAMED else ""
    return ", ".join(parts[:_MAX_NAMED]) + more


@dataclass(kw_only=True, slots=True)
class Peers:
    """This rank's view of all ranks of the run."""

    rank: int
    num_ranks: int
    run_folder: Path
    hang_seconds: float | None
    """time without progress after which the run counts as hanging; None: never"""
    resume_command: Callable[[], str]
    save_reason: Callable[[str], None]
    """saves the reason why the run ends, for torchrun and in the run's folder"""
    has_trained: bool = False
    """whether a batch is done: from then on a long pause is not compilation"""
    is_done: bool = False
    """whether no step follows: ranks end at different times"""
    has_failed: bool = False
    """whether the training thread has an error to report, which ends this rank"""
    _pauses: Pauses = field(default_factory=Pauses)
    _polled_at: float = field(default_factory=time.monotonic)
    _num_signs: int = field(default_factory=lambda: progress()[1])
    """signs of life (beats and liveness refreshes) at the last poll"""
    _verdict: str = ""
    """reason why the run ends, found by this rank or another one"""
    _is_published: bool = False
    """whether the verdict is in the store"""
    _late: str | None = None
    """on rank 0: the rank that the others wait for, as the run's status names it"""
    _rank0: RankReport | None = None
    """newest report of rank 0, which hosts the store"""
    _num_reports: int = 0
    _snapshots: list[list[RankReport]] = field(default_factory=list)
    """reports of all ranks, read one after the other while a check is in progress"""
    _wants_snapshots: threading.Event = field(default_factory=threading.Event)
    _exits: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """held during a check: the training thread may fail while the watching thread checks"""

    def start(self) -> None:
        """Start the threads that report this rank's progress and watch the other ranks."""
        reporting = threading.Thread(target=self._report_loop, daemon=True)
        reporting.start()
        atexit.register(self._stop_reporting, reporting)
        if self.hang_seconds is not None:
            watching = partial(self._watch_loop, self.hang_seconds)
            threading.Thread(target=watching, daemon=True).start()

    # Only the reporting thread talks to the store. If the store's host is gone, that thread waits
    # forever and the others continue.

    def _report_loop(self) -> None:
        while not self._exits.is_set():
            with contextlib.suppress(RuntimeError):  # torch's; one broken connection proves little
                store = self._connect()
                while True:
                    is_last = self.is_done or self._exits.is_set()
                    self._exchange_reports(store)
                    if is_last:
                        return
                    self._exits.wait(REPORT_SECONDS)
            self._exits.wait(REPORT_SECONDS)

    def _stop_reporting(self, reporting: threading.Thread) -> None:
        # Python aborts if it ends while a daemon thread is in C++ code that returns: exit code 134.
        self._exits.set()
        reporting.join(EXIT_SECONDS)

    def _exchange_reports(self, store: TCPStore) -> None:
        self._num_reports += 1
        num_beats, _, step = progress()
        state = TRAINS if self.has_trained else STARTS
        report = RankReport(
            rank=self.rank,
            sequence_number=self._num_reports,
            num_beats=num_beats,
            step=step or 0,
            pause_seconds=self._pauses.seconds,
            state=ENDS if self.is_done or signal_received() is not None else state,
            host=socket.gethostname(),
        )
        store.set(_key(self.rank), json.dumps(asdict(report)))
        if self._verdict and not self._is_published:
            self._verdict = store.compare_set(_VERDICT_KEY, "", self._verdict).decode()
            self._is_published = True
        elif store.check([_VERDICT_KEY]):
            self._verdict = store.get(_VERDICT_KEY).decode()
            self._is_published = True
        if self.is_done:
            return
        if self._rank0 is not None or store.check([_key(0)]):
            self._rank0 = RankReport(**json.loads(store.get(_key(0))))
        if self._wants_snapshots.is_set():
            self._snapshots.append(self._read_reports(store))
        if self.rank == 0 and (self._late or report.pause_seconds > LATE_SECONDS):
            late = find_late(self._read_reports(store))
            named = None if late is None else f"rank {late.rank} on host {late.host}"
            if named != self._late:
                self._late = named
                update_status(self.run_folder, late=named)

    def _connect(self) -> TCPStore:
        from torch.distributed import TCPStore

        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
        )

    def _read_reports(self, store: TCPStore) -> list[RankReport]:
        reporting = list(range(self.num_ranks))
        if not store.check([_key(rank) for rank in reporting]):
            reporting = [rank for rank in reporting if store.check([_key(rank)])]
        texts = store.multi_get([_key(rank) for rank in reporting])
        return [RankReport(**json.loads(text)) for text in texts]

    # The watching thread uses only what the reporting thread has read, and the clock.

    def _watch_loop(self, hang_seconds: float) -> None:
        max_pause = hang_seconds
        while not self.is_done and not self.has_failed:
            time.sleep(REPORT_SECONDS / 2)
            self._poll()
            pause = self._pauses.seconds
            if pause < hang_seconds:
                max_pause = hang_seconds
            is_over = bool(self._verdict) and pause > CHECK_SECONDS
            if not is_over and not self._pauses.is_hang(max_pause):
                continue
            with self._lock:
                num_signs = progress()[1]
                reason = self._diagnose(hang_seconds)
                # The diagnosis takes long enough for a stalled rank to continue.
                is_idle = bool(self._verdict) or progress()[1] == num_signs
                if reason and is_idle and not self.has_failed:
                    self._end(reason)
            max_pause += hang_seconds / 4

    def _poll(self) -> None:
        now, num_signs = time.monotonic(), progress()[1]
        self._pauses.poll(now - self._polled_at, is_alive=num_signs != self._num_signs)
        if not self._num_signs:  # what comes before the first step is not a pause between two
            self._pauses.longest = 0.0
        self._polled_at, self._num_signs = now, num_signs

    def _diagnose(self, hang_seconds: float) -> str | None:
        if self._verdict:
            return self._verdict
        lost, now = self._find_lost(max(CHECK_SECONDS, hang_seconds / 10))
        is_silent = not self._snapshots and not self._verdict
        if is_silent and self.rank != 0 and self._rank0 is None:  # the store has never answered
            pause, host = self._pauses.seconds, os.environ["MASTER_ADDR"]
            lost = [RankReport(rank=0, pause_seconds=pause, state=STARTS, host=host)]
        if lost:
            return (
                f"no report from {describe_lost(lost)} {format_progress(progress()[2])}, for "
                f"{self._pauses.seconds:.0f} s: it is down or stopped, or the link to it is cut"
            )
        if (hanging := find_hanging(now, hang_seconds)) is None:
            return None
        return (
            f"rank {hanging.rank} on host {hanging.host} hangs {format_progress(hanging.step)}, "
            f"for {hanging.pause_seconds:.0f} s; its stacks: {self._stacks_file(hanging.rank)}"
        )

    def _find_lost(self, seconds: float) -> tuple[list[RankReport], list[RankReport]]:
        """Return the ranks that send no report for `seconds`, and the newest reports of all."""
        self._snapshots = []
        self._wants_snapshots.set()
        deadline = time.monotonic() + 2 * seconds + CHECK_SECONDS
        first_at = None
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._poll()
            if self._verdict:
                break
            if first_at is None and self._snapshots:
                first_at = time.monotonic()
            if first_at is not None and time.monotonic() - first_at > seconds:
                break
        self._wants_snapshots.clear()
        if len(self._snapshots) >= 2:
            return find_lost(self._snapshots[0], self._snapshots[-1]), self._snapshots[-1]
        if self._verdict or self.rank == 0 or self._rank0 is None or self._rank0.state == ENDS:
            return [], []
        # Rank 0 hosts the store, which answered before and does not answer any more.
        return [self._rank0], []

    def explain_lost_connection(self, error: str) -> str | None:
        """Return which rank was lost, after the training failed with torch's message `error`.

        Returns None after a signal if no rank is lost: the others ended by the same signal. But
        torchrun itself sends one when it loses the host of its rendezvous.
        """
        self.has_failed = True
        with self._lock:
            needs_no_check = bool(self._verdict) or self.is_done
            lost = [] if needs_no_check else self._find_lost(CHECK_SECONDS)[0]
            if self._verdict:
                return self._publish(self._verdict)
            if not lost and signal_received() is not None:
                return None
            named = describe_lost(lost) if lost else "another rank"
            return self._publish(f"lost {named} {format_progress(progress()[2])}: {error}")

    def publish_failure(self, message: str) -> None:
        """Let the other ranks know why this rank fails."""
        self.has_failed = True
        if not self.is_done and not self._verdict:
            self._verdict = f"rank {self.rank} on host {socket.gethostname()} has failed: {message}"
            self._wait_until_published()

    def _publish(self, reason: str) -> str:
        """Publish `reason`; return it with the command that resumes the run."""
        self._verdict = self._verdict or reason
        self._wait_until_published()
        return f"{reason}\n  {self.resume_command()}"

    def _wait_until_published(self) -> None:
        """Wait for the verdict to be in the store; on rank 0 also for the others to read it."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while (self.rank == 0 or not self._is_published) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _end(self, reason: str) -> None:
        """Save the stacks and the reason, and end this process, whatever it is waiting for."""
        threading.Timer(_DUMP_SECONDS, os._exit, [ENVIRONMENT_ERROR]).start()
        self._verdict = self._verdict or reason
        self._wait_until_published()
        message = f"error (the environment): {self._verdict}"  # the same on all ranks
        self._print_once_per_host(message)
        kill_workers()
        with contextlib.suppress(OSError):
            resume = f"  {self.resume_command()}"  # lists checkpoints, on a disk that may hang
            self._print_once_per_host(resume)
            with open_no_follow(self._stacks_file(self.rank), "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self.save_reason(f"{message}\n{resume}")
        os._exit(ENVIRONMENT_ERROR)

    def _stacks_file(self, rank: int) -> Path:
        return self.run_folder / STACKS_FILE.format(rank)

    def _print_once_per_host(self, text: str) -> None:
        """Print on the first rank of this host, and on the second one if the first is lost."""
        rank_here = self.rank % (read_launch().num_local_ranks or self.num_ranks)
        first = self.rank - rank_here
        is_first_lost = re.search(rf"no report from .*\branks? {first}\b", self._verdict)
        if is_first_on_machine() or (is_first_lost and rank_here == 1):
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)


def _key(rank: int) -> str:
    return f"loft/rank/{rank}"


_peers: Peers | None = None


def start_peers(peers: Peers) -> None:
    """Report to the other ranks and watch them until this process ends."""
    global _peers
    if _peers is None:
        _peers = peers
        peers.start()


def watched_peers() -> Peers | None:
    """Return the ranks that this one watches; None under a supervisor, or for a single rank."""
    return _peers
