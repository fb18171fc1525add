"""What a sweep varies: its overrides in Hydra's grammar, and the search that proposes trials.

A key has one value, several values, or an interval. A grid tries every combination; Optuna proposes
trials from earlier results. Overrides are saved in the sweep's folder, from which it is resumed.
The folder may be somebody else's: links in it are refused, and overrides that grant something count
only if they are typed again (`app.config.conf_files`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from app.config import SweepConfig, conf_files
from app.config.conf_files import PlainLoader, read_conf_file
from app.config.overrides import (
    EXPERIMENT,
    FILE_ALONE,
    WORD,
    check_words,
    over_typed_limit,
    quote_value,
)
from app.config.verbs import GRANTING
from app.run import NEVER
from app.run.folder import expand_home, refuse_special_entries
from app.training.run_documents import is_lower_better
from common.errors import UserError
from common.facts import as_typed, default_of
from common.files import write_atomically
from common.installation import install_extra
from common.redaction import REDACTED, redacted

if TYPE_CHECKING:
    import optuna
    from hydra.core.override_parser.types import Override

_SWEEP_FUNCTION = re.compile(r"(choice|range|interval|shuffle|sort|tag|int|float)\(")
"""start of values that are never parsed as text"""
_LOG_SCALE_RATIO = 100
"""ratio high/low from which an interval is searched on a log scale by default"""
_MAX_VALUES = 1000
"""maximum number of values of one key, because each is checked before the first trial"""
_EDGE_SHARE = 0.05
"""share of an interval at either end in which a value counts as at the edge"""
SWEEP_FILE = "sweep.yaml"
"""file in a sweep's folder with its overrides"""
RESUME = re.compile(r"\+*resume=(?P<value>.+)")
_KEEPS = "a resumed sweep keeps its overrides"
_NO_OVERRIDES = f"{_KEEPS}; use resume=FOLDER without others"
_JOURNAL_FILE = "optuna.log"
_DEFAULT_TRIALS = 20
_MIN_RANDOM, _MAX_RANDOM = 4, 10
"""bounds of the number of random trials before Optuna's model is used, a quarter of all trials"""

_Proposal = tuple[int, dict[str, str]]
"""a trial's number, and its value of every varied key in Hydra's grammar"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Interval:
    """A range of numbers to search; with `is_log`, equal ratios are equally likely."""

    low: float
    high: float
    is_int: bool
    is_log: bool

    def is_edge(self, value: float) -> bool:
        """Return whether a number is within 5 % of either end, on the interval's scale."""
        scale = math.log if self.is_log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return not _EDGE_SHARE < share < 1 - _EDGE_SHARE

    def __str__(self) -> str:
        scale = ", log scale" if self.is_log else ""
        return f"{self.low:g} to {self.high:g}{', whole numbers' if self.is_int else ''}{scale}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A setting of a sweep and the values that its trials may have."""

    key: str
    values: tuple[str, ...]
    """values in Hydra's grammar; for an interval, its two ends"""
    interval: _Interval | None = None
    is_from_file: bool = False
    """whether a `sweep=NAME` file sets it"""

    @property
    def varies(self) -> bool:
        """Whether the trials have different values of it."""
        return len(self.values) > 1

    def __str__(self) -> str:
        return str(self.interval) if self.interval else ", ".join(self.values)


def parse_parameters(overrides: Iterable[str], conf: Path = conf_files.CONF) -> list[Parameter]:
    """Parse the overrides of a sweep, those of `sweep=NAME` files first.

    If a key occurs twice, the later override counts. Raises UserError with all problems.
    """
    from_files: list[str] = []
    typed: list[str] = []
    for override in overrides:
        match = WORD.fullmatch(override := FILE_ALONE.sub(EXPERIMENT, override))
        if match is not None and match["key"] == "sweep":
            from_files += _read_sweep_file(conf_files.find_option(conf, "sweep", match["value"]))
        else:
            typed.append(override)
    check_words("train", typed, conf_files.list_groups(conf))
    parsed: dict[str, Parameter] = {}
    problems = []
    for group, is_from_file in ((from_files, True), (typed, False)):
        for override in group:
            try:
                parameter = dataclasses.replace(_parse(override), is_from_file=is_from_file)
            except UserError as error:
                problems += error.problems
            else:
                parsed[parameter.key] = parameter
    if problems:
        raise UserError(problems)
    return list(parsed.values())


