"""Ranks that watch each other, where no supervisor of ours does.

The ranks of a story are small scripts that beat as a training does, and meet at a real store.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.process import heartbeat, reporting
from app.process.errors import TrainingFault, UserError
from app.process.launch import free_port
from app.process.peers import (
    DONE,
    STARTS,
    TRAINS,
    Pauses,
    Peers,
    Report,
    describe_lost,
    find_hanging,
    find_lost,
    parse_report,
)
from app.training.callbacks.heartbeat import Heartbeat
from data_modules import RemoteError
from tests.conftest import ROOT
from tests.processes import LONGEST, environment_of_a_person
from tests.reliability.person import Person

RANK = """
import os, sys, time
from pathlib import Path
from app.process.errors import TrainingFault
from app.process.heartbeat import beat, beat_again
from app.process.peers import Peers, start_peers
from app.process.reporting import keep_reason, report, write_error_file
from app.process.launch import set_run_dir
from app.process.signals import install_signal_handlers, wait_for_step
from torch.distributed import TCPStore
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
set_run_dir(folder)
if rank == 0:
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
def keep(message):
    write_error_file(message)
    keep_reason(message)
peers = Peers(rank=rank, num_ranks=2, folder=folder, limit=float(sys.argv[2]), fail=keep,
              resume_command=lambda: "to resume: type this")
def wait(seconds=60):
    time.sleep(seconds)
start_peers(peers)
(folder / f"met-{rank}").touch()
while not (folder / f"met-{1 - rank}").exists():
    wait(0.05)
wait(2)
for step in (1, 2, 3):
    beat(step)
    peers.begin()
    wait(0.1)
