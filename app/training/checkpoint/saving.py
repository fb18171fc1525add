"""The callback that saves checkpoints: when it saves, and what each rank contributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from app.process import faults
from app.process.heartbeat import waiting_for_thread
from app.process.signals import (
    DataStalled,
    MeasurementInterrupted,
    exit_after_grace,
    restore_handlers,
    suspend_deadline,
)
from app.strategy.state import ShardedTensor, StateTensor
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.checkpoint_io import BackgroundWriter, StoredCheckpoints
from app.training.checkpoint.disk import SaveError, check_space
from app.training.checkpoint.documents import MODEL, OPTIMIZER, random_state_name
from app.training.checkpoint.state import random_state
from app.training.checkpoint.store import CHECKPOINTS, CheckpointStore
from app.training.checkpoint.tensors import file_bytes
from app.training.metrics import Metrics, is_measured_at
from app.training.stopping import SignalSync
from app.training.trainer import (
    DEFAULT_MONITOR,
    CheckpointConfig,
    TrainerConfig,
    validation_interval,
)
from common.errors import Interrupted, TrainingFault, UserError

SAVES_PER_RUN = 10
"""checkpoints per run by default, in addition to those at the ends of epochs"""


class CheckpointSaver(L.Callback):
    """Save checkpoints after optimizer steps, and after the validation of a step that has one.

    `is_due` returns whether a step is saved, `validates_after` whether a validation follows it.
    """

    def __init__(
        self,
        checkpoints: StoredCheckpoints,
        *,
        is_due: Callable[[int], bool],
        validates_after: Callable[[int], bool],
    ) -> None:
        self.checkpoints, self.store = checkpoints, checkpoints.store
        self.is_due, self.validates_after = is_due, validates_after
        self._checked_full_size = self._checked_local_state = False
        self._saved = 0 if checkpoints.source is None else checkpoints.source.step
        """step of the newest checkpoint"""
        self.signals = SignalSync()

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Reinstall our signal handlers, which Lightning has just replaced."""
        restore_handlers()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Raise SaveError if the disk has no room for the states that already exist."""
        self._check_disk_space(trainer, pl_module)
        self.signals.start(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Wait for the last save; from then on signals end the process at once."""
        self._wait_for_all(trainer)
        self.signals.end(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Finish an optimizer step that no validation follows."""
        if not self.validates_after(trainer.global_step):
            self._finish_step(trainer, pl_module)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Interrupt a validation on a signal; the resumed run starts with that validation."""
        if trainer.sanity_checking:
            return
        if (signum := self.signals.poll()) is not None:
            self._prepare(trainer, pl_module)
            pl_module.has_pending_validation = True
            self.save(trainer, pl_module)
            self._interrupt(trainer, signum)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Finish a step with its validation."""
        if not trainer.sanity_checking:
            self._finish_step(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Save if a signal has interrupted the wait for the next step's data, or an evaluation.

        With several ranks, only if all have agreed to end: otherwise the others would be inside
        that step, waiting for this one.
        """
        agreed = MeasurementInterrupted if trainer.world_size > 1 else DataStalled
        if not isinstance(exception, agreed):
            return
        step, is_within_step = trainer.global_step, bool(pl_module.step_losses)
        if step > self._saved and not (is_within_step or trainer.sanity_checking):
            suspend_deadline()
            pl_module.has_pending_validation = trainer.validating
            self._prepare(trainer, pl_module)
            self.save(trainer, pl_module)
            self._wait_for_all(trainer)
        exit_after_grace()
        if self._saved:
            exception.message = f"{exception.message}; step {self._saved} is saved"

    def _finish_step(self, trainer: L.Trainer, module: Any) -> None:
        self.checkpoints.check()
        self._prepare(trainer, module)
        step = trainer.global_step
        is_saved = self.is_due(step) or module.stops_early or self._is_best(trainer, module.metrics)
        if is_saved:
            self.save(trainer, module)
        faults.fault_point("step", step)
        if (signum := self.signals.poll()) is not None:
            if not is_saved:
                self.save(trainer, module)
            self._interrupt(trainer, signum)

    def _is_best(self, trainer: L.Trainer, metrics: Metrics) -> bool:
        """Return, on all ranks alike, whether this step would be among the best that are kept."""
        metric = metrics.monitored_at(trainer.global_step)
        if metric is None or not self.store.keep_best:
            return False
        self._wait()
        is_best = trainer.is_global_zero and self.store.would_keep(metric)
        return bool(trainer.strategy.broadcast(is_best))

    def _prepare(self, trainer: L.Trainer, module: Any) -> None:
        """Check the disk space and reserve buffers once the optimizer's state exists."""
        if not self._checked_full_size:
            self._check_disk_space(trainer, module)
            self._checked_full_size = True
            if trainer.is_global_zero:
                self.checkpoints.reserve(*module.checkpoint_tensors())
        # With local SGD, ranks have a local state only from a later step on.
        if not self._checked_local_state and trainer.strategy.local_state(module.optimizer):
            self._check_disk_space(trainer, module)
            self._checked_local_state = True

    def _interrupt(self, trainer: L.Trainer, signum: int) -> None:
        self._wait_for_all(trainer)
        raise Interrupted(signum, f"step {trainer.global_step} is saved")

    def _wait_for_all(self, trainer: L.Trainer) -> None:
        """Wait on all ranks until rank 0 has written; the first rank to exit ends the others."""
        self._wait()
        trainer.strategy.barrier("the last checkpoint is written")

    def _wait(self) -> None:
        with waiting_for_thread():
            self.checkpoints.wait()

    def _check_disk_space(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            num_bytes = sum(map(file_bytes, module.checkpoint_tensors()))
            local = trainer.strategy.local_state(module.optimizer)
            num_bytes += trainer.world_size * file_bytes(local)
            check_space(self.store.folder, num_bytes, self.store.keep_last + self.store.keep_best)

    def save(self, trainer: L.Trainer, module: Any) -> None:
        """Save a checkpoint; all ranks must call this at the same step.

        TrainingFault if a value is not finite.
        """
        step, strategy = trainer.global_step, trainer.strategy
        # A step is saved only after its loss is known to be finite.
        module.metrics.flush(module.sum_over_ranks, pause=True)
        tensors = dict(zip((MODEL, OPTIMIZER), module.checkpoint_tensors(), strict=True))
        self._wait()
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                self.checkpoints.do_before_commit(logger.save)
            self.store.begin(step)
        else:
            faults.fault_point("save", step)
        strategy.barrier("a checkpoint has started")
        add_random_state = partial(
            self.store.add_document,
            step,
            random_state_name(trainer.global_rank),
            random_state(strategy.root_device),
        )
        local = strategy.local_state(module.optimizer)
        self._add_files(trainer, step, add_random_state, tensors, local)
        strategy.barrier("all ranks have added their files")
        trainer.save_checkpoint(self.store.folder / f"step-{step}")
        self._saved = step

    def _add_files(
        self,
        trainer: L.Trainer,
        step: int,
        add_random_state: Callable[[], object],
        tensors: Mapping[str, Mapping[str, StateTensor]],
        local: Mapping[str, torch.Tensor],
    ) -> None:
        """Add this rank's files; if tensors are sharded, all ranks raise if one of them fails."""
        rank, num_ranks = trainer.global_rank, trainer.world_size
        failure: SaveError | TrainingFault | None = None
        try:
            # First, because other ranks gather with this one even if it cannot write.
            self.checkpoints.add_tensors(step, tensors, rank=rank, num_ranks=num_ranks)
            self.checkpoints.add_local_state(step, local, rank=rank)
            if rank == 0:
                self.checkpoints.do_before_commit(add_random_state)
            else:
                add_random_state()
        except (SaveError, TrainingFault) as error:
            failure = error
        is_sharded = num_ranks > 1 and any(
            isinstance(tensor, ShardedTensor)
            for named in tensors.values()
            for tensor in named.values()
        )
        if is_sharded:  # a rank that cannot write fails the save of all ranks
            failures: list[SaveError | TrainingFault | None] = [None] * num_ranks
            torch.distributed.all_gather_object(failures, failure)
            failure = next((error for error in failures if error is not None), None)
        if failure is not None:
            if trainer.is_global_zero:
                self.store.abandon(step)
            raise failure


def signals_of(trainer: L.Trainer) -> SignalSync:
    """Return what tells all ranks of a trainer whether any of them has received a signal."""
    (saver,) = (one for one in trainer.callbacks if isinstance(one, CheckpointSaver))
    return saver.signals


def build_checkpoints(
    config: CheckpointConfig,
    run: Path,
    source: Checkpoint | None,
    identity: Mapping[str, Any] | None = None,
    *,
    ends_with_best: bool = False,
) -> StoredCheckpoints:
    """Build the CheckpointIO that writes to the folder `run` and reads `source`.

    `identity`: id and plan of the run, which its checkpoints record. `ends_with_best`: whether the
    run needs its best checkpoint at its end.
    """
    keep_best = max(config.keep_best, int(ends_with_best))
    store = CheckpointStore(run / CHECKPOINTS, keep_last=config.keep_last, keep_best=keep_best)
    writer = BackgroundWriter() if config.asynchronous else None
    return StoredCheckpoints(store, source, writer, identity)


def build_saver(
    config: TrainerConfig,
    checkpoints: StoredCheckpoints,
    plan: Any,
    *,
    has_validation: bool,
    measure_every: int | None = None,
    loss_names: Collection[str] = (),
) -> CheckpointSaver:
    """Build the callback that saves checkpoints of a run with the given `plan` of steps.

    `measure_every`: optimizer steps between evaluations of tasks and generations; None without.
    `loss_names`: metrics that every validation measures, besides val/loss.
    """
    every, total_steps = config.checkpoint.every_steps, plan.num_steps
    validate_every = validation_interval(config, total_steps)
    # The default interval equals that of validations, whose losses can then rank the checkpoints.
    default_every = math.ceil(total_steps / SAVES_PER_RUN)

    def is_due(step: int) -> bool:
        if every is not None:
            return step % every == 0 or step == total_steps
        return step % default_every == 0 or plan.ends_epoch(step) or step == total_steps

    def validates_after(step: int) -> bool:
        return has_validation and (step == total_steps or step % validate_every == 0)

    if checkpoints.store.keep_best:
        validated = range(validate_every, total_steps, validate_every) if has_validation else ()
        monitor = config.checkpoint.monitor
        is_loss = monitor == DEFAULT_MONITOR or monitor in loss_names
        ranked = [
            step
            for step in validated
            if is_loss
            or measure_every is None
            or is_measured_at(step, measure_every, validate_every)
        ]
        if not ranked and total_steps > 1 and config.checkpoint.keep_best:
            raise UserError(_ranking_error(config, validate_every, has_validation, bool(validated)))
    return CheckpointSaver(checkpoints, is_due=is_due, validates_after=validates_after)


def _ranking_error(
    config: TrainerConfig, validate_every: int, has_validation: bool, is_validated: bool
) -> str:
    """Return why no step except the last can be ranked, and what to type."""
    monitor = config.checkpoint.monitor
    if not has_validation:
        why, fix = "there are no validation rows", "data.val_set_size=0.05"
    elif not is_validated:
        smaller = max(1, validate_every // 2)
        why, fix = "only the last step is validated", f"trainer.validate_every_steps={smaller}"
    else:
        why, fix = "only the last step is evaluated", "a smaller evaluation.every_steps"
    return (
        f"trainer.checkpoint.keep_best ranks by {monitor}, but {why}; type {fix} or "
        "trainer.checkpoint.keep_best=0"
    )
