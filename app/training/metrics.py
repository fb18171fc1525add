"""Every data set's curve: an exact row for each optimizer step, without a host sync per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.process.errors import TrainingFault, UserError
from app.training.checkpoint.documents import listed
from app.training.nonfinite import StepWatch, not_finite
from app.training.objective import losses_by_dataset

COUNTED = (
    "dataset_names",
    "latest",
    "latest_step",
    "validations",
    "validated_step",
    "trained_tokens",
    "num_tokens",
    "train_seconds",
)
"""of `Curves`: what a resumed run goes on from"""


@dataclass(slots=True)
class StepRecord:
    """One optimizer step as it waits, on the device, to be written."""

    step: int
    lr: float
    grad_norm: Tensor
    sums: Tensor
    """[3, data sets]: weighted losses, weights, trained tokens, of this rank"""
    num_tokens: int
    """tokens this rank ran through the model, without padding"""
    is_scaled: bool
    """whether a loss scaler watches over the gradients (fp16)"""
    losses: list[Tensor]
    """of this rank's micro-batches, as far as they are parts of the step's"""
    rank: int = 0
    num_ranks: int = 1


class Curves:
    """Collects steps and writes them in blocks: one reduction and one copy to the host a block.

    `watch` judges each step that is written. One that was left out stands in the rows with the loss
    and the norm for which it was: nan or inf.
    """

    def __init__(
        self,
        dataset_names: list[str],
        loggers: Sequence[Any],
        every_steps: int,
        watch: StepWatch | None = None,
    ) -> None:
        self.dataset_names = dataset_names
        self.loggers = loggers
        self.every_steps = every_steps
        self.watch = watch or StepWatch()
        self.waiting: list[StepRecord] = []
        self.latest: dict[str, float] = {}
        self.latest_step = -1
        self.validations: list[dict[str, float]] = []
        self.validated_step = -1
        self.trained_tokens = [0.0] * len(dataset_names)
        self.num_tokens = 0
        self.train_seconds = 0.0
        self._block_started: float | None = None

    def resume_clock(self) -> None:
        """Start, or go on after a validation, to measure the time that training takes."""
        if self._block_started is None:
            self._block_started = time.monotonic()

    def add(self, record: StepRecord, reduce: Callable[[Tensor], Tensor]) -> None:
        """Keep a step; write the block when it is full. `reduce` sums a tensor over all ranks."""
        self.waiting.append(record)
        # The first step is written at once: a person sees soon whether the run is sound.
        if record.step == 1 or record.step % self.every_steps == 0:
            self.flush(reduce)

    def flush(self, reduce: Callable[[Tensor], Tensor], *, pause: bool = False) -> None:
        """Write what waits; TrainingFault where `watch` finds a step bad that may not pass."""
        seconds = self._take_seconds(pause)
        if not self.waiting:
            return
        counts = torch.tensor([float(record.num_tokens) for record in self.waiting])
        sums = torch.stack([record.sums for record in self.waiting])
        sums = reduce(torch.cat([sums.flatten(1), counts.to(sums).unsqueeze(1)], dim=1)).cpu()
        norms = torch.stack([record.grad_norm for record in self.waiting]).tolist()
        block_tokens = int(sums[:, -1].sum().item())
        self.num_tokens += block_tokens
        rate = block_tokens / max(seconds, 1e-9)

        for record, row, norm in zip(self.waiting, sums, norms, strict=True):
            by_dataset = row[:-1].view(3, -1)
            metrics = losses_by_dataset(by_dataset, self.dataset_names, "train")
            self.trained_tokens = [
                before + now
                for before, now in zip(self.trained_tokens, by_dataset[2].tolist(), strict=True)
            ]
            metrics |= {
                "train/lr": record.lr,
                "train/grad_norm": norm,
                "speed/tokens_per_second": rate,
            }
            self.write(record.step, metrics)
            self.watch.judge(record, metrics, reduce)
        self.waiting = []

    def add_validation(self, step: int, sums: Tensor) -> None:
        """Write a validation's exact losses; sums [3, data sets] are those of all ranks.

        TrainingFault where one is not finite: no checkpoint could be rated by it.
        """
        metrics = losses_by_dataset(sums.cpu(), self.dataset_names, "val")
        self.validations.append(metrics)
        self.validated_step = step
        self.write(step, metrics)
        if bad := not_finite(metrics, "val/loss/"):
            raise TrainingFault(
                f"validation after step {step}: loss {metrics['val/loss']} (of {', '.join(bad)}); "
                "lower optimizer.lr, or look at the validation rows"
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Hand one row to every logger."""
        # Without what is not finite: it is kept in checkpoints.
        self.latest |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.latest_step = step
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    def _take_seconds(self, pause: bool) -> float:
        now = time.monotonic()
        seconds = now - self._block_started if self._block_started is not None else 0.0
        self.train_seconds += seconds
        self._block_started = None if pause or self._block_started is None else now
        return seconds

    def summary(self) -> dict[str, float]:
        """Figures of the whole training: tokens a second over all ranks, seconds, tokens."""
        return {
            "speed/tokens_per_second": self.num_tokens / max(self.train_seconds, 1e-9),
            "speed/train_seconds": self.train_seconds,
            "train/tokens": float(self.num_tokens),
            "train/skipped_steps": float(self.watch.num_skipped),
        } | {
            f"train/trained_tokens/{name}": count
            for name, count in zip(self.dataset_names, self.trained_tokens, strict=True)
        }

    def val_loss_at(self, step: int) -> float | None:
        """Return the validation loss after `step`; None where there was none."""
        if self.validated_step != step:
            return None
        return self.validations[-1].get("val/loss")

    def state_dict(self) -> dict[str, Any]:
        """Return all that was counted and measured so far, as JSON; nothing may wait."""
        if self.waiting:
            raise RuntimeError("steps wait to be written")
        counted = {name: getattr(self, name) for name in COUNTED}
        return counted | {"skipped_steps": self.watch.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; UserError where the data sets have other names."""
        if state["dataset_names"] != self.dataset_names:
            raise UserError(
                f"resume: the run's curves are of the data sets {listed(state['dataset_names'])}"
                f", these are named {', '.join(self.dataset_names)}; give them their names back by "
                "data.datasets=[{name: ...}], or start anew with resume=never"
            )
        for name in COUNTED:
            setattr(self, name, state[name])
        self.watch.num_skipped = state["skipped_steps"]
