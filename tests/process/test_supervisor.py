"""Ranks that die, hang, lose each other or find their port taken: named, ended, started again.

The ranks are small scripts that beat as a training does, so that a whole story takes a second.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from app.process import supervisor as supervisor_module
from app.process.launch import free_port
from app.process.reporting import REASON_FILE
from app.process.signals import SAME_PRESS_OF_A_RANK
from app.process.supervisor import SuperviseConfig, Supervisor
from app.run import ranks as run_module
from app.training.checkpoint.store import CheckpointStore
from tests.conftest import ROOT
from tests.door import make_data, make_model
from tests.processes import AT_ONCE, GONE_WITHIN, LONGEST, ends_within
from tests.resumed import make_run, open_typed

RANK = """
import os, signal, sys, time
from pathlib import Path
from app.process.errors import UserError, TrainingFault
from app.process.reporting import report
from app.process.heartbeat import ENDED, beat, refresh_liveness, send_to_supervisor, start_heartbeat
from app.process.launch import live_with_parent
live_with_parent()
folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
first = int(os.environ["LOFT_RESUME_STEP"])
os.environ["LOFT_RUN_DIR"] = str(folder)
with (folder / f"started-{rank}").open("a") as file:
    file.write(f"{os.getpid()} {first} {os.environ['MASTER_PORT']}\\n")
while not (folder / f"started-{1 - rank}").exists():  # whose start would count as a pause
    time.sleep(0.01)
