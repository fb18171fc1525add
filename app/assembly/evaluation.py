"""Build the evaluators of a run: base vs tuned at its end, and the model during training.

During training, tasks and held-out prompts are answered on a small fixed set. The metrics are
logged with the validation as `val/<metric>/<task or data set>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.assembly.base import Base
from app.config import TrainConfig
from app.evaluation.evaluator import Evaluator
from app.evaluation.generation import TrainEvaluationConfig
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks.questions import Task, build_tasks
from app.process.collectives import all_gather
from app.process.heartbeat import refresh_liveness
from app.process.signals import (
    DataStalled,
    MeasurementInterrupted,
    measuring,
    signal_received,
    suspend_deadline,
)
from app.training.metrics import is_measured_at
from app.training.module import FinetuneModule
from app.training.objective.objective import Objective
from app.training.trainer import validation_interval
from common.errors import UserError, nearest
from data_modules import FinetuneDataModule

_SAMPLES = "samples"
"""folder of a run with the answers of the model, one file per measurement"""
_VARIANT = "val"


def _small_set(
    config: TrainEvaluationConfig, tasks: Sequence[Task]
) -> tuple[TrainEvaluationConfig, list[Task]]:
    """Return the settings and tasks of a measurement during training: only the first rows."""
    most = config.during_rows
    fewer = [replace(task, max_rows=min(task.max_rows or most, most)) for task in tasks]
    return replace(config, max_rows=min(config.max_rows, most), harness=[]), fewer


class TrainingEvaluation:
    """Measures answers of the model at every validation selected by `every_steps`."""

    def __init__(
        self,
        evaluator: Evaluator,
        folder: Path,
        *,
        every_steps: int,
        interval: int,
        last: int,
        poll: Callable[[], int | None] = signal_received,
    ) -> None:
        """`poll`: collective that returns the signal that any rank has received, on every rank."""
        self.evaluator, self.folder, self._poll = evaluator, folder / _SAMPLES, poll
        self._is_due: Callable[[int], bool] = lambda step: (
            step == last or is_measured_at(step, every_steps, interval)
        )
        self.names = evaluator.metric_names(_VARIANT)
        """names of the metrics of a measurement"""

    def measure(self, module: FinetuneModule, step: int) -> dict[str, float]:
        """Return the metrics after `step`, the same on every rank; empty if no measurement is due.

        Ranks that hold the whole model each take a share of the rows. Does not advance the random
        number generators of training. A signal interrupts the measurement on all ranks.
        """
        if not self._is_due(step):
            return {}
        from lightning.pytorch.utilities.seed import isolate_rng

        strategy, trainer = module.strategy, module.trainer
        sharding = strategy if strategy.shards_weights else None
        self.evaluator.sharding = sharding
        self.evaluator.runner = self._row_runner(trainer, is_sharded=sharding is not None)
        interruptible = measuring() if trainer.world_size == 1 else nullcontext()
        with interruptible, isolate_rng(), trainer.precision_plugin.forward_context():
            metrics = self.evaluator.measure_answers(_VARIANT, module.model)
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.evaluator.write_predictions(self.folder, f"step-{step}.jsonl")
        return metrics

    def _row_runner(self, trainer: Any, *, is_sharded: bool) -> RowRunner:
        """Return what divides the rows among ranks; ranks can save a checkpoint only together."""
        if trainer.world_size == 1:
            return RowRunner(show=_beat)
        if is_sharded:  # all ranks compute the same batches together
            return RowRunner(show=self._beat_and_agree)
        return RowRunner(
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            gather=all_gather,
            show=_beat,
            own_rows=_ended_by_signal,
            agree=self._agree,
        )

    def _beat_and_agree(self, key: str, done: int, total: int) -> None:
        _beat(key, done, total)
        self._agree()

    def _agree(self) -> None:
        if (signum := self._poll()) is not None:
            raise MeasurementInterrupted(signum)


def _beat(key: str, done: int, total: int) -> None:
    refresh_liveness()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let a signal end the work of this rank, which then saves together with the others."""
    try:
        with measuring():
            yield
    except DataStalled:
        suspend_deadline()


def build_training_evaluation(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    objective: Objective,
    folder: Path,
    poll: Callable[[], int | None],
) -> TrainingEvaluation | None:
    """Build the measurement of tasks and answers during training; None if none is requested.

    `poll` as for `TrainingEvaluation`. UserError if the monitored metric is not measured.
    """
    evaluation, every = None, config.evaluation.every_steps
    if every is not None:
        settings, tasks = _small_set(config.evaluation, build_tasks(config.evaluation))
        evaluation = TrainingEvaluation(
            Evaluator(settings, base, data, tasks, objective),
            folder,
            every_steps=every,
            interval=validation_interval(config.trainer, data.total_steps),
            last=data.total_steps,
            poll=poll,
        )
    _check_monitor(config.trainer.checkpoint.monitor, data, evaluation, objective.figures)
    return evaluation


def _check_monitor(
    monitor: str,
    data: FinetuneDataModule,
    evaluation: TrainingEvaluation | None,
    figures: Sequence[str] = (),
) -> None:
    """Raise UserError if the monitored metric is not measured during the run."""
    held_out = set(data.val_examples.datasets.tolist())
    measured = ("loss", *figures)
    names = [name for number, name in enumerate(data.dataset_names) if number in held_out]
    own = [f"val/{one}/{name}" for one in measured for name in names]
    answers = [] if evaluation is None else evaluation.names
    known = [*(f"val/{one}" for one in measured), *own, *answers]
    if monitor in known:
        return
    name = monitor.removeprefix("val/loss/")
    if name != monitor and name in data.dataset_names:
        raise UserError(
            f"trainer.checkpoint.monitor={monitor}: no row of {name} is held out for validation; "
            "type a larger data.val_set_size, or val/loss"
        )
    raise UserError(
        f"trainer.checkpoint.monitor={monitor} is not measured during this "
        f"run{nearest(monitor, known)}; measured are {', '.join(known[:20])}"
        + ("" if evaluation else "; evaluation.every_steps=N measures evaluation.tasks, too")
    )
