"""Where a run's files go: the folder is decided once, and found again by other verbs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.errors import REASON_FILE, UserError
from app.launch import RUN_DIR_VARIABLE, is_first_rank, is_one_of_several

OUTPUTS = Path("outputs")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.json"
"""in a run's folder: its settings from its start on, its figures when it has finished"""


@dataclass(kw_only=True, slots=True)
class OutputConfig:
    name: str | None = None
    """name of the run, part of its folder; null = the experiment's"""
    dir: str | None = None
    """folder of this run; null = outputs/<name>/<time>"""


def check_output(config: OutputConfig, *, goes_on: bool = False) -> list[str]:
    """List what forbids writing a run here: a bad name, a folder that holds another run.

    `goes_on`: a run in that folder may be resumed.
    """
    problems = []
    if config.name is not None and not NAME_PATTERN.fullmatch(config.name):
        problems.append(
            f"output.name={config.name!r}: at most 80 letters, digits, dots, dashes and "
            "underscores, starting with a letter or digit"
        )
    if config.dir is not None and RUN_DIR_VARIABLE not in os.environ:
        folder = Path(config.dir)
        with into_folder(folder):
            is_there, holds_run = folder.exists(), (folder / CONFIG_FILE).exists()
        if is_there and not folder.is_dir():
            problems.append(f"output.dir={config.dir}: this is a file; type a folder's name")
        elif holds_run and is_first_rank() and not goes_on:
            problems.append(
                f"output.dir={config.dir} holds another run ({CONFIG_FILE} is there): type another "
                "folder, or leave output.dir out to get a new one; resume=auto goes on with a "
                "training run"
            )
    return problems


def decide_run_dir(config: OutputConfig) -> Path:
    """Make this run's folder, or return the one that the parent process has decided on."""
    if RUN_DIR_VARIABLE in os.environ:
        return Path(os.environ[RUN_DIR_VARIABLE])
    folder = make_run_dir(config)
    hand_to_ranks(folder)
    return folder


def make_run_dir(config: OutputConfig, *, goes_on: bool = False) -> Path:
    """Make a run's folder; with `goes_on` it may be there, and hold a run."""
    problems = check_output(config, goes_on=goes_on)
    if problems:
        raise UserError(problems)
    if config.dir is not None:
        folder = Path(config.dir)
        with into_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not goes_on:  # a run that is done already is only read
                tempfile.TemporaryFile(dir=folder).close()
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
            with into_folder(folder):
                folder.mkdir(parents=True)
        except FileExistsError:  # another run of the same second
            continue
        return folder
    raise UserError(f"{parent}: a hundred runs of this second already; type another output.name")


@contextlib.contextmanager
def into_folder(folder: Path) -> Iterator[None]:
    """Word what the system says when a run's folder cannot be made or written."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(
            f"output.dir={folder}: cannot be written: {error.strerror}; type output.dir=FOLDER of "
            "your own"
        ) from error


def hand_to_ranks(folder: Path) -> None:
    """Tell this run's folder to the ranks that this process starts, and to its own errors."""
    if is_first_rank():
        (folder / REASON_FILE).unlink(missing_ok=True)  # why an earlier process stopped
    os.environ[RUN_DIR_VARIABLE] = str(folder.resolve())


def write_whole(file: Path, text: str) -> None:
    """Write a file of a run's folder so that it is the old or the new one whenever it is read."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts know no such
            raise
    finally:
        os.close(descriptor)


def find_run(run: str | None, name: str | None = None) -> Path:
    """Return folder `run`, or the newest finished run under outputs/ (of that name, if given).

    A run is finished when it has written metrics.json.
    """
    if run is not None:
        folder = Path(run)
        if not folder.is_dir():
            raise UserError(f"run={run}: no such folder{_known_runs(name)}")
        if not (folder / METRICS_FILE).exists() or not is_training(folder / CONFIG_FILE):
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
    found = (OUTPUTS / name if name else OUTPUTS).rglob(METRICS_FILE)
    runs = [file.parent for file in found if is_training(file.parent / CONFIG_FILE)]
    return sorted(runs, key=lambda run: (run / METRICS_FILE).stat().st_mtime_ns)


def is_training(config: Path) -> bool:
    """Tell a training run from an evaluation, which leaves metrics.json too."""
    return config.exists() and "optimizer:" in config.read_text(encoding="utf-8").splitlines()


def _known_runs(name: str | None) -> str:
    known = finished_runs(name)
    return f"; the newest finished run is run={known[-1]}" if known else ""


def saved_folder(run: Path) -> Path:
    """Return what a run saved: its `adapter/`, or its `model/` where every weight was trained."""
    adapter = run / "adapter"
    return adapter if adapter.is_dir() else run / "model"
