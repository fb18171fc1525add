"""A sweep from its words to its end: what is searched, and trials that keep every slot busy."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config import TrainConfig, check_before_start, compose, load_config
from app.config.overrides import quote_value
from app.model.adapter import DEFAULT_LR
from app.preflight import requested_devices
from app.process.errors import DONE, INTERRUPTED, TERMINATED, UserError
from app.process.files import write_whole
from app.run import NEVER
from app.run.folder import OUTPUTS, UNSET, expand_home, hold_run, into_folder
from app.sweep.results import (
    PAGE_FILE,
    RESULTS_FILE,
    TABLE_FILE,
    outcome_of,
    read_results,
    save_results,
    show_results,
    write_page,
)
from app.sweep.search import Grid, OptunaSearch, Search
from app.sweep.slurm import Slurm, check_slurm
from app.sweep.trials import Launcher, Local, RunningTrial, Trial
from app.sweep.words import Swept, as_words, read_words, varied
from data_modules import REDACTED, printable, redact, redacted

WORDS_FILE = "sweep.yaml"
"""in a sweep's folder: its words, with which it goes on"""
ALONE = "a sweep goes on with its own words; type it alone"
RESUME = re.compile(r"\+*resume=(?P<value>.+)")
OWN = ("sweep.", "launcher", "output.", "resume")
"""beginnings of keys that are the sweep's and not its trials'"""
MOST_TRIALS = 10_000
"""of a grid"""
EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


def run_sweep(words: list[str]) -> int:
    """Run a sweep, or go on with the one in `resume=FOLDER`.

    Returns 0, the exit code of the first trial that failed, or that of a signal. UserError before
    the first trial if any value would be refused.
    """
    swept, folder = _open(words)
    config, typed = _check(swept)
    slots = _gpu_slots(config)
    if config.launcher.name == "slurm":
        check_slurm()
    if folder is None:
        folder = _make_folder(config.output.name or "train", config.output.dir)
        write_whole(folder / WORDS_FILE, yaml.safe_dump({"words": redacted(words)}))
    hold_run(folder)
    ended = read_results(folder)
    search = _build_search(swept, config, folder, [one.number for one in ended])
    print(f"{search.total} trials in {printable(str(folder))}:", end=" ")
    print(redact("; ".join(f"{one.key} {one}" for one in varied(swept))), flush=True)
    launcher: Launcher = Local(slots)
    if config.launcher.name == "slurm":
        launcher = Slurm(config.launcher, config.trainer.devices, folder, config.sweep.parallel)
    runs = _Trials(search, typed, folder, launcher, ended)
    code = runs.run()
    keys = [one.key for one in varied(swept)]
    show_results(runs.ended, swept, typed)
    write_page(runs.ended, folder, keys)
    print(printable(f"{folder}/: {RESULTS_FILE}, {TABLE_FILE}, {PAGE_FILE}"))
    print(printable(f"run: {folder}"))
    failed = next((trial.exit_code for trial in runs.ended if trial.has_failed), DONE)
    return code or failed


def _open(words: Sequence[str]) -> tuple[list[Swept], Path | None]:
    """Return what is swept, and the folder of the sweep that is resumed."""
    found = [match["value"] for word in words if (match := RESUME.fullmatch(word)) is not None]
    if not found or found[0] == NEVER:
        return read_words(words), None
    where = found[0]
    folder = expand_home("resume", where)
    file = folder / WORDS_FILE
    if not file.is_file():
        raise UserError(
            f"resume={where}: expected the folder of a sweep, with {WORDS_FILE}; {ALONE}"
        )
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    kept = read.get("words") if isinstance(read, dict) else None
    if not isinstance(kept, list) or not all(isinstance(word, str) for word in kept):
        raise UserError(f"{file}: expected `words:`, a list; copy the sweep's folder again")
    typed = read_words(word for word in words if RESUME.fullmatch(word) is None)
    return _with_secrets(read_words(kept), typed, where), folder


def _with_secrets(kept: Sequence[Swept], typed: Sequence[Swept], where: str) -> list[Swept]:
    """Return the words of a sweep that goes on, with the secrets that its file left out."""
    left_out = {one.key: one for one in kept if any(REDACTED in value for value in one.values)}
    again = {one.key: one for one in typed}
    problems = [
        f"{key}: {ALONE}" + (f", with {', '.join(left_out)}" if left_out else "")
        for key in again.keys() - left_out.keys()
    ]
    for key, one in left_out.items():
        if key not in again:
            problems.append(
                f"resume={where}: a secret was left out of {key}; type it again, beside "
                f"resume={where}: {key}={','.join(one.values)}"
            )
        elif redacted(again[key].values) != list(one.values):
            problems.append(
                f"{key}: expected what the sweep was started with, its secrets in their place: "
                f"{key}={','.join(one.values)}"
            )
    if problems:
        raise UserError(problems)
    return [again.get(one.key, one) for one in kept]