start_heartbeat(folder, rank)
beat(first)
def is_first_time(what):
    try:
        (folder / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
def wait():
    time.sleep(60)
def wait_for_both():
    while len(list(folder.glob("started-*"))) < 2:
        time.sleep(0.01)
"""


@dataclasses.dataclass
class Story:
    """One run of a supervisor over two ranks: what came of it."""

    folder: Path
    code: int
    said: str
    seconds: float
    ended: float = 0.0
    """by the wall clock, as files have it"""

    def starts(self, rank: int) -> list[list[str]]:
        """Process, first step and port of each start of a rank."""
        return [line.split() for line in (self.folder / f"started-{rank}").read_text().splitlines()]

    def is_anyone_left(self) -> bool:
        pids = [start[0] for rank in (0, 1) for start in self.starts(rank)]
        return any(Path(f"/proc/{pid}").exists() for pid in pids)


Tell = Callable[..., Story]


@pytest.fixture
def tell_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Tell:
    monkeypatch.setattr(supervisor_module, "STACK_SECONDS", 0.5)

    def tell(
        *script: str,
        saved: Sequence[int] = (),
        first_step: int = 0,
        grace: float = 1.0,
        **settings: int | float | None,
    ) -> Story:
        monkeypatch.setattr(supervisor_module, "GRACE", grace)
        code = "\n".join([RANK, *script])
        newest = iter(saved)
        supervisor = Supervisor(
            command=[sys.executable, "-c", code, str(tmp_path)],
            folder=tmp_path,
            config=SuperviseConfig(**settings),  # type: ignore[arg-type]
            step=first_step,
            newest_step=lambda: next(newest),
            of_rank=[
                {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"} for rank in (0, 1)
            ],
        )
        before = time.monotonic()
        ended = supervisor.run()
        seconds = time.monotonic() - before
        return Story(tmp_path, ended, capfd.readouterr().err, seconds, ended=time.time())

    return tell


def test_ranks_that_end_well_end_the_run(tell_story: Tell) -> None:
    story = tell_story("send_to_supervisor(ENDED)", "if rank == 0: time.sleep(0.3)")
    assert (story.code, story.said) == (0, "")
    assert {path.name for path in story.folder.iterdir()} == {"started-0", "started-1"}


def test_a_killed_rank_is_named_with_its_last_lines_and_ends_the_others(tell_story: Tell) -> None:
    story = tell_story(
        "if rank == 0: wait()",
        "wait_for_both()",
        "beat(3)",
        "print('what the driver says', file=sys.stderr, flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        grace=0.0,
    )
    assert story.code == 3
    assert "rank 1 was killed by SIGKILL (often for lack of memory" in story.said
    assert "after step 3; its last lines:\n  what the driver says\n" in story.said
    assert story.said.count("error") == 1
    assert story.seconds < GONE_WITHIN and not story.is_anyone_left()
    assert (story.folder / REASON_FILE).read_text() in story.said


def test_an_exit_without_a_word_is_named(tell_story: Tell) -> None:
    story = tell_story("if rank == 0: wait()", "os._exit(7)", grace=0.0)
    assert story.code == 3
    assert "rank 1 ended with exit code 7 before its first step" in story.said


@pytest.mark.parametrize(
    ("error", "code"), [("TrainingFault('loss is nan')", 4), ("UserError('no such file')", 2)]
)
def test_what_a_rank_says_itself_is_said_once_and_not_tried_again(
    tell_story: Tell, error: str, code: int
) -> None:
    story = tell_story(
        "if rank == 1: wait()",
        "wait_for_both()",
        f"sys.exit(report({error}))",
        grace=0.0,
        max_restarts=3,
    )
    assert story.code == code
    assert story.said.count("error") == 1 and "rank" not in story.said
    assert len(story.starts(0)) == 1 and not story.is_anyone_left()


def test_a_rank_that_lost_another_is_not_to_blame(tell_story: Tell) -> None:
    # The one that lost it may be gone first: it only has to read from a closed connection.
    lost = "RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')"
    story = tell_story(
        f"if rank == 0: beat(9); sys.exit(report({lost}))",
        "time.sleep(0.4)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
    )
    assert story.code == 3
    assert "rank 1 was killed by SIGSEGV" in story.said and "gloo" not in story.said


def test_a_lost_connection_is_reported_where_nobody_else_is_to_blame(tell_story: Tell) -> None:
    story = tell_story("sys.exit(report(RuntimeError('gloo: Connection reset by peer')))")
    assert story.code == 3
    assert story.said.count("Connection reset by peer") == 1


DIES_TWICE = (
    "if rank == 0 and first < 6: wait()",
    "beat(first + 2)",
    "if first < 6: os.kill(os.getpid(), signal.SIGKILL)",
)


@pytest.mark.slow
def test_a_run_that_gets_further_each_time_is_started_again(tell_story: Tell) -> None:
    story = tell_story(*DIES_TWICE, saved=[3, 6], max_restarts=2)
    assert story.code == 0
    assert [start[1] for start in story.starts(0)] == ["0", "3", "6"]
    assert [start[1] for start in story.starts(1)] == ["0", "3", "6"]
    assert "supervise: restart 2 of 2, from step 6" in story.said
    assert not (story.folder / REASON_FILE).exists()  # of a run that has ended well


@pytest.mark.slow
def test_no_more_restarts_than_were_allowed(tell_story: Tell) -> None:
    story = tell_story(*DIES_TWICE, saved=[3], max_restarts=1)
    assert story.code == 3 and len(story.starts(0)) == 2


def test_the_same_step_failing_twice_ends_the_run(tell_story: Tell) -> None:
    story = tell_story(*DIES_TWICE, saved=[0, 0, 0], max_restarts=9)
    assert story.code == 3 and len(story.starts(0)) == 2
    assert "it has failed twice after step 2: not started again" in story.said


def test_a_restart_goes_back_again_until_the_run_is_of_the_new_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    words = (f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "trainer.max_steps=4")
    run = make_run(tmp_path / "run", *words)
    typed = (f"resume={run / 'checkpoints' / 'step-2'}", "supervise.max_restarts=3")
    start, found = open_typed(*typed), []

    class Restarts:
        def __init__(self, *, newest_step: Callable[[], int], **_: object) -> None:
            self.newest_step = newest_step

        def run(self) -> int:
            found.append(self.newest_step())  # it died while it loaded
            start.discard_later_steps()
            found.append(self.newest_step())
            store = CheckpointStore(run / "checkpoints")
            store.begin(4)
            store.add_document(4, "training", {"step": 4})  # byte for byte what was there
            store.commit(4)
            found.append(self.newest_step())
            return 0

    monkeypatch.setattr(run_module, "Supervisor", Restarts)
    assert run_module.run_ranks(start.config, start, typed) == 0
    assert found == [2, 2, 4]


HANGS = (
    "import threading",
    "def idle(): wait()",
    "def hang_here(): wait()",
    "threading.Thread(target=idle, daemon=True).start()",
    "for step in range(5):",
    "    time.sleep(0.02); beat(step)",
    "    if step == 3 and rank == 1: {}",
    "wait()",
)


def test_a_rank_that_hangs_is_found_and_its_stack_shown(tell_story: Tell) -> None:
    story = tell_story("\n".join(HANGS).format("hang_here()"), hang_minutes=0.02)
    assert story.code == 3
    assert "rank 1 hangs after step 3, for " in story.said
    assert "in hang_here" in story.said and "stacks-rank-1.txt" in story.said
    stacks = (story.folder / "stacks-rank-1.txt").read_text()
    assert "in hang_here" in stacks and "in idle" in stacks and "in idle" not in story.said
    assert not story.is_anyone_left()


def test_a_stopped_rank_is_found_and_named_so(tell_story: Tell) -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    story = tell_story("\n".join(HANGS).format(stop), hang_minutes=0.02)
    assert "rank 1 is stopped (SIGSTOP) after step 3" in story.said
    assert not story.is_anyone_left()


@pytest.mark.slow
def test_a_run_of_long_steps_does_not_hang(tell_story: Tell) -> None:
    slow = ("beat(1)", "time.sleep(0.9)", "beat(2)", "time.sleep(2.4)", "beat(3)")
    assert tell_story(*slow, hang_minutes=0.02).code == 0
    # What takes its time outside of the training loop is no concern.
    assert (
        tell_story("beat(1)", "send_to_supervisor(ENDED)", "time.sleep(2)", hang_minutes=0.02).code
        == 0
    )
    assert tell_story("beat(1)", "time.sleep(2)", hang_minutes=None).code == 0


@pytest.mark.slow
def test_waiting_for_a_long_save_is_not_a_hang(tell_story: Tell) -> None:
    save = (
        "def is_there(what): return (folder / what).exists()",
        "if rank == 0:",
        "    (folder / 'started').touch()",
        "    for _ in range(13): refresh_liveness(); time.sleep(0.2)",
        "    (folder / 'saved').touch()",
        "while not is_there('started'): beat(1); time.sleep(0.02)",
        "while not is_there('saved'): time.sleep(0.02)",
        "beat(2)",
        "(folder / f'ends-{rank}').touch()",
        "while not is_there(f'ends-{1 - rank}'): time.sleep(0.02)",
    )
    story = tell_story(*save, hang_minutes=0.02)
    assert (story.code, story.said) == (0, "")


def test_another_port_is_tried_where_one_was_taken(
    tell_story: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([4001, 4002])
    monkeypatch.setattr(supervisor_module, "free_port", lambda: next(ports))
    story = tell_story(
        "if os.environ['MASTER_PORT'] == '4001':",
        "    if rank == 1: wait()",
        "    sys.exit(report(RuntimeError('port: 4001, name: EADDRINUSE, message: in use')))",
    )
    assert (story.code, story.said) == (0, "")
    assert [start[2] for start in story.starts(1)] == ["4001", "4002"]


def test_a_port_is_free_and_not_always_the_same() -> None:
    assert len({free_port() for _ in range(8)}) > 1


READY = "(folder / f'ready-{rank}').touch()"


@pytest.fixture
def hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the supervisor hear of a signal when both ranks are ready for it."""

    def arm(signum: int) -> None:
        heard = lambda: signum if len(list(tmp_path.glob("ready-*"))) == 2 else None  # noqa: E731
        monkeypatch.setattr(supervisor_module, "signal_received", heard)

    return arm


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_waited_for(
    tell_story: Tell, hear: Callable[[int], None], signum: signal.Signals
) -> None:
    hear(signum)
    story = tell_story(
        f"signal.signal({int(signum)}, lambda *_: (folder / f'heard-{{rank}}').touch())",
        "beat(1)",
        READY,
        "while not (folder / f'heard-{rank}').exists(): time.sleep(0.01)",
        "time.sleep(0.3)",  # it saves
        "(folder / f'saved-{rank}').touch()",
        f"os._exit({128 + signum})",
        max_restarts=3,
    )
    assert (story.code, story.said) == (128 + signum, "")
    assert all((story.folder / f"saved-{rank}").exists() for rank in (0, 1))
    assert len(story.starts(0)) == 1


def test_a_save_that_fails_after_a_signal_is_a_failure(
    tell_story: Tell, hear: Callable[[int], None]
) -> None:
    hear(signal.SIGTERM)
    story = tell_story(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / f'heard-{rank}').touch())",
        "beat(1)",
        READY,
        "while not (folder / f'heard-{rank}').exists(): time.sleep(0.01)",
        "os._exit(3 if rank == 0 else 143)",
        max_restarts=3,
    )
    assert story.code == 3
    assert len(story.starts(0)) == 1


