"""Run folders: where they are made, what they may hold, which kind of run, and their lock."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml  # type: ignore[import-untyped]

from app.process.launch import is_child, is_first_rank, read_launch, run_dir, set_run_dir
from app.process.logs import LOG_FILE
from app.process.reporting import REASON_FILE, is_reason
from app.process.status import STATUS_FILE
from common.errors import UserError
from common.facts import setting
from common.files import open_no_follow, special_entries, write_atomically
from common.untrusted import read_json_object, read_text

log = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.json"
"""in a run folder: the settings, from the start; the metrics, once the run has finished"""
VERB_LINE = re.compile(r"# settings of loft (\w+)\n")
"""first line of config.yaml, with the verb; earlier versions wrote none"""
LOCK_FILE = "run.lock"
_UNUSED = (LOCK_FILE, REASON_FILE, STATUS_FILE)
"""what a process that was refused leaves in its new folder"""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""errors of a file system without locks"""
_PROBE = ".writable-"
"""prefix of a temporary file that tests whether the folder is writable"""
_LEFT_BY_REFUSED = re.compile(
    rf"{re.escape(LOCK_FILE)}|{re.escape(REASON_FILE)}|stacks-rank-\d+\.txt|\.config\.yaml\.\d+|"
    rf"\.?{re.escape(STATUS_FILE)}(\.\d+)?|"
    rf"{re.escape(_PROBE)}.*|faults-fired|checkpoints|partial|job\.(sbatch|yaml|json|log)|"
    r"slurm-\d+\.txt|(adapter|model)-step-\d+(\.\d+)?|unfinished"
)
"""files left by a process that was refused before training, or killed during an evaluation or a
merge"""
_WRITTEN_WHILE_EVALUATED = re.compile(
    r"(predictions|judge_answers|verdicts)\.jsonl|judge\.html|(metrics|verdict)\.json|config\.yaml"
)
"""files left next to `partial` by an evaluation that was killed after its measurements"""
UNFINISHED, _MOVED_FILE = "unfinished", ".moved.json"
"""folder of a result that is not complete; in it, the names that are being moved to its parent"""
WRITTEN_AT_START = re.compile(
    rf"{_LEFT_BY_REFUSED.pattern}|config\.yaml|manifest\.json|\.manifest\.json\.\d+|"
    r"audit\.(json|txt)|mixture\.json|quarantine|tensorboard|metrics\.csv|train\.log|"
    r"report\.html|training_curves\.png|start_adapter"
)
"""files that a training run writes before its first step, or when it fails before it"""
_NEVER_FOLLOWED = "optuna.log.lock"
"""link that the lock of Optuna leaves in a sweep's folder; nothing opens it"""
_MAX_NAMED = 5
"""maximum number of a folder's entries listed in a message"""
_URL_BEGINS = re.compile(r"[A-Za-z][\w+.-]+:/")
"""start of a URL; one slash suffices, since a Path drops the second"""
NO_URL = "only train writes to s3:// and gs://, into output.dir; type a folder of this machine"
UNSET = "is it a variable that is not set? type a folder, or leave it out"


@dataclass(kw_only=True, slots=True)
class OutputConfig:
    name: str | None = setting(None, shown=("train",), grants="nothing")
    """name of the run; null = the experiment's"""
    dir: str | None = setting(None, shown=True, aliases=("output_dir",), grants="write")
    """folder of the run; null = outputs/NAME/TIME; train takes a URL (s3, gs)"""


@dataclass(kw_only=True, slots=True)
class TrainOutputConfig(OutputConfig):
    weights: str = setting("auto", choices=("auto", "best", "last"), typed="from", resume="free")
    """whose weights are the result: of the best step by trainer.checkpoint.monitor, or of the last;
    auto = best with early stopping, keep_best or a monitor other than val/loss"""
    dtype: str = setting("auto", choices=("auto", "fp32", "bf16"), resume="free")
    """dtype of the saved model of adapter=full and freeze. auto = that of the base's files, unless
    rounding to it costs more validation loss than noise explains, or there are no validation rows
    to measure it on: then fp32"""


def check_output(config: OutputConfig, *, resumes: bool = False) -> list[str]:
    """List the problems of `output`; with `resumes` its folder may hold a run."""
    problems = []
    if config.name is not None and not NAME_PATTERN.fullmatch(config.name):
        problems.append(
            f"output.name={config.name!r}: at most 80 letters, digits, dots, dashes and "
            "underscores, starting with a letter or digit"
        )
    if config.dir is not None and not is_child():
        problems += _check_folder(config.dir, resumes=resumes)
    return problems


