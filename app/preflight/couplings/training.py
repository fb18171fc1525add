"""What cannot be combined in a training: its data and objective, trainer, optimizer, measurements,
trackers and sweeps.
"""

from __future__ import annotations

from typing import Any

from app.model.adapter import Ia3Config, LoraConfig, continued_from, saves_whole_model
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict, Group, is_set
from app.preflight.couplings.devices import has_data, is_training, splits_matrices
from app.preflight.couplings.model import changes_base
from app.strategy.settings import shards_weights
from common.errors import nearest
from common.installation import install_extra, verb_command
from data_modules import dataset_names

_OF_OBJECTIVES = {
    "preference": "objective=dpo, or format: prompt_completion, columns: {completion: chosen}",
    "kto": "objective=kto, or columns: {weight: label} without a format",
    "classification": "objective=classify, or format: alpaca, columns: {instruction: text, "
    "output: label}",
}
"""format of rows that only some objectives learn from -> what to type for another one"""


def _ambiguous_tasks(config: Any) -> list[str]:
    names = {*dataset_names(config.data.loss_datasets), *dataset_names(config.data.test_datasets)}
    return [task.name for task in config.evaluation.tasks if task.name in names]


def _losses(config: Any) -> list[str]:
    return ["val/loss", *(f"val/loss/{name}" for name in dataset_names(config.data.loss_datasets))]


def _measured_tasks(config: Any) -> list[str]:
    data, tasks = config.data, [task.name for task in config.evaluation.tasks]
    if config.evaluation.answers_prompts:
        tasks += {*dataset_names(data.loss_datasets), *dataset_names(data.test_datasets)}
    return tasks


def _is_measured(config: Any) -> bool:
    """Return whether the monitored metric is that of a task, or of a group of its questions."""
    name = [*config.trainer.checkpoint.monitor.split("/", 2), "", ""][2]
    return any(f"{name}/".startswith(f"{task}/") for task in _measured_tasks(config))


def _known_metrics(config: Any) -> tuple[str, str]:
    """Return a hint at the metric nearest to the monitored one, and what is measured."""
    monitor = config.trainer.checkpoint.monitor
    metric = [*monitor.split("/", 2), ""][1]
    known = _losses(config) + [f"val/{metric}/{task}" for task in sorted(_measured_tasks(config))]
    return nearest(monitor, known), ", ".join(known[:12])


