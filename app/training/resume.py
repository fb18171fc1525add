"""Resume a run from a checkpoint, in three stages.

Lightning loads the model before the optimizer exists, and random states must be restored after
everything that draws random numbers: the optimizer is therefore restored when the fit starts, and
the rest at the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from app.strategy.ddp import Ddp
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    local_state_name,
    random_state_name,
    read_random_state,
    unusable_checkpoint,
)
from app.training.checkpoint.schema import printable
from app.training.checkpoint.state import (
    StateError,
    check_finite_values,
    check_random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    restore_schedule,
)
from common.errors import UserError
from data_modules import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from app.training.module import FinetuneModule

_SEED_STRIDE = 1_000_003
"""difference between the seeds of two steps; larger than any number of ranks"""


class Resume:
    """Restore one checkpoint into a module, in the order in which Lightning builds its parts."""

    def __init__(
        self, module: FinetuneModule, source: Checkpoint, state: Mapping[str, Any]
    ) -> None:
        self.module, self.source, self.state = module, source, state

    def restore_model(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` into the model; UserError unless it fits completely."""
        with self._naming_file(MODEL):
            restore_model(self.module.model, state_dict, self.module.strategy)

    def restore_optimizer(self) -> None:
        """Restore optimizer and schedule; UserError if they or the random state do not fit."""
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
            with self._naming_file(random_state_name(rank)):
                check_random_state(read_random_state(source, rank), module.strategy.root_device)

    def restore_at_first_batch(self, batches: Sequence[Batch]) -> None:
        """Check that `batches` are the next step's, and restore the last step's random state."""
        module, source = self.module, self.source
        step, first_step = module.trainer.global_step, module.trainer.datamodule.first_step
        if not step == first_step == source.step:
            raise RuntimeError(
                f"{source.folder} was saved after step {source.step}; the trainer resumes at step "
                f"{step}, the data at step {first_step}"
            )
        if module.trainer.world_size > 2 and isinstance(module.strategy, Ddp):
            _rebuild_buckets(module, batches[0])
        module.strategy.restore_local_state(module.optimizer, self._local_state())
        if (rank := self._rank_of_random_state()) is not None:
            restore_random_state(read_random_state(source, rank), module.strategy.root_device)
        else:  # this run has more ranks with tokens of their own than the checkpoint
            torch.manual_seed(torch.initial_seed() + _SEED_STRIDE * source.step)

    def _local_state(self) -> dict[str, Tensor]:
        """Return the tensors that only this rank held; none if the number of ranks has changed."""
        module, details = self.module, self.source.details
        name = local_state_name(module.trainer.global_rank)
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
        """Turn a StateError into a UserError that names the checkpoint's file and the fix."""
        try:
            yield
        except StateError as error:
            raise unusable_checkpoint(
                self.source.folder,
                [
                    f"{_file_of(self.source, name, key)}: {printable(key)} {problem}"
                    for key, problem in error.problems_by_name
                ],
            ) from error

    def _rank_of_random_state(self) -> int | None:
        """Return the saved rank whose random state this rank continues; None for a new one.

        Ranks that see the same tokens must use the same dropout masks, others must not.
        """
        strategy, details = self.module.strategy, self.source.details
        saved: int = details["num_data_ranks"]
        group = details["num_ranks"] // saved
        place = strategy.random_rank - strategy.data_rank * strategy.context_size
        is_new = strategy.data_rank >= saved or place >= group
        return None if is_new else strategy.data_rank * group + place


def check_same_step(trainer: L.Trainer, resume: Resume | None) -> None:
    """Raise UserError if ranks, which each look for checkpoints, resume at different steps."""
    strategy, step = trainer.strategy, 0 if resume is None else resume.source.step
    # On the strategy's device: the module's device is where its weights were last moved to.
    steps = strategy.all_gather(torch.tensor(step, device=strategy.root_device))
    if trainer.world_size > 1 and len(set(steps.tolist())) > 1:
        found = ", ".join(map(str, steps.tolist()))
        raise UserError(
            f"the ranks resume at different steps ({found}), because they do not all see the same "
            "checkpoints; name one with resume=FOLDER/checkpoints/step-N"
        )


def _rebuild_buckets(module: FinetuneModule, batch: Batch) -> None:
    """Run a backward pass and discard its gradients, so that DDP's buckets are those of the save.

    DDP rebuilds its buckets after the first step of a process, in the order in which gradients
    became ready. A parameter's position in its bucket decides the order in which the ranks'
    gradients are added, which changes the last bits with three or more ranks.
    """
    module.strategy.run_micro_batches([batch], module.micro_batch_loss)
    module.reset_step()


def _file_of(source: Checkpoint, name: str, key: str) -> str:
    """Return the file of a checkpoint that holds `key` of `name`."""
    if f"{name}.json" in source.manifest["files"]:
        return f"{name}.json"
    return f"{TRAINING}.json" if key.startswith("optimizer.") else source.file_of(name, key)
