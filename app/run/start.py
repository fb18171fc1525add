"""How a training starts: anew, from a checkpoint, or not at all because it is done."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.preflight import describe_base, requested_devices
from app.process.errors import UserError
from app.process.launch import STEP_VARIABLE, is_child, is_first_rank, run_dir
from app.run.changes import (
    check_allow,
    check_global_batch,
    check_stream,
    compare_facts,
    compare_settings,
    describe_global_batch,
    judge,
)
from app.run.find import AUTO, NEVER, checkpoints_of, has_checkpoints, typed_step
from app.run.lock import hold_run
from app.run.manifest import check_own, identity_of, installed_versions, read_manifest
from app.run.output import CONFIG_FILE, METRICS_FILE, hand_to_ranks, is_training, make_run_dir
from app.training.checkpoint.checkpoint import MARKER, Checkpoint, DamageError, load_checkpoint
from app.training.checkpoint.documents import check_documents

log = logging.getLogger(__name__)

ReadSettings = Callable[[Path], Any]
"""reads a run's config.yaml"""
LENGTHENS = ("epochs", "data")
"""changes that give a finished run more to do"""


@dataclass(kw_only=True, slots=True)
class Start:
    """Where a run begins."""

    folder: Path
    checkpoint: Checkpoint | None = None
    """what it goes on from; None: it starts anew"""
    is_done: bool = False
    """the run had finished, and nothing is left to do"""
    before: Mapping[str, Any] = field(default_factory=dict)
    """the manifest of the run that it goes on with"""
    allow: list[str] = field(default_factory=list)
    """resume_allow"""
    goes_back: bool = False
    """whether a person has named the checkpoint, which then need not be the newest"""

    @property
    def step(self) -> int:
        """Return how many optimizer steps are done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def check(self, facts: Mapping[str, Any]) -> None:
        """Compare what the data became with what it was; UserError where that forbids to go on."""
        if self.checkpoint is None or not is_first_rank():
            return
        problems, notes = judge(compare_facts(self.before, facts), self.allow)
        total = facts["total_steps"]
        if not problems and self.step > total:
            problems = [
                f"the run has {total} steps now, and goes on from step {self.step}; type "
                "trainer.max_steps or trainer.num_epochs for a longer one, or resume from an "
                "earlier checkpoint by resume=FOLDER/checkpoints/step-N"
            ]
        if problems:
            raise UserError(problems)
        for note in notes:
            log.info("RESUME: %s", note)
        log.info("RESUME: %d of %d steps are done", self.step, total)

    def earlier(self) -> list[dict[str, Any]]:
        """Return what earlier processes did of this run, for its manifest."""
        if self.checkpoint is None:
            return []
        newest = {name: self.before[name] for name in ("command", "started", "versions")}
        if "run" in self.before:
            newest["plan"] = self.before["run"]["plan"]
        return [*self.before.get("earlier", []), {**newest, "until_step": self.step}]

    def identity(self, facts: Mapping[str, Any]) -> dict[str, str | int]:
        """Return whose the checkpoints of this run are, for its manifest."""
        return identity_of(self.before, facts, self.step)

    def leaves(self) -> set[tuple[Path, int]]:
        """Name the checkpoints above one that was typed, by when they were written.

        Not by what they hold: the same steps trained again may save the very same bytes.
        """
        if self.checkpoint is None or not self.goes_back:
            return set()
        there = checkpoints_of(self.folder).checkpoints()
        newer = [one.folder for one in there if one.step > self.step]
        return {(folder, (folder / MARKER).stat().st_mtime_ns) for folder in newer}

    def take_over(self) -> None:
        """Take back what the run has gone beyond its start, on the first rank before it trains.

        What says that it has finished, and the checkpoints of a course that is left by going back.
        """
        (self.folder / METRICS_FILE).unlink(missing_ok=True)
        if self.checkpoint is not None and self.goes_back:
            for step in checkpoints_of(self.folder).drop_newer(self.step):
                log.warning("RESUME: step-%d is removed: it is not of the course from here", step)


def check_resume(config: Any, read_settings: ReadSettings) -> tuple[list[str], bool]:
    """List what forbids to go on with the run in output.dir, before torch is imported.

    Returns the problems, and whether there is nothing left to do.
    """
    problems = check_allow(config.resume_allow)
    if problems or not _is_resumed(config):
        return problems, False
    found = _compare(config, read_settings)
    return found.problems, found.is_done and not found.problems


def start_run(config: Any, read_settings: ReadSettings) -> Start:
    """Decide and hold the run's folder, and choose the checkpoint that it goes on from.

    The first rank checks every byte of the checkpoint, and tells the ranks that it starts.
    """
    if is_child() and (decided := run_dir()) is not None:
        folder = Path(config.output.dir or decided)
        step = int(os.environ.get(STEP_VARIABLE, 0))
        start = Start(
            folder=folder,
            allow=list(config.resume_allow),
            goes_back=typed_step(config.resume) is not None,
        )
        if step:
            start.checkpoint = _of_step(folder, step)
            start.before = read_manifest(folder) if is_first_rank() else {}
        return start
    folder = make_run_dir(config.output, goes_on=config.resume != NEVER)
    start = Start(
        folder=folder,
        allow=list(config.resume_allow),
        goes_back=typed_step(config.resume) is not None,
    )
    found = _compare(config, read_settings) if _is_resumed(config) else _Found()
    if found.problems:
        raise UserError(found.problems)
    if found.is_done:
        start.is_done, start.before = True, found.before
        return start
    if is_first_rank():
        hold_run(folder)
    if _is_resumed(config):
        start.before, start.checkpoint = found.before, _choose(config, folder)
    if start.checkpoint is not None:
        check_documents(start.checkpoint)
        own = check_own(
            *(start.checkpoint, folder, start.before),
            is_typed=start.goes_back,
            allow=start.allow,
        )
        if own is not None:
            log.info("RESUME: %s", own)
        for note in found.notes:
            log.info("RESUME: %s", note)
        log.info("RESUME: from %s", start.checkpoint.folder)
    elif config.resume != NEVER:
        log.info("RESUME: fresh start, no checkpoint in %s", folder)
    hand_to_ranks(folder)
    os.environ[STEP_VARIABLE] = str(start.step)
    return start


@dataclass(kw_only=True, slots=True)
class _Found:
    """What a run that is there says of going on with it."""

    before: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_done: bool = False


def _is_resumed(config: Any) -> bool:
    """Tell whether the run's folder holds a run that may be resumed."""
    folder = config.output.dir
    return config.resume != NEVER and folder is not None and is_training(Path(folder) / CONFIG_FILE)


