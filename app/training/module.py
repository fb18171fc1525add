"""The training step: a batch in, the exact token-mean loss out, metrics by data set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.model.adapter import drop_pending_outputs, hold_transposed, ungroup_adapters
from app.model.attention import restore_kernel
from app.model.fp8 import release_columns, restore_trained_layers
from app.model.kernels import unfuse_layers
from app.process import faults
from app.strategy.disk_states import AdamWOnDisk
from app.strategy.mixin import StrategyMixin
from app.training.algorithms import use_averaged_weights, use_training_weights
from app.training.checkpoint.state import (
    Resume,
    loop_state_after,
    model_state,
    optimizer_state,
    restore_model,
)
from app.training.metrics import ExpertLoad, Metrics, StepRecord
from app.training.objective.objective import (
    DatasetSums,
    Objective,
    RouterBalance,
    RowSums,
    batch_loss,
    head_inputs,
)
from app.training.optimizers import ScheduleConfig, base_lr, build_schedule
from app.training.prepare import prepare_model, print_parameter_table, room_for_transposed
from data_modules import Batch

log = logging.getLogger(__name__)

_LOSS_FAULTS = {"nan": math.nan, "inf": math.inf}
_GRADIENT_FAULTS = {"grad_nan": math.nan, "grad_inf": math.inf}
"""injected values by fault name"""


class StepSkipped(Exception):
    """Ends an optimizer step before it has changed anything."""


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return `loss`, with NaN gradients if it is not finite.

    An infinite loss may have finite gradients. This way the gradient norm, which covers all ranks,
    is not finite in either case.
    """
    return loss * (1 + 0 * loss.detach())


def skip_nonfinite_step(optimizer: Any, grad_norm: Tensor, *, is_scaled: bool) -> None:
    """Make `optimizer` skip its step if `grad_norm` is not finite.

    Called within the step's closure. `is_scaled`: a loss scaler checks the gradients. Raises
    StepSkipped if the optimizer cannot skip on the device.
    """
    if is_scaled:
        return  # the scaler has checked the gradients, and skips by itself
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in groups):
        # Fused kernels read this on the device, and change nothing if it is 1.
        optimizer.found_inf = grad_norm.isfinite().logical_not().float()
    # Other optimizers have no such flag, and a zero gradient or learning rate would still change
    # their moments: one number is read on the host in every step.
    elif not math.isfinite(grad_norm.item()):
        raise StepSkipped


def inject_faults(loss: Tensor, step: int, batch: Batch, sums: DatasetSums) -> Tensor:
    """Return `loss` with the faults that are due at `step`; a faulty loss also enters `sums`."""
    for name, value in _LOSS_FAULTS.items():
        if faults.is_due(name, step):
            sums.scale_losses(batch.dataset_ids[batch.labels >= 0].unique(), value)
            loss = loss + value  # its gradients stay finite
    for name, value in _GRADIENT_FAULTS.items():
        if faults.is_due(name, step):
            loss = loss * 1.0  # a separate node for the hook
            loss.register_hook(lambda grad, value=value: grad * value)
    return loss