def _check_folder(typed: str, *, resumes: bool) -> list[str]:
    if not typed.strip():
        return [f"output.dir is empty; {UNSET}"]
    if _URL_BEGINS.match(typed):
        return [f"output.dir={typed}: {NO_URL}"]
    folder = expand_home("output.dir", typed)
    with into_folder(folder):
        if not folder.exists():
            return []
        if not folder.is_dir():
            return [f"output.dir={typed}: this is a file; type a folder's name"]
        found, written_again = {entry.name for entry in folder.iterdir()}, _moved(folder)
        if (folder / "partial").is_dir() and not is_training_run(folder / CONFIG_FILE):
            written_again |= set(filter(_WRITTEN_WHILE_EVALUATED.fullmatch, found))
        names = sorted(found - written_again)
        others = [] if CONFIG_FILE in names else _foreign_entries(folder, names)
        if not others and (special := _check_entries(folder)):
            return special
        if not is_first_rank() or (resumes and CONFIG_FILE in names):
            return []
        if CONFIG_FILE in names and not _ended_before_first_step(folder, names):
            return [
                f"output.dir={typed} holds another run ({CONFIG_FILE} is there): type another "
                "folder, or leave output.dir out to get a new one; resume=auto continues a "
                "training run"
            ]
    if not others:
        return []
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    return [
        f"output.dir={typed} holds files that do not belong to a run: "
        f"{', '.join(others[:_MAX_NAMED])}{more}; type a new folder's name, or leave output.dir "
        "out to get one"
    ]


def _ended_before_first_step(folder: Path, names: Sequence[str]) -> bool:
    if not is_training_run(folder / CONFIG_FILE):
        return False
    return all(WRITTEN_AT_START.fullmatch(name) for name in names) and not (
        _has_entries(folder / "checkpoints") or _has_steps(folder / "metrics.csv")
    )


def _foreign_entries(folder: Path, names: Sequence[str]) -> list[str]:
    """List the entries that a process which was refused before training does not leave behind."""
    return [
        name
        for name in names
        # The log is opened right after the lock of a run is held.
        if not (_LEFT_BY_REFUSED.fullmatch(name) or (name == LOG_FILE and LOCK_FILE in names))
        or (name == REASON_FILE and not is_reason(folder / name))
        or (name == "checkpoints" and _has_entries(folder / name))
    ]


def _moved(folder: Path) -> set[str]:
    """Return what a merge had moved here when it was killed."""
    moved, _ = read_json_object(folder / UNFINISHED / _MOVED_FILE)
    return {entry.name for entry in folder.iterdir()} & moved.keys()


def open_unfinished(folder: Path) -> Path:
    """Make and lock an empty folder in `folder` for a result that is not complete.

    What a killed process left is removed; UserError if a process is still working on it.
    """
    for name in _moved(folder):
        _remove(folder / name)
    return open_empty(folder / UNFINISHED)


def open_empty(folder: Path) -> Path:
    """Make `folder`, or remove what a killed process left in it; return it, locked."""
    with into_folder(folder):
        folder.mkdir(exist_ok=True)
        lock_run(folder)
        for entry in folder.iterdir():
            if entry.name != LOCK_FILE:
                _remove(entry)
    return folder


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def move_finished(unfinished: Path, *, last: str) -> None:
    """Move a complete result to the parent of its folder, `last` as the last; remove the folder.

    If this is killed, the names that it moves are taken for what a killed process left.
    """
    names = [entry.name for entry in unfinished.iterdir() if entry.name not in (LOCK_FILE, last)]
    text = json.dumps(dict.fromkeys([*names, last], True))
    write_atomically(unfinished / _MOVED_FILE, text)
    for name in [*names, last]:
        os.replace(unfinished / name, unfinished.parent / name)
    shutil.rmtree(unfinished)


def _has_entries(folder: Path) -> bool:
    """Whether `checkpoints` holds more than what probed its disk."""
    probe = re.compile(r"probe-\d+\.tmp")
    return folder.is_dir() and not all(probe.fullmatch(entry.name) for entry in folder.iterdir())