def test_a_signal_while_a_checkpoint_is_looked_for_ends_the_run(tmp_path: Path) -> None:
    slow = "newest_step=lambda: Path(sys.argv[1], 'looks').touch() or time.sleep(60)"
    script = LAUNCHER.replace("newest_step=lambda: 0", slow).replace(
        "import sys", "import sys, time"
    )
    script = script.replace("SuperviseConfig()", "SuperviseConfig(max_restarts=1)")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), "\n".join([RANK, "os._exit(7)"])], cwd=ROOT
    )
    until = time.monotonic() + LONGEST
    while not (tmp_path / "looks").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONGEST) == 143
    assert time.monotonic() - before < ends_within()


@pytest.mark.slow
def test_ranks_that_have_not_started_a_step_are_not_waited_for(
    tell_story: Tell, hear: Callable[[int], None]
) -> None:
    hear(signal.SIGTERM)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    story = tell_story("send_to_supervisor(ENDED)", ignore, READY, "wait()")
    assert story.code == 143
    assert story.seconds < GONE_WITHIN and not story.is_anyone_left()
    # From the signal on: what comes before is the start of two processes.
    began = max(file.stat().st_mtime for file in story.folder.glob("ready-*"))
    assert story.ended - began < ends_within()


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
    step=0,
    newest_step=lambda: 0,
    of_rank=[{"LOCAL_RANK": str(rank)} for rank in (0, 1)],
).run())
"""


def launch(folder: Path, *script: str) -> subprocess.Popen[str]:
    """Start a supervisor in a process of its own; returns when its ranks run."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), "\n".join([RANK, *script])],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + LONGEST
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call ties ranks to it")
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process = launch(tmp_path, READY, "wait()")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until = time.monotonic() + GONE_WITHIN
    while Story(tmp_path, 0, "", 0).is_anyone_left():
        assert time.monotonic() < until, "a rank goes on without its launcher"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    process = launch(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",  # a long step
        "beat(1)",
        READY,
        "wait()",
    )
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * SAME_PRESS_OF_A_RANK)
    assert process.poll() is None
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    while Story(tmp_path, 0, "", 0).is_anyone_left():
        time.sleep(0.02)
    assert time.monotonic() - before < AT_ONCE


def test_a_child_whose_parent_is_gone_ends_itself() -> None:
    code = "from app.process.launch import live_with_parent; live_with_parent(); print('alive')"
    environment = os.environ | {"LOFT_PARENT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (137, b"")