class FinetuneModule(L.LightningModule):
    """A language model, trained on the mean loss over all trained tokens of a global step.

    `build` is called in `configure_model`, where a strategy may shard the weights while they load.
    """

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        *,
        backend: str,
        objective: Objective,
        build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        schedule: ScheduleConfig,
        total_steps: int,
        is_packed: bool,
        metrics: Metrics,
        trains_in_fp8: bool = False,
        uses_fused_kernels: bool = True,
        recomputes_layers: bool = False,
        router_aux_loss: float = 0.0,
        probe_micro_batch: Callable[[FinetuneModule], None] | None = None,
        store_references: Callable[[FinetuneModule], None] | None = None,
        measure: Callable[[FinetuneModule, int], dict[str, float]] | None = None,
        patience: int | None = None,
    ) -> None:
        super().__init__()
        self.build = build
        self.backend = backend
        self.objective = objective
        self.build_optimizer = build_optimizer
        self.schedule_config = schedule
        self.total_steps = total_steps
        self.is_packed = is_packed
        self.metrics = metrics
        self.trains_in_fp8 = trains_in_fp8
        self.uses_fused_kernels = uses_fused_kernels
        self.recomputes_layers = recomputes_layers
        """whether layers are recomputed in whole"""
        self.router_aux_loss = router_aux_loss
        self.probe_micro_batch = probe_micro_batch
        """probes the micro-batch size before the first step; None if the size is fixed"""
        self.store_references = store_references
        """stores what the base says of the pairs before the first step; None if that is not used"""
        self.patience = patience
        """measurements of the monitored metric without improvement that end the run; None: never"""
        self.measure = measure
        """runs tasks and generations after the validation at a step, and returns their metrics"""
        self.model: Any = None
        self.expert_load: ExpertLoad | None = None
        self.balance: RouterBalance | None = None
        self.train_sums = DatasetSums(len(metrics.dataset_names))
        self.val_sums = DatasetSums(len(metrics.dataset_names))
        self.val_rows = RowSums()
        self.step_tokens = 0
        self.step_losses: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.resume: Resume | None = None
        """restores a checkpoint; None once the first batch has started"""
        self.joined_gates: dict[str, bool] = {}
        """by widths of a gated MLP, whether its adapters run in the gate's kernel"""
        self.transposed_bytes: int | None = None
        """of transposed copies of frozen FP8 weights, held between validations; None: undecided"""
        self.has_pending_validation = False
        """whether a signal has interrupted the validation of the last step"""

    @property
    def strategy(self) -> StrategyMixin:
        strategy: Any = self.trainer.strategy
        return strategy

    @property
    def shards(self) -> StrategyMixin | None:
        """The strategy if each rank holds a shard of the weights; otherwise None."""
        return self.strategy if self.strategy.shards_weights else None

    @property
    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def configure_model(self) -> None:
        """Build the model once; Lightning calls this before every fit and validate."""
        if self.model is None:
            self.model = self.strategy.build_model(self.build)
            self.expert_load = ExpertLoad(self.model)
            self.metrics.add_experts(self.expert_load)
            if self.router_aux_loss:
                self.balance = RouterBalance(self.model, self.router_aux_loss)

    def configure_optimizers(self) -> dict[str, Any]:
        """Build the optimizer and its schedule, which advances once per optimizer step."""
        optimizer = self.build_optimizer(self.model)
        if self.global_rank == 0:
            print_parameter_table(self.model, optimizer)
        schedule = build_schedule(optimizer, self.schedule_config, self.total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }

    def on_fit_start(self) -> None:
        prepare_model(self)

    def on_train_batch_start(self, batches: Sequence[Batch], batch_idx: int) -> int | None:
        """Finish the restore of a resumed run, then use the training weights.

        Returns -1, which makes Lightning skip the step, if the pending validation ended the run.
        """
        if self.resume is not None:
            self.resume.restore_at_first_batch(batches)
            self.resume = None
            if self.has_pending_validation:
                self._validate_pending()
                if self.trainer.should_stop:
                    return -1
        use_training_weights(self.optimizer)
        if self.transposed_bytes:
            hold_transposed(self.model)
        return None

    def on_fit_end(self) -> None:
        """Restore averaged weights and the unfused layers, which are saved and evaluated.

        The validation of the last step comes first, if a signal had interrupted it.
        """
        if self.has_pending_validation:
            self._validate_pending()
        use_averaged_weights(self.optimizer)
        self.strategy.load_averaged_weights()
        restore_kernel(self.backend)
        unfuse_layers(self.model)
        restore_trained_layers(self.model)
        release_columns(self.model)
        ungroup_adapters(self.model)

    def _validate_pending(self) -> None:
        """Run the validation that a signal interrupted, before the next step.

        Lightning 2.6 has no public way to validate between two batches; this does what its loop
        does.
        """
        self.has_pending_validation, trainer = False, self.trainer
        results = trainer._logger_connector
        is_first = results._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training, results._first_loop_iter = True, is_first

    def release_optimizer(self) -> None:
        """Free gradients and optimizer states; call it after the last checkpoint."""
        self.optimizer.state.clear()
        if isinstance(self.optimizer, AdamWOnDisk):
            self.optimizer.close()
        self.zero_grad()

    def training_step(self, batches: Sequence[Batch], batch_idx: int) -> Tensor:
        """Run forward and backward of an optimizer step; `batches` are its micro-batches."""
        self.metrics.resume_clock()
        self.optimizer.zero_grad()
        if not self.strategy.holds_loss:
            self.train_sums.add_nothing(
                3 + 2 * len(self.metrics.figures), self.strategy.root_device
            )
            self.step_losses = [torch.zeros((), device=self.strategy.root_device)] * len(batches)
        self._begin_objective(batches)
        return self.strategy.run_micro_batches(batches, self.micro_batch_loss)

    def _begin_objective(self, batches: Iterable[Batch]) -> None:
        """Measure what the losses of these batches need, in the autocast of a step."""
        with self.trainer.precision_plugin.forward_context():
            self.objective.begin(
                self.model, batches, self.backend, self.strategy.root_device, self.sum_over_ranks
            )

    def run_layers(self, batch: Batch) -> None:
        """Run the model on a micro-batch, for a stage that has no head and so no loss."""
        self.model(**head_inputs(self.model, batch, self.backend).inputs)

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Do nothing: Lightning calls this after `training_step`, which has set the gradients."""

    def micro_batch_loss(self, batch: Batch) -> Tensor:
        """Return a loss whose gradients add up, over all micro-batches, to those of the mean."""
        step = self.trainer.global_step + 1
        self.step_tokens += batch.num_tokens
        self.metrics.num_positions += batch.num_positions
        self.metrics.num_padded += batch.num_positions - batch.num_tokens
        if self.resume is None:
            faults.fault_point("batch", step)
        loss = self.loss(batch) / batch.step_weight
        if self.resume is None:  # otherwise the gradients of this pass are discarded
            loss = inject_faults(loss, step, batch, self.train_sums)
        self.step_losses.append(loss.detach())
        # The strategy averages over its ranks, which is undone here.
        return propagate_nonfinite(loss) * self.strategy.num_averaged_ranks

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum of loss times weight, plus the auxiliary loss of trained routers."""
        if self.expert_load is None:  # the model was not built by `configure_model`
            self.expert_load = ExpertLoad(self.model)
        # Before the counting: the tokens of the reference's pass are those of the batch again.
        reference = self.objective.reference(self.model, batch, self.backend)
        compute = partial(
            batch_loss,
            *(self.objective, self.model, batch, self.backend, self.train_sums),
            reference=reference,
        )
        with self.expert_load.counting(batch):
            if self.balance is None:
                return compute()
            with self.balance.recording():
                return compute() + self.balance.loss(batch)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by their global norm and record it; skip the step if it is not finite."""
        # Every strategy scales by min(1, limit / norm): exactly 1 without a limit.
        limit = math.inf if gradient_clip_val is None else gradient_clip_val
        self.grad_norm = self.strategy.clip(optimizer, limit)
        skip_nonfinite_step(optimizer, self.grad_norm, is_scaled=self.is_scaled)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any) -> None:
        lr = base_lr(optimizer)
        with suppress(StepSkipped):
            super().optimizer_step(epoch, batch_idx, optimizer, *args)
        step = self.trainer.global_step + 1
        self.strategy.end_step(step, is_last=step >= self.total_steps)
        record = StepRecord(
            step=step,
            lr=lr,
            grad_norm=self.grad_norm,
            norm_differs=self.strategy.norms_differ,
            sums=self.train_sums.take(),
            num_tokens=self.step_tokens,
            is_scaled=self.is_scaled,
            losses=self.step_losses,
            rank=self.strategy.data_rank,
            num_ranks=self.strategy.num_data_ranks,
            loads=self.expert_load.take() if self.expert_load is not None else None,
        )
        self.step_tokens, self.step_losses = 0, []
        self.metrics.add(record, self.sum_over_ranks)

    @property
    def is_scaled(self) -> bool:
        """Return whether a loss scaler checks the gradients."""
        return self.trainer.precision == "16-mixed"

    def on_train_batch_end(self, outputs: Any, batches: Sequence[Batch], batch_idx: int) -> None:
        """Stop at the last step, which makes Lightning run the last validation."""
        if self.transposed_bytes is None:
            self.transposed_bytes = room_for_transposed(self, batches)
        if self.trainer.global_step >= self.total_steps:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """Write the pending steps; the validation does not count as training time."""
        use_averaged_weights(self.optimizer)
        release_columns(self.model)  # generations may need their memory
        self.metrics.flush(self.sum_over_ranks, pause=True)
        self.strategy.load_averaged_weights()
        data: Any = self.trainer.datamodule
        # A loader of its own: Lightning has begun to iterate over that of the validation.
        self._begin_objective(data.val_dataloader())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        rows = None if self._row_losses_index is None else self.val_rows
        batch_loss(self.objective, self.model, batch, self.backend, self.val_sums, rows)

    def on_validation_epoch_end(self) -> None:
        """Write the exact validation loss of every data set; stop if it no longer improves."""
        step = 0 if self.trainer.sanity_checking else self.trainer.global_step
        if self._row_losses_index is not None:
            data: Any = self.trainer.datamodule
            rows = self.val_rows.take(data.val_order, len(data.val_examples))
            self.metrics.row_losses[self._row_losses_index] = self.sum_over_ranks(rows).cpu()
        sums = self.sum_over_ranks(self.val_sums.take())
        measured = self.measure(self, step) if self.measure is not None else None
        self.strategy.load_local_weights()
        self.metrics.add_validation(step, sums, measured)
        if self.stops_early:  # on all ranks alike, since the metrics are
            log.info(
                "%s has not improved for %s measurements: stopping after step %s",
                self.metrics.monitor,
                self.patience,
                step,
            )
            self.trainer.should_stop = True

    @property
    def stops_early(self) -> bool:
        """Return whether the monitored metric has not improved for `patience` measurements."""
        return self.patience is not None and self.metrics.num_worse >= self.patience

    @property
    def _row_losses_index(self) -> int | None:
        """Return where row losses are stored: 0 before the first step, -1 after the last."""
        if self.trainer.sanity_checking:
            return 0
        # With early stopping, any validation may be the last.
        is_last = self.trainer.global_step >= self.total_steps or self.patience is not None
        return -1 if is_last else None

    def on_train_end(self) -> None:
        self.metrics.flush(self.sum_over_ranks)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks that do not count the same loss."""
        copies = self.strategy.num_loss_copies
        if not self.strategy.holds_loss:
            tensor = torch.zeros_like(tensor)
        if self.trainer.world_size == copies:
            return tensor
        total: Tensor = self.trainer.strategy.reduce(tensor, reduce_op="sum")
        return total / copies

    def checkpoint_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer_tensors, _ = optimizer_state(self.model, self.optimizer, self.strategy)
        return model_state(self.model, self.strategy), optimizer_tensors

    def reset_step(self) -> None:
        """Discard gradients, sums and pending outputs of passes that belong to no step."""
        self.zero_grad()
        drop_pending_outputs(self.model)
        if self.train_sums.sums is not None:
            self.train_sums.take()
        if self.expert_load is not None:
            self.expert_load.take()
        self.step_tokens, self.step_losses = 0, []

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the trainable weights, by the base's names."""
        return model_state(self.model, self.strategy)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Copy `state_dict` into the model; UserError unless it fits completely."""
        if self.resume is not None:
            self.resume.restore_model(state_dict)
        else:
            restore_model(self.model, state_dict, self.strategy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs in addition to Lightning's own state."""
        step, optimizer = self.trainer.global_step, self.optimizer
        _, numbers = optimizer_state(self.model, optimizer, self.strategy)
        checkpoint["training"] = {
            "step": step,
            "optimizer": numbers,
            "curves": self.metrics.state_dict(),
            "owes_validation": self.has_pending_validation,
            "joined_gates": self.joined_gates,
        }
        checkpoint["metric"] = self.metrics.monitored_at(step)
        checkpoint["details"] = {
            "num_ranks": self.trainer.world_size,
            "num_data_ranks": self.strategy.num_data_ranks,
            "total_steps": self.total_steps,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the metrics; `resume` keeps the rest until optimizer and first batch exist."""
        state = checkpoint["training"]
        self.resume = Resume(self, checkpoint["source"], state)
        self.metrics.load_state_dict(state["curves"])
        self.has_pending_validation = state["owes_validation"]
        # The run had stopped early, and was interrupted after its last checkpoint.
        if self.stops_early and self.metrics.validated_step == state["step"]:
            log.info(
                "RESUME: the run had stopped early after step %s, since %s had not improved for %s "
                "measurements; it ends with what was left to do",
                *(state["step"], self.metrics.monitor, self.patience),
            )
            self.trainer.should_stop = True
        checkpoint["loops"] = {"fit_loop": loop_state_after(self.trainer.fit_loop, state["step"])}
