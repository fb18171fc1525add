"""Ranks that watch each other, when no supervisor watches them.

The slow tests run two small scripts that send heartbeats as a training run does, connected by a
real store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from app.process.heartbeat import Pauses
from app.process.launch import free_port
from app.process.peers import (
    ENDS,
    LATE_SECONDS,
    STARTS,
    TRAINS,
    Peers,
    RankReport,
    describe_lost,
    find_hanging,
    find_late,
    find_lost,
)
from app.process.status import begin_status
from app.training.callbacks import Heartbeat
from common.errors import RemoteError, TrainingFault
from tests.conftest import ROOT
from tests.processes import LONGEST, user_environment
from tests.reliability.shell import Shell

RANK = """
import json, os, sys, time
from pathlib import Path
from common.errors import TrainingFault
from app.process.heartbeat import send_heartbeat, refresh_liveness
from app.process import peers as module
from app.process.peers import Peers, start_peers
module.REPORT_SECONDS, module.CHECK_SECONDS, module.VERDICT_SECONDS = 0.5, 2.0, 1.0
from app.process.reporting import save_reason, report, write_error_file
from app.process.launch import set_run_dir
from app.process.signals import install_signal_handlers, defer_signals
from torch.distributed import TCPStore
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
set_run_dir(folder)
if rank == 0:
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
def save_error(message):
    write_error_file(message)
    save_reason(message)
peers = Peers(rank=rank, num_ranks=2, run_folder=folder, hang_seconds=float(sys.argv[2]),
              save_reason=save_error, resume_command=lambda: "to resume: type this")
def wait(seconds=60):
    time.sleep(seconds)
start_peers(peers)
(folder / f"started-{rank}").touch()
while not (folder / f"started-{1 - rank}").exists():
    wait(0.05)
wait(1)
for step in (1, 2, 3):
    send_heartbeat(step)
    peers.has_trained = True
    wait(0.1)
