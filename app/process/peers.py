"""Which ranks live and make progress, watched from within each where no supervisor watches them.

Under torchrun and srun each rank tells the others how far it has come, by a store at rank 0, once a
second and in a thread of its own. A rank that is idle reads what the others tell: one that has
fallen silent is lost, with its host or with the link to it; one that speaks but has made fewer
steps than the others hangs. Its name, the stacks of all threads, and the command that resumes the
run are left by every rank, which then ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from app.process.errors import ENVIRONMENT_ERROR
from app.process.files import open_no_follow
from app.process.heartbeat import STACKS_FILE, progress
from app.process.launch import is_first_here, read_launch
from app.process.signals import kill_workers, signal_received

if TYPE_CHECKING:
    from torch.distributed import TCPStore

REPORT_SECONDS = 1.0
"""between two reports of a rank"""
LOOK_SECONDS = 4.0
"""between two looks at the reports: a rank that lives has reported in between"""
CONNECT_SECONDS = 60.0
"""in which the store must answer for the first time"""
VERDICT_SECONDS = 2.0
"""left to the others to read why this rank ends: the store may end with it"""
DUMP_SECONDS = 10.0
"""in which the disk must take the stacks: it may be what hangs"""
PAUSE_FACTOR = 10
"""a rank may pause for so many times its longest pause so far"""
LONGEST_POLL = 1.0
"""seconds counted between two polls: this process may have been stopped itself"""
MAX_NAMED = 4
"""ranks of one host that are listed; more are counted"""
STARTS, TRAINS, DONE = "starts", "trains", "done"
"""before the first batch is done, which may compile; in the training loop; after it or after a
signal, where silence means nothing"""
VERDICT = "loft/verdict"
"""key of the store: why the run ends"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank tells of itself."""

    rank: int
    number: int
    """of this report: that of a rank which lives grows"""
    num_beats: int
    step: int
    pause: float
    """seconds since it last made progress"""
    state: str
    host: str

    def __str__(self) -> str:
        numbers = f"{self.number} {self.num_beats} {self.step} {self.pause:.1f}"
        return f"{numbers} {self.state} {self.host}"


def parse_report(rank: int, text: str) -> Report:
    """Return the report that `str` made a text of."""
    number, num_beats, step, pause, state, host = text.split(maxsplit=5)
    return Report(
        rank=rank,
        number=int(number),
        num_beats=int(num_beats),
        step=int(step),
        pause=float(pause),
        state=state,
        host=host,
    )


def find_lost(before: Sequence[Report], now: Sequence[Report]) -> list[Report]:
    """Return the ranks that fell silent: they reported nothing between two looks."""
    numbers = {one.rank: one.number for one in before}
    return [one for one in now if one.state != DONE and one.number == numbers.get(one.rank)]


def find_hanging(now: Sequence[Report], least: float) -> Report | None:
    """Return the rank with the fewest beats; None while one of them starts or makes progress."""
    here = [one for one in now if one.state != DONE]
    if not here or any(one.state == STARTS or one.pause <= least for one in here):
        return None
    return min(here, key=lambda one: (one.num_beats, one.rank))


def describe_lost(lost: Sequence[Report]) -> str:
    """Name the ranks that are lost, host by host."""
    by_host: dict[str, list[int]] = {}
    for one in lost:
        by_host.setdefault(one.host, []).append(one.rank)
    parts = []
    for host, ranks in by_host.items():
        shown = " and ".join(map(str, ranks)) if len(ranks) <= 2 else f"{ranks[0]} to {ranks[-1]}"
        named = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
        parts.append(f"{named} on host {host}")
    more = f" and {len(parts) - MAX_NAMED} more hosts" if len(parts) > MAX_NAMED else ""
    return ", ".join(parts[:MAX_NAMED]) + more


@dataclass(kw_only=True, slots=True)
class Pauses:
    """How long this rank has made no progress, and how long it ever did not."""

    polled_at: float
    num_signs: int
    """of life, at the last poll"""
    seconds: float = 0.0
    longest: float = 0.0
    """that has ended, since the first beat"""

    def poll(self, now: float, num_signs: int) -> None:
        """Count the time since the last poll, of which there are two a second or more."""
        elapsed, self.polled_at = min(now - self.polled_at, LONGEST_POLL), now
        if num_signs == self.num_signs:
            self.seconds += elapsed
            return
        if self.num_signs:
            self.longest = max(self.longest, self.seconds)
        self.seconds, self.num_signs = 0.0, num_signs


