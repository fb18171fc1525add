"""The table of settings that cannot be combined: when, why, and what to type instead.

One function per subject; each `if` with its `yield` is a row of the table. Rows marked
`is_of_machine` may not apply on another machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from app.model.adapter import Ia3Config, LoraConfig, continued_from, saves_whole_model
from app.model.attention import BACKEND_PACKAGES, EXCHANGED, GPU_ONLY, HALF_PRECISION_ONLY
from app.model.hub import COMMIT
from app.preflight.couplings.devices import (
    Devices,
    check_devices,
    check_global_batch,
    check_layout,
    has_data,
    is_merge,
    is_training,
    requested_devices,
)
from app.preflight.couplings.unused import find_unused, is_set
from app.strategy.deepspeed_config import conflicting_keys, given_keys, refused_keys
from app.strategy.settings import (
    FsdpConfig,
    LocalSgdConfig,
    PipelineConfig,
    ZeroConfig,
    context_parallel_size,
    is_sharding,
    num_stages,
    states_folder,
    tensor_parallel_size,
)
from common.errors import nearest
from common.facts import check_values
from common.files import file_system_of
from common.installation import install_extra, verb_command
from data_modules import DEFAULT_SEQUENCE_LEN, dataset_names

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig, TunedConfig
    from app.training.optimizers import ScheduleFreeConfig

CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that subtract the initial adapter from the base's weights"""
MIN_SLICE_TOKENS = 64
"""fewest tokens of a row on each of the ranks that split it"""
MEMORY_FILES = ("tmpfs", "ramfs")
REMOTE_FILES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("9p", "afs"),
)
"""file systems that optimizer states are not kept on; `fuse.NAME` are taken for remote, too"""
OF_OBJECTIVES = {
    "preference": "objective=dpo, or format: prompt_completion, columns: {completion: chosen}",
    "kto": "objective=kto, or columns: {weight: label} without a format",
    "classification": "objective=classify, or format: alpaca, columns: {instruction: text, "
    "output: label}",
}
"""format of rows that only some objectives learn from -> what to type for another one"""
NEAREST_IN_PYTORCH = {
    "zero1": "fsdp_grad_op",
    "zero2": "fsdp_grad_op",
    "zero2_offload": "fsdp_offload",
    "zero3": "fsdp",
    "zero3_offload": "fsdp_offload",
    "zero3_nvme": "fsdp_offload",
    "zero3_hpz": "fsdp_hybrid",
    "zeropp": "fsdp_hybrid",
}
"""DeepSpeed strategy -> the nearest PyTorch strategy"""


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that cannot be combined."""

    why: str
    instead: str
    """what to type instead"""
    is_of_machine: bool = False
    """whether the conflict depends on the machine"""


def check_compatibility(
    config: TrainConfig | TunedConfig,
    num_gpus: int | None = None,
    *,
    on_this_machine: bool = True,
) -> list[str]:
    """List the values out of range, or if there are none, the settings that cannot be combined.

    `num_gpus`: GPUs of this machine; counted if None. With `on_this_machine=False`, conflicts that
    depend on the machine are left out.
    """
    if problems := check_values(config, skip=("data",)):  # check_datasets checks those of the data
        return problems
    devices = requested_devices(config, num_gpus if on_this_machine else num_gpus or 0)
    conflicts = [*_of_device(config, devices), *_of_base(config), *_of_head(config, devices)]
    if has_data(config):
        conflicts += [*_of_data(config), *_of_objective(config)]
    if is_training(config):
        conflicts += [*_of_adapter(config), *_of_trainer(config), *_of_optimizer(config)]
        conflicts += [*_of_sweep(config), *_of_logger(config), *_of_measurements(config)]
        conflicts += _of_strategy(config, devices)
        conflicts += _of_context(config, devices)
        if isinstance(config.strategy, FsdpConfig):
            conflicts += _of_fsdp(config, config.strategy, devices)
        if isinstance(config.strategy, PipelineConfig):
            conflicts += _of_pipeline(config, config.strategy)
            conflicts += _of_schedule(config, config.strategy, devices)
        if isinstance(config.strategy, LocalSgdConfig):
            conflicts += _of_local_sgd(config, config.strategy)
        if isinstance(config.strategy, ZeroConfig):
            conflicts += _of_deepspeed(config, config.strategy, devices)
            conflicts += _of_deepspeed_keys(config.strategy.config, config)
    problems = [
        f"{conflict.why}; type {conflict.instead}"
        for conflict in conflicts
        if on_this_machine or not conflict.is_of_machine
    ]
    problems += find_unused(config)
    if is_training(config):
        trainer = config.trainer
        if on_this_machine:
            problems += check_devices(trainer, devices.num_gpus if devices.on_gpu else None)
        # A preview may be for another machine, whose number of GPUs is unknown.
        if on_this_machine or isinstance(trainer.devices, int):
            problems += check_layout(config.strategy, trainer, devices.ranks_per_node)
        problems += check_global_batch(trainer, devices.num_ranks, devices.num_data_ranks)
    return problems


def _of_device(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    trainer, backend = config.trainer, config.attention.backend
    if trainer.accelerator == "gpu" and devices.num_gpus == 0:
        yield Conflict(
            "trainer.accelerator=gpu, but no GPU was found",
            "trainer.accelerator=cpu (CUDA_VISIBLE_DEVICES hides GPUs, too)",
            is_of_machine=True,
        )
    if trainer.precision == "fp16" and not devices.on_gpu:
        yield Conflict(
            f"trainer.precision=fp16 needs a GPU, but this run is on {devices}",
            "trainer.precision=fp32 or bf16",
            is_of_machine=True,
        )
    if backend in GPU_ONLY and not devices.on_gpu:
        needs = (
            "computes gradients on NVIDIA GPUs only" if backend == "flex" else "needs an NVIDIA GPU"
        )
        yield Conflict(
            f"attention={backend} {needs}, but this run is on {devices}: attention without a "
            "document mask would let the documents of a pack attend to each other",
            "attention=sdpa (which computes each document separately on a CPU)",
            is_of_machine=True,
        )
    if backend in HALF_PRECISION_ONLY and trainer.precision == "fp32":
        yield Conflict(
            f"attention={backend} computes in half precision only, but trainer.precision=fp32",
            "trainer.precision=bf16, or attention=sdpa",
        )
    module, package = BACKEND_PACKAGES.get(backend, (None, None))
    if module is not None and devices.on_gpu and not is_installed(module):
        yield Conflict(
            f"attention={backend} needs the package {package}, which is not installed",
            "attention=varlen, which is part of PyTorch, or install the package",
            is_of_machine=True,
        )


def is_installed(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    # flash-attn-4 without flash-attn leaves a folder flash_attn that is not a package.
    return spec is not None and spec.origin is not None


def _of_logger(config: TrainConfig) -> Iterator[Conflict]:
    chosen = [config.logger.name, *config.logger.also]
    for tracker in ("wandb", "mlflow"):
        if tracker in chosen and not is_installed(tracker):
            yield Conflict(
                f"logger={tracker} needs the package {tracker}, which is not installed",
                f"{install_extra(tracker)}, or logger=tensorboard",
                is_of_machine=True,
            )


def _of_base(config: TrainConfig | TunedConfig) -> Iterator[Conflict]:
    model = config.model
    from_hub = [p for p in (model.path, model.tokenizer_path) if p and not Path(p).is_dir()]
    if model.trust_remote_code and from_hub and not COMMIT.fullmatch(model.revision or ""):
        yield Conflict(
            "model.trust_remote_code=true runs whatever code is on the hub at that time",
            "model.revision=COMMIT, too (40 hex digits; branches and tags move)",
        )
    if model.trust_remote_code and len(set(from_hub)) > 1:
        yield Conflict(
            f"model.trust_remote_code=true runs whatever code is in {model.tokenizer_path} at that "
            "time: model.revision is a commit of model.path only",
            "model.tokenizer_path=FOLDER, with a copy of it",
        )
    if config.quantization.method != "none" and model.from_scratch:
        yield Conflict(
            f"quantization={config.quantization.method} freezes the weights in few bits, but "
            "model.from_scratch=true starts from random weights, which must be trained",
            "quantization=none",
        )


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
                "objective.reference=none",
            )


def _of_head(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of a head for classes or a reward."""
    labels = config.model.labels
    given = f"model.labels=[{', '.join(labels)}]"
    objective = config.objective if has_data(config) else None
    if objective is not None and objective.name == "reward" and len(labels) != 1:
        yield Conflict(f"{given}: a reward is one number, with a name", "model.labels=[reward]")
    if not labels:
        return
    if len({label.casefold() for label in labels}) < len(labels):
        yield Conflict(f"{given} has a name twice", "model.labels=[...] with each class once")
    if objective is None and not is_merge(config):
        yield Conflict(
            f"{given}: a model with a head for classes or a reward writes no text",
            f"{verb_command('evaluate')} or {verb_command('merge')} run=FOLDER",
        )
    if objective is not None and not objective.has_own_head:
        yield Conflict(
            f"{given} replaces the language model's head, which objective={objective.name} trains",
            "objective=classify, or model.labels=[]",
        )
    if objective is not None and objective.name == "classify":
        weights = cast("Any", objective).class_weights
        if weights and (len(weights) != len(labels) or len(labels) < 2):
            yield Conflict(
                f"objective.class_weights has {len(weights)} numbers, and {given}",
                "objective.class_weights=[1.0, ...] with a number for each class",
            )
    if has_data(config) and (asked := _asks_for_text(config)) is not None:
        key, value, without = asked
        yield Conflict(
            f"{key}={value} asks for answers, and a model with {given} writes no text",
            f"{key}={without}",
        )
    if config.model.added_tokens:
        yield Conflict(
            f"{given} and model.added_tokens are not built together yet", "model.added_tokens=[]"
        )
    if not is_training(config):
        return
    if not isinstance(config.adapter, LoraConfig) and config.adapter.name != "full":
        yield Conflict(
            f"{given}: the head is trained whole, which adapter={config.adapter.name} does not do",
            "adapter=lora or full",
        )
    if tensor_parallel_size(config.strategy, devices.ranks_per_node) > 1:
        yield Conflict(
            f"strategy={config.strategy.name} splits the head by tokens of the vocabulary, and "
            f"{given} has none",
            "strategy=fsdp",
        )
    if config.quantization.method == "fp8":
        yield Conflict(
            f"quantization=fp8 has not been tried with {given}", "quantization=nf4, or none"
        )


