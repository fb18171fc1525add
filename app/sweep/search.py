"""Which trials a sweep runs: every combination of a grid, or what Optuna proposes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.config import SweepConfig
from app.sweep.words import Swept, varied

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.log"
DEFAULT_TRIALS = 20
MIN_RANDOM, MAX_RANDOM = 4, 10
"""trials that are drawn at random before Optuna learns from them, a quarter of all otherwise"""

Proposal = tuple[int, dict[str, str]]
"""a trial's number and its value of every varied key, in Hydra's spelling"""


class Search(Protocol):
    """Proposes trials and learns from how they end."""

    total: int
    """trials of the whole sweep"""

    def ask(self) -> Proposal | None:
        """Return the next trial; None when all have been proposed."""

    def stops_at(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Return the step at which a trial with these validation losses, by step, is given up.

        None: it is worth its rest.
        """

    def tell(self, number: int, objective: float | None, *, was_stopped: bool) -> None:
        """Record a trial's end; `objective` None where it failed."""


class Grid:
    """Every combination of the listed values, the last key's changing fastest."""

    def __init__(self, swept: Sequence[Swept], ended: Collection[int]) -> None:
        keys = [one.key for one in varied(swept)]
        lists = [one.values for one in varied(swept)]
        self.total = math.prod(map(len, lists))
        self._left: Iterator[Proposal] = (
            (number, dict(zip(keys, values, strict=True)))
            for number, values in enumerate(itertools.product(*lists))
            if number not in ended
        )

    def ask(self) -> Proposal | None:
        """Return the next combination."""
        return next(self._left, None)

    def stops_at(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Return None: a grid shows every trial whole."""
        return None

    def tell(self, number: int, objective: float | None, *, was_stopped: bool) -> None:
        """Learn nothing."""


class OptunaSearch:
    """Optuna's TPE by ask and tell, with its journal in the sweep's folder.

    Each trial has a sampler of its own seed, so that what is proposed follows from the trials
    before it alone: a sweep that was killed goes on as if it had not been. The first trial has the
    settings as they stand (`start`), of those that lie within what is searched.
    """

    def __init__(
        self,
        swept: Sequence[Swept],
        settings: SweepConfig,
        folder: Path,
        ended: Collection[int],
        *,
        seed: int,
        start: Mapping[str, Any],
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "sweep.search=optuna needs Optuna: pip install -e '.[sweep]'"
            ) from error
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._swept = varied(swept)
        self._seed = seed
        self._parallel = settings.parallel > 1
        self.total = settings.trials or DEFAULT_TRIALS
        self._num_random = min(MAX_RANDOM, max(MIN_RANDOM, self.total // 4))
        # Of a sweep that was killed while it wrote: nobody else writes, since the folder is locked.
        (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        self.study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            pruner=_pruner(optuna, settings.prune),
        )
        if not self.study.trials and start:
            self.study.enqueue_trial(dict(start))
        state = optuna.trial.TrialState
        self._again = [
            trial.number
            for trial in self.study.trials
            if trial.state != state.WAITING and trial.number not in ended
        ]

    def ask(self) -> Proposal | None:
        """Return a trial that a kill left unfinished, or a new one."""
        if self._again:
            number = self._again.pop(0)
        else:
            number = sum(trial.state.name != "WAITING" for trial in self.study.trials)
            if number >= self.total:
                return None
            self._set_sampler(number)
            self.study.ask()
        if (trial := self._running(number)) is not None:
            return number, {one.key: _suggest(trial, one) for one in self._swept}
        params = self.study.trials[number].params  # ended as the sweep was killed
        return number, {one.key: _spell(one, params[one.key]) for one in self._swept}

    def stops_at(self, number: int, curve: Mapping[int, float]) -> int | None:
        """Report each new validation; return the first at which the pruner gives the trial up."""
        if (trial := self._running(number)) is None:
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

    def tell(self, number: int, objective: float | None, *, was_stopped: bool) -> None:
        """Record a trial's end, unless the journal has it from before a kill."""
        state = self._optuna.trial.TrialState
        if self.study.trials[number].state.is_finished():
            return
        if was_stopped:
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

    def _running(self, number: int) -> optuna.trial.Trial | None:
        frozen = self.study.trials[number]
        if frozen.state.is_finished():
            return None
        self._set_sampler(number)
        # Of Optuna's own: its ask() starts new trials only. Tried with 5.0.
        return self._optuna.trial.Trial(self.study, frozen._trial_id)


def _suggest(trial: optuna.trial.Trial, one: Swept) -> str:
    interval = one.interval
    if interval is None:
        return str(trial.suggest_categorical(one.key, one.values))
    if interval.is_int:
        low, high = int(interval.low), int(interval.high)
        return str(trial.suggest_int(one.key, low, high, log=interval.is_log))
    value = trial.suggest_float(one.key, interval.low, interval.high, log=interval.is_log)
    return _spell(one, value)


def _spell(one: Swept, value: Any) -> str:
    """Return a proposed value as a person would type it: four digits of a number are enough."""
    if isinstance(value, float) and one.interval is not None:
        return repr(min(max(float(f"{value:.4g}"), one.interval.low), one.interval.high))
    return str(value)


def _pruner(optuna: Any, name: str) -> Any:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=MIN_RANDOM)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner()
    return optuna.pruners.NopPruner()