def _read_sweep_file(path: Path) -> list[str]:
    file = conf_files.read_conf_file(path, package="", is_global=True)
    if file.problems:
        raise UserError(file.problems)
    params = file.values.get("hydra", {}).get("sweeper", {}).get("params")
    if not set(file.values) <= {"hydra", "sweep"} or not isinstance(params, dict):
        raise UserError(
            f"{conf_files.display_path(path)}:2 expected `hydra: {{sweeper: {{params: ...}}}}`, "
            "and the sweep's own settings under `sweep:`"
        )
    settings = {f"sweep.{name}": value for name, value in file.values.get("sweep", {}).items()}
    return [f"{key}={value}" for key, value in (settings | params).items()]


def _parse(text: str) -> Parameter:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    match = WORD.fullmatch(text)
    if match is None or match["prefix"] == "~":
        raise UserError(f"{text}: expected key=value, or key=a,b for several values")
    key, value = match["key"], match["value"]
    if (problem := over_typed_limit(key, value)) is not None:
        raise UserError(problem)
    quoted = (
        quote_value(value) if value[:1] in "[{" else ",".join(map(quote_value, value.split(",")))
    )
    parser = OverridesParser.create()
    for spelling in (value,) if _SWEEP_FUNCTION.match(value) else (value, quoted):
        try:
            override = parser.parse_override(f"key={spelling}")
            if not override.is_sweep_override():
                return Parameter(key=key, values=(str(override.get_value_element_as_str()),))
            if override.is_discrete_sweep():  # fails on a choice() inside a list
                values = _list_values(text, override)
                return Parameter(key=key, values=tuple(dict.fromkeys(values)))
        except (HydraException, OmegaConfBaseException):
            continue
        return _interval(text, key, override)
    if value.replace(" ", "").endswith("()"):
        raise UserError(f"{text}: no values are listed; list some, as in {key}=choice(8,16)")
    raise UserError(f"{key}={value}: cannot parse this value; quote it: \"{key}='...'\"")


def _list_values(text: str, override: Override) -> tuple[str, ...]:
    from hydra.core.override_parser.types import RangeSweep

    value: Any = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop or 0, value.step
        numbers = (stop - start) / step if step and math.isfinite(step) else math.inf
        if not 0 < numbers <= _MAX_VALUES:
            raise UserError(
                f"{text}: expected range(START, END, STEP) with 1 to {_MAX_VALUES:,} values (END "
                "is excluded); to search a continuous range, use 'interval(LOW, HIGH)' with "
                "sweep.search=optuna"
            )
    elif text.count(",") >= _MAX_VALUES:
        raise UserError(f"{text[:80]}...: more than {_MAX_VALUES:,} values")
    return tuple(str(item) for item in override.sweep_string_iterator())


def _interval(text: str, key: str, override: Override) -> Parameter:
    value: Any = override.value()
    if not override.is_interval_sweep():
        raise UserError(f"{text}: expected a list, choice(), range() or interval()")
    low, high = value.start, value.end
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{text}: an interval needs a lower and a higher number, both finite")
    is_log = "log" in value.tags
    if is_log and low <= 0:
        raise UserError(f"{text}: a log scale needs numbers above 0")
    interval = _Interval(
        low=low,
        high=high,
        is_int=isinstance(low, int) and isinstance(high, int),
        is_log=is_log or 0 < low * _LOG_SCALE_RATIO <= high,
    )
    return Parameter(key=key, values=(repr(low), repr(high)), interval=interval)


