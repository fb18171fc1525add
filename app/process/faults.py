"""Fault injection: kill or hang a run, or give it a NaN or a full disk, at a point of `faults=`.

The program calls `fault_point` at each point, where an armed fault fires. A fault fires as often as
it is listed. It is recorded in the run's folder before it fires, so a resumed run does not repeat
it.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import nearest

NOTES_FILE = "faults-fired"
"""file in the run folder that lists the faults that have fired, one per line"""
SIGNALS = {
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sigusr1": signal.SIGUSR1,
    "sigstop": signal.SIGSTOP,
}
"""faults that send a signal to a rank during a step"""
_STEP_FAULTS = (
    *("rank_killed", "hang", "worker_killed", "nan", "inf", "grad_nan", "grad_inf"),
    *SIGNALS,
)
_SAVE_FAULTS = ("enospc", "ckpt", "disk")
FAULT_NAMES = (*_STEP_FAULTS, "batch_killed", *_SAVE_FAULTS)
CHECKPOINT_POINTS = (
    "after_begin",
    "after_file",
    "after_manifest",
    "after_marker",
    "after_rename",
    "after_unmark",
    "after_rotation",
)
"""points of a save, in order; `after_unmark` is during the removal of an old checkpoint"""
NEEDS_SPACE = ("disk.mkdir", "disk.create", "disk.write", "disk.fsync", "disk.replace")
"""operations that fail on a full disk"""
_FORMS = (
    "rank_killed@STEP, rank_killed:RANK@STEP (without RANK: the last; likewise hang; nan and inf: "
    "the step's loss; grad_nan, grad_inf: its gradients; sigterm, sigint, sigusr1, sigstop: during "
    "the step; worker_killed: a worker of the data loader), "
    "batch_killed:K@STEP (the last rank, before the K-th micro-batch of the step), "
    "enospc, enospc:K@STEP (the K-th operation of the save), ckpt:POINT@STEP, "
    "disk:K@STEP (killed at the K-th operation of the save); faults of a save fire on the first "
    "rank, or on RANK: enospc:K:RANK@STEP, ckpt:POINT:RANK@STEP, disk:K:RANK@STEP"
)
_PATTERN = re.compile(r"(?P<name>[^:@]+)(:(?P<argument>[^@]*))?(@(?P<step>.*))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of `faults=`."""

    text: str
    name: str
    step: int | None = None
    """optimizer step, or the step of the save; None: the first save"""
    rank: int | None = None
    """None: the last rank for a fault of a step, the first rank for a fault of a save"""
    number: int | None = None
    """number of the operation in the save, or of the micro-batch in the step, from 1"""
    point: str | None = None

    def fires_on(self, rank: int, num_ranks: int) -> bool:
        if self.rank is not None:
            return self.rank == rank
        is_step_fault = self.name in (*_STEP_FAULTS, "batch_killed")
        return rank == (num_ranks - 1 if is_step_fault else 0)