def _asks_for_text(config: TrainConfig | EvaluateConfig) -> tuple[str, str, str] | None:
    """Return the key and value of what asks for answers, and the value that does not; or None."""
    evaluation = config.evaluation
    if evaluation.tasks:
        return "evaluation.tasks", f"[{', '.join(task.name for task in evaluation.tasks)}]", "[]"
    if evaluation.harness:
        return "evaluation.harness", f"[{', '.join(evaluation.harness)}]", "[]"
    if evaluation.exact_match:
        return "evaluation.exact_match", "true", "false"
    if evaluation.metrics:
        return "evaluation.metrics", f"[{', '.join(evaluation.metrics)}]", "[]"
    if evaluation.metric is not None:
        return "evaluation.metric", evaluation.metric, "null"
    return None


def _of_reference(config: TrainConfig) -> Iterator[Conflict]:
    """Yield what keeps the model without its adapter from being what the run starts from."""
    adapter, needs = config.adapter, f"objective={config.objective.name} compares with the base"
    if saves_whole_model(adapter) and config.objective.reference_source == "base":
        yield Conflict(
            f"adapter={adapter.name} changes the base itself, and {needs}",
            "objective.reference=cached, or " * (config.objective.name != "kto") + "adapter=lora",
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


def _of_adapter(config: TrainConfig) -> Iterator[Conflict]:
    adapter, model, method = config.adapter, config.model, config.quantization.method
    if method != "none" and saves_whole_model(adapter):
        yield Conflict(
            f"quantization={method} freezes the weights in few bits, but adapter={adapter.name} "
            "trains them",
            "quantization=none, or adapter=lora",
        )
    if method == "fp8" and isinstance(adapter, LoraConfig) and adapter.use_dora:
        yield Conflict(
            "adapter.use_dora=true needs the norms of the base's columns, which peft cannot read "
            "from weights of quantization=fp8",
            "adapter.use_dora=false, or quantization=nf4",
        )
    if method == "fp8" and config.trainer.precision == "fp16":
        yield Conflict(
            "trainer.precision=fp16 is for GPUs without bf16, but quantization=fp8 scales by "
            "numbers that fp16 cannot hold",
            "trainer.precision=bf16",
        )
    if model.router_aux_loss and adapter.name != "full":
        yield Conflict(
            f"model.router_aux_loss={model.router_aux_loss:g} balances trainable routers, but "
            f"adapter={adapter.name} leaves them frozen",
            "model.router_aux_loss=null, or adapter=full",
        )
    if isinstance(adapter, Ia3Config) and model.added_tokens:
        yield Conflict(
            f"model.added_tokens={model.added_tokens} need trainable embedding rows, but "
            "adapter=ia3 trains vectors only",
            "adapter=lora or adapter=full",
        )
    if model.from_scratch and adapter.name != "full":
        yield Conflict(
            f"model.from_scratch=true with adapter={adapter.name}: an adapter on random frozen "
            "weights learns nothing",
            "adapter=full",
        )
    if not isinstance(adapter, LoraConfig) or adapter.init not in CHANGE_BASE:
        return
    start = f"adapter.init={adapter.init} subtracts the initial adapter from the base's weights, "
    strategy = config.strategy
    if adapter.use_dora:
        yield Conflict(
            f"{start}but adapter.use_dora=true learns the magnitudes of the unchanged weights",
            "adapter.init=default, or adapter.use_dora=false",
        )
    if isinstance(strategy, FsdpConfig) or (
        isinstance(strategy, ZeroConfig) and strategy.stage == 3
    ):
        yield Conflict(
            f"{start}and is saved relative to the original weights, which are loaded again for it: "
            f"strategy={strategy.name} leaves no rank room for them",
            "adapter.init=default, or strategy=ddp",
        )
    if method != "none":
        yield Conflict(
            f"{start}but weights of quantization={method} cannot represent the difference",
            "adapter.init=default, or quantization=none",
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


def _of_strategy(config: TrainConfig, devices: Devices) -> Iterator[Conflict]:
    strategy, trainer = config.strategy, config.trainer
    optimizer, name = config.optimizer.name, f"strategy={config.strategy.name}"
    if strategy.name == "single" and devices.num_ranks > 1:
        yield Conflict(
            f"strategy=single runs on one device, but {devices.num_ranks} ranks were requested",
            "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        )
    if strategy.offload_optimizer == "disk":
        yield from _of_disk_states(config)
    if not is_sharding(strategy):
        return
    if trainer.precision == "fp16":
        yield Conflict(
            f"{name} and trainer.precision=fp16: each rank would decide from its own shard of the "
            "gradients whether a scaled step overflowed",
            "trainer.precision=bf16, or strategy=ddp",
        )
    if trainer.compile:
        yield Conflict(
            f"{name} and trainer.compile=true have not been tested together yet",
            "trainer.compile=false, or strategy=ddp",
        )
    if trainer.checkpoint.asynchronous:
        yield Conflict(
            f"trainer.checkpoint.async=true copies the state of one rank, but {name} shards it "
            "over all ranks, which gather and write it together",
            "trainer.checkpoint.async=false, or strategy=ddp",
        )
    elementwise, per_node = ["adamw"], devices.ranks_per_node
    is_whole = tensor_parallel_size(strategy, per_node) == num_stages(strategy) == 1
    if isinstance(strategy, FsdpConfig) and is_whole:
        elementwise.append("schedule_free")
    if optimizer not in elementwise:
        yield Conflict(
            f"optimizer={optimizer} cannot update shards of weights, and {name} shards them",
            "optimizer=adamw, or strategy=ddp",
        )


def _of_disk_states(config: TrainConfig) -> Iterator[Conflict]:
    """Yield conflicts of optimizer states that are on a disk."""
    strategy, trainer, name = config.strategy, config.trainer, "strategy.offload_optimizer=disk"
    without = "strategy.offload_optimizer=none"
    if config.optimizer.name != "adamw":
        yield Conflict(
            f"{name} steps AdamW with fp32 states, not optimizer={config.optimizer.name}",
            f"optimizer=adamw, or {without}",
        )
    if trainer.precision == "fp16":
        yield Conflict(
            f"{name} and trainer.precision=fp16: its fused steps take no loss scaler",
            f"trainer.precision=bf16, or {without}",
        )
    if trainer.checkpoint.asynchronous:
        yield Conflict(
            "trainer.checkpoint.async=true copies the optimizer states to host memory, where "
            f"{name} never has all of them",
            f"trainer.checkpoint.async=false, or {without}",
        )
    if isinstance(strategy, LocalSgdConfig):
        yield Conflict(
            f"strategy={strategy.name} averages optimizer states over the nodes, which is not "
            f"built for {name}",
            f"strategy=fsdp_hybrid, or {without}",
        )
    folder = states_folder(strategy, Path(config.output.dir or "."))
    kind = "" if folder is None else file_system_of(folder)
    why = "is in memory itself" if kind in MEMORY_FILES else "may be remote, and slow or lost"
    if kind in (*MEMORY_FILES, *REMOTE_FILES) or kind.startswith("fuse."):
        yield Conflict(
            f"{name}: {folder} is on {kind}, which {why}",
            f"strategy.offload_dir=FOLDER on a local disk, or {without}",
            is_of_machine=True,
        )


def _of_context(config: TrainConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of rows whose tokens are split over ranks."""
    strategy, data = config.strategy, config.data
    size, without = context_parallel_size(strategy), "strategy.context_parallel_size=1"
    if size == 1:
        return
    name = f"strategy.context_parallel_size={size}"
    if tensor_parallel_size(strategy, devices.ranks_per_node) > 1:
        yield Conflict(
            f"{name} splits rows, and strategy={strategy.name} matrices: together they are not "
            "built yet",
            f"strategy=fsdp, or {without}",
        )
    if isinstance(strategy, LocalSgdConfig):
        yield Conflict(
            f"{name} and strategy={strategy.name}: nodes that train separately are not built yet "
            "for split rows",
            f"strategy=fsdp_hybrid, or {without}",
        )
    if config.attention.backend not in ("auto", *EXCHANGED):
        yield Conflict(
            f"{name} gives each rank a share of the heads, which attention="
            f"{config.attention.backend} cannot compute",
            f"attention={' or '.join(EXCHANGED)}, or {without}",
        )
    if config.objective.name != "sft":
        yield Conflict(
            f"{name} splits rows, and objective={config.objective.name} needs whole answers",
            f"objective=sft, or {without}",
        )
    if config.trainer.compile:
        yield Conflict(
            f"{name} and trainer.compile=true have not been tested together yet",
            f"trainer.compile=false, or {without}",
        )
    if config.adapter.neftune_alpha is not None:
        yield Conflict(
            f"adapter.neftune_alpha={config.adapter.neftune_alpha:g} scales its noise by the "
            f"length of a document, of which {name} gives a rank a part",
            f"adapter.neftune_alpha=null, or {without}",
        )
    tokens = data.sequence_len or DEFAULT_SEQUENCE_LEN
    if tokens < size * MIN_SLICE_TOKENS:
        yield Conflict(
            f"{name}: rows of {tokens} tokens (data.sequence_len) leave a rank fewer than "
            f"{MIN_SLICE_TOKENS}",
            f"data.sequence_len={size * MIN_SLICE_TOKENS}, or {without}",
        )


def _of_fsdp(config: TrainConfig, strategy: FsdpConfig, devices: Devices) -> Iterator[Conflict]:
    method, name = config.quantization.method, f"strategy={strategy.name}"
    use_dora = isinstance(config.adapter, LoraConfig) and config.adapter.use_dora
    splits_matrices = tensor_parallel_size(strategy, devices.ranks_per_node) > 1
    if strategy.offload_parameters and not devices.on_gpu:
        yield Conflict(
            "strategy.offload_parameters=true keeps weights in host memory that is pinned for a "
            f"GPU, but this run is on {devices}, where weights are in host memory anyway",
            "strategy=fsdp",
            is_of_machine=True,
        )
    if strategy.offload_parameters and splits_matrices:
        yield Conflict(
            f"{name} splits matrices, whose gradients are summed on the devices, but "
            "strategy.offload_parameters=true keeps them in host memory",
            "strategy=fsdp_offload, or strategy.offload_parameters=false",
        )
    if method == "int8":
        yield Conflict(
            f"{name} shards weights of one floating-point dtype, but those of quantization=int8 "
            "are integers with separate scales",
            "quantization=nf4, or strategy=zero2 or ddp",
        )
    if method in ("nf4", "fp8") and splits_matrices:
        why = "packs weights in blocks that cross both" if method == "nf4" else "scales whole rows"
        yield Conflict(
            f"{name} splits matrices by rows and columns, but quantization={method} {why}",
            "strategy=fsdp, or quantization=none",
        )
    if use_dora and splits_matrices:
        yield Conflict(
            f"adapter.use_dora=true needs the norms of whole columns of a matrix, but {name} "
            "splits them between ranks",
            "adapter.use_dora=false, or strategy=fsdp",
        )
    if use_dora and method == "nf4":
        yield Conflict(
            f"adapter.use_dora=true needs the norms of the base's columns while it is built, but "
            f"{name} builds it with its 4-bit weights on rank 0 only",
            "adapter.use_dora=false, or strategy=ddp",
        )


def _of_pipeline(config: TrainConfig, strategy: PipelineConfig) -> Iterator[Conflict]:
    """Yield conflicts of layers that are divided into stages."""
    name = f"strategy={strategy.name}"
    if config.packing.method == "none":
        yield Conflict(
            f"{name} sends hidden states of one shape, and rows of packing=none differ in length",
            "packing=multipack, or strategy=fsdp",
        )
    if config.data.streaming:
        yield Conflict(
            f"{name} has not been tested with data.streaming=true yet",
            "data.streaming=false, or strategy=fsdp",
        )
    if config.objective.name != "sft":
        yield Conflict(
            f"{name} computes the loss of objective=sft in its last stage; objective="
            f"{config.objective.name} is not built yet",
            "objective=sft, or strategy=fsdp",
        )
    if config.quantization.method != "none":
        yield Conflict(
            f"{name} has not been tested with quantization={config.quantization.method} yet",
            "quantization=none, or strategy=fsdp",
        )
    if strategy.context_parallel_size > 1:
        yield Conflict(
            f"strategy.context_parallel_size={strategy.context_parallel_size} splits rows, and "
            f"{name} layers: together they are not built yet",
            "strategy.context_parallel_size=1, or strategy=fsdp",
        )
    offloads = strategy.offload_parameters or strategy.offload_optimizer != "none"
    if offloads or strategy.replicas != 1 or not strategy.shards_data_parallel:
        yield Conflict(
            f"{name} shards a stage over all ranks that hold it, on their devices: "
            "strategy.offload_parameters, strategy.offload_optimizer, strategy.replicas and "
            "strategy.shards_data_parallel are not built yet",
            "strategy=fsdp_pp without them, or strategy=fsdp_hybrid",
        )
    if config.adapter.neftune_alpha is not None:
        yield Conflict(
            f"adapter.neftune_alpha={config.adapter.neftune_alpha:g} adds noise to an embedding, "
            f"which {name} computes on one rank of several; together they are not tested yet",
            "adapter.neftune_alpha=null, or strategy=fsdp",
        )


def _of_schedule(
    config: TrainConfig, strategy: PipelineConfig, devices: Devices
) -> Iterator[Conflict]:
    """Yield conflicts of the micro-batches that pass through the stages in a step."""
    trainer, size = config.trainer, strategy.pipeline_parallel_size
    batches = trainer.gradient_accumulation_steps
    if trainer.global_batch_size is not None:
        batches = trainer.global_batch_size // (trainer.least_micro_batch * devices.num_data_ranks)
    least = max(1, round(batches / size)) * size
    typed = f"trainer.gradient_accumulation_steps={least}"
    if trainer.global_batch_size is not None:
        packs = least * trainer.least_micro_batch * devices.num_data_ranks
        typed = f"trainer.global_batch_size={packs}"
    if batches < size:
        yield Conflict(
            f"strategy.pipeline_parallel_size={size} needs at least {size} micro-batches in a "
            f"step, to keep all stages busy, and there would be {batches}",
            typed,
        )
    elif strategy.schedule == "interleaved" and batches % size:
        yield Conflict(
            f"strategy.schedule=interleaved passes micro-batches through {size} ranks in rounds "
            f"of {size}, which do not divide the {batches} of a step",
            f"{typed}, or strategy.schedule=1f1b",
        )


def _of_local_sgd(config: TrainConfig, strategy: LocalSgdConfig) -> Iterator[Conflict]:
    name, nodes = f"strategy={strategy.name}", config.trainer.num_nodes
    if (strategy.replicas or nodes) == 1:
        only = f"trainer.num_nodes={nodes}" if strategy.replicas is None else "strategy.replicas=1"
        yield Conflict(
            f"{name} averages the weights of nodes that train separately, but {only} leaves "
            "nothing to average",
            "strategy=fsdp, or strategy.replicas=2 for groups of ranks on one node",
        )
    if strategy.tensor_parallel_size != 1 or not strategy.shards_data_parallel:
        yield Conflict(
            f"{name} always shards weights over the ranks of a node and never splits matrices, "
            "against strategy.tensor_parallel_size and strategy.shards_data_parallel",
            "strategy.tensor_parallel_size=1 strategy.shards_data_parallel=true, or "
            "strategy=fsdp_tp",
        )
    if strategy.offload_parameters:
        yield Conflict(
            f"{name} averages weights on the devices, but strategy.offload_parameters=true keeps "
            "them in host memory",
            "strategy.offload_parameters=false, or strategy=fsdp_offload",
        )
    max_steps, first = config.trainer.max_steps, strategy.synchronous_steps
    if max_steps is not None and max_steps <= first:
        yield Conflict(
            f"{name} lets nodes train separately after strategy.synchronous_steps={first}, but "
            f"trainer.max_steps={max_steps} ends the run before that",
            f"strategy.synchronous_steps={max_steps // 4}, or strategy=fsdp_hybrid",
        )
    if config.optimizer.name == "schedule_free":
        yield Conflict(
            f"optimizer=schedule_free keeps its own average of the weights, which {name} does not "
            "share between nodes",
            "optimizer=adamw, or strategy=fsdp_hybrid",
        )


def _of_deepspeed(
    config: TrainConfig, strategy: ZeroConfig, devices: Devices
) -> Iterator[Conflict]:
    method = config.quantization.method
    name, stage = f"strategy={strategy.name}", strategy.stage
    if not is_installed("deepspeed"):
        nearest = NEAREST_IN_PYTORCH[strategy.name]
        if nearest == "fsdp_offload" and not devices.on_gpu:
            nearest = "fsdp"
        yield Conflict(
            f"{name} needs the package deepspeed, which is not installed",
            f"strategy={nearest}, or DS_BUILD_OPS=0 {install_extra('deepspeed')} (which builds its "
            "operators when they are first used)",
            is_of_machine=True,
        )
    if stage < 3 and strategy.offload_parameters != "none":
        yield Conflict(
            f"strategy.offload_parameters={strategy.offload_parameters} moves sharded weights, but "
            f"strategy.stage={stage} keeps all weights on every rank",
            "strategy.stage=3, or strategy.offload_parameters=none",
        )
    if strategy.name == "zero3_nvme":
        yield Conflict(
            "strategy=zero3_nvme would have DeepSpeed keep weights and optimizer states on a disk, "
            "which is not built; fsdp keeps the states there",
            "strategy=fsdp strategy.offload_optimizer=disk, or strategy=zero3_offload",
        )
    is_quantized = strategy.quantized_weights or strategy.quantized_gradients
    if stage < 3 and (strategy.partition_within_node or is_quantized):
        yield Conflict(
            "partition_within_node, quantized_weights and quantized_gradients set how sharded "
            f"weights are communicated, but strategy.stage={stage} does not shard weights",
            "strategy.stage=3, or strategy=zeropp",
        )
    if is_quantized and not devices.on_gpu:
        yield Conflict(
            f"{name} quantizes communication with DeepSpeed operators that need a GPU, but this "
            f"run is on {devices}",
            "strategy=zero3_hpz, which does not quantize it",
            is_of_machine=True,
        )
    if strategy.offload_optimizer != "none" and config.trainer.precision == "bf16-pure":
        yield Conflict(
            f"{name} and trainer.precision=bf16-pure: the optimizer in host memory keeps its "
            "weights in fp32",
            "trainer.precision=bf16, or strategy.offload_optimizer=none",
        )
    if stage == 3 and method != "none":
        yield Conflict(
            f"{name} shards plain weights while they are loaded, but those of "
            f"quantization={method} are packed, with separate scales",
            "strategy=fsdp (with nf4 or fp8), strategy=zero2 (each rank holds the whole quantized "
            "base), or quantization=none",
        )


def _of_deepspeed_keys(given: Any, config: TrainConfig) -> Iterator[Conflict]:
    """Yield keys of `strategy.config` that contradict a setting, or that may not be given."""
    if not isinstance(given, dict):
        yield Conflict(
            f"strategy.config={given} is neither keys of DeepSpeed nor a file",
            "'strategy.config={KEY: VALUE}' or strategy.config=FILE.json",
        )
        return
    keys = given_keys(given)
    if conflicts := conflicting_keys(keys, config):
        settings = ", ".join(dict.fromkeys(each.partition("=")[0] for each in conflicts.values()))
        said = [f"{key}={keys[key]} is set by {name}" for key, name in conflicts.items()]
        yield Conflict(
            "strategy.config: " + ", ".join(said),
            f"{settings} instead, and leave it out of strategy.config",
        )
    unknown, refused = refused_keys(keys)
    if unknown:
        yield Conflict(
            "strategy.config: DeepSpeed has no key " + ", no key ".join(unknown),
            "a key that it has, or leave it out of strategy.config",
        )
    if refused:
        yield Conflict(
            "strategy.config may not have keys that write files, contact hosts, run code or change "
            "the model: " + "; ".join(refused),
            "strategy.config without them",
        )