"""
LEAVES_LAST = 1.0
"""seconds in which the other rank sends its last report to the store of rank 0"""
REPORT = RankReport(
    rank=0,
    sequence_number=4,
    num_beats=9,
    step=3,
    pause_seconds=11.0,
    state=TRAINS,
    host="a host name with spaces",
)


def make_reports(*sequence_numbers: int, **fields: object) -> list[RankReport]:
    """Return one report per rank."""
    return [
        replace(REPORT, rank=rank, sequence_number=number, **fields)
        for rank, number in enumerate(sequence_numbers)
    ]


def test_ranks_without_a_new_report_are_lost() -> None:
    assert find_lost(make_reports(4, 5, 6), make_reports(5, 5, 9)) == make_reports(5, 5, 9)[1:2]
    assert find_lost(make_reports(4, 5), make_reports(5, 5, state=ENDS)) == []
    assert find_lost(make_reports(4), make_reports(5, 1)) == []  # rank 1 has just started


def test_the_rank_with_the_fewest_beats_hangs() -> None:
    reports = [REPORT, replace(REPORT, rank=1, num_beats=8)]
    assert find_hanging(reports, 10) == reports[1]
    saves = replace(REPORT, rank=2, pause_seconds=1.0)
    assert find_hanging([*reports, saves], 10) is None
    compiles = replace(reports[0], state=STARTS)
    assert find_hanging([compiles, reports[1]], 10) is None
    assert find_hanging([replace(report, state=ENDS) for report in reports], 10) is None


def test_the_rank_that_others_wait_for_is_late() -> None:
    pause = LATE_SECONDS + 1
    ahead = replace(REPORT, rank=0, pause_seconds=pause)
    silent = replace(REPORT, rank=1, num_beats=8, pause_seconds=0.5)  # its host is down
    assert find_late([ahead, silent]) == silent
    assert find_late([ahead, replace(silent, num_beats=9)]) is None
    assert find_late([ahead, silent, replace(ahead, rank=2, pause_seconds=1.0)]) is None
    assert find_late([ahead, replace(silent, state=STARTS)]) is None
    assert find_late([ahead]) is None and find_late([]) is None


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans())))
def test_a_pause_is_the_time_polled_between_two_signs_of_life(
    polls: list[tuple[float, bool]],
) -> None:
    """If the polling process itself was stopped, that time counts as one second."""
    pauses, ended, current = Pauses(), [0.0], 0.0
    for seconds, is_alive in polls:
        ended += [current] if is_alive else []
        current = 0.0 if is_alive else current + min(seconds, 1.0)
        pauses.poll(seconds, is_alive=is_alive)
        assert pauses.seconds == pytest.approx(current)
        assert pauses.longest == pytest.approx(max(ended))
    assert not pauses.is_hang(pauses.seconds)
    assert pauses.is_hang(0.0) == (pauses.seconds > 10 * pauses.longest)


def make_peers(folder: Path, rank: int = 1) -> Peers:
    """Return the peers of a rank whose threads have not been started."""
    return Peers(
        rank=rank,
        num_ranks=2,
        run_folder=folder,
        hang_seconds=1.0,
        resume_command=lambda: "to resume: type this",
        save_reason=lambda message: None,
    )


@pytest.mark.parametrize("is_done", [True, False], ids=["done", "never-connected"])
def test_rank_0_is_not_blamed_without_evidence(
    is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks stop reporting after training; a rank that never connected knows nothing of rank 0."""
    monkeypatch.setattr("app.process.peers.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("app.process.peers.VERDICT_SECONDS", 0.1)
    peers = make_peers(tmp_path)
    if is_done:
        peers._rank0 = REPORT
        peers.is_done = True
    message = peers.explain_lost_connection("closed")
    assert message and message.startswith("lost another rank before its first step: closed\n")


@pytest.mark.parametrize(
    "rank0",
    [None, REPORT, replace(REPORT, state=ENDS)],
    ids=["never-connected", "training", "done"],
)
def test_rank_0_is_lost_if_its_store_stops_answering(
    rank0: RankReport | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the link was cut before rank 0's first report was read, MASTER_ADDR names its host."""
    monkeypatch.setattr("app.process.peers.CHECK_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    peers = make_peers(tmp_path)
    peers._rank0 = rank0
    reason = peers._diagnose(hang_seconds=0.1)
    if rank0 is not None and rank0.state == ENDS:
        assert reason is None
    else:
        host = "node1" if rank0 is None else rank0.host
        assert reason and reason.startswith(f"no report from rank 0 on host {host} ")


def test_a_rank_with_its_own_error_reports_that_error(tmp_path: Path) -> None:
    """Lightning calls `on_exception` before the page of the run is written."""
    peers = make_peers(tmp_path)
    Heartbeat(tmp_path, peers).on_exception(L.Trainer(logger=False), None, TrainingFault("NaN"))
    peers._verdict = "rank 0 on host node1 has failed: NaN"
    peers._watch_loop(0.0)  # returns, and does not end this process


def test_rank_0_waits_until_the_others_have_read_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.process.peers.VERDICT_SECONDS", 1.0)
    seconds = []
    for rank in (0, 1):
        peers = make_peers(tmp_path, rank)
        peers._is_published = True
        before = time.monotonic()
        peers.publish_failure("the loss is NaN")
        seconds.append(time.monotonic() - before)
    assert seconds[0] >= 1.0 > seconds[1]


def test_only_an_error_from_torch_means_that_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    class Recorded:
        def publish_failure(self, message: str) -> None:
            called.append("failed")

        def explain_lost_connection(self, error: str) -> str:
            called.append("lost")
            return "lost"

    monkeypatch.setattr(reporting, "watched_peers", Recorded)
    monkeypatch.setattr(reporting, "write_error_file", lambda message: None)
    for error in (
        RuntimeError("[x/pair.cc:5] Connection closed by peer [1.2.3.4]:5"),
        RemoteError("https://a.b/c: Connection reset by peer"),
        ConnectionResetError("Connection reset by peer"),
        TrainingFault("the loss of gloo.jsonl is NaN"),
    ):
        reporting.report(error)
    assert called == ["lost", "failed", "failed", "failed"]


def test_only_the_training_thread_refreshes_liveness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray runs the training in a separate thread."""
    for name, value in (("_step", None), ("_thread", None), ("_num_signs", 0)):
        monkeypatch.setattr(heartbeat, name, value)
    with ThreadPoolExecutor(1) as training_thread:
        training_thread.submit(heartbeat.send_heartbeat, 1).result()
        training_thread.submit(heartbeat.refresh_liveness).result()
        heartbeat.refresh_liveness()
    assert heartbeat.progress()[1] == 2


def test_lost_ranks_are_grouped_by_host() -> None:
    lost = [replace(REPORT, rank=rank, host=host) for rank, host in enumerate("bbbcdef")]
    assert describe_lost(lost).startswith("ranks 0 to 2 on host b, rank 3 on host c, ")
    assert describe_lost(lost).endswith(" and 1 more hosts")


RunRanks = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def run_ranks(shell: Shell, tmp_path: Path) -> RunRanks:
    """Run two ranks, each with its script after the common one; returns exit codes and stderrs."""

    def run(*scripts: Sequence[str], hang_seconds: float = 3.0) -> list[tuple[int, str]]:
        return run_scripts(shell.python, tmp_path, scripts, hang_seconds)

    return run


def run_scripts(
    python: str, folder: Path, scripts: Sequence[Sequence[str]], hang_seconds: float
) -> list[tuple[int, str]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank, lines in enumerate(scripts):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        own["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.json")
        processes.append(
            subprocess.Popen(
                [python, "-c", "\n".join([RANK, *lines]), str(folder), str(hang_seconds)],
                cwd=ROOT,
                env=user_environment() | address | own,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    stderrs = [process.communicate(timeout=LONGEST)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, stderrs, strict=True)]


@pytest.mark.slow
def test_the_status_names_the_rank_that_is_late_until_it_goes_on(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    begin_status(tmp_path, 0)
    waits = [
        "module.LATE_SECONDS = 1.0",
        "send_heartbeat(4)",
        "read = lambda: json.loads((folder / 'status.json').read_text())['late']",
        "while read() is None: wait(0.1)",
        "print(read(), file=sys.stderr)",
        "(folder / 'goes on').touch()",
        "send_heartbeat(5)",
        "while read() is not None: wait(0.1)",
        f"peers.is_done = True; wait({LEAVES_LAST})",
    ]
    late = [
        "while not (folder / 'goes on').exists(): wait(0.1)",
        "send_heartbeat(4); send_heartbeat(5); peers.is_done = True",
    ]
    first, second = run_ranks(waits, late, hang_seconds=60.0)
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert f"rank 1 on host {os.uname().nodename}" in first[1]


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_all_ranks_end(run_ranks: RunRanks, tmp_path: Path) -> None:
    hangs = ["def hangs_here():", "    wait()", "hangs_here()"]
    first, second = run_ranks(["send_heartbeat(4)", "wait()"], hangs)
    assert (first[0], second[0]) == (3, 3)
    stderr = first[1]
    assert f"rank 1 on host {os.uname().nodename} hangs after step 3, for " in stderr
    assert "to resume: type this" in stderr and "Traceback" not in stderr
    assert "hangs_here" in (tmp_path / "stacks-rank-1.txt").read_text()
    error = json.loads((tmp_path / "0.json").read_text())["message"]
    assert error["message"] in stderr and error["extraInfo"]["timestamp"].isdecimal()
    assert (tmp_path / "error.txt").read_text().strip() == stderr.strip()


SLOW_STORE = """
import json, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from app.process.peers import Peers
reports = threading.Event()
def set(key, value):
    reports.set()
    time.sleep(0.3)
    print(json.loads(value)["state"])
store = SimpleNamespace(set=set, check=lambda keys: False)
Peers._connect = lambda self: store
peers = Peers(rank=1, num_ranks=2, run_folder=Path("."), hang_seconds=None,
              save_reason=print, resume_command=str)
peers.start()
reports.wait()
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("code", "last_state"), [("peers.is_done = True", ENDS), ("sys.exit(3)", STARTS)]
)
def test_a_rank_exits_after_its_last_report(code: str, last_state: str) -> None:
    """A thread that talks to a store while Python ends would abort the process."""
    command = [sys.executable, "-c", SLOW_STORE, code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert ended.stdout.split() == [STARTS, last_state]
    assert ended.returncode == (0 if last_state == ENDS else 3), ended.stderr


@pytest.mark.slow
def test_a_killed_rank_is_named_when_its_connection_breaks(run_ranks: RunRanks) -> None:
    lost = "RuntimeError('[/x/pair.cc:5] Connection closed by peer [1.2.3.4]:5. This is typically')"
    fails = [f"sys.exit(report({lost}))"]
    first, second = run_ranks(fails, ["os.kill(os.getpid(), 9)"], hang_seconds=60.0)
    assert (first[0], second[0]) == (3, -9)
    assert first[1].startswith(
        f"error (the environment): lost rank 1 on host {os.uname().nodename} after step 3: "
        "Connection closed by peer [1.2.3.4]:5\n  to resume: type this"
    )


@pytest.mark.slow
@pytest.mark.parametrize("all_signalled", [False, True], ids=["lost", "signalled"])
def test_a_rank_ended_by_a_signal_names_only_a_lost_rank(
    run_ranks: RunRanks, tmp_path: Path, all_signalled: bool
) -> None:
    """torchrun signals the ranks of a host that has lost the host of the rendezvous.

    A scheduler signals all ranks, and a rank that its signal has ended is not lost.
    """
    signalled = ["install_signal_handlers()", "defer_signals(True)", "os.kill(os.getpid(), 15)"]
    closed = "RuntimeError('[/x/pair.cc:5] Connection closed by peer [1.2.3.4]:5. This is ')"
    first = ["(folder / 'pid').write_text(str(os.getpid()))", "wait(1)"]
    first += [*(signalled if all_signalled else []), "wait(1.5)", "os.kill(os.getpid(), 9)"]
    second = ["wait(1)", "pid = (folder / 'pid').read_text()"]
    second += ["while os.path.exists(f'/proc/{pid}'): wait(0.1)"]
    second += [*signalled, f"os._exit(report({closed}))"]
    _, (code, _) = run_ranks(first, second, hang_seconds=60.0)
    error_file = tmp_path / "1.json"
    if all_signalled:
        assert code == 143 and not error_file.exists()
    else:
        lost = f"lost rank 0 on host {os.uname().nodename} after step 3: Connection closed by peer"
        assert code == 3 and lost in json.loads(error_file.read_text())["message"]["message"]


@pytest.mark.slow
def test_the_error_of_a_failed_rank_ends_the_others(run_ranks: RunRanks) -> None:
    bad = ["sys.exit(report(TrainingFault('the loss is NaN')))"]
    first, second = run_ranks(["wait()"], bad, hang_seconds=60.0)
    assert (first[0], second[0]) == (3, 4)
    assert second[1].startswith("error (training stopped): the loss is NaN\n")
    assert "rank 1 on host" in first[1] and "the loss is NaN" in first[1]


@pytest.mark.slow
def test_a_stall_that_ends_during_the_check_is_not_a_hang(run_ranks: RunRanks) -> None:
    stalls = [
        "wait(3.5)",
        "for _ in range(25): refresh_liveness(); wait(0.1)",
        "peers.is_done = True",
    ]
    first = [*stalls, f"wait({LEAVES_LAST})"]
    assert [code for code, _ in run_ranks(first, stalls, hang_seconds=3.0)] == [0, 0]
