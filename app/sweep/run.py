"""Running a sweep: checking its overrides, keeping every slot busy, and resuming it."""

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
from app.process.files import write_atomically
from app.process.installation import verb_command
from app.run import NEVER
from app.run.folder import OUTPUTS, UNSET, expand_home, hold_run, into_folder
from app.sweep.parameters import Parameter, format_overrides, parse_parameters, varied
from app.sweep.results import (
    PAGE_FILE,
    RESULTS_FILE,
    TABLE_FILE,
    describe_outcome,
    load_results,
    print_results,
    save_results,
    write_page,
)
from app.sweep.search import Grid, OptunaSearch, Search
from app.sweep.slurm import SlurmLauncher, check_slurm
from app.sweep.trials import Launcher, LocalLauncher, RunningTrial, Trial
from data_modules import REDACTED, printable, redact, redacted

SWEEP_FILE = "sweep.yaml"
"""file in a sweep's folder with its overrides, from which it is resumed"""
NO_OVERRIDES = "a resumed sweep keeps its overrides; use resume=FOLDER without others"
RESUME = re.compile(r"\+*resume=(?P<value>.+)")
SWEEP_KEYS = ("sweep.", "launcher", "output.", "resume")
"""prefixes of the keys that apply to the whole sweep and are not passed on to its trials"""
MAX_GRID_TRIALS = 10_000
EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


def run_sweep(overrides: list[str]) -> int:
    """Run a sweep, or resume the one in `resume=FOLDER`; return the exit code.

    The exit code is 0, that of the first trial that failed, or that of a signal. Raises UserError
    before the first trial if any value is invalid.
    """
    parameters, folder = _load_parameters(overrides)
    config, shared = _check(parameters)
    slots = _gpu_slots(config)
    if config.launcher.name == "slurm":
        check_slurm()
    if folder is None:
        folder = _make_folder(config.output.name or "train", config.output.dir)
        write_atomically(folder / SWEEP_FILE, yaml.safe_dump({"words": redacted(overrides)}))
    hold_run(folder)
    finished = load_results(folder)
    search = _build_search(parameters, config, folder, [trial.number for trial in finished])
    print(f"{search.num_trials} trials in {printable(str(folder))}:", end=" ")
    searched = "; ".join(f"{parameter.key} {parameter}" for parameter in varied(parameters))
    print(redact(searched), flush=True)
    launcher: Launcher = LocalLauncher(slots)
    if config.launcher.name == "slurm":
        launcher = SlurmLauncher(
            config.launcher, config.trainer.devices, folder, config.sweep.parallel
        )
    runner = _TrialRunner(search, shared, folder, launcher, finished)
    code = runner.run()
    print_results(runner.finished, parameters, shared)
    write_page(runner.finished, folder, [parameter.key for parameter in varied(parameters)])
    print(printable(f"{folder}/: {RESULTS_FILE}, {TABLE_FILE}, {PAGE_FILE}"))
    print(printable(f"run: {folder}"))
    failed = next((trial.exit_code for trial in runner.finished if trial.has_failed), DONE)
    return code or failed


def _load_parameters(overrides: Sequence[str]) -> tuple[list[Parameter], Path | None]:
    """Return the parameters of a sweep, and its folder if it is resumed."""
    found = [match["value"] for item in overrides if (match := RESUME.fullmatch(item)) is not None]
    if not found or found[0] == NEVER:
        return parse_parameters(overrides), None
    value = found[0]
    folder = expand_home("resume", value)
    file = folder / SWEEP_FILE
    if not file.is_file():
        raise UserError(
            f"resume={value}: expected the folder of a sweep, with {SWEEP_FILE}; {NO_OVERRIDES}"
        )
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    saved = content.get("words") if isinstance(content, dict) else None
    if not isinstance(saved, list) or not all(isinstance(item, str) for item in saved):
        raise UserError(f"{file}: expected `words:`, a list; copy the sweep's folder again")
    typed = parse_parameters(item for item in overrides if RESUME.fullmatch(item) is None)
    return _restore_secrets(parse_parameters(saved), typed, value), folder


def _restore_secrets(
    saved: Sequence[Parameter], typed: Sequence[Parameter], resume: str
) -> list[Parameter]:
    """Return the saved parameters with the secrets, which are not saved, taken from `typed`."""
    with_secrets = {
        parameter.key: parameter
        for parameter in saved
        if any(REDACTED in value for value in parameter.values)
    }
    given = {parameter.key: parameter for parameter in typed}
    problems = [
        f"{key}: {NO_OVERRIDES}" + (f" than {', '.join(with_secrets)}" if with_secrets else "")
        for key in given.keys() - with_secrets.keys()
    ]
    for key, parameter in with_secrets.items():
        values = ",".join(parameter.values)
        if key not in given:
            problems.append(
                f"resume={resume}: a secret in {key} was not saved; add it again next to "
                f"resume={resume}: {key}={values}"
            )
        elif redacted(given[key].values) != list(parameter.values):
            problems.append(
                f"{key}: expected the value with which the sweep was started, including its "
                f"secrets: {key}={values}"
            )
    if problems:
        raise UserError(problems)
    return [given.get(parameter.key, parameter) for parameter in saved]