def format_overrides(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def varied(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.varies]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The parameters of a sweep, and where they come from."""

    parameters: list[Parameter]
    folder: Path | None = None
    """folder of the sweep that is resumed; None for a new one"""
    typed: frozenset[str] = frozenset()
    """keys that were typed next to `resume=`"""


def save_words(folder: Path, overrides: Sequence[str]) -> None:
    """Save the overrides of a new sweep, without secrets."""
    write_atomically(folder / SWEEP_FILE, yaml.safe_dump({"words": redacted(overrides)}))


def load_words(overrides: Sequence[str]) -> Words:
    """Return the parameters of a new sweep, or those of the one in `resume=FOLDER`."""
    found = [match["value"] for item in overrides if (match := RESUME.fullmatch(item)) is not None]
    if not found or found[0] == NEVER:
        return Words(parameters=parse_parameters(overrides))
    value = found[0]
    folder = expand_home("resume", value)
    file = folder / SWEEP_FILE
    if folder.is_dir():
        refuse_special_entries(folder)
    if not file.is_file():
        raise UserError(
            f"resume={value}: expected the folder of a sweep, with {SWEEP_FILE}; {_NO_OVERRIDES}"
        )
    saved = read_conf_file(file, package="", loader=PlainLoader).values.get("words")
    if not (isinstance(saved, list) and saved and all(isinstance(item, str) for item in saved)):
        raise UserError(
            f"{file}: words: expected a list of overrides; copy the sweep's folder again"
        )
    typed = parse_parameters(item for item in overrides if RESUME.fullmatch(item) is None)
    parameters = _take_typed(parse_parameters(saved), typed, value)
    keys = frozenset(parameter.key for parameter in typed)
    return Words(parameters=parameters, folder=folder, typed=keys)


def _take_typed(
    saved: Sequence[Parameter], typed: Sequence[Parameter], resume: str
) -> list[Parameter]:
    """Return the saved parameters with what a folder cannot give taken from `typed`.

    That is secrets, which are not saved, and settings that grant something.
    """
    of_saved = {parameter.key: parameter for parameter in saved}
    with_secrets = {
        parameter.key: parameter
        for parameter in saved
        if any(REDACTED in value for value in parameter.values)
    }
    given = {parameter.key: parameter for parameter in typed}
    problems = [
        f"{key}: {_NO_OVERRIDES}" + (f" than {', '.join(with_secrets)}" if with_secrets else "")
        for key in given.keys() - with_secrets.keys() - GRANTING.keys()
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
    for key in (given.keys() & GRANTING.keys()) - with_secrets.keys():
        known = of_saved.get(key, given[key])
        (without,) = parse_parameters([f"{key}={as_typed(default_of(GRANTING[key].field))}"])
        is_free = GRANTING[key].facts.grants == "write" and not given[key].varies
        if not is_free and given[key].values not in (known.values, without.values):
            problems.append(
                f"{key}: {_KEEPS}; type the saved value, {key}={','.join(known.values)}"
            )
    if problems:
        raise UserError(problems)
    added = [parameter for key, parameter in given.items() if key not in of_saved]
    return [given.get(parameter.key, parameter) for parameter in saved] + added


class Search:
    """Proposes trials and receives their results; may ignore them."""

    num_trials: int
    """number of trials of the whole sweep"""

    def ask(self) -> _Proposal | None:
        """Return the next trial; None when all have been proposed."""
        raise NotImplementedError

    def find_prune_step(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Return the step at which to prune a trial by its curve, step -> metric; or None."""
        return None

    def tell(self, number: int, objective: float | None, *, was_pruned: bool) -> None:
        """Record a trial's result; `objective` is None if it failed."""


class Grid(Search):
    """Every combination of the listed values; the last key varies fastest."""

    def __init__(self, parameters: Sequence[Parameter], finished: Collection[int]) -> None:
        keys = [parameter.key for parameter in varied(parameters)]
        lists = [parameter.values for parameter in varied(parameters)]
        self.num_trials = math.prod(map(len, lists))
        self._remaining: Iterator[_Proposal] = (
            (number, dict(zip(keys, values, strict=True)))
            for number, values in enumerate(itertools.product(*lists))
            if number not in finished
        )

    def ask(self) -> _Proposal | None:
        return next(self._remaining, None)


class OptunaSearch(Search):
    """Optuna's TPE sampler through ask and tell, with its journal in the sweep's folder.

    Each trial has a separately seeded sampler, so that a proposal depends only on the trials before
    it and a killed sweep resumes as if it had never stopped. The first trial uses the default
    values (`start`) of the parameters whose default is among the searched values.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        settings: SweepConfig,
        folder: Path,
        finished: Collection[int],
        *,
        seed: int,
        start: Mapping[str, Any],
        metric: str,
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                f"sweep.search=optuna needs Optuna: {install_extra('sweep')}"
            ) from error
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._parameters = varied(parameters)
        self._seed = seed
        self._parallel = settings.parallel > 1
        self.num_trials = settings.trials or _DEFAULT_TRIALS
        self._num_random = min(_MAX_RANDOM, max(_MIN_RANDOM, self.num_trials // 4))
        # Left by a sweep that was killed while writing. No other process writes to the journal,
        # because the sweep's folder is locked.
        (folder / f"{_JOURNAL_FILE}.lock").unlink(missing_ok=True)
        pruners = {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=_MIN_RANDOM),
            "halving": optuna.pruners.SuccessiveHalvingPruner(),
        }
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / _JOURNAL_FILE)))
        self.study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction="minimize" if is_lower_better(metric) else "maximize",
            pruner=pruners[settings.prune],
        )
        if not self.study.trials and start:
            self.study.enqueue_trial(dict(start))
        state = optuna.trial.TrialState
        self._unfinished = [
            trial.number
            for trial in self.study.trials
            if trial.state != state.WAITING and trial.number not in finished
        ]

    def ask(self) -> _Proposal | None:
        """Return a trial that a killed sweep left unfinished, or a new one."""
        if self._unfinished:
            number = self._unfinished.pop(0)
        else:
            number = sum(trial.state.name != "WAITING" for trial in self.study.trials)
            if number >= self.num_trials:
                return None
            self._set_sampler(number)
            self.study.ask()
        if (trial := self._open_trial(number)) is not None:
            return number, {
                parameter.key: _suggest(trial, parameter) for parameter in self._parameters
            }
        params = self.study.trials[number].params  # finished just before the kill
        return number, {
            parameter.key: _format_value(parameter, params[parameter.key])
            for parameter in self._parameters
        }

    def find_prune_step(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Report new validations; return the first step at which to prune, or None."""
        if (trial := self._open_trial(number)) is None:
            return None
        last = self.study.trials[number].last_step
        if last is not None and trial.should_prune():
            return last
        for step in sorted(curve):
            if (last is None or step > last) and math.isfinite(curve[step]):
                trial.report(curve[step], step)
                if trial.should_prune():
                    return step
        return None

    def tell(self, number: int, objective: float | None, *, was_pruned: bool) -> None:
        """Record a trial's result, unless the journal of a killed sweep already has it."""
        state = self._optuna.trial.TrialState
        if self.study.trials[number].state.is_finished():
            return
        if was_pruned:
            self.study.tell(number, state=state.PRUNED)
        elif objective is None or not math.isfinite(objective):
            self.study.tell(number, state=state.FAIL)
        else:
            self.study.tell(number, objective)

    def _set_sampler(self, number: int) -> None:
        self.study.sampler = self._optuna.samplers.TPESampler(
            seed=(self._seed + number) % 2**32,
            n_startup_trials=self._num_random,
            constant_liar=self._parallel,
        )

    def _open_trial(self, number: int) -> optuna.trial.Trial | None:
        frozen = self.study.trials[number]
        if frozen.state.is_finished():
            return None
        self._set_sampler(number)
        # Optuna has no public way to reopen a trial: ask() only starts new ones (checked with 5.0).
        return self._optuna.trial.Trial(self.study, frozen._trial_id)


def _suggest(trial: optuna.trial.Trial, parameter: Parameter) -> str:
    interval = parameter.interval
    if interval is None:
        return str(trial.suggest_categorical(parameter.key, parameter.values))
    if interval.is_int:
        low, high = int(interval.low), int(interval.high)
        return str(trial.suggest_int(parameter.key, low, high, log=interval.is_log))
    value = trial.suggest_float(parameter.key, interval.low, interval.high, log=interval.is_log)
    return _format_value(parameter, value)


def _format_value(parameter: Parameter, value: Any) -> str:
    if isinstance(value, float) and parameter.interval is not None:
        return repr(
            min(max(float(f"{value:.4g}"), parameter.interval.low), parameter.interval.high)
        )
    return str(value)