def _has_steps(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    rows = metrics.read_bytes().splitlines()[1:]
    return any(not row.startswith(b"0,") for row in rows)


def _check_entries(folder: Path) -> list[str]:
    """List the links, pipes and devices in a run folder: writing to them may change files outside.

    The folder itself may be a link, since the user named it.
    """
    found = (each for each in special_entries(folder) if each[0].name != _NEVER_FOLLOWED)
    special = itertools.islice(found, _MAX_NAMED)
    return [
        f"{folder}: {entry.relative_to(folder)} is {what}, which runs neither create nor follow: "
        "it may lead out of the folder; remove it, or replace it by a copy of its target"
        for entry, what in special
    ]


def refuse_special_entries(folder: Path) -> None:
    """Raise UserError if a run folder holds links, pipes or devices."""
    if problems := _check_entries(folder):
        raise UserError(problems)


def expand_home(key: str, path: str) -> Path:
    """Expand `~` in the path of setting `key`; raises UserError without a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{key}={path}: that user has no home folder; type the folder's full path"
        ) from error


def decide_run_dir(config: OutputConfig) -> Path:
    """Make this run's folder, or return the one that the launcher has chosen."""
    if is_child() and (decided := run_dir()) is not None:
        return decided
    folder = make_run_dir(config)
    if is_first_rank():
        separate_files(folder)
    share_with_ranks(folder)
    return folder


def make_run_dir(config: OutputConfig, *, resumes: bool = False) -> Path:
    """Make a run folder; with `resumes` it may exist and hold a run."""
    problems = check_output(config, resumes=resumes)
    if problems:
        raise UserError(problems)
    if config.dir is not None:
        folder = expand_home("output.dir", config.dir)
        with into_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not resumes:  # a finished run may be read-only
                tempfile.TemporaryFile(dir=folder, prefix=_PROBE).close()
        return folder
    if read_launch().is_one_of_several:
        raise UserError(
            "ranks that were started from outside (torchrun, slurm) cannot agree on a new folder: "
            "type output.dir=FOLDER"
        )
    return make_new_dir(OUTPUTS / (config.name or "train"))


def make_new_dir(parent: Path, prefix: str = "") -> Path:
    """Make a folder in `parent` that is named after this second; UserError if a hundred exist."""
    started = prefix + time.strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(100):
        folder = parent / (f"{started}_{attempt}" if attempt else started)
        with contextlib.suppress(FileExistsError), into_folder(folder):  # of the same second
            folder.mkdir(parents=True)
            return folder
    raise UserError(f"{parent}: a hundred runs started in this second; type another output.name")


@contextlib.contextmanager
def into_folder(folder: Path, name: str | None = None) -> Iterator[None]:
    """Explain an OSError of writing a run folder, or file `name` in it."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        what = "" if name is None else f"{name} "
        raise OSError(
            f"output.dir={folder}: {what}cannot be written: {error.strerror}; type "
            "output.dir=FOLDER of your own"
        ) from error


def share_with_ranks(folder: Path) -> None:
    """Pass this run's folder to the ranks that this process starts and to error reporting."""
    if is_first_rank():
        (folder / REASON_FILE).unlink(missing_ok=True)  # why an earlier process stopped
    set_run_dir(folder.resolve())


def discard_unused() -> None:
    """Remove this process's folder under outputs/ if it holds only the lock and the error report.

    The error has been printed; a run that has written anything else keeps its folder.
    """
    folder = run_dir()
    if folder is None or is_child() or folder.parent.parent != OUTPUTS.resolve():
        return
    with contextlib.suppress(OSError):  # another process may be using it
        if {entry.name for entry in folder.iterdir()} <= set(_UNUSED):
            for name in _UNUSED:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def verb_line(verb: str) -> str:
    """Return the first line of the config.yaml that a verb writes."""
    return f"# settings of loft {verb}\n"


def is_training_run(config: Path) -> bool:
    """Whether a config.yaml is a training run's, not an evaluation's, a preview's or a plan's.

    Decided by its first line, or by its sections if an earlier version wrote it. A damaged file
    counts as a training run's; loading it reports why.
    """
    text, problem = read_text(config, "yaml_mib") if config.is_file() else ("", None)
    if problem is not None:
        return True
    if (recorded := VERB_LINE.match(text)) is not None:
        return recorded[1] == "train"
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return True
    if not isinstance(root, yaml.MappingNode):
        return False
    sections = {key.value for key, _ in root.value}
    return "optimizer" in sections and not {"preview", "hardware"} & sections


def separate_files(folder: Path) -> None:
    """Replace each hard-linked file of a run by a copy.

    `cp -al` and some archives make hard links, and a run must not change the files of another one.
    Checkpoints are exempt: they are replaced as a whole and never written in place.
    """
    for file in sorted(folder.rglob("*")):
        if {"checkpoints", LOCK_FILE} & set(file.relative_to(folder).parts):
            continue
        entry = file.lstat()
        if stat.S_ISREG(entry.st_mode) and entry.st_nlink > 1:
            copy = file.with_name(f".{file.name}.{os.getpid()}")
            copy.unlink(missing_ok=True)
            with into_folder(folder, file.name), contextlib.ExitStack() as stack:
                stack.callback(copy.unlink, missing_ok=True)
                shutil.copy2(file, copy)
                os.replace(copy, file)


_held: dict[Path, IO[str]] = {}
"""lock files of this process, kept open: closing one releases its lock"""


def lock_run(folder: Path) -> None:
    """Lock run `folder` until this process ends, in whatever way.

    Raises UserError naming the process that holds the lock. Only the first rank locks. The lock
    file holds the process id, the host and the start time, for people to read.
    """
    import fcntl

    file = folder.resolve() / LOCK_FILE
    if file in _held:
        return
    with into_folder(folder, LOCK_FILE):
        stream = open_no_follow(file, "a+", encoding="utf-8")
    try:
        # Not flock: forked data-loader workers would inherit that lock.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(
                f"{folder}: {_lock_holder(stream)} is working on this run; wait for it or stop "
                "it, or type another output.dir"
            ) from error
        if error.errno not in _NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s): run one process at a time",
            folder,
            error.strerror,
        )
    _held[file] = stream
    if os.fstat(stream.fileno()).st_nlink > 1:  # a hard link may belong to another run
        return
    stream.truncate(0)
    note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    stream.write(json.dumps(note) + "\n")
    stream.flush()


def _lock_holder(stream: IO[str]) -> str:
    stream.seek(0)
    try:
        note = json.load(stream)
        return f"process {note['pid']} on {note['host']}, started {note['started']},"
    except (ValueError, KeyError, TypeError):  # locked, but not written yet
        return "another process"