@dataclass(kw_only=True, slots=True)
class _Armed:
    faults: list[Fault]
    notes: Path
    save: int | None = None
    """step of the current save"""
    num_operations: int = 0
    """disk operations since the save began"""
    num_space_operations: int = 0
    """those of them that fail on a full disk"""
    batches: list[int] = field(default_factory=list)
    """the current step, once for each of its micro-batches so far"""

    def record(self, fault: Fault) -> None:
        """Record that `fault` fires, before it does: the process may not survive it."""
        self.faults.remove(fault)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self.notes, flags, 0o666)
        try:
            os.write(descriptor, f"{fault.text}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_armed: _Armed | None = None


def parse_faults(texts: Sequence[str]) -> tuple[list[Fault], list[str]]:
    """Parse `faults=[...]`; return the valid faults, and the problems of the others."""
    faults, problems = [], []
    for text in texts:
        try:
            faults.append(_parse(str(text)))
        except ValueError as error:
            problems.append(f"faults: {text!r} {error}")
    return faults, problems


def check_workers(faults: Sequence[Fault], num_workers: int) -> list[str]:
    """List the faults that kill a worker of the data loader if it has none."""
    return [
        f"faults: {fault.text!r} kills a worker of the data loader, but "
        f"data.num_workers={num_workers}; type data.num_workers=1"
        for fault in faults
        if fault.name == "worker_killed" and num_workers == 0
    ]


def _parse(text: str) -> Fault:
    match = _PATTERN.fullmatch(text)
    name = match["name"] if match else text
    if match is None or name not in FAULT_NAMES:
        raise ValueError(f"is not a fault{nearest(name, FAULT_NAMES)}; expected {_FORMS}")
    argument = match["argument"]
    step = None if match["step"] is None else _number(match["step"], "the step after @", least=1)
    if name in _STEP_FAULTS:
        if step is None:
            raise ValueError(f"has no step; type {name}@12")
        rank = None if argument is None else _number(argument, "the rank after :", least=0)
        return Fault(text=text, name=name, step=step, rank=rank)
    rank = None
    if name in _SAVE_FAULTS and argument is not None and ":" in argument:
        argument, _, of_rank = argument.partition(":")
        rank = _number(of_rank, "the rank after the second :", least=0)
    if name == "ckpt":
        if argument not in CHECKPOINT_POINTS:
            close = nearest(argument or "", CHECKPOINT_POINTS)
            points = ", ".join(CHECKPOINT_POINTS)
            raise ValueError(f"is not at a point of a save{close}; expected ckpt:POINT of {points}")
        return Fault(text=text, name=name, step=step, point=argument, rank=rank)
    if argument is None and name == "disk":
        raise ValueError("has no operation number; type disk:1")
    if name == "batch_killed" and (argument is None or step is None):
        raise ValueError("has no micro-batch or no step; type batch_killed:1@12")
    number = None if argument is None else _number(argument, "the number after :", least=1)
    return Fault(text=text, name=name, step=step, number=number, rank=rank)


def _number(text: str, what: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"has {text!r} for {what}; expected a whole number of at least {least}")
    return int(text)


def arm_faults(faults: Sequence[Fault], folder: Path, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Arm this rank's `faults` that have not fired yet in the run in `folder`."""
    global _armed
    notes = folder / NOTES_FILE
    fired = Counter(notes.read_text().splitlines() if notes.exists() else [])
    left = []
    for fault in faults:
        if fired[fault.text] > 0:
            fired[fault.text] -= 1
        elif fault.fires_on(rank, num_ranks):
            left.append(fault)
    _armed = _Armed(faults=left, notes=notes) if left else None


def is_due(name: str, step: int) -> bool:
    """Return, once, whether fault `name` (nan, inf, grad_nan, grad_inf) fires at `step`."""
    if _armed is None:
        return False
    due = [fault for fault in _armed.faults if fault.name == name and fault.step == step]
    if due:
        _armed.record(due[0])
    return bool(due)


def fault_point(point: str, step: int | None = None) -> None:
    """Fire the fault armed for `point`, if any: it may kill or hang the process, or raise OSError.

    Points are `batch` (before a micro-batch of `step`), `step` (after an optimizer step), `save`
    (a save begins, on each rank), `ckpt:...` during a save, and `disk....` for each operation on
    its files.
    """
    if _armed is None:
        return
    if point == "save":
        _armed.save, _armed.num_operations, _armed.num_space_operations = step, 0, 0
    elif point == "batch" and step is not None:
        _armed.batches = [batch for batch in (*_armed.batches, step) if batch == step]
    elif point.startswith("disk."):
        _armed.num_operations += 1
        _armed.num_space_operations += point in NEEDS_SPACE
    for fault in _armed.faults:
        if _fires_at(fault, _armed, point, step):
            _armed.record(fault)
            return _act(fault)


def _fires_at(fault: Fault, armed: _Armed, point: str, step: int | None) -> bool:
    if fault.name in ("rank_killed", "hang"):
        return point == "step" and fault.step == step
    if fault.name in SIGNALS or fault.name == "worker_killed":
        return point == "batch" and fault.step == step
    if fault.name == "batch_killed":
        return point == "batch" and fault.step == step and fault.number == len(armed.batches)
    if armed.save is None or fault.step not in (None, armed.save):
        return False
    if fault.name == "ckpt":
        return point == f"ckpt:{fault.point}"
    if fault.name == "disk":
        return point.startswith("disk.") and fault.number == armed.num_operations
    if fault.name == "enospc" and fault.number is None:
        return point == "disk.write"
    return (
        fault.name == "enospc"
        and point in NEEDS_SPACE
        and fault.number == armed.num_space_operations
    )


def _act(fault: Fault) -> None:
    if fault.name == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.name in SIGNALS:
        return os.kill(os.getpid(), SIGNALS[fault.name])
    if fault.name == "worker_killed":
        return multiprocessing.active_children()[0].kill()
    if fault.name != "hang":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(3600)
