"""Resolve `resume=` and `run=` to a run folder and a checkpoint step."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from app.process.launch import is_child, quote_words, run_dir
from app.run.folder import (
    CONFIG_FILE,
    METRICS_FILE,
    OUTPUTS,
    UNSET,
    is_training_run,
    refuse_special_entries,
)
from app.run.manifest import MANIFEST_FILE, STARTED_FORMAT
from app.run.remote import fetched_folder, run_folder
from app.training.checkpoint.checkpoint import Checkpoint, DamageError, load_checkpoint
from app.training.checkpoint.documents import check_documents
from app.training.checkpoint.store import CHECKPOINTS, STEP_FOLDER, CheckpointStore
from common.errors import UserError, nearest
from common.installation import verb_command
from common.untrusted import read_json_object

log = logging.getLogger(__name__)

FINAL, _BEST, _NEWEST = "final", "best", "newest"
_SELECTED = re.compile(rf"{FINAL}|{_BEST}|{_NEWEST}|{STEP_FOLDER.pattern}")
"""values of `checkpoint`, which selects the weights of a run"""
NEVER, AUTO, _MUST = "never", "auto", "must"
_STARTED = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:_(\d+))?")
"""default name of a run folder: its start time, with a number if that second has several runs"""
_OTHER_TOOLS = {
    "true": AUTO,
    "yes": AUTO,
    "last": _MUST,
    "latest": _MUST,
    "allow": AUTO,
    "false": NEVER,
    "none": NEVER,
    "null": NEVER,
}
"""values of `resume` that other tools use -> the value here"""


def find_run_to_resume(resume: str, folder: str | None, name: str | None) -> Path | None:
    """Return the folder of the run that `resume=` names; None for a new run.

    `folder` and `name` are output.dir and output.name; if `name` is None, runs of every name count.
    Raises UserError if a required run does not exist.
    """
    if resume == NEVER:
        return None
    if is_child():  # the launcher has found the run
        started = run_dir()
        return started if started and is_training_run(started / CONFIG_FILE) else None
    if not resume.strip():
        raise UserError(f"resume is empty; {UNSET}")
    if resume not in (AUTO, _MUST):
        return _typed_run(resume, folder)
    if folder is not None:
        run = fetched_folder("output.dir", folder, resumes=True)
        found = run if (run / CONFIG_FILE).exists() else None
        where = folder
    else:
        found = _newest_unfinished(name)
        where = str(OUTPUTS / (name or ""))
    if found is None and resume == _MUST:
        what = "run" if folder is not None else "unfinished run"
        raise UserError(
            f"resume=must, but there is no {what} in {where}; type resume=auto to start a new one "
            "if there is none, or resume=FOLDER of another run"
        )
    if found is not None:
        refuse_special_entries(found)
        if not is_training_run(found / CONFIG_FILE):
            raise UserError(f"output.dir={where} holds an evaluation; type another folder")
    return found


def typed_step(resume: str) -> int | None:
    """Return the step in `resume=RUN/checkpoints/step-40`; None if no checkpoint is named."""
    match = STEP_FOLDER.fullmatch(Path(resume).name)
    return int(match[1]) if match else None


def checkpoints_of(run: Path) -> CheckpointStore:
    """Return the checkpoint store of a run, for reading."""
    return CheckpointStore(run / CHECKPOINTS)


def checkpoint_of_step(run: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint of a run that was saved at `step`, without reading its weights."""
    return next((each for each in checkpoints_of(run).checkpoints() if each.step == step), None)


def has_checkpoints(run: Path) -> bool:
    """Whether a run has any checkpoint, good or damaged."""
    folder = run / CHECKPOINTS
    return folder.is_dir() and any(
        STEP_FOLDER.fullmatch(entry.name.removesuffix(".old")) for entry in folder.iterdir()
    )


def _typed_run(resume: str, folder: str | None) -> Path:
    # A bare true or false is read as a boolean, and converted to text as Python writes it.
    resume = {"True": "true", "False": "false"}.get(resume, resume)
    path = fetched_folder("resume", resume, resumes=True)
    if not path.is_dir():
        known = _OTHER_TOOLS.get(resume.lower())
        hint = f"; type resume={known}" if known else nearest(resume, (NEVER, AUTO, _MUST))
        raise UserError(
            f"resume={resume}: no such folder; expected never, auto, must, or the folder of a run "
            f"or of one of its checkpoints{hint}"
        )
    # A relative path such as `step-40` does not name its parent folders, which are needed below.
    run = path.resolve()
    if typed_step(resume) is not None:
        run = run.parent
    if run.name == CHECKPOINTS:
        run = run.parent
    if (run / CONFIG_FILE).exists():
        refuse_special_entries(run)
    if not is_training_run(run / CONFIG_FILE):
        raise UserError(
            f"resume={resume}: not a training run (no {CONFIG_FILE} of one in {run}); "
            "type the folder that a run printed as its last line"
        )
    if folder is not None and run_folder("output.dir", folder).resolve() != run:
        raise UserError(
            f"resume={resume} continues in that run's own folder, but output.dir={folder}; leave "
            "output.dir out (to keep the run as it is, copy its folder first)"
        )
    here = Path.cwd()
    return run.relative_to(here) if run.is_relative_to(here) else run