def _check(parameters: Sequence[Parameter]) -> tuple[TrainConfig, dict[str, str]]:
    """Check every value together with the first values of the other parameters.

    Returns the settings of the first combination, and the values that all trials share.
    """
    first = {parameter.key: parameter.values[0] for parameter in parameters}
    problems: list[str] = []
    for parameter in parameters:
        if parameter.varies and parameter.key.startswith(SWEEP_KEYS):
            problems.append(f"{parameter.key}: expected one value for the whole sweep")
        for value in parameter.values[1:]:
            try:
                compose("train", format_overrides(first | {parameter.key: value}))
            except UserError as error:
                problems += error.problems
    try:
        config = load_config("train", format_overrides(first))
        assert isinstance(config, TrainConfig)
        # Without the folder of the sweep, since each trial gets a new one.
        output = dataclasses.replace(config.output, dir=None)
        check_before_start(dataclasses.replace(config, output=output))
        problems += check_search(config.sweep.search, parameters)
        if config.launcher.name == "slurm":
            problems += [
                f"{parameter.key}: contains a secret, and submitit writes the settings of a job "
                "to a file; use launcher=local, or data that needs no secret"
                for parameter in parameters
                if redacted(parameter.values) != list(parameter.values)
            ]
    except UserError as error:
        problems = error.problems + problems
    if problems or not isinstance(config, TrainConfig):
        raise UserError(dict.fromkeys(problems))
    shared = {
        parameter.key: parameter.values[0]
        for parameter in parameters
        if not parameter.varies and not parameter.key.startswith(SWEEP_KEYS)
    }
    return config, shared


def check_search(search: str, parameters: Sequence[Parameter]) -> list[str]:
    """Return the problems of the searched values."""
    problems = []
    if search == "grid":
        problems += [
            f"{parameter.key}=interval(...): a grid needs listed values; use sweep.search=optuna, "
            f"or {parameter.key}={parameter.values[0]},{parameter.values[1]}"
            for parameter in parameters
            if parameter.interval is not None
        ]
        num_trials = math.prod(len(parameter.values) for parameter in parameters)
        if num_trials > MAX_GRID_TRIALS:
            problems.append(
                f"this grid has {num_trials:,} trials, more than {MAX_GRID_TRIALS:,}; use "
                "sweep.search=optuna sweep.trials=20, or list fewer values"
            )
        return problems
    problems += [
        f"{parameter.key}: the values contain secrets, which Optuna writes to its journal; use "
        "sweep.search=grid, or data that needs no secret"
        for parameter in varied(parameters)
        if redacted(parameter.values) != list(parameter.values)
    ]
    if not varied(parameters):
        problems.append(
            "sweep.search=optuna: no parameter to search; add a range, such as "
            "'optimizer.lr=interval(1e-5,1e-3)' or 'adapter.r=choice(8,16,32)'"
        )
    return problems


def _build_search(
    parameters: Sequence[Parameter], config: TrainConfig, folder: Path, finished: Sequence[int]
) -> Search:
    if config.sweep.search == "grid":
        return Grid(parameters, finished)
    return OptunaSearch(
        parameters,
        config.sweep,
        folder,
        finished,
        seed=config.seed,
        start=_default_values(parameters),
    )


