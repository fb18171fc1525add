"""How one step goes: batch in, exact token-mean loss out, curves kept by data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.model.attention import check_isolation, check_pair_isolation
from app.model.head import prove_head
from app.model.kernels import fuse_layers, unfuse_layers
from app.model.quantization import tokens_quantized_alone
from app.training.curves import Curves, StepRecord
from app.training.loss import DatasetSums, batch_loss
from app.training.optimizer import base_lr
from app.training.schedule import ScheduleConfig, build_schedule
from app.training.schedule_free import use_averaged_weights, use_training_weights
from app.training.what_trains import say_what_trains
from data_modules import Batch


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
        self.grad_norm: Tensor | None = None

    def configure_model(self) -> None:
        """Build the model once; Lightning calls this before every fit and validate."""
        if self.model is None:
            self.model = self.build()

    def configure_optimizers(self) -> dict[str, Any]:
        """Build the optimizer over what trains, and a schedule that moves once a step."""
        optimizer = self.build_optimizer(self.model)
        if self.global_rank == 0:
            say_what_trains(self.model, optimizer)
        schedule = build_schedule(optimizer, self.schedule_config, self.total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }

    def on_fit_start(self) -> None:
        """Refuse to train a model whose documents see each other, or their padding."""
        alone = tokens_quantized_alone(self.model)
        with self.trainer.precision_plugin.forward_context(), alone:
            if self.model.config.is_encoder_decoder:
                check_pair_isolation(self.model, self.backend, is_packed=self.is_packed)
            elif self.is_packed:
                check_isolation(self.model, self.backend)
            prove_head(self.model, self.backend)
            if self.uses_fused_kernels:
                fuse_layers(self.model)
        # From here on only dropout is random, and ranks must not drop the same.
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Go back from what a validation measures to what trains, where the two differ."""
        use_training_weights(self.optimizers(use_pl_optimizer=False))

    def on_fit_end(self) -> None:
        """Leave the model to be saved and measured by its own layers."""
        unfuse_layers(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss whose gradients, added over micro-batches and ranks, are those of the exact mean."""
        self.curves.resume_clock()
        self.step_tokens += batch.num_tokens
        loss = batch_loss(self.model, batch, self.backend, self.train_sums) / batch.step_weight
        # Lightning divides by the accumulation, DDP averages over ranks: both are undone here.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm and keep the norm for the curves."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any) -> None:
        """Step, then keep the step's row for the curves."""
        lr = base_lr(optimizer)
        super().optimizer_step(epoch, batch_idx, optimizer, *args)
        record = StepRecord(
            step=self.trainer.global_step + 1,
            lr=lr,
            grad_norm=self.grad_norm,
            sums=self.train_sums.take(),
            num_tokens=self.step_tokens,
            is_scaled=self.trainer.precision == "16-mixed",
        )
        self.step_tokens = 0
        self.curves.add(record, self.sum_over_ranks)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """End the run at its last step, which makes Lightning validate there."""
        if self.trainer.global_step >= self.total_steps:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """Write the steps before a validation, whose time does not count as training."""
        use_averaged_weights(self.optimizers(use_pl_optimizer=False))
        self.curves.flush(self.sum_over_ranks, pause=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a micro-batch to the validation sums."""
        batch_loss(self.model, batch, self.backend, self.val_sums)

    def on_validation_epoch_end(self) -> None:
        """Write the exact validation loss of every data set."""
        step = 0 if self.trainer.sanity_checking else self.trainer.global_step
        self.curves.add_validation(step, self.sum_over_ranks(self.val_sums.take()))

    def on_train_end(self) -> None:
        """Write the last steps; the model is left with the weights that were learned."""
        use_averaged_weights(self.optimizers(use_pl_optimizer=False))
        self.curves.flush(self.sum_over_ranks)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks."""
        if self.trainer.world_size == 1:
            return tensor
        return self.trainer.strategy.reduce(tensor, reduce_op="sum")
