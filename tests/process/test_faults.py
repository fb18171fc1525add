"""Faults strike where they are typed, once for each time they are typed."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from app.process import faults
from tests.training.checkpoint.saves import NOT_KILLED, in_a_child


def plan_faults(run: Path, *texts: str, rank: int = 0, num_ranks: int = 1) -> None:
    armed, problems = faults.parse_faults(texts)
    assert problems == []
    faults.arm_faults(armed, run, rank=rank, num_ranks=num_ranks)


def test_every_form_is_read() -> None:
    texts = {
        "rank_killed@12": (12, None, None, None),
        "inf:1@7": (7, 1, None, None),
        "enospc": (None, None, None, None),
        "enospc@20": (20, None, None, None),
        "enospc:3:1@20": (20, 1, 3, None),
        "ckpt:after_rename": (None, None, None, "after_rename"),
        "ckpt:after_file:1@20": (20, 1, None, "after_file"),
        "disk:17:2": (None, 2, 17, None),
        "batch_killed:2@3": (3, None, 2, None),
    }
    found, problems = faults.parse_faults([*texts])
    assert problems == []
    read = {fault.text: (fault.step, fault.rank, fault.number, fault.point) for fault in found}
    assert read == texts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank_kiled@12", "is not a fault; did you mean rank_killed?"),
        ("ckpt:after_renam", "is not at a point of a save; did you mean after_rename?"),
        ("nan", "has no step; type nan@12"),
        ("nan@0", "'0' for the step after @; expected a whole number of at least 1"),
        ("disk:0", "'0' for the number after :"),
    ],
)
def test_what_is_not_a_fault_is_refused_with_the_nearest(text: str, words: str) -> None:
    found, problems = faults.parse_faults(["nan@3", text])
    assert [fault.text for fault in found] == ["nan@3"]
    (problem,) = problems
    assert problem.startswith(f"faults: {text!r} ") and words in problem


def test_a_rank_is_killed_at_its_step_and_not_again(tmp_path: Path) -> None:
    def train() -> None:
        plan_faults(tmp_path, "rank_killed@3")
        for step in range(1, 6):
            (tmp_path / "steps").write_text(str(step))
            faults.fault_point("step", step)

    assert in_a_child(train) == -signal.SIGKILL
    assert (tmp_path / "steps").read_text() == "3"
    assert in_a_child(train) == NOT_KILLED
    assert (tmp_path / faults.NOTES_FILE).read_text() == "rank_killed@3\n"


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


def test_a_signal_comes_within_its_step(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        plan_faults(tmp_path, "sigusr1@3")
        for step in (2, 3, 3):
            faults.fault_point("batch", step)
            faults.fault_point("step", step - 1)
            assert heard == ([signal.SIGUSR1] if step == 3 else [])
    finally:
        signal.signal(signal.SIGUSR1, before)


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