def _compare(config: Any, read_settings: ReadSettings) -> _Found:
    """Compare settings, base, versions and ranks with those of the run in output.dir."""
    folder = Path(config.output.dir)
    has_finished = (folder / METRICS_FILE).exists()
    if not has_checkpoints(folder) and not has_finished:  # nothing is there to go on with
        missing = f"resume={config.resume}: {folder} has no checkpoint; type resume=auto to start"
        return _Found(problems=[] if config.resume == AUTO else [f"{missing} it anew"])
    before = read_manifest(folder)
    changes = compare_settings(read_settings(folder), config)
    now = {"base": describe_base(config.model), "versions": installed_versions()}
    problems, notes = judge([*changes, *compare_facts(before, now)], config.resume_allow)
    if "global_batch" in before:
        batch = describe_global_batch(config.trainer, requested_devices(config).num_data_ranks)
        refused, noted = check_global_batch(before["global_batch"], batch, config.trainer)
        if config.data.streaming and not refused:
            refused = check_stream(changes, before["global_batch"], batch)
        problems, notes = problems + refused, notes + noted
    goes_back = typed_step(config.resume) is not None
    lengthens = any(change.kind in LENGTHENS for change in changes)
    is_done = has_finished and not goes_back and not lengthens
    if not is_done and not has_checkpoints(folder):
        problems.append(f"{folder} has finished and has no checkpoint to go on from")
    return _Found(before=before, problems=problems, notes=notes, is_done=is_done)


def _choose(config: Any, folder: Path) -> Checkpoint | None:
    """Return the checkpoint that was typed, else the newest good one; None where there is none."""
    if (step := typed_step(config.resume)) is not None:
        try:
            return load_checkpoint(Path(config.resume).expanduser(), step)
        except DamageError as error:
            raise UserError(
                f"resume={config.resume} is damaged ({error}); type resume={folder} for the "
                "newest good checkpoint"
            ) from error
    good, damaged = find_newest_good(folder)
    if is_first_rank():
        for sentence in damaged:
            log.warning("RESUME: %s", sentence)
    return good


def find_newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return a run's newest good checkpoint, and what is wrong with those that were passed over.

    None where there is none at all; UserError where all of them are damaged.
    """
    good, damaged = checkpoints_of(folder).newest_good()
    if good is None and damaged:
        raise UserError(
            [f"{folder}: {sentence}" for sentence in damaged]
            + ["leave resume out and type another output.dir to start anew"]
        )
    return good, damaged


def _of_step(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint that the first rank has checked; UserError where it is not seen."""
    store = checkpoints_of(folder)
    for one in store.checkpoints():
        if one.step == step:
            return one
    raise UserError(
        f"the first rank goes on from step {step}, and this one finds no such checkpoint in "
        f"{store.folder}: every machine must see the same files; give all of them one output.dir"
    )
