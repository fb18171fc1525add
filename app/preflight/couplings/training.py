"""What cannot be combined in a training: its data and objective, trainer, optimizer, measurements,
trackers and sweeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from app.model.adapter import Ia3Config, LoraConfig, continued_from, saves_whole_model
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict
from app.preflight.couplings.devices import Devices, has_data, is_training
from app.preflight.couplings.model import CHANGE_BASE
from app.preflight.couplings.unused import is_set
from app.strategy.settings import ZeroConfig, is_sharding, tensor_parallel_size
from common.errors import nearest
from common.installation import install_extra, verb_command
from data_modules import dataset_names

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig, TunedConfig
    from app.training.optimizers import ScheduleFreeConfig


OF_OBJECTIVES = {
    "preference": "objective=dpo, or format: prompt_completion, columns: {completion: chosen}",
    "kto": "objective=kto, or columns: {weight: label} without a format",
    "classification": "objective=classify, or format: alpaca, columns: {instruction: text, "
    "output: label}",
}
"""format of rows that only some objectives learn from -> what to type for another one"""


def find_conflicts(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield the conflicts of settings that are neither of the model nor of the strategy."""
    if has_data(config):
        yield from _of_data(config)
        yield from _of_objective(config)
        if config.objective.name == "distill":
            yield from _of_teacher(config, devices)
    if is_training(config):
        yield from _of_trainer(config)
        yield from _of_optimizer(config)
        yield from _of_sweep(config)
        yield from _of_logger(config)
        yield from _of_measurements(config)


def _of_data(config: TrainConfig | EvaluateConfig) -> Iterator[Conflict]:
    data = config.data
    if config.evaluation.exact_match and not data.has_validation and not data.test_datasets:
        yield Conflict(
            "evaluation.exact_match=true, but there are no rows to evaluate",
            "data.val_set_size=0.05, or data.test_datasets=[{path: FILE}]",
        )
    names = {*dataset_names(data.loss_datasets), *dataset_names(data.test_datasets)}
    for name in [task.name for task in config.evaluation.tasks if task.name in names]:
        yield Conflict(
            f"evaluation.tasks: {name} is the name of a data set, too, and metrics have both names",
            "another name: for the task (and form: with it if it is a known task)",
        )
    if data.streaming and is_training(config) and config.trainer.max_steps is None:
        yield Conflict(
            "data.streaming=true without trainer.max_steps: a stream has no end",
            "trainer.max_steps=N, or data.streaming=false",
        )
    if data.streaming and config.packing.window is not None:
        yield Conflict(
            f"packing.window={config.packing.window} has no effect with data.streaming=true, which "
            "has its own packing window",
            "packing.window=null",
        )


def _of_objective(config: TrainConfig | EvaluateConfig) -> Iterator[Conflict]:
    name, needed, data = config.objective.name, config.objective.row_format, config.data
    for dataset in data.loss_datasets:
        if needed is None and dataset.format in OF_OBJECTIVES:
            yield Conflict(
                f"format: {dataset.format} of {dataset.path}: objective={name} learns from single "
                "answers that are all right",
                OF_OBJECTIVES[dataset.format],
            )
        if needed is not None and dataset.format not in (None, needed):
            yield Conflict(
                f"format: {dataset.format} of {dataset.path}: objective={name} learns from rows of "
                f"format {needed}",
                f"format: {needed} for them, or objective=sft",
            )
    if needed is None:
        return
    if data.train_on_inputs:
        yield Conflict(
            f"data.train_on_inputs=true: objective={name} learns what a better and a worse answer "
            "to a prompt differ in, and the prompt is the same",
            "data.train_on_inputs=false",
        )
    if data.on_long == "split":
        yield Conflict(
            f"data.on_long=split: objective={name} compares whole answers",
            "data.on_long=drop, truncate_left or truncate_right",
        )
    if is_training(config) and config.objective.compares_with_base:
        yield from _of_reference(config)
    if is_training(config) and config.objective.reference_source == "cached":
        if data.streaming:
            yield Conflict(
                "data.streaming=true does not know its pairs before the first step, when "
                "objective.reference=cached computes what the base says of them",
                "data.streaming=false, or objective.reference=base",
            )
        if config.model.from_scratch:
            yield Conflict(
                "model.from_scratch=true has no base whose log-probabilities objective.reference="
                "cached could store",
                "objective.reference=none" if config.objective.name != "kto" else "objective=orpo",
            )


