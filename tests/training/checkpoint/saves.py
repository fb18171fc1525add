"""What the tests of the store save, and how they let it die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from app.process import faults
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.store import CheckpointStore

NAMES = ["model", "optimizer", "random-rank-0", "trainer"]
NOT_KILLED = 0


def tensors_of(step: int, name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + len(name))
    return {
        f"{name}/weight": torch.randn(20, 7, generator=generator),
        f"{name}/half": torch.randn(5, generator=generator).bfloat16(),
    }


def save(store: CheckpointStore, step: int, metric: float | None = None) -> Checkpoint:
    store.begin(step)
    for name in ("model", "optimizer"):
        store.add_tensors(step, name, tensors_of(step, name))
    for name in ("random-rank-0", "trainer"):
        store.add_document(step, name, {"step": step, "of": name, "lr": step / 3})
    return store.commit(step, metric=metric, details={"step": step})


def is_as_saved(checkpoint: Checkpoint) -> bool:
    """Tell whether every tensor and document is what `save` gave."""
    step = checkpoint.step
    assert checkpoint.names() == NAMES
    for name in ("model", "optimizer"):
        expected, found = tensors_of(step, name), checkpoint.tensors(name)
        if found.keys() != expected.keys():
            return False
        if not all(torch.equal(found[key], expected[key]) for key in expected):
            return False
    return all(
        checkpoint.document(name) == {"step": step, "of": name, "lr": step / 3}
        for name in ("random-rank-0", "trainer")
    )


def in_a_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return its exit status, below zero for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = NOT_KILLED
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number: int, run: Path, work: Callable[[], None]) -> bool:
    """Run `work` in a process that dies at its `number`-th operation; tell whether it came so far.

    Counted from the beginning of a save.
    """

    def work_until_then() -> None:
        armed, problems = faults.parse_faults([f"disk:{number}"])
        assert not problems
        faults.arm_faults(armed, run)
        work()

    status = in_a_child(work_until_then)
    assert status in (NOT_KILLED, -signal.SIGKILL)
    (run / faults.NOTES_FILE).unlink(missing_ok=True)
    return status == -signal.SIGKILL


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())
