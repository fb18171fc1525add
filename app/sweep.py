"""A sweep: Hydra lists the trials, each is a process of its own, one table at the end.

A process of its own, because Lightning starts further ranks by the same command line: within
Hydra's multirun they would start the whole sweep again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import check_before_start, compose, conf_files, load_config
from app.config.overrides import WORD, quote_value
from app.process.errors import DONE, INTERRUPTED, UserError
from app.process.launch import PARENT_VARIABLE, VARIABLES_OF_A_RANK
from app.run.folder import OUTPUTS, expand_home
from data_modules import redacted

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

OBJECTIVE = "val/loss"
PREFIX = "++trial."
"""The sweep composes nothing of a trial: to Hydra every word is a new value of no known group."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of a sweep, and what became of it."""

    number: int
    overrides: list[str]
    folder: str
    exit_code: int
    seconds: float
    objective: float | None
    """the final validation loss; None where the trial has none"""
    error: str | None

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sort by objective, trials without one last."""
        known = self.objective is not None and math.isfinite(self.objective)
        return (
            not known,
            self.objective if known and self.objective is not None else 0.0,
            self.number,
        )


def run_sweep(words: list[str]) -> int:
    """Run every combination of the listed values; returns the first failed trial's exit code, or 0.

    UserError before the first trial if any of them would be refused.
    """
    overrides = read_overrides(words)
    config = check_trials(overrides)
    folder = make_sweep_folder(config.output.name, config.output.dir)
    trials, interrupted = run_trials(overrides, folder)
    by_objective = sorted(trials, key=lambda trial: trial.rank)
    summary = [dataclasses.asdict(trial) for trial in by_objective]
    (folder / "sweep.json").write_text(
        json.dumps(redacted(summary), indent=2) + "\n", encoding="utf-8"
    )
    show_table(by_objective, [key_of(one) for one in overrides if one.is_sweep_override()])
    print(f"run: {folder}")
    if interrupted:
        return INTERRUPTED
    return next((trial.exit_code for trial in trials if trial.exit_code != DONE), DONE)


def read_overrides(words: Sequence[str], conf: Path = conf_files.CONF) -> list[Override]:
    """Parse the words of a sweep, those of `sweep=NAME` files first; UserError with problems."""
    from_files: list[str] = []
    typed: list[str] = []
    for word in words:
        match = WORD.fullmatch(word)
        if match is not None and match["key"] == "sweep":
            from_files += _words_of_file(conf_files.find_option(conf, "sweep", match["value"]))
        else:
            typed.append(word)
    parsed, problems = [], []
    for word in [*from_files, *typed]:
        try:
            parsed.append(_parse(word))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return parsed


def _words_of_file(path: Path) -> list[str]:
    file = conf_files.read_conf_file(path, package="", is_global=True)
    params = file.values.get("hydra", {}).get("sweeper", {}).get("params")
    if list(file.values) != ["hydra"] or not isinstance(params, dict):
        raise UserError(
            f"{conf_files.shown(path)}:2 expected `hydra: {{sweeper: {{params: ...}}}}`"
        )
    return [f"{key}={value}" for key, value in params.items()]


def _parse(word: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    match = WORD.fullmatch(word)
    if match is None or match["prefix"] == "~":
        raise UserError(f"{word}: expected key=value, or key=a,b for several values")
    key, value = match["key"], match["value"]
    quoted = (
        quote_value(value) if value[:1] in "[{" else ",".join(map(quote_value, value.split(",")))
    )
    parser = OverridesParser.create()
    for spelling in (value, quoted):
        try:
            override = parser.parse_override(f"{PREFIX}{key}={spelling}")
            is_listed = not override.is_sweep_override() or override.is_discrete_sweep()
            if is_listed:
                values_of(override)  # fails on a choice() inside a list
        except (HydraException, OmegaConfBaseException):
            continue
        if not is_listed:
            raise UserError(f"{key}={value}: only lists, choice() and range() are tried one by one")
        return override
    raise UserError(f"{key}={value}: this value cannot be read; type \"{key}='...'\" around it")


def key_of(override: Override) -> str:
    """Return the key without Hydra's plus signs."""
    return str(override.get_key_element()).removeprefix(PREFIX)


