"""Resume a training: restore what a checkpoint holds besides the model, when there is room for it.

Lightning loads the model before the optimizer exists, and random states must be restored after
everything that draws: so the optimizer follows when the fit starts, the rest at the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from app.process.errors import UserError
from app.strategy.ddp import Ddp
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    local_state_of,
    random_state_of,
    read_random_state,
    unusable,
)
from app.training.checkpoint.optimizer_state import restore_optimizer
from app.training.checkpoint.schema import printable
from app.training.checkpoint.state import (
    StateError,
    check_finite_values,
    check_random_state,
    loop_state_after,
    restore_model,
    restore_random_state,
    restore_schedule,
)
from data_modules import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from app.training.module import FinetuneModule

SEED_STRIDE = 1_000_003
"""between the seeds of two steps: larger than any number of ranks"""


class Resume:
    """Restore one checkpoint into a module, in the order in which Lightning makes its parts."""

    def __init__(
        self, module: FinetuneModule, source: Checkpoint, state: Mapping[str, Any]
    ) -> None:
        self.module, self.source, self.state = module, source, state

    def loop_state(self) -> dict[str, Any]:
        """Return the state of Lightning's loops after the last step."""
        trainer = self.module.trainer
        step, accumulation = self.state["step"], trainer.accumulate_grad_batches
        return {"fit_loop": loop_state_after(trainer.fit_loop, step, accumulation)}

    def restore_model(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` into the model, all of it or UserError."""
        with self._naming_file(MODEL):
            restore_model(self.module.model, state_dict, self.module.strategy)

    def restore_optimizer(self) -> None:
        """Restore optimizer and schedule; UserError also where the random state does not fit."""
        module, source = self.module, self.source
        with self._naming_file(OPTIMIZER):
            restore_optimizer(
                module.model,
                module.optimizer,
                source.tensors(OPTIMIZER),
                self.state["optimizer"],
                module.strategy,
                step=source.step,
            )
        restore_schedule(module.lr_schedulers(), source.step)
        if (rank := self._rank_of_random_state()) is not None:  # before a step is taken
            with self._naming_file(random_state_of(rank)):
                check_random_state(read_random_state(source, rank), module.strategy.root_device)

    def restore_at_first_batch(self, batch: Batch) -> None:
        """Check that `batch` is the next one, and restore the random state of the last step."""
        module, source = self.module, self.source
        step, first_step = module.trainer.global_step, module.trainer.datamodule.first_step
        if not step == first_step == source.step:
            raise RuntimeError(
                f"{source.folder} was saved after step {source.step}; the trainer resumes at step "
                f"{step}, the data at step {first_step}"
            )
        if module.trainer.world_size > 2 and isinstance(module.strategy, Ddp):
            _rebuild_buckets(module, batch)
        module.strategy.restore_local_state(module.optimizer, self._local_state())
        if (rank := self._rank_of_random_state()) is not None:
            restore_random_state(read_random_state(source, rank), module.strategy.root_device)
        else:  # there are more data ranks than at the save
            torch.manual_seed(torch.initial_seed() + SEED_STRIDE * source.step)

    def _local_state(self) -> dict[str, Tensor]:
        """Return what this rank alone held; nothing where ranks are others than at the save."""
        module, details = self.module, self.source.details
        name = local_state_of(module.trainer.global_rank)
        ranks = module.trainer.world_size, module.strategy.num_data_ranks
        if ranks != (details["num_ranks"], details["num_data_ranks"]) or (
            name not in self.source.names()
        ):
            return {}
        state = self.source.tensors(name)
        with self._naming_file(name):
            for key, value in state.items():
                check_finite_values(key, value)
        return state

    @contextmanager
    def _naming_file(self, name: str) -> Iterator[None]:
        """Raise a StateError as UserError that names the checkpoint's file, and the way out."""
        try:
            yield
        except StateError as error:
            raise unusable(
                self.source.folder,
                [
                    f"{_file_of(self.source, name, key)}: {printable(key)} {what}"
                    for key, what in error.named
                ],
            ) from error

    def _rank_of_random_state(self) -> int | None:
        """Return the saved rank whose random state this rank takes over; None for a new one.

        Ranks that see the same data must drop the same.
        """
        data_rank, details = self.module.strategy.data_rank, self.source.details
        saved: int = details["num_data_ranks"]
        return data_rank * (details["num_ranks"] // saved) if data_rank < saved else None


def check_same_step(trainer: L.Trainer, resume: Resume | None) -> None:
    """Raise UserError where ranks resume at different steps: each looks for checkpoints itself."""
    strategy, step = trainer.strategy, 0 if resume is None else resume.source.step
    # By the strategy's device: the module's own is where its weights were last moved to.
    steps = strategy.all_gather(torch.tensor(step, device=strategy.root_device))
    if trainer.world_size > 1 and len(set(steps.tolist())) > 1:
        found = ", ".join(map(str, steps.tolist()))
        raise UserError(
            f"the ranks resume at different steps ({found}): not all of them see the same "
            "checkpoints; name one by resume=FOLDER/checkpoints/step-N"
        )


def run_owed_validation(trainer: L.Trainer) -> None:
    """Run the validation that a signal has interrupted, before the next step.

    Lightning 2.6 has no public way to validate between two batches; this is what its own loop does.
    """
    results = trainer._logger_connector
    is_first = results._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training, results._first_loop_iter = True, is_first


def _rebuild_buckets(module: FinetuneModule, batch: Batch) -> None:
    """Run a backward pass whose gradients are dropped, so that DDP's buckets are as at the save.

    DDP rebuilds its buckets after the first step of a process, in the order in which gradients
    became ready. A parameter's place in its bucket decides in which order the ranks' parts are
    added, which shows in the last bits from three ranks on.
    """
    module.trainer.strategy.training_step(batch, 0).backward()
    module.zero_grad()
    module.reset_step()


def _file_of(source: Checkpoint, name: str, key: str) -> str:
    """Return the file of a checkpoint that holds `key` of `name`."""
    if f"{name}.json" in source.manifest["files"]:
        return f"{name}.json"
    return f"{TRAINING}.json" if key.startswith("optimizer.") else source.file_of(name, key)
