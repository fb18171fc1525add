"""How one step goes: batch in, exact token-mean loss out, curves kept by data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.model.attention import (
    check_causal,
    check_isolation,
    check_pair_isolation,
    check_reference,
)
from app.model.base import reading_first_forward
from app.model.head import check_head_loss
from app.model.kernels import fuse_layers, unfuse_layers
from app.model.quantization import tokens_quantized_alone
from app.process import faults
from app.process.errors import UserError
from app.strategy.mixin import Replicated, StrategyMixin
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    printable,
    random_state_of,
    read_random_state,
    unusable,
)
from app.training.checkpoint.state import (
    StateError,
    check_random_state,
    model_state,
    optimizer_state,
    progress_after,
    restore_model,
    restore_optimizer,
    restore_random_state,
    restore_schedule,
)
from app.training.metrics import Curves, StepRecord
from app.training.nonfinite import StepSkipped, hold_back, inject, spread
from app.training.objective import DatasetSums, batch_loss
from app.training.optimizers import base_lr
from app.training.parameter_table import print_parameter_table
from app.training.schedule import ScheduleConfig, build_schedule
from app.training.schedule_free import use_averaged_weights, use_training_weights
from data_modules import Batch

RANDOM_APART = 1_000_003
"""between the seeds of two steps: larger than any number of ranks"""


class FinetuneModule(L.LightningModule):
    """A language model, trained on the mean loss over all trained tokens of a global step.

    `build` makes the model inside `configure_model`, where a strategy may shard while it loads.
    """

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        *,
        backend: str,
        build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        schedule: ScheduleConfig,
        total_steps: int,
        is_packed: bool,
        curves: Curves,
        uses_fused_kernels: bool = True,
    ) -> None:
        super().__init__()
        self.build = build
        self.backend = backend
        self.build_optimizer = build_optimizer
        self.schedule_config = schedule
        self.total_steps = total_steps
        self.is_packed = is_packed
        self.curves = curves
        self.uses_fused_kernels = uses_fused_kernels
        self.model: Any = None
        self.train_sums = DatasetSums(len(curves.dataset_names))
        self.val_sums = DatasetSums(len(curves.dataset_names))
        self.step_tokens = 0
        self.step_losses: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.source: Checkpoint | None = None
        """what this run goes on from, until its first batch"""
        self.owes_validation = False
        """whether what is saved now, or what this run goes on from, comes before a validation"""
        self._resumed: dict[str, Any] = {}

    @property
    def strategy(self) -> StrategyMixin:
        """Where weights, states and data are."""
        strategy: Any = self.trainer.strategy
        return strategy

    @property
    def optimizer(self) -> Any:
        """The optimizer that `build_optimizer` made."""
        return self.strategy.own_optimizer(self.optimizers(use_pl_optimizer=False))

    def configure_model(self) -> None:
        """Build the model once; Lightning calls this before every fit and validate."""
        if self.model is None:
            self.model = self.strategy.build_model(self.build)

    def configure_optimizers(self) -> dict[str, Any]:
        """Build the optimizer over what trains, and a schedule that moves once a step."""
        optimizer = self.build_optimizer(self.model)
        if self.global_rank == 0:
            print_parameter_table(self.model, optimizer)
        schedule = build_schedule(optimizer, self.schedule_config, self.total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }

    def on_fit_start(self) -> None:
        """Refuse to train a model whose documents see each other, or their padding."""
        alone, device = tokens_quantized_alone(self.model), self.strategy.root_device
        with self.trainer.precision_plugin.forward_context(), alone:
            with reading_first_forward(self.model):
                self._probe_attention(device)
                check_head_loss(self.model, self.backend, device)
            if self.uses_fused_kernels and self.strategy.fuses_adapters:
                fuse_layers(self.model, self.strategy.gathered, device)
        # From here on only dropout is random, and ranks must not drop the same.
        torch.manual_seed(torch.initial_seed() + self.strategy.data_rank)
        self._check_agreement()
        if self.source is not None:
            self._restore_optimizer(self.source)

    def _probe_attention(self, device: torch.device) -> None:
        if self.model.config.is_encoder_decoder:
            check_pair_isolation(self.model, self.backend, device, is_packed=self.is_packed)
            return
        check_causal(self.model, device)
        if self.is_packed:
            check_isolation(self.model, self.backend, device)
        check_reference(self.model, self.backend, device, is_packed=self.is_packed)

    def _check_agreement(self) -> None:
        """Refuse ranks that go on from different steps: each may have looked for itself."""
        step = 0 if self.source is None else self.source.step
        # By the strategy's device: the module's own is where its weights were last moved to.
        strategy = self.trainer.strategy
        steps = strategy.all_gather(torch.tensor(step, device=strategy.root_device))
        if self.trainer.world_size > 1 and len(set(steps.tolist())) > 1:
            found = ", ".join(map(str, steps.tolist()))
            raise UserError(
                f"the ranks go on from different steps ({found}): not "
                "all of them see the same checkpoints; name one by resume=FOLDER/checkpoints/step-N"
            )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Begin or go on with a step; a run that goes on first ends the validation it owes."""
        if self.source is not None:
            self._go_on(self.source, batch)
            self.source = None
            if self.owes_validation:
                self._validate()
        # From what a validation measures back to what trains, where the two differ.
        use_training_weights(self.optimizer)
        faults.reach("batch", self.trainer.global_step + 1)

    def on_fit_end(self) -> None:
        """Leave the model with what was learned, to be saved and measured by its own layers."""
        use_averaged_weights(self.optimizer)
        unfuse_layers(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss whose gradients, added over micro-batches and ranks, are those of the exact mean."""
        self.curves.resume_clock()
        self.step_tokens += batch.num_tokens
        loss = batch_loss(self.model, batch, self.backend, self.train_sums) / batch.step_weight
        if self.source is None:  # else it is a rehearsal
            loss = inject(loss, self.trainer.global_step + 1, batch, self.train_sums)
        self.step_losses.append(loss.detach())
        loss = spread(loss)
        # Divided by the accumulation, and averaged over ranks with data: both are undone here.
        return loss * self.trainer.accumulate_grad_batches * self.strategy.num_data_ranks

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, keep it for the curves; no step where it is not finite."""
        assert gradient_clip_val is not None
        self.grad_norm = self.strategy.clip(optimizer, gradient_clip_val)
        hold_back(optimizer, self.grad_norm, is_scaled=self.is_scaled)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any) -> None:
        """Step, then keep the step's row for the curves."""
        lr = base_lr(optimizer)
        with suppress(StepSkipped):
            super().optimizer_step(epoch, batch_idx, optimizer, *args)
        record = StepRecord(
            step=self.trainer.global_step + 1,
            lr=lr,
            grad_norm=self.grad_norm,
            sums=self.train_sums.take(),
            num_tokens=self.step_tokens,
            is_scaled=self.is_scaled,
            losses=self.step_losses,
            rank=self.strategy.data_rank,
            num_ranks=self.strategy.num_data_ranks,
        )
        self.step_tokens, self.step_losses = 0, []
        self.curves.add(record, self.sum_over_ranks)

    @property
    def is_scaled(self) -> bool:
        """Tell whether a loss scaler watches over the gradients."""
        return self.trainer.precision == "16-mixed"

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """End the run at its last step, which makes Lightning validate there."""
        if self.trainer.global_step >= self.total_steps:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """Write the steps before a validation, whose time does not count as training."""
        use_averaged_weights(self.optimizer)
        self.curves.flush(self.sum_over_ranks, pause=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a micro-batch to the validation sums."""
        batch_loss(self.model, batch, self.backend, self.val_sums)

    def on_validation_epoch_end(self) -> None:
        """Write the exact validation loss of every data set."""
        step = 0 if self.trainer.sanity_checking else self.trainer.global_step
        self.curves.add_validation(step, self.sum_over_ranks(self.val_sums.take()))

    def on_train_end(self) -> None:
        """Write the last steps."""
        self.curves.flush(self.sum_over_ranks)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks that have data of their own."""
        world_size, num_data_ranks = self.trainer.world_size, self.strategy.num_data_ranks
        if num_data_ranks == 1:
            return tensor
        total: Tensor = self.trainer.strategy.reduce(tensor, reduce_op="sum")
        return total if world_size == num_data_ranks else total * (num_data_ranks / world_size)

    def kept_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint keeps as tensors: of the model, and of the optimizer so far."""
        optimizer = self.optimizer
        kept = optimizer_state(self.model, optimizer, self.strategy)[0]
        return model_state(self.model, self.strategy), kept

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what a checkpoint keeps of the model: what trains, by the base's names."""
        return model_state(self.model, self.strategy)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Copy `state_dict` into the model, all of it or UserError."""
        with self._naming_file(MODEL):
            restore_model(self.model, state_dict, self.strategy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add all that a run goes on from to what Lightning has collected."""
        step, optimizer = self.trainer.global_step, self.optimizer
        _, numbers = optimizer_state(self.model, optimizer, self.strategy)
        checkpoint["training"] = {
            "step": step,
            "optimizer": numbers,
            "curves": self.curves.state_dict(),
            "owes_validation": self.owes_validation,
        }
        checkpoint["metric"] = self.curves.val_loss_at(step)
        checkpoint["details"] = {
            "num_ranks": self.trainer.world_size,
            "num_data_ranks": self.strategy.num_data_ranks,
            "total_steps": self.total_steps,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take what is restored later, when there is an optimizer, and at the first batch."""
        self.source, self._resumed = checkpoint["source"], checkpoint["training"]
        self.curves.load_state_dict(self._resumed["curves"])
        self.owes_validation = self._resumed.get("owes_validation", False)
        trainer = self.trainer
        progress = progress_after(
            trainer.fit_loop, self._resumed["step"], trainer.accumulate_grad_batches
        )
        checkpoint["loops"] = {"fit_loop": progress}

    def _restore_optimizer(self, source: Checkpoint) -> None:
        optimizer = self.optimizer
        tensors, numbers = source.tensors(OPTIMIZER), self._resumed["optimizer"]
        with self._naming_file(OPTIMIZER):
            restore_optimizer(
                self.model, optimizer, tensors, numbers, self.strategy, step=source.step
            )
        restore_schedule(self.lr_schedulers(), source.step)
        if (rank := self._rank_of_random_state(source)) is not None:  # before a step is taken
            with self._naming_file(random_state_of(rank)):
                check_random_state(read_random_state(source, rank), self.strategy.root_device)
        self._resumed = {}

    @contextmanager
    def _naming_file(self, name: str) -> Iterator[None]:
        """Say of what does not fit in which file of the checkpoint it stands, and the way out."""
        try:
            yield
        except StateError as error:
            if self.source is None:
                raise
            raise unusable(
                self.source.folder,
                [
                    f"{_file_of(self.source, name, key)}: {printable(key)} {what}"
                    for key, what in error.named
                ],
            ) from error

    def _rank_of_random_state(self, source: Checkpoint) -> int | None:
        """Return the saved rank whose random state this one goes on with; None for a new one.

        Ranks that see the same data must drop the same.
        """
        data_rank, details = self.strategy.data_rank, source.details
        there: int = details["num_data_ranks"]
        return data_rank * (details["num_ranks"] // there) if data_rank < there else None

    def _go_on(self, source: Checkpoint, batch: Batch) -> None:
        """Make sure that `batch` is the next one, and go on as the last step left off."""
        started = self.trainer.datamodule.first_step
        if not self.trainer.global_step == started == source.step:
            raise RuntimeError(
                f"{source.folder} was saved after step {source.step}; the trainer goes on from "
                f"step {self.trainer.global_step}, the data from step {started}"
            )
        if self.trainer.world_size > 2 and isinstance(self.strategy, Replicated):
            self._rehearse(batch)
        if (rank := self._rank_of_random_state(source)) is not None:
            restore_random_state(read_random_state(source, rank), self.strategy.root_device)
        else:  # more data is seen at once than was
            torch.manual_seed(torch.initial_seed() + RANDOM_APART * source.step)

    def _validate(self) -> None:
        """Make up for the validation in which a signal has ended the run, as Lightning does it."""
        self.owes_validation = False
        trainer, results = self.trainer, self.trainer._logger_connector
        is_first = results._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training, results._first_loop_iter = True, is_first

    def _rehearse(self, batch: Batch) -> None:
        """Take a step for nothing, after which DDP's buckets are as in the run that is resumed.

        DDP lays its buckets out anew behind a process's first step, in the order in which the
        gradients came. Where a number stands in a bucket decides in which order its parts are
        added, which shows in its last bits from three ranks on.
        """
        self.trainer.strategy.training_step(batch, 0).backward()
        self.zero_grad()
        self.train_sums.take()
        self.step_tokens, self.step_losses = 0, []


def _file_of(source: Checkpoint, name: str, key: str) -> str:
    """Name the file of a checkpoint that `key` of `name` stands in."""
    if f"{name}.json" in source.manifest["files"]:
        return f"{name}.json"
    return f"{TRAINING}.json" if key.startswith("optimizer.") else source.file_of(name, key)