def _check(swept: Sequence[Swept]) -> tuple[TrainConfig, dict[str, str]]:
    """Check each value beside the first ones of the others.

    Returns the settings of the first combination, and the words that all trials share.
    """
    first = {one.key: one.values[0] for one in swept}
    problems: list[str] = []
    for one in swept:
        if one.varies and one.key.startswith(OWN):
            problems.append(f"{one.key}: expected one value for the whole sweep")
        for value in one.values[1:]:
            try:
                compose("train", as_words(first | {one.key: value}))
            except UserError as error:
                problems += error.problems
    try:
        config = load_config("train", as_words(first))
        assert isinstance(config, TrainConfig)
        own = dataclasses.replace(config.output, dir=None)  # each trial has a folder of its own
        check_before_start(dataclasses.replace(config, output=own))
        problems += _check_search(config.sweep.search, swept)
        if config.launcher.name == "slurm":
            problems += [
                f"{one.key}: holds a secret, and submitit writes a job's settings into a file; "
                "type launcher=local, or name data that needs no secret"
                for one in swept
                if redacted(one.values) != list(one.values)
            ]
    except UserError as error:
        problems = error.problems + problems
    if problems or not isinstance(config, TrainConfig):
        raise UserError(dict.fromkeys(problems))
    shared = {one.key: one.values[0] for one in swept if not one.varies}
    return config, {key: value for key, value in shared.items() if not key.startswith(OWN)}


def _check_search(search: str, swept: Sequence[Swept]) -> list[str]:
    """List what is wrong with the values that are searched."""
    problems = []
    intervals = [one for one in swept if one.interval is not None]
    if search == "grid":
        problems += [
            f"{one.key}=interval(...): a grid tries listed values; type sweep.search=optuna, or "
            f"{one.key}={one.values[0]},{one.values[1]}"
            for one in intervals
        ]
        total = math.prod(len(one.values) for one in swept)
        if total > MOST_TRIALS:
            problems.append(
                f"this grid has {total:,} trials, more than {MOST_TRIALS:,}; type "
                "sweep.search=optuna sweep.trials=20, or list fewer values"
            )
        return problems
    problems += [
        f"{one.key}: its values hold secrets, which Optuna writes into its journal; type "
        "sweep.search=grid, or name data that needs no secret"
        for one in varied(swept)
        if redacted(one.values) != list(one.values)
    ]
    if not varied(swept):
        problems.append(
            "sweep.search=optuna: nothing is searched; type a range, as "
            "'optimizer.lr=interval(1e-5,1e-3)' or 'adapter.r=choice(8,16,32)'"
        )
    return problems


def _build_search(
    swept: Sequence[Swept], config: TrainConfig, folder: Path, ended: Sequence[int]
) -> Search:
    if config.sweep.search == "grid":
        return Grid(swept, ended)
    return OptunaSearch(
        swept, config.sweep, folder, ended, seed=config.seed, start=_as_they_stand(swept)
    )


def _as_they_stand(swept: Sequence[Swept]) -> dict[str, Any]:
    """Return the values that varied settings have when not typed, of those that are searched."""
    fixed = {one.key: one.values[0] for one in swept if not one.varies}
    config = compose("train", as_words(fixed))
    assert isinstance(config, TrainConfig)
    if config.optimizer.lr is None:
        config.optimizer.lr = DEFAULT_LR[config.adapter.name]
    start: dict[str, Any] = {}
    for one in varied(swept):
        value: Any = config
        for name in one.key.split("."):
            value = getattr(value, name, None)
        if one.interval is None:
            spelled = quote_value(str(value))
            start |= {one.key: spelled} if spelled in one.values else {}
        elif isinstance(value, (int, float)) and one.interval.low <= value <= one.interval.high:
            start[one.key] = value
    return start