def _newest_unfinished(name: str | None) -> Path | None:
    """Return the newest run under outputs/ without metrics.json, with or without checkpoints.

    A folder whose name has no start time counts only if it is the only unfinished run.
    """
    unfinished = [
        run
        for run in OUTPUTS.glob(f"{name or '*'}/*")
        if not (run / METRICS_FILE).exists() and is_training_run(run / CONFIG_FILE)
    ]
    if len(unfinished) == 1:
        return unfinished[0]
    return max(filter(_started, unfinished), key=_started, default=None)


def _started(run: Path) -> tuple[str, int] | tuple[()]:
    match = _STARTED.fullmatch(run.name)
    return (match[1], int(match[2] or 0)) if match else ()


def find_run(
    run: str | None,
    *,
    verb: str = "",
    takes_unfinished: bool = False,
    typed_again: Callable[[Path], Sequence[str]] = lambda run: (),
) -> Path:
    """Return folder `run`, or the newest finished run under outputs/.

    A run is finished once it has written metrics.json. `verb`: the verb that uses the run.
    `typed_again`: lists the words that must be typed when a run is resumed.
    """
    if run is not None:
        if not run.strip():
            raise UserError(f"run is empty; {UNSET}")
        folder = fetched_folder("run", run, resumes=False)
        if not folder.is_dir():
            raise UserError(f"run={run}: no such folder{_known_runs()}")
        if (folder / CONFIG_FILE).exists():
            refuse_special_entries(folder)
        is_finished = (folder / METRICS_FILE).exists()
        if not is_finished and is_training_run(folder / CONFIG_FILE) and has_checkpoints(folder):
            if takes_unfinished:
                return folder
            hint = "" if verb == "report" else ", or use that with checkpoint=newest"
            resume = quote_words(f"resume={run}", *typed_again(folder))
            raise UserError(
                f"run={run}: the run is not finished (no metrics.json); finish it from its newest "
                f"checkpoint with {verb_command('train')} {resume}{hint}{_known_runs()}"
            )
        if not is_finished or not is_training_run(folder / CONFIG_FILE):
            raise UserError(
                f"run={run}: not the folder of a finished training run (metrics.json and its "
                f"config.yaml){_known_runs()}"
            )
        return folder
    finished = finished_runs()
    if not finished:
        raise UserError(
            f"no finished run under {OUTPUTS}: train first with {verb_command('train')}"
        )
    refuse_special_entries(finished[-1])
    return finished[-1]


def finished_runs() -> list[Path]:
    """List the finished training runs under outputs/, the one that started last at the end."""
    found = files_in_outputs(METRICS_FILE)
    runs = [file.parent for file in found if is_training_run(file.parent / CONFIG_FILE)]
    return sorted(runs, key=_start_of_finished)


def files_in_outputs(name: str) -> Iterator[Path]:
    """Yield the files of this name in run folders under outputs/, at any depth.

    `Path.rglob` fails if a running job removes a folder during the walk, and follows no links.
    """
    seen: set[str] = set()
    for folder, subfolders, files in os.walk(OUTPUTS, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [each for each in subfolders if each != CHECKPOINTS]
        if name in files:
            yield Path(folder) / name


def _start_of_finished(run: Path) -> tuple[float, float]:
    """Return the start that a run's manifest records, or its end if there is none; and its end.

    The end is when metrics.json was last modified, which copying changes.
    """
    end = (run / METRICS_FILE).stat().st_mtime
    manifest, _ = read_json_object(run / MANIFEST_FILE)
    try:
        started = datetime.strptime(str(manifest.get("started")), STARTED_FORMAT).timestamp()
    except ValueError:
        started = end
    return started, end


def _known_runs() -> str:
    known = finished_runs()
    return f"; the newest finished run is run={known[-1]}" if known else ""


def check_selected(wanted: str, run: str | None, adapter_path: str | None) -> list[str]:
    """List the problems of `checkpoint=`, and of what is typed beside it."""
    if not _SELECTED.fullmatch(wanted):
        hint = nearest(wanted, (FINAL, _BEST, _NEWEST))
        return [f"checkpoint={wanted}: expected final, best, newest or step-N{hint}"]
    if wanted != FINAL and (run is None or adapter_path is not None):
        return [f"checkpoint={wanted}: type run=FOLDER, and leave out adapter_path"]
    return []


def select_checkpoint(run: Path, wanted: str) -> Checkpoint:
    """Return the undamaged checkpoint that `checkpoint=` selects; UserError if there is none."""
    store = checkpoints_of(run)
    steps = [saved.step for saved in store.checkpoints()]
    listed = ", ".join(f"step-{step}" for step in steps) or "no checkpoint"
    problems: list[str] = []
    checkpoint = None
    if wanted == _BEST:
        checkpoint, problems = store.best_good()
        missing = f"no undamaged checkpoint is ranked by a metric; the run has {listed}"
    elif wanted == _NEWEST:
        checkpoint, problems = store.newest_good()
        missing = "there is no valid checkpoint"
    else:
        missing = f"the run has {listed}"
        step = int(wanted.removeprefix("step-"))
        try:
            checkpoint = load_checkpoint(store.folder / f"step-{step}") if step in steps else None
        except DamageError as error:
            missing = f"it is damaged ({error})"
    if checkpoint is None:
        raise UserError(
            [f"run={run}: {problem}" for problem in problems]
            + [f"run={run} checkpoint={wanted}: {missing}"]
        )
    for problem in problems:
        log.warning("%s", problem)
    check_documents(checkpoint)
    return checkpoint


def saved_folder(run: Path) -> Path:
    """Return a run's `adapter/`, or its `model/` if it trained all weights."""
    adapter = run / "adapter"
    return adapter if adapter.is_dir() else run / "model"
