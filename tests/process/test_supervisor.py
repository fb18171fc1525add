"""Ranks that die, hang, lose each other or find their port in use are named, ended and restarted.

The ranks are small scripts that send heartbeats as a training run does, so that a test takes a
second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from app.process import supervisor as supervisor_module
from app.process.launch import free_port
from app.process.reporting import REASON_FILE
from app.process.signals import SAME_SIGNAL_SECONDS_OF_RANK
from app.process.status import STATUS_FILE, begin_status
from app.process.supervisor import SuperviseConfig, Supervisor
from app.run import ranks as ranks_module
from app.training.checkpoint.store import CheckpointStore
from tests.conftest import ROOT
from tests.in_process import make_words
from tests.processes import AT_ONCE, GONE_WITHIN, LONGEST, ends_within, wait_for
from tests.resumed import make_run, open_typed

RANK = """
import os, signal, sys, time
from pathlib import Path
from common.errors import UserError, TrainingFault
from app.process.reporting import report
from app.process.heartbeat import ENDED, send_heartbeat, refresh_liveness
from app.process.heartbeat import send_to_supervisor, start_heartbeat
from app.process.launch import exit_with_parent
exit_with_parent()
folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
first = int(os.environ["LOFT_RESUME_STEP"])
os.environ["LOFT_RUN_DIR"] = str(folder)
with (folder / f"started-{rank}").open("a") as file:
    file.write(f"{os.getpid()} {first} {os.environ['MASTER_PORT']}\\n")
def starts(rank):
    file = folder / f"started-{rank}"
    return len(file.read_text().splitlines()) if file.exists() else 0
while starts(1 - rank) < starts(rank):  # waiting later would count as a pause
    time.sleep(0.01)
start_heartbeat(folder, rank)
send_heartbeat(first)

def wait():
    time.sleep(60)
"""


@dataclasses.dataclass
class SupervisedRun:
    """The outcome of a supervisor's run of two ranks."""

    folder: Path
    code: int
    stderr: str
    seconds: float
    ended_at: float = 0.0
    """by the wall clock, as the modification times of files"""

    def starts(self, rank: int) -> list[list[str]]:
        """Return the process id, first step and port of each start of a rank."""
        return [line.split() for line in (self.folder / f"started-{rank}").read_text().splitlines()]

    def has_live_ranks(self) -> bool:
        pids = [start[0] for rank in (0, 1) for start in self.starts(rank)]
        return any(Path(f"/proc/{pid}").exists() for pid in pids)


Supervise = Callable[..., SupervisedRun]


