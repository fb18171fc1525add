"""What cannot be combined with trainer, optimizer, measurements, trackers and sweeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from app.model.adapter import Ia3Config, LoraConfig
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict
from app.preflight.couplings.devices import Devices, is_training
from app.preflight.couplings.unused import is_set
from app.strategy.settings import ZeroConfig, is_sharding
from common.errors import nearest
from common.installation import install_extra, verb_command
from data_modules import dataset_names

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig
    from app.training.optimizers import ScheduleFreeConfig


def find_conflicts(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield the conflicts of a training's settings that are of no other part."""
    if is_training(config):
        yield from _of_trainer(config)
        yield from _of_optimizer(config)
        yield from _of_sweep(config)
        yield from _of_logger(config)
        yield from _of_measurements(config)


def _of_logger(config: TrainConfig) -> Iterator[Conflict]:
    chosen = [config.logger.name, *config.logger.also]
    for tracker in ("wandb", "mlflow"):
        if tracker in chosen and not conflict.is_installed(tracker):
            yield Conflict(
                f"logger={tracker} needs the package {tracker}, which is not installed",
                f"{install_extra(tracker)}, or logger=tensorboard",
                is_of_machine=True,
            )


def _of_measurements(config: TrainConfig) -> Iterator[Conflict]:
    """Yield conflicts of what is measured during a run and at its end."""
    evaluation, data, strategy = config.evaluation, config.data, config.strategy
    if config.trainer.early_stopping_patience is not None and not data.has_validation:
        yield Conflict(
            f"trainer.early_stopping_patience={config.trainer.early_stopping_patience} watches "
            f"{config.trainer.checkpoint.monitor}, but there are no validation rows",
            "data.val_set_size=0.05",
        )
    if config.output.weights == "best" and not data.has_validation:
        yield Conflict(
            f"output.from=best ranks steps by {config.trainer.checkpoint.monitor}, but there are "
            "no validation rows",
            "data.val_set_size=0.05, or output.from=last",
        )
    if config.trainer.checkpoint.monitor != "val/loss":
        yield from _of_monitor(config)
    keeps_weights = isinstance(strategy, ZeroConfig) and strategy.stage < 3
    if evaluation.harness and is_sharding(strategy) and not keeps_weights:
        tasks = ", ".join(evaluation.harness)
        yield Conflict(
            f"evaluation.harness=[{tasks}] needs the whole model on a rank, but "
            f"strategy={strategy.name} shards the weights",
            f"evaluation.harness=[], and afterwards {verb_command('evaluate')} run=FOLDER "
            f"evaluation.harness=[{tasks}]",
        )
    if evaluation.every_steps is None:
        return
    key = f"evaluation.every_steps={evaluation.every_steps}"
    if not evaluation.tasks and not evaluation.answers_prompts:
        only_at_end = " (evaluation.harness runs at the end only)" * bool(evaluation.harness)
        yield Conflict(
            f"{key}, but there is nothing to measure{only_at_end}",
            "evaluation.tasks=[{name: mmlu}] or evaluation.exact_match=true, too",
        )
    if not data.has_validation:
        yield Conflict(
            f"{key} measures at validations, but there are no validation rows",
            "data.val_set_size=0.05",
        )
    if config.trainer.compile:
        yield Conflict(
            f"{key} generates with layers that trainer.compile=true has compiled for one size of "
            "batch",
            "trainer.compile=false, or evaluation.every_steps=null",
        )


def _of_monitor(config: TrainConfig) -> Iterator[Conflict]:
    """Yield conflicts of a typed metric that selects the best checkpoint and stops a run early."""
    evaluation, data = config.evaluation, config.data
    monitor = config.trainer.checkpoint.monitor
    losses = ["val/loss", *(f"val/loss/{name}" for name in dataset_names(data.loss_datasets))]
    if monitor in losses:
        if not data.has_validation:
            yield Conflict(
                f"trainer.checkpoint.monitor={monitor} needs validation rows, but there are none",
                "data.val_set_size=0.05",
            )
        return
    tasks = [task.name for task in evaluation.tasks]
    if evaluation.answers_prompts:
        tasks += {*dataset_names(data.loss_datasets), *dataset_names(data.test_datasets)}
    _, metric, name = [*monitor.split("/", 2), "", ""][:3]
    key = f"trainer.checkpoint.monitor={monitor}"
    # A task, or a group of its questions.
    if not any(f"{name}/".startswith(f"{task}/") for task in tasks):
        known = [*losses, *(f"val/{metric}/{task}" for task in sorted(tasks))]
        yield Conflict(
            f"{key} is not measured{nearest(monitor, known)}; measured are {', '.join(known[:12])}",
            "one of them; evaluation.every_steps=N measures evaluation.tasks, too",
        )
    elif evaluation.every_steps is None:
        yield Conflict(
            f"{key} is measured at the end only",
            "evaluation.every_steps=N, too, to measure it during the run",
        )