def _make_folder(name: str, folder: str | None) -> Path:
    """Make outputs/<name>/sweep-<time>, or the folder that was typed."""
    if folder is not None and not folder.strip():
        raise UserError(f"output.dir is empty; {UNSET}")
    if folder is None:
        return _make_new_folder(OUTPUTS / name)
    path = Path(folder)
    if (path / WORDS_FILE).exists():
        raise UserError(
            f"output.dir={path} holds another sweep; type another folder, or -m resume={path} "
            "alone to go on with it"
        )
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"output.dir={path} is not empty; type another folder")
    if path.exists() and not path.is_dir():
        raise UserError(f"output.dir={path}: this is a file; type a folder's name")
    with into_folder(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def _make_new_folder(parent: Path) -> Path:
    started = time.strftime("%Y-%m-%d_%H-%M-%S")
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / f"sweep-{started}", 1
    while path.exists():  # another sweep of this second
        number += 1
        path = parent / f"sweep-{started}-{number}"
    path.mkdir()
    return path


def _gpu_slots(config: TrainConfig) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each trial that runs at a time, None where all may see all."""
    parallel = config.sweep.parallel
    devices = requested_devices(config)
    if parallel == 1 or not devices.on_gpu or config.launcher.name != "local":
        return [None] * parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(devices.num_gpus)]
    each = config.trainer.devices if isinstance(config.trainer.devices, int) else None
    if each is None or each * parallel > len(names):
        needed = "several" if each is None else str(each * parallel)
        raise UserError(
            f"sweep.parallel={parallel} with trainer.devices={config.trainer.devices} needs "
            f"{needed} GPUs, {len(names)} are visible; type trainer.devices="
            f"{max(len(names) // parallel, 1)} or a smaller sweep.parallel"
        )
    return [",".join(names[slot * each : (slot + 1) * each]) for slot in range(parallel)]


class _Trials:
    """Keeps every slot busy until the search has nothing to propose."""

    def __init__(
        self,
        search: Search,
        typed: Mapping[str, str],
        folder: Path,
        launcher: Launcher,
        ended: Sequence[Trial],
    ) -> None:
        self.search, self.typed, self.folder = search, dict(typed), folder
        self.ended = list(ended)
        self._launcher = launcher
        self._running: dict[int, RunningTrial] = {}
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run all trials; returns 0, or the exit code of the signal that ended them."""
        handlers = {signum: signal.signal(signum, self._note) for signum in EXIT_CODES}
        try:
            while self._fill() or self._running:
                time.sleep(self._launcher.poll_seconds)
                for slot in list(self._running):
                    self._watch(slot)
                if self._signal and self._launcher.outlives_sweep:
                    break
                if self._signal:
                    for trial in self._running.values():
                        trial.end_by(self._signal)  # and saves itself
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        if self._signal:
            print(
                f"interrupted after {len(self.ended)} of {self.search.total} trials",
                file=sys.stderr,
            )
            if self._running:
                ids = " ".join(str(trial.job.id) for trial in self._running.values())
                print(f"  scancel {ids}   # ends the jobs, which go on otherwise", file=sys.stderr)
            where = shlex.quote(f"resume={self.folder}")
            print(f"  python -m app.train -m {where}   # goes on", file=sys.stderr)
        return EXIT_CODES[self._signal] if self._signal else DONE

    def _note(self, signum: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(signum)

    def _fill(self) -> bool:
        """Start a trial in each free slot; returns whether any was started."""
        started = False
        for slot in range(self._launcher.num_slots):
            if slot in self._running or self._signal or (next_one := self.search.ask()) is None:
                continue
            number, values = next_one
            words = as_words(self.typed | values)
            self._running[slot] = RunningTrial(number, words, self.folder, slot, self._launcher)
            started = True
        return started

    def _watch(self, slot: int) -> None:
        running = self._running[slot]
        has_ended = running.has_ended  # before its curve is read, which is whole then
        if running.stopped_at is None:
            step = self.search.stops_at(running.number, running.curve())
            if step is not None:
                running.stop(step)
        if not has_ended:
            return
        del self._running[slot]
        trial = running.result()
        if self._signal and trial.exit_code != DONE:
            return  # it goes on when the sweep does
        self.search.tell(trial.number, trial.objective, was_stopped=trial.stopped_at is not None)
        self.ended.append(trial)
        save_results(self.ended, self.folder)
        print(printable(self._line(trial)), flush=True)

    def _line(self, trial: Trial) -> str:
        shared = redacted(as_words(self.typed))
        what = " ".join(word for word in trial.overrides if word not in shared)
        count = f"{len(self.ended)}/{self.search.total}"
        return f"[{count}] trial {trial.number}: {what}: {outcome_of(trial)}, {trial.seconds:.0f} s"