@pytest.fixture
def supervise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Supervise:
    """Supervise two ranks that run the given script after the common one."""
    monkeypatch.setattr(supervisor_module, "STACK_SECONDS", 0.5)

    def supervise_script(
        *script: str,
        saved: Sequence[int] = (),
        first_step: int = 0,
        grace: float = LONGEST,
        **settings: int | float | None,
    ) -> SupervisedRun:
        monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", grace)
        code = "\n".join([RANK, *script])
        newest = iter(saved)
        supervisor = Supervisor(
            command=[sys.executable, "-c", code, str(tmp_path)],
            folder=tmp_path,
            config=SuperviseConfig(**settings),  # type: ignore[arg-type]
            resume_step=first_step,
            find_newest_step=lambda: next(newest),
            rank_variables=[
                {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"} for rank in (0, 1)
            ],
        )
        before = time.monotonic()
        exit_code = supervisor.run()
        seconds = time.monotonic() - before
        stderr = capfd.readouterr().err
        return SupervisedRun(tmp_path, exit_code, stderr, seconds, ended_at=time.time())

    return supervise_script


def test_a_killed_rank_is_named_with_its_last_lines_and_ends_the_others(
    supervise: Supervise, tmp_path: Path
) -> None:
    begin_status(tmp_path, 0)
    run = supervise(
        "if rank == 0: wait()",
        "send_heartbeat(3)",
        "print('what the driver says', file=sys.stderr, flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        grace=0.0,
    )
    assert run.code == 3
    assert "rank 1 was killed by SIGKILL (often for lack of memory" in run.stderr
    assert "after step 3; its last lines:\n  what the driver says\n" in run.stderr
    assert run.stderr.count("error") == 1
    assert run.seconds < GONE_WITHIN and not run.has_live_ranks()
    assert (run.folder / REASON_FILE).read_text() in run.stderr
    status = json.loads((run.folder / STATUS_FILE).read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert "rank 1 was killed" in status["message"]


def test_an_unexplained_exit_is_named(supervise: Supervise) -> None:
    run = supervise("if rank == 0: wait()", "os._exit(7)", grace=0.0)
    assert run.code == 3
    assert "rank 1 ended with exit code 7 before its first step" in run.stderr


def test_a_lost_connection_is_reported_if_no_other_rank_failed(supervise: Supervise) -> None:
    run = supervise("sys.exit(report(RuntimeError('gloo: Connection reset by peer')))")
    assert run.code == 3
    assert run.stderr.count("Connection reset by peer") == 1


@pytest.mark.parametrize(
    ("error", "code"), [("TrainingFault('loss is nan')", 4), ("UserError('no such file')", 2)]
)
def test_an_error_that_a_rank_reports_is_printed_once_without_a_restart(
    supervise: Supervise, error: str, code: int
) -> None:
    run = supervise("if rank == 1: wait()", f"sys.exit(report({error}))", grace=0.0, max_restarts=3)
    assert run.code == code
    assert run.stderr.count("error") == 1 and "rank" not in run.stderr
    assert len(run.starts(0)) == 1 and not run.has_live_ranks()


def test_a_rank_that_lost_another_is_not_to_blame(supervise: Supervise) -> None:
    # The rank that lost its peer may end first: it only has to read from a closed connection.
    lost = "RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')"
    run = supervise(
        f"if rank == 0: send_heartbeat(9); sys.exit(report({lost}))",
        "time.sleep(0.4)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
    )
    assert run.code == 3
    assert "rank 1 was killed by SIGSEGV" in run.stderr and "gloo" not in run.stderr


DIES_TWICE = (
    "if rank == 0 and first < 6: wait()",
    "send_heartbeat(first + 2)",
    "if first < 6: os.kill(os.getpid(), signal.SIGKILL)",
)


@pytest.mark.slow
def test_a_run_that_gets_further_each_time_is_restarted_so_many_times(supervise: Supervise) -> None:
    run = supervise(*DIES_TWICE, saved=[3], grace=0.0, max_restarts=1)
    assert run.code == 3 and len(run.starts(0)) == 2
    (run.folder / "started-0").unlink()
    (run.folder / "started-1").unlink()
    run = supervise(*DIES_TWICE, saved=[3, 6], grace=0.0, max_restarts=2)
    assert run.code == 0
    assert [start[1] for start in run.starts(0)] == ["0", "3", "6"]
    assert [start[1] for start in run.starts(1)] == ["0", "3", "6"]
    assert "supervise: restart 2 of 2, from step 6" in run.stderr
    assert not (run.folder / REASON_FILE).exists()  # the run has succeeded


def test_the_same_step_failing_twice_ends_the_run(supervise: Supervise) -> None:
    run = supervise(*DIES_TWICE, saved=[0, 0, 0], grace=0.0, max_restarts=9)
    assert run.code == 3 and len(run.starts(0)) == 2
    assert "the run failed twice after step 2: not restarted" in run.stderr


def test_restarts_rewind_until_the_later_checkpoints_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*make_words(tmp_path), "trainer.max_steps=4"]
    run = make_run(tmp_path / "run", *words)
    typed = (f"resume={run / 'checkpoints' / 'step-2'}", "supervise.max_restarts=3")
    start, found = open_typed(*typed), []

    class Restarts:
        def __init__(self, *, find_newest_step: Callable[[], int], **_: object) -> None:
            self.find_newest_step = find_newest_step

        def run(self) -> int:
            found.append(self.find_newest_step())  # the run died while loading
            start.discard_later_steps()
            found.append(self.find_newest_step())
            store = CheckpointStore(run / "checkpoints")
            store.begin(4)
            store.add_document(4, "training", {"step": 4})  # byte for byte the same as before
            store.commit(4)
            found.append(self.find_newest_step())
            return 0

    monkeypatch.setattr(ranks_module, "Supervisor", Restarts)
    assert ranks_module.run_ranks(start.config, start, typed) == 0
    assert found == [2, 2, 4]


HANGS = (
    "import threading",
    "def idle(): wait()",
    "def hang_here(): wait()",
    "threading.Thread(target=idle, daemon=True).start()",
    "for step in range(5):",
    "    time.sleep(0.02); send_heartbeat(step)",
    "    if step == 3 and rank == 1: {}",
    "wait()",
)


def test_a_hanging_rank_is_named_with_its_stack(supervise: Supervise) -> None:
    run = supervise("\n".join(HANGS).format("hang_here()"), hang_minutes=0.02)
    assert run.code == 3
    assert "rank 1 hangs after step 3, for " in run.stderr
    assert "in hang_here" in run.stderr and "stacks-rank-1.txt" in run.stderr
    stacks = (run.folder / "stacks-rank-1.txt").read_text()
    assert "in hang_here" in stacks and "in idle" in stacks and "in idle" not in run.stderr
    assert not run.has_live_ranks()


def test_a_stopped_rank_is_named(supervise: Supervise) -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    run = supervise("\n".join(HANGS).format(stop), hang_minutes=0.02)
    assert "rank 1 is stopped (SIGSTOP) after step 3" in run.stderr
    assert not run.has_live_ranks()


@pytest.mark.slow
def test_a_run_of_long_steps_does_not_hang(supervise: Supervise) -> None:
    slow = (
        "send_heartbeat(1)",
        "time.sleep(0.7)",
        "send_heartbeat(2)",
        "time.sleep(1.6)",
        "send_heartbeat(3)",
    )
    assert supervise(*slow, hang_minutes=0.02).code == 0
    # Time outside the training loop does not count.
    ended = ("send_heartbeat(1)", "send_to_supervisor(ENDED)", "time.sleep(1.5)")
    assert supervise(*ended, hang_minutes=0.02).code == 0


@pytest.mark.slow
def test_waiting_for_a_long_save_is_not_a_hang(supervise: Supervise) -> None:
    save = (
        "def exists(name): return (folder / name).exists()",
        "if rank == 0:",
        "    (folder / 'started').touch()",
        "    for _ in range(13): refresh_liveness(); time.sleep(0.2)",
        "    (folder / 'saved').touch()",
        "while not exists('started'): send_heartbeat(1); time.sleep(0.02)",
        "while not exists('saved'): time.sleep(0.02)",
        "send_heartbeat(2)",
        "(folder / f'ends-{rank}').touch()",
        "while not exists(f'ends-{1 - rank}'): time.sleep(0.02)",
    )
    run = supervise(*save, hang_minutes=0.02)
    assert (run.code, run.stderr) == (0, "")


def test_another_port_is_tried_if_one_is_in_use(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([4001, 4002])
    monkeypatch.setattr(supervisor_module, "free_port", lambda: next(ports))
    run = supervise(
        "if os.environ['MASTER_PORT'] == '4001':",
        "    if rank == 1: wait()",
        "    sys.exit(report(RuntimeError('port: 4001, name: EADDRINUSE, message: in use')))",
        grace=0.0,
    )
    assert (run.code, run.stderr) == (0, "")
    assert [start[2] for start in run.starts(1)] == ["4001", "4002"]


def test_free_ports_vary_and_are_given_to_no_connection() -> None:
    ports = {free_port() for _ in range(8)}
    assert len(ports) > 1 and max(ports) < 32768
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        with patch("secrets.randbelow", side_effect=[taken - 20_000, 1]):
            assert free_port() == 20_001


READY = "(folder / f'ready-{rank}').touch()"


@pytest.fixture
def send_when_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the supervisor receive a signal as soon as both ranks are ready for it."""

    def send(signum: int) -> None:
        def received() -> int | None:
            return signum if len(list(tmp_path.glob("ready-*"))) == 2 else None

        monkeypatch.setattr(supervisor_module, "signal_received", received)

    return send


def test_a_signal_is_forwarded_and_the_ranks_may_save(
    supervise: Supervise, send_when_ready: Callable[[int], None]
) -> None:
    signum = signal.SIGUSR1
    send_when_ready(signum)
    run = supervise(
        f"signal.signal({int(signum)}, lambda *_: (folder / f'received-{{rank}}').touch())",
        "send_heartbeat(1)",
        READY,
        "while not (folder / f'received-{rank}').exists(): time.sleep(0.01)",
        "time.sleep(0.3)",  # saves
        "(folder / f'saved-{rank}').touch()",
        f"os._exit({128 + signum})",
        max_restarts=3,
    )
    assert (run.code, run.stderr) == (128 + signum, "")
    assert all((run.folder / f"saved-{rank}").exists() for rank in (0, 1))
    assert len(run.starts(0)) == 1


def test_a_save_that_fails_after_a_signal_is_a_failure(
    supervise: Supervise, send_when_ready: Callable[[int], None]
) -> None:
    send_when_ready(signal.SIGTERM)
    run = supervise(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / f'received-{rank}').touch())",
        "send_heartbeat(1)",
        READY,
        "while not (folder / f'received-{rank}').exists(): time.sleep(0.01)",
        "os._exit(3 if rank == 0 else 143)",
        max_restarts=3,
    )
    assert run.code == 3
    assert len(run.starts(0)) == 1


@pytest.mark.slow
def test_ranks_outside_the_training_loop_are_not_waited_for(
    supervise: Supervise, send_when_ready: Callable[[int], None]
) -> None:
    send_when_ready(signal.SIGTERM)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    run = supervise("send_to_supervisor(ENDED)", ignore, READY, "wait()")
    assert run.code == 143
    assert run.seconds < GONE_WITHIN and not run.has_live_ranks()
    # Measured from the signal on, without the start of two processes.
    signalled_at = max(file.stat().st_mtime for file in run.folder.glob("ready-*"))
    assert run.ended_at - signalled_at < ends_within()


LAUNCHER = """
import sys
from pathlib import Path
from app.process.signals import install_signal_handlers
from app.process.supervisor import SuperviseConfig
from app.process.supervisor import Supervisor
install_signal_handlers()
sys.exit(Supervisor(
    command=[sys.executable, "-c", sys.argv[2], sys.argv[1]],
    folder=Path(sys.argv[1]),
    config=SuperviseConfig(),
    resume_step=0,
    find_newest_step=lambda: 0,
    rank_variables=[{"LOCAL_RANK": str(rank)} for rank in (0, 1)],
).run())
"""


def launch(folder: Path, *script: str) -> subprocess.Popen[str]:
    """Start a supervisor in a separate process; returns when its ranks are ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), "\n".join([RANK, *script])],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: process.poll() is not None or len(list(folder.glob("ready-*"))) == 2)
    assert process.poll() is None
    return process