def _default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Return the default values of the varied settings, if they are among the searched values."""
    fixed = {parameter.key: parameter.values[0] for parameter in parameters if not parameter.varies}
    config = compose("train", format_overrides(fixed))
    assert isinstance(config, TrainConfig)
    if config.optimizer.lr is None:
        config.optimizer.lr = DEFAULT_LR[config.adapter.name]
    defaults: dict[str, Any] = {}
    for parameter in varied(parameters):
        value: Any = config
        for name in parameter.key.split("."):
            value = getattr(value, name, None)
        interval = parameter.interval
        if interval is None:
            quoted = quote_value(str(value))
            defaults |= {parameter.key: quoted} if quoted in parameter.values else {}
        elif isinstance(value, (int, float)) and interval.low <= value <= interval.high:
            defaults[parameter.key] = value
    return defaults


def _make_folder(name: str, folder: str | None) -> Path:
    """Create the folder of a sweep: the requested one, or outputs/NAME/sweep-TIME."""
    if folder is not None and not folder.strip():
        raise UserError(f"output.dir is empty; {UNSET}")
    if folder is None:
        return _make_new_folder(OUTPUTS / name)
    path = Path(folder)
    if (path / SWEEP_FILE).exists():
        raise UserError(
            f"output.dir={path} contains another sweep; use another folder, or resume that sweep "
            f"with -m resume={path}"
        )
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"output.dir={path} is not empty; use another folder")
    if path.exists() and not path.is_dir():
        raise UserError(f"output.dir={path} is a file; use the name of a folder")
    with into_folder(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def _make_new_folder(parent: Path) -> Path:
    started = time.strftime("%Y-%m-%d_%H-%M-%S")
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / f"sweep-{started}", 1
    while path.exists():  # another sweep started in the same second
        number += 1
        path = parent / f"sweep-{started}-{number}"
    path.mkdir()
    return path


def _gpu_slots(config: TrainConfig) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each slot for a trial, None where trials inherit it."""
    parallel = config.sweep.parallel
    devices = requested_devices(config)
    if parallel == 1 or not devices.on_gpu or config.launcher.name != "local":
        return [None] * parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(devices.num_gpus)]
    per_trial = config.trainer.devices if isinstance(config.trainer.devices, int) else None
    if per_trial is None or per_trial * parallel > len(gpus):
        needed = "several" if per_trial is None else str(per_trial * parallel)
        raise UserError(
            f"sweep.parallel={parallel} with trainer.devices={config.trainer.devices} needs "
            f"{needed} GPUs, but {len(gpus)} are visible; use trainer.devices="
            f"{max(len(gpus) // parallel, 1)} or a smaller sweep.parallel"
        )
    return [",".join(gpus[slot * per_trial : (slot + 1) * per_trial]) for slot in range(parallel)]


class _TrialRunner:
    """Runs trials in every slot of a launcher until the search proposes no more."""

    def __init__(
        self,
        search: Search,
        shared: Mapping[str, str],
        folder: Path,
        launcher: Launcher,
        finished: Sequence[Trial],
    ) -> None:
        self.finished = list(finished)
        self._search, self._shared, self._folder = search, dict(shared), folder
        self._launcher = launcher
        self._running: dict[int, RunningTrial] = {}
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run all trials; return 0, or the exit code of the signal that interrupted them."""
        handlers = {signum: signal.signal(signum, self._record_signal) for signum in EXIT_CODES}
        try:
            while self._start_trials() or self._running:
                time.sleep(self._launcher.poll_seconds)
                for slot in list(self._running):
                    self._poll(slot)
                if self._signal and self._launcher.jobs_outlive_sweep:
                    break
                if self._signal:
                    for trial in self._running.values():
                        trial.send_signal_once(self._signal)  # it saves a checkpoint and exits
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        if self._signal is None:
            return DONE
        self._print_interrupted()
        return EXIT_CODES[self._signal]

    def _print_interrupted(self) -> None:
        print(
            f"interrupted after {len(self.finished)} of {self._search.num_trials} trials",
            file=sys.stderr,
        )
        if self._running:
            ids = " ".join(str(trial.job.id) for trial in self._running.values())
            print(f"  scancel {ids}   # ends the jobs, which otherwise continue", file=sys.stderr)
        resume = shlex.quote(f"resume={self._folder}")
        print(f"  {verb_command('train')} -m {resume}   # resumes the sweep", file=sys.stderr)

    def _record_signal(self, signum: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(signum)

    def _start_trials(self) -> bool:
        """Start a trial in each free slot; return whether any was started."""
        started = False
        for slot in range(self._launcher.num_slots):
            if slot in self._running or self._signal or (proposal := self._search.ask()) is None:
                continue
            number, values = proposal
            overrides = format_overrides(self._shared | values)
            self._running[slot] = RunningTrial(
                number, overrides, self._folder, slot, self._launcher
            )
            started = True
        return started

    def _poll(self, slot: int) -> None:
        """Prune the trial of a slot if it falls behind; record its result once it has ended."""
        running = self._running[slot]
        has_ended = running.has_ended  # checked before reading the curve, which then is complete
        if running.stopped_at is None:
            step = self._search.find_prune_step(running.number, running.curve())
            if step is not None:
                running.prune(step)
        if not has_ended:
            return
        del self._running[slot]
        trial = running.result()
        if self._signal and trial.exit_code != DONE:
            return  # interrupted: the trial resumes with the sweep
        was_pruned = trial.stopped_at is not None
        self._search.tell(trial.number, trial.objective, was_pruned=was_pruned)
        self.finished.append(trial)
        save_results(self.finished, self._folder)
        print(printable(self._format_progress(trial)), flush=True)

    def _format_progress(self, trial: Trial) -> str:
        shared = redacted(format_overrides(self._shared))
        own = " ".join(override for override in trial.overrides if override not in shared)
        count = f"{len(self.finished)}/{self._search.num_trials}"
        outcome = describe_outcome(trial)
        return f"[{count}] trial {trial.number}: {own}: {outcome}, {trial.seconds:.0f} s"
