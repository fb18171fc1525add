"""Faults strike where they are typed, once for each time they are typed."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.process import faults
from tests.processes import LONGEST
from tests.training.checkpoint.saves import NOT_KILLED, in_a_child


def plan_faults(run: Path, *texts: str, rank: int = 0, num_ranks: int = 1) -> None:
    armed, problems = faults.parse_faults(texts)
    assert problems == []
    faults.arm_faults(armed, run, rank=rank, num_ranks=num_ranks)


def test_every_form_is_read() -> None:
    texts = [
        "rank_killed@12",
        "rank_killed:0@12",
        "hang@9",
        "nan@7",
        "inf:1@7",
        "grad_nan@7",
        "grad_inf:0@8",
        "enospc",
        "enospc:3@20",
        "enospc@20",
        "ckpt:after_rename",
        "ckpt:after_marker@20",
        "disk:17",
        "disk:17@20",
        "enospc:3:1@20",
        "ckpt:after_file:1@20",
        "disk:17:2",
    ]
    found, problems = faults.parse_faults(texts)
    assert problems == []
    assert [fault.text for fault in found] == texts
    other_steps = [None, 20, 20, None, 20, None, 20, 20, 20, None]
    assert [fault.step for fault in found] == [12, 12, 9, 7, 7, 7, 8, *other_steps]
    assert [fault.rank for fault in found[:7]] == [None, 0, None, None, 1, None, 0]
    assert [fault.number for fault in found[7:10]] == [None, 3, None]
    assert found[10].point == "after_rename" and found[12].number == 17
    assert [fault.rank for fault in found[7:]] == [None] * 7 + [1, 1, 2]
    assert found[15].point == "after_file" and found[16].number == 17


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank_kiled@12", "is not a fault; did you mean rank_killed?"),
        ("ckpt:after_renam", "is not at a point of a save; did you mean after_rename?"),
        ("ckpt", "is not at a point of a save"),
        ("nan", "has no step; type nan@12"),
        ("nan@0", "'0' for the step after @; expected a whole number of at least 1"),
        ("nan@", "'' for the step after @"),
        ("hang:-1@3", "'-1' for the rank after :"),
        ("disk", "has no operation number"),
        ("disk:0", "'0' for the number after :"),
        ("enospc:k", "'k' for the number after :"),
        ("disk:3:x", "'x' for the rank after the second :"),
        ("", "is not a fault"),
        ("nan@3@4", "'3@4' for the step after @"),
    ],
)
def test_what_is_not_a_fault_is_refused_with_the_nearest(text: str, words: str) -> None:
    found, problems = faults.parse_faults(["nan@3", text])
    assert [fault.text for fault in found] == ["nan@3"]
    (problem,) = problems
    assert problem.startswith(f"faults: {text!r} ") and words in problem


def test_nothing_happens_where_nothing_is_armed(tmp_path: Path) -> None:
    for point in ("step", "save", "disk.write", "ckpt:after_rename"):
        faults.fault_point(point, 3)
    assert not faults.is_due("nan", 3)
    plan_faults(tmp_path, "nan@5", "rank_killed@5", "ckpt:after_rename@5", "disk:1@5", "enospc@5")
    faults.fault_point("step", 4)
    faults.fault_point("disk.write")  # of no save
    faults.fault_point("save", 4)
    faults.fault_point("disk.write")
    faults.fault_point("ckpt:after_rename", 4)
    assert not (tmp_path / faults.NOTES_FILE).exists()


def test_a_rank_is_killed_at_its_step_and_not_again(tmp_path: Path) -> None:
    def train() -> None:
        plan_faults(tmp_path, "rank_killed@3")
        for step in range(1, 6):
            (tmp_path / "steps").write_text(str(step))
            faults.fault_point("step", step)

    assert in_a_child(train) == -signal.SIGKILL
    assert (tmp_path / "steps").read_text() == "3"
    assert in_a_child(train) == NOT_KILLED


def test_a_fault_strikes_as_often_as_it_is_typed(tmp_path: Path) -> None:
    def train() -> None:
        plan_faults(tmp_path, "rank_killed@3", "rank_killed@3")
        faults.fault_point("step", 3)

    assert [in_a_child(train) for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, NOT_KILLED]


@pytest.mark.parametrize(
    ("text", "struck"),
    [
        ("rank_killed@3", [1]),
        ("rank_killed:0@3", [0]),
        ("rank_killed:2@3", []),
        ("ckpt:after_rename", [0]),
        ("ckpt:after_rename:1@3", [1]),
    ],
)
def test_a_fault_strikes_on_its_rank(tmp_path: Path, text: str, struck: list[int]) -> None:
    for rank in (0, 1):

        def train(rank: int = rank) -> None:
            plan_faults(tmp_path, text, rank=rank, num_ranks=2)
            faults.fault_point("step", 3)
            faults.fault_point("save", 3)
            faults.fault_point("ckpt:after_rename", 3)

        assert in_a_child(train) == (-signal.SIGKILL if rank in struck else NOT_KILLED)


def test_a_nonfinite_number_is_injected_once(tmp_path: Path) -> None:
    plan_faults(tmp_path, "nan@7", "inf@8")
    asked = [(faults.is_due("nan", step), faults.is_due("inf", step)) for step in (6, 7, 7, 8)]
    assert asked == [(False, False), (True, False), (False, False), (False, True)]
    plan_faults(tmp_path, "nan@7", "inf@8")  # the run goes on
    assert not faults.is_due("nan", 7)


def test_a_full_disk_is_met_in_the_save_of_its_step(tmp_path: Path) -> None:
    plan_faults(tmp_path, "enospc:2@20")
    for step in (10, 20):
        faults.fault_point("save", step)
        faults.fault_point("disk.mkdir")
        faults.fault_point("disk.unlink")  # needs no room
        if step == 20:
            with pytest.raises(OSError) as told:
                faults.fault_point("disk.create")
            assert told.value.errno == errno.ENOSPC
        else:
            faults.fault_point("disk.create")
        faults.fault_point("disk.write")


def test_operations_are_counted_from_the_beginning_of_a_save(tmp_path: Path) -> None:
    def work() -> None:
        plan_faults(tmp_path, "disk:3")
        faults.fault_point("save", 10)
        for _ in range(2):
            faults.fault_point("disk.write")
        faults.fault_point("save", 20)
        for count in range(1, 4):
            (tmp_path / "count").write_text(str(count))
            faults.fault_point("disk.write")

    assert in_a_child(work) == -signal.SIGKILL
    assert (tmp_path / "count").read_text() == "3"


def test_a_hanging_rank_hangs(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.process import faults\n"
        "faults.arm_faults(faults.parse_faults(['hang@2'])[0], Path(sys.argv[1]))\n"
        "faults.fault_point('step', 1); print('one', flush=True)\n"
        "faults.fault_point('step', 2); print('two')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "one\n"
    until = time.monotonic() + LONGEST
    while not (tmp_path / faults.NOTES_FILE).exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    assert (tmp_path / faults.NOTES_FILE).read_text() == "hang@2\n"
    process.kill()
    assert process.communicate()[0] == ""


def test_faults_need_no_torch() -> None:
    code = (
        "import sys; import app.process.faults, app.training.checkpoint.store, "
        "app.training.checkpoint.checkpoint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["sigterm", "sigint", "sigusr1"])
def test_a_signal_comes_within_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    heard: list[int] = []
    before = signal.signal(faults.SIGNALS[name], lambda signum, frame: heard.append(signum))
    try:
        plan_faults(tmp_path, f"{name}@3")
        for step in (2, 3, 3):
            faults.fault_point("batch", step)
            faults.fault_point("step", step - 1)
            assert heard == ([faults.SIGNALS[name]] if step == 3 else [])
    finally:
        signal.signal(faults.SIGNALS[name], before)


def test_a_micro_batch_is_counted_within_its_step(tmp_path: Path) -> None:
    def reach_batches(*steps: int) -> int:
        def work() -> None:
            plan_faults(tmp_path, "batch_killed:2@3", rank=1, num_ranks=2)
            for step in steps:
                faults.fault_point("batch", step)

        return in_a_child(work)

    assert reach_batches(1, 1, 2, 2, 3, 4, 4) == NOT_KILLED
    assert reach_batches(2, 3, 3) == -signal.SIGKILL
    assert reach_batches(2, 3, 3) == NOT_KILLED  # it struck
    assert "type batch_killed:1@12" in faults.parse_faults(["batch_killed@3"])[1][0]