"""
ONE = Report(
    rank=0, number=4, num_beats=9, step=3, pause=11.0, state=TRAINS, host="a host of one name"
)


def ranks(*numbers: int, **same: object) -> list[Report]:
    return [replace(ONE, rank=rank, number=number, **same) for rank, number in enumerate(numbers)]


def test_a_report_is_read_as_it_was_told() -> None:
    assert parse_report(0, str(ONE)) == ONE


def test_the_lost_are_those_that_fell_silent() -> None:
    assert find_lost(ranks(4, 5, 6), ranks(5, 5, 9)) == ranks(5, 5, 9)[1:2]
    assert find_lost(ranks(4, 5), ranks(5, 5, state=DONE)) == []
    assert find_lost(ranks(4), ranks(5, 1)) == []  # the second has just begun to tell


def test_the_one_that_hangs_made_fewer_steps() -> None:
    here = [ONE, replace(ONE, rank=1, num_beats=8)]
    assert find_hanging(here, 10) == here[1]
    assert find_hanging([*here, replace(ONE, rank=2, pause=1.0)], 10) is None  # a long save
    assert find_hanging([replace(here[0], state=STARTS), here[1]], 10) is None  # it compiles
    assert find_hanging([replace(one, state=DONE) for one in here], 10) is None


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans())))
def test_pauses_are_what_was_polled_between_two_signs_of_life(
    polls: list[tuple[float, bool]],
) -> None:
    """Time in which this process was stopped itself counts as a second."""
    pauses, now, signs = Pauses(polled_at=0.0, num_signs=0), 0.0, 0
    ended, current = [0.0], 0.0
    for seconds, is_alive in polls:
        now, current = now + seconds, current + min(seconds, 1.0)
        if is_alive:
            ended += [current - min(seconds, 1.0)] if signs else []
            signs, current = signs + 1, 0.0
        pauses.poll(now, signs)
        assert pauses.seconds == pytest.approx(current)
        assert pauses.longest == pytest.approx(max(ended))


def peers_of(folder: Path, rank: int = 1) -> Peers:
    """Return the peers of a rank that has neither connected nor begun to watch."""
    return Peers(
        rank=rank,
        num_ranks=2,
        folder=folder,
        limit=1.0,
        resume_command=lambda: "to resume: type this",
        fail=lambda message: None,
    )


@pytest.mark.parametrize("ends", [Peers.finish, lambda peers: None], ids=["done", "unmet"])
def test_rank_0_is_not_blamed_for_a_silence_that_says_nothing(
    ends: Callable[[Peers], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that have trained to the end tell nothing more; one that never met it knows nothing."""
    monkeypatch.setattr("app.process.peers.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("app.process.peers.VERDICT_SECONDS", 0.1)
    peers = peers_of(tmp_path)
    peers._first = ONE if ends is Peers.finish else None
    ends(peers)
    said = peers.explain("closed")
    assert said and said.startswith("lost another rank before its first step: closed\n")


@pytest.mark.parametrize("first", [None, ONE, replace(ONE, state=DONE)], ids=["unmet", "", "done"])
def test_rank_0_is_lost_if_its_store_stops_answering(
    first: Report | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the link was cut before rank 0's first report was read: its address names it."""
    monkeypatch.setattr("app.process.peers.LOOK_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    peers = peers_of(tmp_path)
    peers._first = first
    reason = peers._judge(limit=0.1)
    if first is not None and first.state == DONE:
        assert reason is None
    else:
        host = "node1" if first is None else first.host
        assert reason and reason.startswith(f"nothing has been heard of rank 0 on host {host} ")


def test_a_rank_with_an_error_of_its_own_is_left_to_report_it(tmp_path: Path) -> None:
    """As Lightning calls it, before the page is written."""
    peers = peers_of(tmp_path)
    Heartbeat(tmp_path, peers).on_exception(L.Trainer(logger=False), None, TrainingFault("NaN"))
    peers._verdict = "rank 0 on host node1 has failed: NaN"
    peers._watch(0.0)  # returns, and does not end this process


def test_the_first_rank_stays_until_the_others_have_read_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.process.peers.VERDICT_SECONDS", 1.0)
    took = []
    for rank in (0, 1):
        peers = peers_of(tmp_path, rank)
        peers._is_known = True
        began = time.monotonic()
        peers.tell("the loss is NaN")
        took.append(time.monotonic() - began)
    assert took[0] >= 1.0 > took[1]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[x/pair.cc:5] Connection closed by peer [1.2.3.4]:5"), True),
        (RemoteError("https://a.b/c: Connection reset by peer"), False),
        (UserError("model.path=/data/gloo: no such folder"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (TrainingFault("the loss of gloo.jsonl is NaN"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_torch_says_that_a_rank_is_lost(
    error: BaseException, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    class Recorded:
        def tell(self, message: str) -> None:
            called.append("tell")

        def explain(self, error: str) -> str:
            called.append("explain")
            return "lost"

    monkeypatch.setattr(reporting, "watched_peers", Recorded)
    monkeypatch.setattr(reporting, "write_error_file", lambda message: None)
    reporting.report(error)
    assert called == ["explain" if is_lost else "tell"]


def test_signs_of_life_are_of_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray calls the training in a thread of its own."""
    for name, value in (("_step", None), ("_thread", None), ("_num_signs", 0)):
        monkeypatch.setattr(heartbeat, name, value)
    with ThreadPoolExecutor(1) as trains:
        trains.submit(heartbeat.beat, 1).result()
        trains.submit(heartbeat.beat_again).result()
        heartbeat.beat_again()
    assert heartbeat.progress()[1] == 2


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("b", "rank 0 on host b"),
        ("bb", "ranks 0 and 1 on host b"),
        ("bbbc", "ranks 0 to 2 on host b, rank 3 on host c"),
        ("abcdef", "on host a, rank 1 on host b, rank 2 on host c, rank 3 on host d and 2 more"),
    ],
)
def test_the_lost_are_named_host_by_host(hosts: str, said: str) -> None:
    lost = [replace(ONE, rank=rank, host=host) for rank, host in enumerate(hosts)]
    assert said in describe_lost(lost)


Tell = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def tell_story(person: Person, tmp_path: Path) -> Tell:
    """Run two ranks that begin alike and end by their own lines; returns codes and what is said."""

    def tell(*of_rank: Sequence[str], limit: float = 3.0) -> list[tuple[int, str]]:
        return run_ranks(person.python, tmp_path, of_rank, limit)

    return tell


def run_ranks(
    python: str, folder: Path, of_rank: Sequence[Sequence[str]], limit: float
) -> list[tuple[int, str]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank, lines in enumerate(of_rank):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        own["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.json")
        processes.append(
            subprocess.Popen(
                [python, "-c", "\n".join([RANK, *lines]), str(folder), str(limit)],
                cwd=ROOT,
                env=environment_of_a_person() | address | own,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [one.communicate(timeout=LONGEST)[1] for one in processes]
    return [(one.returncode, text) for one, text in zip(processes, said, strict=True)]


@pytest.mark.slow
def test_one_that_hangs_is_named_and_all_end(tell_story: Tell, tmp_path: Path) -> None:
    stands = ["def stands_here():", "    wait()", "stands_here()"]
    first, second = tell_story(["beat(4)", "wait()"], stands)
    assert (first[0], second[0]) == (3, 3)
    said = first[1]
    assert f"rank 1 on host {os.uname().nodename} hangs after step 3, for " in said
    assert "to resume: type this" in said and "Traceback" not in said
    assert "stands_here" in (tmp_path / "stacks-rank-1.txt").read_text()
    left = json.loads((tmp_path / "0.json").read_text())["message"]
    assert left["message"] in said and left["extraInfo"]["timestamp"].isdecimal()
    assert (tmp_path / "error.txt").read_text().strip() == said.strip()


@pytest.mark.slow
def test_one_that_dies_is_named_where_the_connection_breaks(tell_story: Tell) -> None:
    lost = "RuntimeError('[/x/pair.cc:5] Connection closed by peer [1.2.3.4]:5. This is typically')"
    fails = [f"sys.exit(report({lost}))"]
    first, second = tell_story(fails, ["os.kill(os.getpid(), 9)"], limit=60.0)
    assert (first[0], second[0]) == (3, -9)
    assert first[1].startswith(
        f"error (the environment): lost rank 1 on host {os.uname().nodename} after step 3: "
        "Connection closed by peer [1.2.3.4]:5\n  to resume: type this"
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [False, True], ids=["lost", "told"])
def test_a_rank_that_is_told_to_end_names_a_lost_one_only(
    tell_story: Tell, tmp_path: Path, is_told: bool
) -> None:
    """As torchrun tells the ranks of a host that has lost the one of the rendezvous.

    A scheduler tells all ranks, and one that has ended by its signal is not lost.
    """
    told = ["install_signal_handlers()", "wait_for_step(True)", "os.kill(os.getpid(), 15)"]
    closed = "RuntimeError('[/x/pair.cc:5] Connection closed by peer [1.2.3.4]:5. This is ')"
    first = ["wait(1)", *(told if is_told else []), "wait(3)", "os.kill(os.getpid(), 9)"]
    second = ["wait(4.5)", *told, f"os._exit(report({closed}))"]
    _, (code, _) = tell_story(first, second, limit=60.0)
    left = tmp_path / "1.json"
    if is_told:
        assert code == 143 and not left.exists()
    else:
        lost = f"lost rank 0 on host {os.uname().nodename} after step 3: Connection closed by peer"
        assert code == 3 and lost in json.loads(left.read_text())["message"]["message"]


@pytest.mark.slow
def test_one_that_fails_is_why_the_others_end(tell_story: Tell) -> None:
    bad = ["sys.exit(report(TrainingFault('the loss is NaN')))"]
    first, second = tell_story(["wait()"], bad, limit=60.0)
    assert (first[0], second[0]) == (3, 4)
    assert second[1].startswith("error (training stopped): the loss is NaN\n")
    assert "rank 1 on host" in first[1] and "the loss is NaN" in first[1]


@pytest.mark.slow
def test_a_stall_that_ends_while_it_is_judged_is_none(tell_story: Tell) -> None:
    stalls = ["wait(10)", "for _ in range(60): beat_again(); wait(0.1)", "peers.finish()"]
    assert [code for code, _ in tell_story(stalls, stalls, limit=7.8)] == [0, 0]


@pytest.mark.slow
def test_a_long_save_of_one_rank_is_waited_for(tell_story: Tell) -> None:
    saves = ["for _ in range(40): beat_again(); wait(0.1)", "peers.finish()", "wait(2)"]
    waits = ["wait(5)", "peers.finish()"]
    assert [code for code, _ in tell_story(saves, waits)] == [0, 0]