@dataclass(kw_only=True, slots=True)
class Peers:
    """The ranks of this run, as this one sees them."""

    rank: int
    num_ranks: int
    folder: Path
    """of the run"""
    limit: float | None
    """seconds without progress after which the run counts as hanging; None: never"""
    resume_command: Callable[[], str]
    fail: Callable[[str], None]
    """leaves the reason why the run ends for whoever starts it again"""
    _has_trained: bool = False
    """whether a batch is done, after which a long pause is one"""
    _is_done: bool = False
    _pauses: Pauses = field(
        default_factory=lambda: Pauses(polled_at=time.monotonic(), num_signs=progress()[1])
    )
    _verdict: str = ""
    """why another rank ends, or this one"""
    _is_known: bool = False
    """whether the others have been told the verdict"""
    _has_failed: bool = False
    """whether the training thread has an error to report"""
    _first: Report | None = None
    """the newest of rank 0, which has the store"""
    _num_reports: int = 0
    _looks: list[list[Report]] = field(default_factory=list)
    _looks_wanted: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """of a judgement: the training thread may fail while another one judges"""

    def start(self) -> None:
        """Start to report, and to watch."""
        threading.Thread(target=self._report_for_ever, daemon=True).start()
        if self.limit is not None:
            threading.Thread(target=self._watch, args=(self.limit,), daemon=True).start()

    def begin(self) -> None:
        """Record that a batch is done: what is compiled for the first one may take long."""
        self._has_trained = True

    def fail_here(self) -> None:
        """Record that the training thread has an error to report, which ends this rank."""
        self._has_failed = True

    def finish(self) -> None:
        """Record that no step follows: ranks end at different times."""
        self._is_done = True

    # The thread that reports is the only one that talks to the store, whose host may be gone: it
    # then waits for ever, and the others go on.

    def _report_for_ever(self) -> None:
        while True:
            with contextlib.suppress(RuntimeError):  # of torch: one broken connection is no verdict
                store = self._connect()
                while True:
                    is_last = self._is_done
                    self._report(store)
                    if is_last:
                        return
                    time.sleep(REPORT_SECONDS)
            time.sleep(REPORT_SECONDS)

    def _state(self) -> str:
        if self._is_done or signal_received() is not None:
            return DONE
        return TRAINS if self._has_trained else STARTS

    def _report(self, store: TCPStore) -> None:
        """Tell the others how far this rank is, and read what they tell."""
        self._num_reports += 1
        num_beats, _, step = progress()
        mine = Report(
            rank=self.rank,
            number=self._num_reports,
            num_beats=num_beats,
            step=step or 0,
            pause=self._pauses.seconds,
            state=self._state(),
            host=socket.gethostname(),
        )
        store.set(_key(self.rank), str(mine))
        if self._verdict and not self._is_known:
            self._verdict = store.compare_set(VERDICT, "", self._verdict).decode()
            self._is_known = True
        elif store.check([VERDICT]):
            self._verdict = store.get(VERDICT).decode()
            self._is_known = True
        if self._is_done:
            return
        if self._first is not None or store.check([_key(0)]):
            self._first = parse_report(0, store.get(_key(0)).decode())
        if self._looks_wanted.is_set():
            self._looks.append(self._look(store))

    def _connect(self) -> TCPStore:
        from torch.distributed import TCPStore

        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )

    def _look(self, store: TCPStore) -> list[Report]:
        there = list(range(self.num_ranks))
        if not store.check([_key(rank) for rank in there]):
            there = [rank for rank in there if store.check([_key(rank)])]
        texts = store.multi_get([_key(rank) for rank in there])
        return [parse_report(rank, text.decode()) for rank, text in zip(there, texts, strict=True)]

    # The other thread judges by what it has been told, and by the clock.

    def _watch(self, limit: float) -> None:
        patience = limit
        while not self._is_done and not self._has_failed:
            time.sleep(REPORT_SECONDS / 2)
            self._poll()
            pause = self._pauses.seconds
            if pause < limit:
                patience = limit
            is_over = bool(self._verdict) and pause > LOOK_SECONDS
            if not is_over and pause <= max(patience, PAUSE_FACTOR * self._pauses.longest):
                continue
            with self._lock:
                seen = progress()[1]
                why = self._judge(limit)
                # To judge takes long enough for what has stalled to go on.
                is_idle = bool(self._verdict) or progress()[1] == seen
                if why and is_idle and not self._has_failed:
                    self._end(why)
            patience += limit / 4

    def _poll(self) -> None:
        self._pauses.poll(time.monotonic(), progress()[1])

    def _judge(self, limit: float) -> str | None:
        """Return why the run cannot go on, None where it may."""
        if self._verdict:
            return self._verdict
        lost, now = self._find_lost(max(LOOK_SECONDS, limit / 10))
        if self._never_reached_rank_0():
            lost = [self._unreached_rank_0()]
        if lost:
            return (
                f"nothing has been heard of {describe_lost(lost)} {_after(progress()[2])}, for "
                f"{self._pauses.seconds:.0f} s: it is down or stopped, or the link to it is cut"
            )
        if (first := find_hanging(now, limit)) is None:
            return None
        return (
            f"rank {first.rank} on host {first.host} hangs {_after(first.step)}, for "
            f"{first.pause:.0f} s; where it stands: {self.folder / STACKS_FILE.format(first.rank)}"
        )

    def _find_lost(self, seconds: float) -> tuple[list[Report], list[Report]]:
        """Return the ranks that are silent for `seconds`, and the newest reports of all."""
        self._looks = []
        self._looks_wanted.set()
        until = time.monotonic() + 2 * seconds + LOOK_SECONDS
        first_at = None
        while time.monotonic() < until:
            time.sleep(0.1)
            self._poll()
            if self._verdict:
                break
            if first_at is None and self._looks:
                first_at = time.monotonic()
            if first_at is not None and time.monotonic() - first_at > seconds:
                break
        self._looks_wanted.clear()
        if len(self._looks) >= 2:
            return find_lost(self._looks[0], self._looks[-1]), self._looks[-1]
        if self._verdict or self.rank == 0 or self._first is None or self._first.state == DONE:
            return [], []
        # The host of rank 0 has the store, which answered before and does not take calls any more.
        return [self._first], []

    def _never_reached_rank_0(self) -> bool:
        """Whether the store does not answer and never returned a report of rank 0."""
        is_silent = not self._looks and not self._verdict
        return is_silent and self.rank != 0 and self._first is None

    def _unreached_rank_0(self) -> Report:
        """Return a report in place of the one that rank 0 never sent; its host is MASTER_ADDR."""
        return Report(
            rank=0,
            number=0,
            num_beats=0,
            step=0,
            pause=self._pauses.seconds,
            state=STARTS,
            host=os.environ["MASTER_ADDR"],
        )

    def explain(self, error: str) -> str | None:
        """Return which rank this one has lost, where the training has failed by `error`.

        None after a signal, where no rank is lost: the others have ended by theirs. Of torchrun
        itself one comes where the host of the rendezvous is lost.
        """
        self._has_failed = True
        with self._lock:
            tells_nothing = bool(self._verdict) or self._is_done
            lost = [] if tells_nothing else self._find_lost(LOOK_SECONDS)[0]
            if self._verdict:
                return self._told(self._verdict)
            if not lost and signal_received() is not None:
                return None
            who = describe_lost(lost) if lost else "another rank"
            return self._told(f"lost {who} {_after(progress()[2])}: {error}")

    def tell(self, message: str) -> None:
        """Tell the others why this rank fails."""
        self._has_failed = True
        if not self._is_done and not self._verdict:
            self._verdict = f"rank {self.rank} on host {socket.gethostname()} has failed: {message}"
            self._wait_until_known()

    def _told(self, why: str) -> str:
        self._verdict = self._verdict or why
        self._wait_until_known()
        return f"{why}\n  {self.resume_command()}"

    def _wait_until_known(self) -> None:
        until = time.monotonic() + VERDICT_SECONDS
        while (self.rank == 0 or not self._is_known) and time.monotonic() < until:
            time.sleep(0.05)

    def _end(self, why: str) -> None:
        """Leave the stacks and the reason, and end this process, whatever it waits for."""
        threading.Timer(DUMP_SECONDS, os._exit, [ENVIRONMENT_ERROR]).start()
        self._verdict = self._verdict or why
        self._wait_until_known()
        message = f"error (the environment): {self._verdict}"  # the same on all ranks
        self._say(message)
        kill_workers()
        with contextlib.suppress(OSError):
            resume = f"  {self.resume_command()}"  # lists checkpoints, of a disk that may hang
            self._say(resume)
            stacks = self.folder / STACKS_FILE.format(self.rank)
            with open_no_follow(stacks, "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self.fail(f"{message}\n{resume}")
        os._exit(ENVIRONMENT_ERROR)

    def _say(self, text: str) -> None:
        """Print, once for each machine: by its second rank where nothing is heard of the first."""
        place = self.rank % (read_launch().ranks_here or self.num_ranks)
        first = self.rank - place
        is_first_lost = re.search(rf"heard of .*\branks? {first}\b", self._verdict) is not None
        if is_first_here() or (is_first_lost and place == 1):
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)


def _after(step: int | None) -> str:
    return f"after step {step}" if step else "before its first step"


def _key(rank: int) -> str:
    return f"loft/rank/{rank}"


_peers: Peers | None = None


def start_peers(peers: Peers) -> None:
    """Watch the other ranks from this one, until it ends."""
    global _peers
    if _peers is None:
        _peers = peers
        peers.start()


def watched_peers() -> Peers | None:
    """Return the ranks that this one watches; None where a supervisor watches, or for one rank."""
    return _peers
