"""How a run starts: new, from a checkpoint, or not at all because it has finished."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import resumed_adapter
from app.preflight import describe_base, requested_devices
from app.process.launch import STEP_VARIABLE, is_child, is_first_rank, run_dir
from app.process.status import begin_status
from app.run import find
from app.run.folder import (
    CONFIG_FILE,
    METRICS_FILE,
    lock_run,
    make_run_dir,
    separate_files,
    share_with_ranks,
)
from app.run.manifest import (
    check_changes,
    check_run_id,
    check_stream,
    compare_facts,
    compare_global_batch,
    compare_settings,
    describe_global_batch,
    installed_versions,
    is_more_patient,
    read_run_manifest,
)
from app.training.checkpoint.checkpoint import MARKER, Checkpoint, DamageError, load_checkpoint
from app.training.checkpoint.documents import check_documents
from app.training.checkpoint.store import CHECKPOINTS
from app.training.run_documents import CSV_FILE, read_curves
from common.errors import UserError

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

_LENGTHENS = ("epochs", "data")
"""resume rules of the changes that give a finished run more steps"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """An open run: its folder, locked by this process, and the step at which it starts."""

    typed_config: TrainConfig
    """what was typed, for config.yaml and the commands that are printed: each `auto` stays"""
    folder: Path
    checkpoint: Checkpoint | None = None
    """the checkpoint to resume from, None for a new run"""
    is_done: bool = False
    """whether the run has finished, so that nothing is left to train"""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """manifest of the run that is resumed, empty for a new run"""
    resume_allow: Sequence[str] = ()
    rewinds: bool = False
    """whether `resume=` names a checkpoint, which then need not be the newest"""

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def last_step(self) -> int:
        """Return the step at which a finished run ended: the last one planned, or an early stop."""
        planned: int = self.manifest["total_steps"]
        recorded = (self.manifest.get("result") or {}).get("last")
        return recorded or _ended_before(self.folder, planned) or planned

    @property
    def checkpoint_path(self) -> Path | None:
        """Return the folder of the checkpoint to resume from, None for a new run."""
        return None if self.checkpoint is None else self.checkpoint.folder

    @property
    def config(self) -> TrainConfig:
        """Return what is typed, without the folder adapter.path if a checkpoint has its weights."""
        config = self.typed_config
        if self.checkpoint is None:
            return config
        return replace(config, adapter=resumed_adapter(config.adapter, self.folder))

    def check_unchanged(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts` with the manifest; raises UserError if they forbid resuming.

        Compares what the settings do not determine: rows, tokens, precision, number of steps.
        """
        if self.checkpoint is None or not is_first_rank():
            return
        problems, notes = check_changes(compare_facts(self.manifest, facts), self.resume_allow)
        total = facts["total_steps"]
        if not problems and self.step > total:
            problems = [
                f"the run has {total} steps now, and resumes at step {self.step}; type "
                "trainer.max_steps or trainer.num_epochs for a longer one, or resume from an "
                "earlier checkpoint by resume=FOLDER/checkpoints/step-N"
            ]
        if problems:
            raise UserError(problems)
        for note in notes:
            log.info("RESUME: %s", note)
        log.info("RESUME: %d of %d steps are done", self.step, total)

    def global_batch(self, num_data_ranks: int) -> dict[str, int] | None:
        """Return the packs per step with which a run resumes, and factors; None for a new run."""
        if self.checkpoint is None:
            return None
        # Read here, since only the first rank has the manifest.
        before = read_run_manifest(self.folder)["global_batch"]
        return describe_global_batch(self.typed_config.trainer, num_data_ranks, before)

    def history(self) -> list[dict[str, Any]]:
        """Return the earlier processes of this run and the steps they reached, for its manifest."""
        if self.checkpoint is None:
            return []
        newest = {name: self.manifest[name] for name in ("command", "started", "versions")}
        newest |= {"plan": self.manifest["run"]["plan"], "until_step": self.step}
        return [*self.manifest.get("earlier", []), newest]

    def superseded_checkpoints(self) -> set[tuple[Path, int]]:
        """Return the checkpoints after a named one, with their modification times in ns.

        Their content does not identify them: training the same steps again may save equal bytes.
        """
        if self.checkpoint is None or not self.rewinds:
            return set()
        existing = find.checkpoints_of(self.folder).checkpoints()
        newer = [checkpoint.folder for checkpoint in existing if checkpoint.step > self.step]
        return {(folder, (folder / MARKER).stat().st_mtime_ns) for folder in newer}

    def discard_later_steps(self) -> None:
        """Remove metrics.json and the superseded checkpoints, on the first rank before training."""
        (self.folder / METRICS_FILE).unlink(missing_ok=True)
        if self.checkpoint is not None and self.rewinds:
            for step in find.checkpoints_of(self.folder).drop_newer(self.step):
                log.warning(
                    "RESUME: step-%d is removed: the run goes back to step %d", step, self.step
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExistingRun:
    """The run in output.dir to resume: whether it may be resumed, and why not."""

    manifest: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_done: bool = False
    """whether nothing is left to train"""


def compare_existing(
    config: TrainConfig, read_config: Callable[[Path], TrainConfig]
) -> ExistingRun | None:
    """Compare settings, base, versions and ranks with the run in output.dir that `config` resumes.

    None for a new run, and in a rank, whose launcher has compared them. `read_config` reads the
    config.yaml in a run's folder. Needs no torch.
    """
    if config.resume == find.NEVER or config.output.dir is None or is_child():
        return None
    folder = Path(config.output.dir)
    if not (folder / CONFIG_FILE).is_file():  # `find` has refused evaluations
        return None
    has_finished = (folder / METRICS_FILE).exists()
    if not find.has_checkpoints(folder) and not has_finished:  # nothing to resume from
        missing = f"resume={config.resume}: {folder} has no checkpoint; type resume=auto to start"
        return ExistingRun(problems=[] if config.resume == find.AUTO else [f"{missing} it anew"])
    manifest = read_run_manifest(folder)
    for _ in read_curves(folder / CSV_FILE):
        pass  # every row is one, before anything is loaded
    changes = compare_settings(read_config(folder), config)
    now = {"base": describe_base(config.model), "versions": installed_versions()}
    problems, notes = check_changes([*changes, *compare_facts(manifest, now)], config.resume_allow)
    if "global_batch" in manifest:
        before, num_ranks = manifest["global_batch"], requested_devices(config).num_data_ranks
        batch = describe_global_batch(config.trainer, num_ranks, before)
        refused, noted = compare_global_batch(before, batch, config.trainer)
        if config.data.streaming and not refused:
            refused = check_stream(changes, before, batch)
        problems, notes = problems + refused, notes + noted
    rewinds = find.typed_step(config.resume) is not None
    lengthens = any(change.rule in _LENGTHENS for change in changes)
    if any(is_more_patient(change) for change in changes):
        lengthens |= _ended_before(folder, manifest["total_steps"]) is not None
    is_done = has_finished and not rewinds and not lengthens
    if not is_done and not find.has_checkpoints(folder):
        problems.append(f"{folder} has finished and has no checkpoint to resume from")
    return ExistingRun(manifest=manifest, problems=problems, notes=notes, is_done=is_done)


def _ended_before(folder: Path, planned: int) -> int | None:
    steps = [checkpoint.step for checkpoint in find.checkpoints_of(folder).checkpoints()]
    return max(steps) if steps and max(steps) < planned else None


def open_run(config: TrainConfig, existing: ExistingRun | None) -> Run:
    """Decide and lock the run's folder, and choose the checkpoint that it resumes from.

    The first rank verifies every byte of the checkpoint, and hands its step to the ranks that it
    starts. `existing`: the result of `compare_existing`; raises UserError if it has problems.
    """
    if is_child():
        return _open_as_rank(config)
    folder = make_run_dir(config.output, resumes=config.resume != find.NEVER)
    compared = existing or ExistingRun()
    if compared.problems:
        raise UserError(compared.problems)
    if compared.is_done:
        return Run(typed_config=config, folder=folder, is_done=True, manifest=compared.manifest)
    if is_first_rank():
        lock_run(folder)
        separate_files(folder)
    checkpoint = None if existing is None else _choose_checkpoint(config, folder)
    run = _run_from(config, folder, checkpoint, compared.manifest)
    if run.checkpoint is not None:
        check_documents(run.checkpoint)
        note_of_id = check_run_id(
            *(run.checkpoint, folder, run.manifest), is_typed=run.rewinds, allow=run.resume_allow
        )
        for note in [*([] if note_of_id is None else [note_of_id]), *compared.notes]:
            log.info("RESUME: %s", note)
        log.info("RESUME: from %s", run.checkpoint.folder)
    elif config.resume != find.NEVER:
        log.info("RESUME: fresh start, no checkpoint in %s", folder)
    share_with_ranks(folder)
    if is_first_rank():
        begin_status(folder, run.step)
    os.environ[STEP_VARIABLE] = str(run.step)
    return run


def _open_as_rank(config: TrainConfig) -> Run:
    folder = Path(config.output.dir or run_dir() or "")
    step = int(os.environ.get(STEP_VARIABLE, 0))
    checkpoint = find.checkpoint_of_step(folder, step) if step else None
    if step and checkpoint is None:
        raise UserError(
            f"the first rank resumes from step {step}, but this rank finds no such checkpoint in "
            f"{folder / CHECKPOINTS}: every machine must see the same files; give all of them one "
            "output.dir"
        )
    manifest = read_run_manifest(folder) if step and is_first_rank() else {}
    return _run_from(config, folder, checkpoint, manifest)


def _run_from(
    config: TrainConfig, folder: Path, checkpoint: Checkpoint | None, manifest: Mapping[str, Any]
) -> Run:
    if checkpoint is not None and config.model.revision is None:
        base = read_run_manifest(folder)["base"]
        if base["path"] == config.model.path:  # its commit when the run started
            config = replace(config, model=replace(config.model, revision=base["revision"]))
    return Run(
        typed_config=config,
        folder=folder,
        checkpoint=checkpoint,
        manifest=manifest,
        resume_allow=config.resume_allow,
        rewinds=find.typed_step(config.resume) is not None,
    )


def _choose_checkpoint(config: TrainConfig, folder: Path) -> Checkpoint | None:
    if (step := find.typed_step(config.resume)) is not None:
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
    """Return a run's newest good checkpoint, and the damage of each newer one.

    None if there is none at all; raises UserError if all are damaged.
    """
    good, damaged = find.checkpoints_of(folder).newest_good()
    if good is None and damaged:
        raise UserError(
            [f"{folder}: {sentence}" for sentence in damaged]
            + ["leave resume out and type another output.dir to start anew"]
        )
    return good, damaged
