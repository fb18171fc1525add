"""Selection of a sweep's trials: every combination of a grid, or the proposals of Optuna."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import SweepConfig
from app.sweep.parameters import Parameter, varied
from app.training.run_documents import is_lower_better
from common.installation import install_extra

if TYPE_CHECKING:
    import optuna

_JOURNAL_FILE = "optuna.log"
_DEFAULT_TRIALS = 20
MIN_RANDOM, MAX_RANDOM = 4, 10
"""bounds of the number of random trials before Optuna's model is used, a quarter of all trials"""

Proposal = tuple[int, dict[str, str]]
"""a trial's number, and its value of every varied key in Hydra's grammar"""


class Search:
    """Proposes trials and receives their results; may ignore them."""

    num_trials: int
    """number of trials of the whole sweep"""

    def ask(self) -> Proposal | None:
        """Return the next trial; None when all have been proposed."""
        raise NotImplementedError

    def find_prune_step(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Return the step at which to prune a trial, None to continue it.

        `curve` is the metric of the trial's validations by step.
        """
        return None

    def tell(self, number: int, objective: float | None, *, was_pruned: bool) -> None:
        """Record a trial's result; `objective` is None if it failed."""


class Grid(Search):
    """Every combination of the listed values; the last key varies fastest."""

    def __init__(self, parameters: Sequence[Parameter], finished: Collection[int]) -> None:
        keys = [parameter.key for parameter in varied(parameters)]
        lists = [parameter.values for parameter in varied(parameters)]
        self.num_trials = math.prod(map(len, lists))
        self._remaining: Iterator[Proposal] = (
            (number, dict(zip(keys, values, strict=True)))
            for number, values in enumerate(itertools.product(*lists))
            if number not in finished
        )

    def ask(self) -> Proposal | None:
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
        self._num_random = min(MAX_RANDOM, max(MIN_RANDOM, self.num_trials // 4))
        # Left by a sweep that was killed while writing. No other process writes to the journal,
        # because the sweep's folder is locked.
        (folder / f"{_JOURNAL_FILE}.lock").unlink(missing_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / _JOURNAL_FILE)))
        self.study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction="minimize" if is_lower_better(metric) else "maximize",
            pruner=_build_pruner(optuna, settings.prune),
        )
        if not self.study.trials and start:
            self.study.enqueue_trial(dict(start))
        state = optuna.trial.TrialState
        self._unfinished = [
            trial.number
            for trial in self.study.trials
            if trial.state != state.WAITING and trial.number not in finished
        ]

    def ask(self) -> Proposal | None:
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
    """Return a proposed value as an override's text; numbers are rounded to four digits."""
    if isinstance(value, float) and parameter.interval is not None:
        return repr(
            min(max(float(f"{value:.4g}"), parameter.interval.low), parameter.interval.high)
        )
    return str(value)


def _build_pruner(optuna: Any, name: str) -> Any:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=MIN_RANDOM)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner()
    return optuna.pruners.NopPruner()
