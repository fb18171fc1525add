"""Run a chain of deaths and resumes, and compare the result with an uninterrupted run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from app.process.faults import NEEDS_SPACE, NOTES_FILE
from app.process.logs import LOG_FILE
from app.training.checkpoint.store import CheckpointStore
from tests.processes import GONE_WITHIN
from tests.reliability.cases import Chain, Death, Operations, Variant
from tests.reliability.plans import plan_counted
from tests.reliability.shell import ExitStatus, Shell
from tests.runs import check_same_run
from tests.training.checkpoint.test_checkpoint_store import DAMAGES

RUN = "run"
COMES_WITHIN = 240.0
"""seconds within which a run must reach a step"""
BATCHES = "batches-rank-0"
"""file in which a warm process records hashes of its batches"""


@dataclass(kw_only=True, slots=True)
class Result:
    """Outcome of a chain."""

    chain: str
    done: dict[str, int] = field(default_factory=dict)
    """number of deaths with the expected outcome, by kind"""
    planned: dict[str, int] = field(default_factory=dict)
    is_equal: bool = False
    """whether the run equals the uninterrupted one, bit for bit"""
    problems: list[str] = field(default_factory=list)
    seconds_until_gone: float = 0.0
    """longest time from the end of a command to that of its last process"""
    kills_in_one_epoch: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.is_equal and not self.problems


class References:
    """Uninterrupted runs, one per set of overrides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def train(self, chain: Chain, shell: Shell, words: list[str]) -> Path:
        """Train with `words`, once; return the folder of run, log and records."""
        name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
        folder = self.folder / "references" / name
        with self._locks[name]:
            if not (folder / RUN / "metrics.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                typed = [*words, f"output.dir={folder / RUN}"]
                ending = shell.type_train(typed, folder)
                if ending.code != 0:
                    raise RuntimeError(f"{chain.name}: uninterrupted, it ends with {ending}")
        return folder


def count_operations(variant: Variant, shell: Shell, references: References) -> Operations:
    """Count the disk operations of a save of `variant`."""
    chain = plan_counted(variant)
    folder = references.train(chain, shell, variant.words(references.folder, *chain.words))
    points = defaultdict(list)
    for line in read_lines(folder / "operations"):
        step, point = line.split()
        points[int(step)].append(point)
    del points[min(points)]  # the first save removes no checkpoint
    fewest = min(points.values(), key=len)
    # After the rename the save is complete; a full disk only delays the removal of older ones.
    until_named = fewest[: fewest.index("disk.replace") + 1]
    need_room = sum(point in NEEDS_SPACE for point in until_named)
    return Operations(all=len(fewest), need_room=need_room)


def run_chain(chain: Chain, shell: Shell, references: References, seed: int) -> Result:
    """Let a run die and resume as `chain` says; its folder is removed after success.

    Failures of the run are listed in the result and do not raise.
    """
    began = time.monotonic()
    result = Result(chain=chain.name)
    for death in chain.deaths:
        result.planned[death.what] = result.planned.get(death.what, 0) + 1
    words = chain.variant.words(references.folder, *chain.words)
    folder = references.folder / "chains" / chain.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        uninterrupted = references.train(chain, shell, words)
        _die_and_resume(chain, shell, [*words, f"output.dir={folder / RUN}"], folder, seed, result)
        if not result.problems:
            result.problems += _differences(folder, uninterrupted, chain)
            result.is_equal = not result.problems
            result.kills_in_one_epoch = _most_in_one_epoch(chain, uninterrupted)
    except (RuntimeError, AssertionError, OSError) as error:
        result.problems.append(f"{type(error).__name__}: {error}"[:2000])
    if result.is_good:
        shutil.rmtree(folder)
    result.seconds = time.monotonic() - began
    return result


def _die_and_resume(
    chain: Chain, shell: Shell, words: list[str], folder: Path, seed: int, result: Result
) -> None:
    armed = [death.fault for death in chain.deaths if death.fault is not None]
    typed = [*words, "resume=auto", f"faults=[{','.join(armed)}]"]
    dice = random.Random(f"{chain.name} {seed}")
    expected_output: list[str] = []
    for number, death in enumerate([*chain.deaths, None]):
        is_warm = number != chain.cold or (death is not None and death.fault is None)
        ending = shell.type_train(typed, folder, is_warm=is_warm, meanwhile=_sender(death, folder))
        result.seconds_until_gone = max(result.seconds_until_gone, ending.seconds_until_gone)
        problems = _problems(death, ending, folder / RUN, expected_output)
        where = "the end" if death is None else f"{death.fault or death.signum} at {death.step}"
        result.problems += [f"{where}: {problem}" for problem in problems]
        if problems:
            return
        if death is not None:
            result.done[death.what] = result.done.get(death.what, 0) + 1
            expected_output = _damage_newest(folder / RUN, dice) if death.damages else []


def _sender(death: Death | None, folder: Path) -> Callable[[int], None] | None:
    """Return a function that sends a signal once the run has started the step of `death`."""
    if death is None or death.fault is not None:
        return None
    begins = _size(folder / BATCHES)

    def send(pid: int) -> None:
        until = time.monotonic() + COMES_WITHIN
        while time.monotonic() < until:
            steps = [int(line.split()[0]) for line in read_lines(folder / BATCHES, begins)]
            if steps and steps[-1] >= death.step:
                return os.kill(pid, death.signum)
            time.sleep(0.002)
        raise RuntimeError(f"step {death.step} was not reached")

    return send


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def read_lines(file: Path, begins: int = 0) -> list[str]:
    """Return complete lines of a record, without `begin`."""
    text = file.read_bytes()[begins:].decode() if file.exists() else ""
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line != "begin"]


