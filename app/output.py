"""Where a run's files go: the folder is decided once, and found again by other verbs."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from app.errors import REASON_FILE, UserError
from app.launch import RUN_DIR_VARIABLE, is_first_rank, is_one_of_several

OUTPUTS = Path("outputs")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(kw_only=True, slots=True)
class OutputConfig:
    name: str | None = None
    """name of the run, part of its folder; null = the experiment's"""
    dir: str | None = None
    """folder of this run; null = outputs/<name>/<time>"""


def check_output(config: OutputConfig) -> list[str]:
    """List what forbids writing a run here: a bad name, a folder that holds another run."""
    problems = []
    if config.name is not None and not NAME_PATTERN.fullmatch(config.name):
        problems.append(
            f"output.name={config.name!r}: at most 80 letters, digits, dots, dashes and "
            "underscores, starting with a letter or digit"
        )
    if config.dir is not None and RUN_DIR_VARIABLE not in os.environ:
        folder = Path(config.dir)
        if folder.exists() and not folder.is_dir():
            problems.append(f"output.dir={config.dir}: this is a file; type a folder's name")
        elif (folder / "config.yaml").exists() and is_first_rank():
            problems.append(
                f"output.dir={config.dir} holds another run (config.yaml is there): "
                "type another folder, or leave output.dir out to get a new one"
            )
    return problems


def decide_run_dir(config: OutputConfig) -> Path:
    """Make this run's folder, or return the one that the parent process has decided on."""
    if RUN_DIR_VARIABLE in os.environ:
        return Path(os.environ[RUN_DIR_VARIABLE])
    problems = check_output(config)
    if problems:
        raise UserError(problems)
    folder = _make_folder(config)
    os.environ[RUN_DIR_VARIABLE] = str(folder.resolve())
    return folder


def _make_folder(config: OutputConfig) -> Path:
    if config.dir is not None:
        folder = Path(config.dir)
        folder.mkdir(parents=True, exist_ok=True)
        if is_first_rank():
            (folder / REASON_FILE).unlink(missing_ok=True)  # of a run that never started
        return folder
    if is_one_of_several():
        raise UserError(
            "ranks that were started from outside (torchrun, slurm) cannot agree on a new folder: "
            "type output.dir=FOLDER"
        )
    parent = OUTPUTS / (config.name or "train")
    started = time.strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(100):
        folder = parent / (started if attempt == 0 else f"{started}_{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # another run of the same second
            continue
        return folder
    raise UserError(f"{parent}: a hundred runs of this second already; type another output.name")


def find_run(run: str | None, name: str | None = None) -> Path:
    """Return folder `run`, or the newest finished run under outputs/ (of that name, if given).

    A run is finished when it has written metrics.json.
    """
    if run is not None:
        folder = Path(run)
        if not folder.is_dir():
            raise UserError(f"run={run}: no such folder{_known_runs(name)}")
        if not (folder / "metrics.json").exists() or not _is_training(folder / "config.yaml"):
            raise UserError(
                f"run={run}: not the folder of a finished training run (metrics.json and its "
                f"config.yaml){_known_runs(name)}"
            )
        return folder
    finished = finished_runs(name)
    if not finished:
        where = OUTPUTS / name if name else OUTPUTS
        raise UserError(f"no finished run under {where}: train first with python -m app.train")
    return finished[-1]


def finished_runs(name: str | None = None) -> list[Path]:
    """List the finished training runs under outputs/, oldest first."""
    found = (OUTPUTS / name if name else OUTPUTS).rglob("metrics.json")
    runs = [file.parent for file in found if _is_training(file.parent / "config.yaml")]
    return sorted(runs, key=lambda run: (run / "metrics.json").stat().st_mtime_ns)


def _is_training(config: Path) -> bool:
    """Tell a training run from an evaluation, which leaves metrics.json too."""
    return config.exists() and "optimizer:" in config.read_text(encoding="utf-8").splitlines()


def _known_runs(name: str | None) -> str:
    known = finished_runs(name)
    return f"; the newest finished run is run={known[-1]}" if known else ""


def saved_folder(run: Path) -> Path:
    """Return what a run saved: its `adapter/`, or its `model/` where every weight was trained."""
    adapter = run / "adapter"
    return adapter if adapter.is_dir() else run / "model"
