"""Running a sweep: checking its overrides, keeping every slot busy, and resuming it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from app.config import TrainConfig, check_before_start, compose, load_config
from app.config.conf_files import Granting, is_typed, not_taken, settle
from app.config.overrides import quote_value
from app.model.adapter import DEFAULT_LR
from app.preflight import requested_devices
from app.process.launch import quote_words
from app.run.folder import (
    OUTPUTS,
    OutputConfig,
    expand_home,
    lock_run,
    make_new_dir,
    make_run_dir,
    separate_files,
)
from app.sweep.parameters import (
    SWEEP_FILE,
    Grid,
    OptunaSearch,
    Parameter,
    Search,
    Words,
    format_overrides,
    load_words,
    save_words,
    varied,
)
from app.sweep.trials import (
    RESULTS_FILE,
    SWEEP_PAGE,
    TABLE_FILE,
    LocalLauncher,
    RunningTrial,
    SlurmLauncher,
    Trial,
    check_jobs,
    check_slurm,
    describe_outcome,
    load_results,
    print_results,
    read_curve,
    save_results,
    write_sweep_page,
)
from app.training.trainer import DEFAULT_MONITOR
from common.errors import DONE, INTERRUPTED, TERMINATED, UserError
from common.facts import as_typed
from common.installation import verb_command
from common.redaction import redact, redacted
from common.text import counted, duration, printable

_OF_SWEEP = ("sweep", "launcher", "output", "resume")
"""groups that apply to the whole sweep and are not passed on to its trials"""
_MAX_GRID_TRIALS = 10_000
_MAX_CHECKED_TRIALS = 64
"""up to so many trials of a grid are checked one by one, beyond it only each value"""
_EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


def run_sweep(overrides: list[str]) -> int:
    """Run a sweep, or resume the one in `resume=FOLDER`; return the exit code.

    The exit code is 0, that of the first trial that failed, or that of a signal. Raises UserError
    before the first trial if any value is invalid.
    """
    words = load_words(overrides)
    parameters, folder = words.parameters, words.folder
    config, shared, granting = _check(words)
    slots = _gpu_slots(config)
    if config.launcher.name == "slurm":
        check_slurm()
    if folder is None:
        folder = _make_folder(config.output.name or "train", config.output.dir)
        save_words(folder, overrides)
    lock_run(folder)
    separate_files(folder)
    finished = load_results(folder)
    groups = [parameter.key.partition(".")[0] for parameter in varied(parameters)]
    metric = config.objective.compared_by if "objective" in groups else DEFAULT_MONITOR
    numbers = [trial.number for trial in finished]
    search: Search = Grid(parameters, numbers)
    if config.sweep.search == "optuna":
        search = OptunaSearch(
            *(parameters, config.sweep, folder, numbers),
            seed=config.seed,
            start=_default_values(parameters),
            metric=metric,
        )
    print(f"{counted(search.num_trials, 'trial')} in {printable(str(folder))}:", end=" ")
    searched = "; ".join(f"{parameter.key} {parameter}" for parameter in varied(parameters))
    print(redact(searched), flush=True)
    if metric != DEFAULT_MONITOR:
        print(f"ranked by {metric}: settings of the objective change what {DEFAULT_MONITOR} means")
    launcher: LocalLauncher | SlurmLauncher = LocalLauncher(slots)
    if config.launcher.name == "slurm":
        launcher = SlurmLauncher(config, folder)
    values = {each.key: ",".join(redacted(each.values)) for each in parameters}
    again = {each.key: f"{each.key}={values.get(each.key, each.value)}" for each in granting}
    resume = quote_words(f"resume={folder}", *again.values())
    runner = _TrialRunner(search, shared, folder, launcher, finished, metric, resume=resume)
    code = runner.run()
    print_results(runner.finished, parameters, shared)
    write_sweep_page(runner.finished, folder, parameters)
    print(printable(f"{folder}/: {RESULTS_FILE}, {TABLE_FILE}, {SWEEP_PAGE}"))
    print(printable(f"run: {folder}"))
    failed = next((trial.exit_code for trial in runner.finished if trial.has_failed), DONE)
    return code or failed


def _check(words: Words) -> tuple[TrainConfig, dict[str, str], list[Granting]]:
    """Check the trials before the first one starts: each, or each value if there are many.

    Returns the settings of the first trial, the values that all trials share, and the settings that
    a resumed sweep never takes from its folder.
    """
    parameters = words.parameters
    first = {parameter.key: parameter.values[0] for parameter in parameters}
    problems = [
        f"{parameter.key}: expected one value for the whole sweep"
        for parameter in parameters
        if parameter.varies and parameter.key.startswith(_OF_SWEEP)
    ]
    config, found = _check_trial(first)
    problems += found
    search = first.get("sweep.search", "grid") if config is None else config.sweep.search
    num_trials = math.prod(len(parameter.values) for parameter in parameters)
    if search == "grid" and num_trials > _MAX_GRID_TRIALS:
        problems.append(
            f"this grid has {num_trials:,} trials, more than {_MAX_GRID_TRIALS:,}; use "
            "sweep.search=optuna sweep.trials=20, or list fewer values"
        )
        raise UserError(problems)
    trials = [] if config is None else [config]
    for values in _further_trials(first, parameters):
        other, found = _check_trial(values)
        problems += found
        trials += [] if other is None else [other]
    if words.folder is None:  # such sweeps of earlier versions can still be resumed
        problems += _unlike_objectives(trials)
    granting = [each for one in trials for each in not_taken(one, frozenset(), skip=_OF_SWEEP)]
    resets: list[Granting] = []
    if words.folder is not None:
        untyped = [each for each in granting if not is_typed(each.key, words.typed)]
        resets, found = settle(dict.fromkeys(untyped), words.folder / SWEEP_FILE)
        problems += found
    if config is not None:
        problems += _check_search(search, parameters)
        if config.launcher.name == "slurm":
            problems += check_jobs(config.launcher, parameters)
    if problems or config is None:
        raise UserError(dict.fromkeys(problems))
    shared = {
        parameter.key: parameter.values[0]
        for parameter in parameters
        if not parameter.varies and not parameter.key.startswith(_OF_SWEEP)
    }
    shared |= {each.key: quote_value(as_typed(each.default)) for each in resets}
    return config, shared, granting


def _unlike_objectives(trials: Sequence[TrainConfig]) -> list[str]:
    objectives = [trial.objective for trial in trials]
    # Against the base, accuracy counts answers that gained; otherwise those that are likelier.
    measures = {
        (each.name, each.compared_by + " against the base" * each.compares_with_base): each
        for each in objectives
    }
    if len({metric for _, metric in measures}) < 2:
        return []
    names = list(dict.fromkeys(name for name, _ in measures))
    compared = ", ".join(f"{name} by {metric}" for name, metric in measures)
    first = objectives[0]
    fix = f"={first.name}" if len(names) > 1 else f".reference={first.reference_source}"
    return [
        f"objective={','.join(names)}: their runs are not compared by one metric ({compared}); "
        f"type a sweep for each, as objective{fix}"
    ]


def _check_trial(values: Mapping[str, str]) -> tuple[TrainConfig | None, list[str]]:
    config: TrainConfig | None = None
    try:
        loaded = load_config("train", format_overrides(values))
        assert isinstance(loaded, TrainConfig)
        config = loaded
        # Without the folder of the sweep, since each trial gets a new one.
        output = dataclasses.replace(config.output, dir=None)
        check_before_start(dataclasses.replace(config, output=output))
    except UserError as error:
        return config, list(error.problems)
    return config, []


def _further_trials(
    first: Mapping[str, str], parameters: Sequence[Parameter]
) -> Iterator[dict[str, str]]:
    varying = varied(parameters)
    if math.prod(len(parameter.values) for parameter in varying) <= _MAX_CHECKED_TRIALS:
        trials = itertools.product(*(parameter.values for parameter in varying))
        next(trials)  # that is `first`
        keys = [parameter.key for parameter in varying]
        yield from ({**first, **dict(zip(keys, values, strict=True))} for values in trials)
    else:
        for parameter in varying:
            yield from ({**first, parameter.key: value} for value in parameter.values[1:])


def _check_search(search: str, parameters: Sequence[Parameter]) -> list[str]:
    if search == "grid":
        return [
            f"{parameter.key}=interval(...): a grid needs listed values; use sweep.search=optuna, "
            f"or {parameter.key}={parameter.values[0]},{parameter.values[1]}"
            for parameter in parameters
            if parameter.interval is not None
        ]
    problems = [
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


def _default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
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
    if folder is None:
        return make_new_dir(OUTPUTS / name, "sweep-")
    if (expand_home("output.dir", folder) / SWEEP_FILE).exists():
        raise UserError(
            f"output.dir={folder} contains another sweep; use another folder, or resume that sweep "
            f"with -m resume={folder}"
        )
    return make_run_dir(OutputConfig(name=name, dir=folder))


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
    def __init__(
        self,
        search: Search,
        shared: Mapping[str, str],
        folder: Path,
        launcher: LocalLauncher | SlurmLauncher,
        finished: Sequence[Trial],
        metric: str,
        *,
        resume: str,
    ) -> None:
        """`resume`: the words that resume the sweep, quoted for a shell."""
        self.finished = list(finished)
        self._search, self._shared, self._folder = search, dict(shared), folder
        self._launcher, self._resume, self._metric = launcher, resume, metric
        self._running: dict[int, RunningTrial] = {}
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run all trials; return 0, or the exit code of the signal that interrupted them."""

        def record(signum: int, _: FrameType | None) -> None:
            self._signal = signal.Signals(signum)

        handlers = {signum: signal.signal(signum, record) for signum in _EXIT_CODES}
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
        return _EXIT_CODES[self._signal]

    def _print_interrupted(self) -> None:
        print(
            f"interrupted after {len(self.finished)} of {self._search.num_trials} trials",
            file=sys.stderr,
        )
        if self._running:
            ids = " ".join(str(trial.job.id) for trial in self._running.values())
            print(f"  scancel {ids}   # ends the jobs, which otherwise continue", file=sys.stderr)
        resume = f"{verb_command('train')} -m {self._resume}"
        print(f"  {resume}   # resumes the sweep", file=sys.stderr)

    def _start_trials(self) -> bool:
        started = False
        for slot in range(self._launcher.num_slots):
            if slot in self._running or self._signal or (proposal := self._search.ask()) is None:
                continue
            number, values = proposal
            overrides = format_overrides(self._shared | values)
            self._running[slot] = RunningTrial(
                number, overrides, self._folder, slot, self._launcher, self._metric
            )
            started = True
        return started

    def _poll(self, slot: int) -> None:
        """Prune the trial of a slot if it falls behind; record its result once it has ended."""
        running = self._running[slot]
        # Checked before the curve is read, which then is complete.
        has_ended = running.job.poll() is not None
        if running.stopped_at is None:
            curve = read_curve(running.folder, self._metric)
            step = self._search.find_prune_step(running.number, curve)
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
        shared = redacted(format_overrides(self._shared))
        own = " ".join(override for override in trial.overrides if override not in shared)
        count = f"{len(self.finished)}/{self._search.num_trials}"
        outcome = f"{describe_outcome(trial)}, {duration(trial.seconds)}"
        print(printable(f"[{count}] trial {trial.number}: {own}: {outcome}"), flush=True)