def _of_reference(config: TrainConfig) -> Iterator[Conflict]:
    """Yield what keeps the model without its adapter from being what the run starts from."""
    adapter, needs = config.adapter, f"objective={config.objective.name} compares with the base"
    if saves_whole_model(adapter) and config.objective.reference_source == "base":
        yield Conflict(
            f"adapter={adapter.name} changes the base itself, and {needs}",
            "objective.reference=cached, or adapter=lora",
        )
    if (path := continued_from(adapter)) is not None:
        yield Conflict(
            f"adapter.path={path}: {needs}, which is then not what the run starts from",
            f"{verb_command('merge')} adapter_path={path} model.path={config.model.path} "
            "output.dir=MERGED first, and model.path=MERGED here",
        )
    if isinstance(adapter, LoraConfig) and adapter.init in CHANGE_BASE:
        yield Conflict(
            f"adapter.init={adapter.init} subtracts the adapter from the base, and {needs}",
            "adapter.init=default",
        )
    if config.trainer.compile:
        yield Conflict(
            f"trainer.compile=true compiles the layers with their adapter, and {needs} without it",
            "trainer.compile=false",
        )


def _of_teacher(config: TrainConfig | EvaluateConfig, devices: Devices) -> Iterator[Conflict]:
    if config.objective.teacher_path is None:
        yield Conflict(
            "objective=distill learns from a teacher, and none is named",
            "objective.teacher=FOLDER_OR_HUB_ID",
        )
    objective = cast("Any", config.objective)
    if objective.teacher_logits == "cached" and objective.direction == "reverse":
        yield Conflict(
            "objective.direction=reverse needs the teacher's probability of every token, and "
            "objective.teacher_logits=cached stores the likeliest ones",
            "objective.direction=forward, or objective.teacher_logits=live",
        )
    if objective.teacher_logits == "cached" and config.data.streaming:
        yield Conflict(
            "data.streaming=true does not know its rows before the first step, when "
            "objective.teacher_logits=cached computes what the teacher says of them",
            "data.streaming=false, or objective.teacher_logits=live",
        )
    if not is_training(config):
        return
    if tensor_parallel_size(config.strategy, devices.ranks_per_node) > 1:
        yield Conflict(
            f"strategy={config.strategy.name} splits the tokens of the vocabulary among ranks, and "
            "objective=distill compares whole distributions",
            "strategy=fsdp, zero2 or ddp",
        )
    if config.trainer.compile:
        yield Conflict(
            "trainer.compile=true and objective=distill have not been tested together yet",
            "trainer.compile=false",
        )


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
    if trainer.num_nodes == "auto":
        yield from _of_changing_nodes(config)
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


def _of_changing_nodes(config: TrainConfig) -> Iterator[Conflict]:
    """Yield conflicts of what must stay the same when a machine leaves or joins a run."""
    trainer = config.trainer
    if is_set(trainer, "gradient_accumulation_steps"):
        yield Conflict(
            "trainer.num_nodes=auto lets machines leave and join, and with trainer."
            f"gradient_accumulation_steps={trainer.gradient_accumulation_steps} a step would then "
            "take other rows",
            "trainer.global_batch_size=N, a multiple of every number of ranks",
        )
    if config.data.streaming:
        yield Conflict(
            "trainer.num_nodes=auto lets machines leave and join, and the order of "
            "data.streaming=true depends on the number of ranks",
            "trainer.num_nodes=N, or data.streaming=false",
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
    if launcher.name == "slurm" and config.trainer.nodes > 1:
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