GROUPS = (
    Group(lambda c, d: has_data(c), rows=(
        Conflict(lambda c, d: c.evaluation.exact_match and not c.data.has_validation
                 and not c.data.test_datasets,
                 "evaluation.exact_match=true, but there are no rows to evaluate",
                 "data.val_set_size=0.05, or data.test_datasets=[{{path: FILE}}]"),
        Conflict(lambda c, d: c.evaluation.tasks and _ambiguous_tasks(c),
                 "evaluation.tasks: {found} is the name of a data set, too, and metrics have both "
                 "names",
                 "another name: for the task (and form: with it if it is a known task)"),
        Conflict(lambda c, d: c.data.streaming and is_training(c) and c.trainer.max_steps is None,
                 "data.streaming=true without trainer.max_steps: a stream has no end",
                 "trainer.max_steps=N, or data.streaming=false"),
        Conflict(lambda c, d: c.data.streaming and c.packing.window is not None,
                 "packing.window={c.packing.window} has no effect with data.streaming=true, which "
                 "has its own packing window",
                 "packing.window=null"),
        Conflict(lambda c, d: [
                     (each.format, each.path, _OF_OBJECTIVES[each.format])
                     for each in c.data.loss_datasets
                     if c.objective.row_format is None and each.format in _OF_OBJECTIVES],
                 "format: {found[0]} of {found[1]}: {objective} learns from single answers that "
                 "are all right",
                 "{found[2]}"),
        Conflict(lambda c, d: [
                     each for each in c.data.loss_datasets if c.objective.row_format is not None
                     and each.format not in (None, c.objective.row_format)],
                 "format: {found.format} of {found.path}: {objective} learns from rows of format "
                 "{c.objective.row_format}",
                 "format: {c.objective.row_format} for them, or objective=sft"),
    )),
    Group(lambda c, d: has_data(c) and c.objective.row_format is not None, rows=(
        Conflict(lambda c, d: c.data.train_on_inputs,
                 "data.train_on_inputs=true: {objective} learns what a better and a worse answer "
                 "to a prompt differ in, and the prompt is the same",
                 "data.train_on_inputs=false"),
        Conflict(lambda c, d: c.data.on_long == "split",
                 "data.on_long=split: {objective} compares whole answers",
                 "data.on_long=drop, truncate_left or truncate_right"),
    )),
    Group(lambda c, d: is_training(c) and c.objective.row_format is not None
          and c.objective.compares_with_base, "{objective} compares with the base", rows=(
        Conflict(lambda c, d: saves_whole_model(c.adapter)
                 and c.objective.reference_source == "base",
                 "{adapter} changes the base itself, and {name}",
                 "objective.reference=cached, or adapter=lora"),
        Conflict(lambda c, d: continued_from(c.adapter),
                 "adapter.path={found}: {name}, which is then not what the run starts from",
                 f"{verb_command('merge')} adapter_path={{found}} model.path={{c.model.path}} "
                 "output.dir=MERGED first, and model.path=MERGED here"),
        Conflict(lambda c, d: changes_base(c),
                 "adapter.init={c.adapter.init} subtracts the adapter from the base, and {name}",
                 "adapter.init=default"),
        Conflict(lambda c, d: c.trainer.compile,
                 "trainer.compile=true compiles the layers with their adapter, and {name} without "
                 "it",
                 "trainer.compile=false"),
    )),
    Group(lambda c, d: is_training(c) and c.objective.row_format is not None
          and c.objective.reference_source == "cached", "objective.reference=cached", rows=(
        Conflict(lambda c, d: c.data.streaming,
                 "data.streaming=true does not know its pairs before the first step, when {name} "
                 "computes what the base says of them",
                 "data.streaming=false, or objective.reference=base"),
        Conflict(lambda c, d: c.model.from_scratch and (
                     "objective=orpo" if c.objective.name == "kto" else "objective.reference=none"),
                 "model.from_scratch=true has no base whose log-probabilities {name} could store",
                 "{found}"),
    )),
    Group(lambda c, d: has_data(c) and c.objective.name == "distill",
          "objective.teacher_logits=cached", "objective.teacher_logits=live", (
        Conflict(lambda c, d: c.objective.teacher_path is None,
                 "objective=distill learns from a teacher, and none is named",
                 "objective.teacher=FOLDER_OR_HUB_ID"),
        Conflict(lambda c, d: c.objective.teacher_logits == "cached"
                 and c.objective.direction == "reverse",
                 "objective.direction=reverse needs the teacher's probability of every token, and "
                 "{name} stores the likeliest ones",
                 "objective.direction=forward, or {without}"),
        Conflict(lambda c, d: c.objective.teacher_logits == "cached" and c.data.streaming,
                 "data.streaming=true does not know its rows before the first step, when {name} "
                 "computes what the teacher says of them",
                 "data.streaming=false, or {without}"),
        Conflict(lambda c, d: is_training(c) and splits_matrices(c, d),
                 "{strategy} splits the tokens of the vocabulary among ranks, and "
                 "objective=distill compares whole distributions",
                 "strategy=fsdp, zero2 or ddp"),
        Conflict(lambda c, d: is_training(c) and c.trainer.compile,
                 "trainer.compile=true and objective=distill have not been tested together yet",
                 "trainer.compile=false"),
    )),
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: c.trainer.compile and c.recompute.mode == "selective",
                 "recompute=selective saves the results of single operations, but "
                 "trainer.compile=true fuses them with others",
                 "recompute=full, or trainer.compile=false"),
        Conflict(lambda c, d: c.trainer.global_batch_size is not None
                 and is_set(c.trainer, "gradient_accumulation_steps"),
                 "trainer.global_batch_size={c.trainer.global_batch_size} and "
                 "trainer.gradient_accumulation_steps={c.trainer.gradient_accumulation_steps} set "
                 "the same thing",
                 "only one of the two"),
    )),
    Group(lambda c, d: is_training(c) and c.trainer.num_nodes == "auto",
          "trainer.num_nodes=auto lets machines leave and join", rows=(
        Conflict(lambda c, d: is_set(c.trainer, "gradient_accumulation_steps"),
                 "{name}, and with "
                 "trainer.gradient_accumulation_steps={c.trainer.gradient_accumulation_steps} a "
                 "step would then take other rows",
                 "trainer.global_batch_size=N, a multiple of every number of ranks"),
        Conflict(lambda c, d: c.data.streaming,
                 "{name}, and the order of data.streaming=true depends on the number of ranks",
                 "trainer.num_nodes=N, or data.streaming=false"),
    )),
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: None not in (c.schedule.warmup_steps, c.trainer.max_steps)
                 and c.schedule.warmup_steps >= c.trainer.max_steps > 0
                 and str(c.trainer.max_steps // 10),
                 "schedule.warmup_steps={c.schedule.warmup_steps} leaves no steps of "
                 "trainer.max_steps={c.trainer.max_steps}",
                 "schedule.warmup_steps={found}"),
        Conflict(lambda c, d: c.schedule.shape == "wsd" and c.schedule.warmup_steps is None
                 and c.schedule.warmup_ratio + c.schedule.decay_ratio > 1
                 and f"{1 - c.schedule.warmup_ratio:g}",
                 "schedule.warmup_ratio={c.schedule.warmup_ratio:g} and "
                 "schedule.decay_ratio={c.schedule.decay_ratio:g} are together more than 1",
                 "schedule.decay_ratio={found}"),
    )),
    Group(lambda c, d: is_training(c) and c.optimizer.name == "muon", rows=(
        Conflict(lambda c, d: isinstance(c.adapter, LoraConfig)
                 and c.adapter.lora_plus_ratio is not None,
                 "adapter.lora_plus_ratio={c.adapter.lora_plus_ratio:g} sets the learning rate of "
                 "every B, but optimizer=muon derives it from the matrix's size",
                 "optimizer=adamw, or adapter.lora_plus_ratio=null"),
        Conflict(lambda c, d: isinstance(c.adapter, Ia3Config),
                 "optimizer=muon updates matrices, but adapter=ia3 trains vectors only",
                 "optimizer=adamw"),
    )),
    Group(lambda c, d: is_training(c) and c.optimizer.name == "schedule_free", rows=(
        Conflict(lambda c, d: c.schedule.shape != "constant",
                 "optimizer=schedule_free averages its weights instead of decaying the learning "
                 "rate, but schedule={c.schedule.shape} decays it",
                 "schedule=constant (its warm-up stays), or optimizer=adamw"),
        Conflict(lambda c, d: c.trainer.precision == "bf16-pure",
                 "optimizer=schedule_free averages the weights of all steps, but "
                 "trainer.precision=bf16-pure has too few digits to add one step to an average of "
                 "hundreds",
                 "trainer.precision=bf16, or optimizer=adamw"),
        Conflict(lambda c, d: c.optimizer.beta1 == 0,
                 "optimizer.beta1=0 gives the averaged weights of optimizer=schedule_free no share "
                 "in the weights that gradients are computed at",
                 "optimizer.beta1=0.9"),
    )),
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: ", ".join(
                     f"{each.ratio:g} ({each.pattern})" for each in c.optimizer.lr_by_pattern
                     if not 0 < each.ratio <= 1000),
                 "optimizer.lr_by_pattern: a ratio must be above 0 and at most 1000, not {found}",
                 "ratio: 0.1 (to freeze weights use adapter=freeze)"),
        Conflict(lambda c, d: c.sweep.search == "grid" and c.sweep.trials is not None,
                 "sweep.trials={c.sweep.trials}, but sweep.search=grid runs every combination",
                 "sweep.search=optuna, or leave it out"),
        Conflict(lambda c, d: c.sweep.search == "grid" and c.sweep.prune != "none",
                 "sweep.prune={c.sweep.prune}, but sweep.search=grid runs every trial to its end",
                 "sweep.search=optuna, or leave it out"),
        Conflict(lambda c, d: c.launcher.name not in ("local", "slurm"),
                 "launcher={c.launcher.name} starts one run (app.launch), not the trials of a "
                 "sweep",
                 "launcher=slurm, or launcher=local"),
        Conflict(lambda c, d: c.launcher.name == "slurm" and c.trainer.nodes > 1,
                 "trainer.num_nodes={c.trainer.num_nodes}, but launcher=slurm runs each trial on "
                 "one node",
                 "trainer.num_nodes=1"),
        Conflict(lambda c, d: c.launcher.name == "local" and [
                     f"launcher.{name}={getattr(c.launcher, name)}"
                     for name in c.launcher.__dataclass_fields__ if is_set(c.launcher, name)][:1],
                 "{found} has no effect with launcher=local",
                 "launcher=slurm, or leave it out"),
        Conflict(lambda c, d: [
                     tracker for tracker in ("wandb", "mlflow")
                     if tracker in (c.logger.name, *c.logger.also)
                     and not conflict.is_installed(tracker)],
                 "logger={found} needs the package {found}, which is not installed",
                 f"{install_extra('{found}')}, or logger=tensorboard", is_of_machine=True),
        Conflict(lambda c, d: c.trainer.early_stopping_patience is not None
                 and not c.data.has_validation,
                 "trainer.early_stopping_patience={c.trainer.early_stopping_patience} watches "
                 "{c.trainer.checkpoint.monitor}, but there are no validation rows",
                 "data.val_set_size=0.05"),
        Conflict(lambda c, d: c.output.weights == "best" and not c.data.has_validation,
                 "output.from=best ranks steps by {c.trainer.checkpoint.monitor}, but there are no "
                 "validation rows",
                 "data.val_set_size=0.05, or output.from=last"),
    )),
    Group(lambda c, d: is_training(c) and c.trainer.checkpoint.monitor != "val/loss",
          "trainer.checkpoint.monitor={c.trainer.checkpoint.monitor}", rows=(
        Conflict(lambda c, d: c.trainer.checkpoint.monitor in _losses(c)
                 and not c.data.has_validation,
                 "{name} needs validation rows, but there are none",
                 "data.val_set_size=0.05"),
        Conflict(lambda c, d: c.trainer.checkpoint.monitor not in _losses(c)
                 and not _is_measured(c)
                 # Figures of other objectives are known when these are built.
                 and c.objective.name == "sft" and _known_metrics(c),
                 "{name} is not measured{found[0]}; measured are {found[1]}",
                 "one of them; evaluation.every_steps=N measures evaluation.tasks, too"),
        Conflict(lambda c, d: c.trainer.checkpoint.monitor not in _losses(c)
                 and _is_measured(c) and c.evaluation.every_steps is None,
                 "{name} is measured at the end only",
                 "evaluation.every_steps=N, too, to measure it during the run"),
    )),
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: shards_weights(c.strategy) and ", ".join(c.evaluation.harness),
                 "evaluation.harness=[{found}] needs the whole model on a rank, but {strategy} "
                 "shards the weights",
                 f"evaluation.harness=[], and afterwards {verb_command('evaluate')} run=FOLDER "
                 f"evaluation.harness=[{{found}}]"),
    )),
    Group(lambda c, d: is_training(c) and c.evaluation.every_steps is not None,
          "evaluation.every_steps={c.evaluation.every_steps}", rows=(
        Conflict(lambda c, d: not c.evaluation.tasks and not c.evaluation.answers_prompts and [
                     " (evaluation.harness runs at the end only)" * bool(c.evaluation.harness)],
                 "{name}, but there is nothing to measure{found}",
                 "evaluation.tasks=[{{name: mmlu}}] or evaluation.exact_match=true, too"),
        Conflict(lambda c, d: not c.data.has_validation,
                 "{name} measures at validations, but there are no validation rows",
                 "data.val_set_size=0.05"),
        Conflict(lambda c, d: c.trainer.compile,
                 "{name} generates with layers that trainer.compile=true has compiled for one size "
                 "of batch",
                 "trainer.compile=false, or evaluation.every_steps=null"),
    )),
)  # fmt: skip
"""the rows of settings that are neither of the model nor of the strategy"""