def test_a_signal_during_the_search_for_a_checkpoint_ends_the_run(tmp_path: Path) -> None:
    slow = "find_newest_step=lambda: Path(sys.argv[1], 'searches').touch() or time.sleep(60)"
    script = LAUNCHER.replace("find_newest_step=lambda: 0", slow).replace(
        "import sys", "import sys, time"
    )
    script = script.replace("SuperviseConfig()", "SuperviseConfig(max_restarts=1)")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), "\n".join([RANK, "os._exit(7)"])], cwd=ROOT
    )
    wait_for(lambda: process.poll() is not None or (tmp_path / "searches").exists())
    assert process.poll() is None
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONGEST) == 143
    assert time.monotonic() - before < ends_within()


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call ties ranks to it")
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process = launch(tmp_path, READY, "wait()")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run = SupervisedRun(tmp_path, 0, "", 0)
    wait_for(lambda: not run.has_live_ranks(), GONE_WITHIN)  # none outlives its launcher


@pytest.mark.slow
def test_a_second_signal_ends_all_ranks_immediately(tmp_path: Path) -> None:
    process = launch(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",  # a long step
        "send_heartbeat(1)",
        READY,
        "wait()",
    )
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * SAME_SIGNAL_SECONDS_OF_RANK)
    assert process.poll() is None
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(AT_ONCE) == 143
    run = SupervisedRun(tmp_path, 0, "", 0)
    wait_for(lambda: not run.has_live_ranks(), before + AT_ONCE - time.monotonic())


def test_a_child_ends_itself_if_its_parent_has_ended() -> None:
    code = "from app.process.launch import exit_with_parent; exit_with_parent(); print('alive')"
    environment = os.environ | {"LOFT_PARENT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (137, b"")
