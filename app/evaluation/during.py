"""Tasks and held-out prompts measured while a model trains, on a small set that stays the same.

The figures stand in the row of their validation: `val/<metric>/<task or data set>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.evaluator import Evaluator
from app.evaluation.generation import DuringConfig
from app.evaluation.shares import Shares, gather_results
from app.evaluation.tasks.questions import Task
from app.process.files import write_whole
from app.process.heartbeat import beat_again
from app.process.signals import measuring
from app.training.metrics import is_measured_at

if TYPE_CHECKING:
    from app.training.module import FinetuneModule

SAMPLES = "samples"
"""folder of a run with what the model has answered, a file a measurement"""
WHO = "val"


def small_set(config: DuringConfig, tasks: Sequence[Task]) -> tuple[DuringConfig, list[Task]]:
    """Return the settings and tasks of a measurement during training: fewer rows, the first."""
    most = config.during_rows
    fewer = [replace(task, max_rows=min(task.max_rows or most, most)) for task in tasks]
    return replace(config, max_rows=min(config.max_rows, most), harness=[]), fewer


class DuringTraining:
    """Measure a model at the validations that `every_steps` names."""

    def __init__(
        self, evaluator: Evaluator, folder: Path, *, every_steps: int, interval: int, last: int
    ) -> None:
        self.evaluator, self.folder = evaluator, folder / SAMPLES
        self._is_due: Callable[[int], bool] = lambda step: (
            step == last or is_measured_at(step, every_steps, interval)
        )
        self.names = evaluator.names(WHO)
        """the figures of a measurement"""

    def measure(self, module: FinetuneModule, step: int) -> dict[str, float]:
        """Return the figures after `step`, the same on every rank; none where it is not due.

        Ranks that hold the whole model take a share of the rows each. Draws no random number that
        training would have drawn. A signal ends the measurement of a single rank; several ranks
        complete it, since they can save the step only together.
        """
        if not self._is_due(step):
            return {}
        from lightning.pytorch.utilities.seed import isolate_rng

        strategy, trainer = module.strategy, module.trainer
        shards = strategy if strategy.shards_weights else None
        self.evaluator.shards = shards
        self.evaluator.shares = _shares(trainer) if shards is None else Shares(show=_beat)
        interruptible = measuring() if trainer.world_size == 1 else nullcontext()
        with interruptible, isolate_rng(), trainer.precision_plugin.forward_context():
            figures = self.evaluator.answers(WHO, module.model)
        if trainer.is_global_zero:
            lines = [json.dumps(line, ensure_ascii=False) for line in self.evaluator.lines()]
            self.folder.mkdir(exist_ok=True)
            write_whole(self.folder / f"step-{step}.jsonl", "".join(f"{one}\n" for one in lines))
        return figures


def _beat(key: str, done: int, total: int) -> None:
    beat_again()


def _shares(trainer: Any) -> Shares:
    if trainer.world_size == 1:
        return Shares(show=_beat)
    return Shares(
        rank=trainer.global_rank,
        num_ranks=trainer.world_size,
        gather=gather_results,
        show=_beat,
    )