def _of_trainer(config: TrainConfig) -> Iterator[Conflict]:
    trainer, schedule = config.trainer, config.schedule
    if trainer.compile and config.recompute.mode == "selective":
        yield Conflict(
            "recompute=selective saves the results of single operations, but trainer.compile=true "
            "fuses them with others",
            "recompute=full, or trainer.compile=false",
        )
    if trainer.global_batch_size is not None and is_set(trainer, "gradient_accumulation_steps"):
        yield Conflict(
            f"trainer.global_batch_size={trainer.global_batch_size} and trainer."
            f"gradient_accumulation_steps={trainer.gradient_accumulation_steps} set the same thing",
            "only one of the two",
        )
    warmup, steps = schedule.warmup_steps, trainer.max_steps
    if warmup is not None and steps is not None and warmup >= steps > 0:
        yield Conflict(
            f"schedule.warmup_steps={warmup} leaves no steps of trainer.max_steps={steps}",
            f"schedule.warmup_steps={max(steps // 10, 0)}",
        )
    warmup_ratio, decay_ratio = schedule.warmup_ratio, schedule.decay_ratio
    if schedule.shape == "wsd" and warmup is None and warmup_ratio + decay_ratio > 1:
        yield Conflict(
            f"schedule.warmup_ratio={warmup_ratio:g} and schedule.decay_ratio={decay_ratio:g} are "
            "together more than 1",
            f"schedule.decay_ratio={1 - warmup_ratio:g}",
        )


def _of_sweep(config: TrainConfig) -> Iterator[Conflict]:
    sweep = config.sweep
    if sweep.search == "grid" and sweep.trials is not None:
        yield Conflict(
            f"sweep.trials={sweep.trials}, but sweep.search=grid runs every combination",
            "sweep.search=optuna, or leave it out",
        )
    if sweep.search == "grid" and sweep.prune != "none":
        yield Conflict(
            f"sweep.prune={sweep.prune}, but sweep.search=grid runs every trial to its end",
            "sweep.search=optuna, or leave it out",
        )
    launcher = config.launcher
    if launcher.name not in ("local", "slurm"):
        yield Conflict(
            f"launcher={launcher.name} starts one run (app.launch), not the trials of a sweep",
            "launcher=slurm, or launcher=local",
        )
    if launcher.name == "slurm" and config.trainer.num_nodes > 1:
        yield Conflict(
            f"trainer.num_nodes={config.trainer.num_nodes}, but launcher=slurm runs each trial on "
            "one node",
            "trainer.num_nodes=1",
        )
    values = [
        (field.name, getattr(launcher, field.name), field.default)
        for field in dataclasses.fields(launcher)
    ]
    typed = [f"{name}={value}" for name, value, default in values if value != default]
    if launcher.name == "local" and typed:
        yield Conflict(
            f"launcher.{typed[0]} has no effect with launcher=local",
            "launcher=slurm, or leave it out",
        )


def _of_optimizer(config: TrainConfig) -> Iterator[Conflict]:
    trainer, optimizer, schedule = config.trainer, config.optimizer, config.schedule
    adapter = config.adapter
    if optimizer.name == "muon":
        if isinstance(adapter, LoraConfig) and adapter.lora_plus_ratio is not None:
            yield Conflict(
                f"adapter.lora_plus_ratio={adapter.lora_plus_ratio:g} sets the learning rate of "
                "every B, but optimizer=muon derives it from the matrix's size",
                "optimizer=adamw, or adapter.lora_plus_ratio=null",
            )
        if isinstance(adapter, Ia3Config):
            yield Conflict(
                "optimizer=muon updates matrices, but adapter=ia3 trains vectors only",
                "optimizer=adamw",
            )
    if optimizer.name == "schedule_free":
        if schedule.shape != "constant":
            yield Conflict(
                "optimizer=schedule_free averages its weights instead of decaying the learning "
                f"rate, but schedule={schedule.shape} decays it",
                "schedule=constant (its warm-up stays), or optimizer=adamw",
            )
        if trainer.precision == "bf16-pure":
            yield Conflict(
                "optimizer=schedule_free averages the weights of all steps, but trainer.precision="
                "bf16-pure has too few digits to add one step to an average of hundreds",
                "trainer.precision=bf16, or optimizer=adamw",
            )
        if cast("ScheduleFreeConfig", optimizer).beta1 == 0:
            yield Conflict(
                "optimizer.beta1=0 gives the averaged weights of optimizer=schedule_free no share "
                "in the weights that gradients are computed at",
                "optimizer.beta1=0.9",
            )
    if wrong := [each for each in optimizer.lr_by_pattern if not 0 < each.ratio <= 1000]:
        yield Conflict(
            "optimizer.lr_by_pattern: a ratio must be above 0 and at most 1000, not "
            + ", ".join(f"{each.ratio:g} ({each.pattern})" for each in wrong),
            "ratio: 0.1 (to freeze weights use adapter=freeze)",
        )