def _problems(
    death: Death | None, ending: ExitStatus, run: Path, expected_output: list[str]
) -> list[str]:
    """List deviations from the expected state after the end of a process."""
    problems = []
    expected = 0 if death is None else death.code
    if ending.code != expected:
        problems.append(f"exit code {ending.code}, not {expected}: {ending.output[-1500:]}")
    if ending.seconds_until_gone >= GONE_WITHIN:
        problems.append("processes are still running")
    if "Traceback" in ending.output:
        problems.append(f"a traceback: {ending.output[-1500:]}")
    problems += [
        f"{words!r} is not printed" for words in expected_output if words not in ending.output
    ]
    if death is None:
        return problems
    if death.says not in ending.output:
        problems.append(f"{death.says!r} is not printed: {ending.output[-1500:]}")
    notes = run / NOTES_FILE
    struck = notes.read_text().splitlines() if notes.exists() else []
    if death.fault is not None and (not struck or struck[-1] != death.fault):
        problems.append(f"another fault ended it: {struck}")
    good, damaged = CheckpointStore(run / "checkpoints").newest_good()
    problems += damaged
    newest = 0 if good is None else good.step
    if death.saved is not None and newest != death.saved:
        problems.append(f"the newest checkpoint is of step {newest}, not {death.saved}")
    if death.what == "sigterms" and not newest >= death.step:
        problems.append(f"the newest checkpoint is of step {newest}, before {death.step}")
    if death.what.startswith("disk full") and list(run.glob("checkpoints/*.tmp")):
        problems.append("the unfinished save was not removed")
    return problems


def _damage_newest(run: Path, dice: random.Random) -> list[str]:
    """Damage the newest checkpoint; return the expected output of the next resume."""
    *_, before, newest = CheckpointStore(run / "checkpoints").checkpoints()
    file = newest.folder / dice.choice(sorted(newest.manifest["files"]))
    dice.choice(DAMAGES)(file, dice)
    return [f"{newest.folder.name} damaged (", file.name, f"using {before.folder.name}, "]


def _differences(folder: Path, uninterrupted: Path, chain: Chain) -> list[str]:
    try:
        check_same_run(folder / RUN, uninterrupted / RUN)
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        return [f"not the same run: {line} {error}"[:2000]]
    problems = []
    for rank in range(chain.variant.ranks):
        name = f"batches-rank-{rank}"
        (reference,) = read_batches(uninterrupted / name)
        seen: set[int] = set()
        for process in read_batches(folder / name):
            for step, hashes in process.items():
                if hashes != reference[step][: len(hashes)]:
                    problems.append(f"rank {rank} trained on other rows in step {step}")
                if len(hashes) == len(reference[step]):
                    seen.add(step)
        if chain.cold is None and seen != set(reference):
            problems.append(f"rank {rank} did not do steps {sorted(set(reference) - seen)}")
    return problems


def read_batches(file: Path) -> list[dict[int, list[str]]]:
    """Return hashes of batches by step, for each training process."""
    processes: list[dict[int, list[str]]] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        if line == "begin":
            processes.append(defaultdict(list))
        else:
            step, digest = line.split()
            processes[-1][int(step)].append(digest)
    return processes


def _most_in_one_epoch(chain: Chain, uninterrupted: Path) -> int:
    """Return the largest number of deaths in one epoch."""
    found = re.search(r"; (\d+) steps of ", (uninterrupted / RUN / LOG_FILE).read_text())
    assert found is not None
    epochs = [(death.step - 1) // int(found[1]) for death in chain.deaths]
    return max(map(epochs.count, epochs))