def values_of(override: Override) -> list[str]:
    """Return the values that an override lists, in Hydra's spelling."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [str(override.get_value_element_as_str())]


def check_trials(overrides: Sequence[Override]) -> Any:
    """Check each listed value beside the first ones of the others; returns the first config."""
    first = {key_of(one): values_of(one)[0] for one in overrides}
    problems: list[str] = []
    for one in overrides:
        for value in values_of(one)[1:]:
            try:
                compose("train", _words(first | {key_of(one): value}))
            except UserError as error:
                problems += error.problems
    try:
        config = load_config("train", _words(first))
        check_before_start(config)
    except UserError as error:
        problems = error.problems + problems
    if problems:
        raise UserError(dict.fromkeys(problems))
    return config


def _words(values: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def make_sweep_folder(name: str, folder: str | None) -> Path:
    """Make outputs/<name>/sweep-<time>, or the folder that was typed."""
    started = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = expand_home("output.dir", folder) if folder else OUTPUTS / name / f"sweep-{started}"
    if (path / "sweep.json").exists():
        raise UserError(f"output.dir={path} holds another sweep; type another folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_trials(overrides: Sequence[Override], folder: Path) -> tuple[list[Trial], bool]:
    """Hand the words to Hydra's multirun, which calls back once a trial.

    Returns the trials that ended, and whether Ctrl-C stopped the sweep.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    trials: list[Trial] = []
    settings = folder / "multirun.yaml"

    def run_next(_: Any) -> float:
        settings.unlink(missing_ok=True)  # Hydra's, with all that was typed; sweep.json says more
        job = HydraConfig.get()
        words = [word.removeprefix(PREFIX) for word in job.overrides.task]
        trials.append(run_trial(int(job.job.num), words, folder))
        if trials[-1].exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        objective = trials[-1].objective
        return math.inf if objective is None else objective

    interrupted = False
    typed = sys.argv
    sys.argv = [
        typed[0],
        "--multirun",
        *(one.input_line for one in overrides if one.input_line is not None),
        f"hydra.sweep.dir={quote_value(str(folder.resolve()))}",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    try:
        hydra.main(version_base="1.3", config_path=None)(run_next)()
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted after {len(trials)} trials", file=sys.stderr)
    finally:
        sys.argv = typed
        settings.unlink(missing_ok=True)
    return trials, interrupted


def run_trial(number: int, words: list[str], folder: Path) -> Trial:
    """Run one trial to its end, whatever that is."""
    trial_folder = folder / str(number)
    words = [word for word in words if not word.startswith("output.dir=")]
    print(f"\ntrial {number}: {' '.join(words)}", flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES_OF_A_RANK}
    environment[PARENT_VARIABLE] = str(os.getpid())  # a trial ends with its sweep
    where = f"output.dir={quote_value(str(trial_folder))}"
    command = [sys.executable, "-m", "app.train", *words, where]
    started = time.monotonic()
    last_error: str | None = None
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            for raw in process.stderr:
                line = raw.decode(errors="replace")
                sys.stderr.write(line)
                if line.startswith("error") or not (last_error or "").startswith("error"):
                    last_error = line.strip() or last_error
        except KeyboardInterrupt:  # the trial was told, too, and saves itself
            process.wait()
            raise
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Trial(
        number=number,
        overrides=words,
        folder=str(trial_folder),
        exit_code=code,
        seconds=round(time.monotonic() - started, 1),
        objective=_objective_of(trial_folder) if code == DONE else None,
        error=None if code == DONE else last_error or f"exit code {code}",
    )


def _objective_of(folder: Path) -> float | None:
    file = folder / "metrics.json"
    if not file.exists():
        return None
    value = json.loads(file.read_text(encoding="utf-8")).get(OBJECTIVE)
    return None if value is None else float(value)


def show_table(trials: Sequence[Trial], varied: Sequence[str]) -> None:
    """Print the trials, best first: what varied, the objective, what went wrong."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{len(trials)} trials by {OBJECTIVE}", title_justify="left")
    some_failed = any(trial.error for trial in trials)
    for column in ("trial", *varied, OBJECTIVE, "seconds", "exit", *["error"] * some_failed):
        table.add_column(column, justify="right" if column in (OBJECTIVE, "seconds") else "left")
    for trial in trials:
        values = dict(word.split("=", 1) for word in trial.overrides)
        objective = "-" if trial.objective is None else f"{trial.objective:.4f}"
        table.add_row(
            str(trial.number),
            *(escape(values[key]) for key in varied),
            objective,
            f"{trial.seconds:.0f}",
            str(trial.exit_code),
            *[escape((trial.error or "")[:100])] * some_failed,
        )
    Console().print(table)
