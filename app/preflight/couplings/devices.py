"""Requested devices and ranks, whether batches and shards divide by them, and how tables are read.

A `Conflict` is of settings that cannot be combined; an `_Unused` of one that nothing reads because
of another setting. Settings that come with an option or an experiment as often as they are typed
are not among the latter, such as the length of answers that are not asked for: their docstrings say
when they are read.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from app.model.adapter import saves_whole_model
from app.process.gpus import find_gpu_problems, num_device_files, num_visible, read_machine
from app.strategy.settings import (
    FsdpConfig,
    StrategyConfig,
    context_parallel_size,
    divisors,
    expert_parallel_size,
    pipeline_parallel_size,
    ranks_per_row,
    tensor_parallel_size,
)
from common.errors import DeviceError
from common.facts import as_typed, default_of
from common.text import counted

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from app.config.verbs import EvaluateConfig, MergeConfig, TrainConfig, TunedConfig
    from app.training.trainer import TrainerConfig


MAX_CPU_RANKS = 64
"""most ranks of one machine without GPUs, if it has fewer cores"""


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """The devices and ranks that the settings request, on a machine with `num_gpus` GPUs."""

    num_gpus: int
    on_gpu: bool
    ranks_per_node: int
    num_ranks: int
    num_data_ranks: int
    """ranks with different data; with tensor or context parallelism, groups of ranks"""

    def __str__(self) -> str:
        if self.on_gpu:
            return counted(self.num_gpus, "GPU")
        return "the CPU" if self.num_gpus else "the CPU (no GPU was found)"


def requested_devices(config: TrainConfig | TunedConfig, num_gpus: int | None = None) -> Devices:
    """Return the requested devices and ranks; the GPUs of this machine are counted if not given."""
    num_gpus = count_gpus() if num_gpus is None else num_gpus
    accelerator = config.trainer.accelerator
    on_gpu = accelerator == "gpu" or (accelerator == "auto" and num_gpus > 0)
    if not has_data(config):
        return Devices(num_gpus, on_gpu, 1, 1, 1)
    per_node = config.trainer.devices
    if not isinstance(per_node, int):
        per_node = max(num_gpus, 1) if on_gpu else 1
    if not is_training(config):
        return Devices(num_gpus, on_gpu, per_node, per_node, per_node)
    num_ranks = per_node * config.trainer.nodes
    together = ranks_per_row(config.strategy, per_node)
    return Devices(num_gpus, on_gpu, per_node, num_ranks, max(num_ranks // together, 1))


def splits_matrices(config: Any, devices: Devices) -> bool:
    """Return whether the ranks of a training run split each layer's matrices."""
    return tensor_parallel_size(config.strategy, devices.ranks_per_node) > 1


# The classes of the settings belong to app.config, which imports this package.


def is_training(config: TrainConfig | TunedConfig) -> TypeIs[TrainConfig]:
    """Return whether these are the settings of a training run, its preview or its plan."""
    return "optimizer" in config.__dataclass_fields__


def has_data(config: TrainConfig | TunedConfig) -> TypeGuard[TrainConfig | EvaluateConfig]:
    """Return whether these are the settings of a verb that reads data."""
    return "data" in config.__dataclass_fields__


def is_merge(config: TrainConfig | TunedConfig) -> TypeGuard[MergeConfig]:
    """Return whether these are the settings of a merge."""
    return "merge" in config.__dataclass_fields__


def count_gpus() -> int:
    """Count the NVIDIA devices that this process may use, by their device files."""
    return num_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), num_device_files())


def check_gpus(config: TrainConfig | TunedConfig) -> None:
    """Check that the requested GPUs can be used; DeviceError if they cannot.

    Called before any rank starts: all of them would fail, and none may train on the CPU instead.
    """
    if config.trainer.accelerator == "cpu":
        return
    wanted = requested_devices(config).ranks_per_node
    problems = find_gpu_problems(
        read_machine(),
        wanted,
        config.trainer.precision,
        computes_in_fp8=config.quantization.method == "fp8",
    )
    if problems:
        raise DeviceError(problems)


def check_devices(trainer: TrainerConfig, num_gpus: int | None) -> list[str]:
    """Check that the machine has trainer.devices GPUs; `num_gpus` is None for a run on the CPU."""
    if isinstance(trainer.devices, str):
        return []
    if num_gpus is None:
        cores = os.cpu_count() or 1
        most = max(MAX_CPU_RANKS, cores)
        return [
            f"trainer.devices={trainer.devices}, but each rank is a process, and this machine has "
            f"{cores} cores; type trainer.devices={cores} or fewer"
        ] * (trainer.devices > most)
    if not num_gpus or trainer.devices <= num_gpus:
        return []
    return [
        f"trainer.devices={trainer.devices}, but this machine has {counted(num_gpus, 'GPU')}; type "
        f"trainer.devices={num_gpus}"
    ]


def indivisible(name: str, size: int, count: int, what: str, fits: list[int], *others: str) -> str:
    """Say that strategy.`name`=`size` does not divide `what`, and which numbers would.

    `count`: the number in `what`. `others`: what to type instead of one of `fits`.
    """
    typed = (f"strategy.{name}={' or '.join(map(str, fits))}",) if fits else ()
    return (
        f"strategy.{name}={size} does not divide {what} ({count} / {size} leaves {count % size}); "
        f"type {', or '.join(typed + others)}"
    )


def check_layout(
    strategy: StrategyConfig, trainer: TrainerConfig, ranks_per_node: int
) -> list[str]:
    """Check that the ranks divide into groups that split rows or matrices, those into replicas."""
    ranks, pipe = ranks_per_node * trainer.nodes, pipeline_parallel_size(strategy)
    for name, split, least in (
        ("context_parallel_size", context_parallel_size(strategy), 1),
        ("expert_parallel_size", expert_parallel_size(strategy), 1),
        ("pipeline_parallel_size", pipe, 2),
    ):
        if ranks % split:
            what, devices = counted(ranks, "rank"), f"trainer.devices={split}"
            return [indivisible(name, split, ranks, what, divisors(ranks, least), devices)]
    if not isinstance(strategy, FsdpConfig):
        return []
    ranks //= pipe
    name, size = "tensor_parallel_size", tensor_parallel_size(strategy, ranks_per_node)
    if ranks % size:
        fits = [each for each in divisors(ranks, 2) if each <= ranks_per_node]
        others = (*(() if fits else ("strategy=ddp",)), f"trainer.devices={size}")
        return [indivisible(name, size, ranks, counted(ranks, "rank"), fits, *others)]
    groups, replicas = ranks // size, strategy.replicas or trainer.nodes
    if groups % replicas == 0 or not strategy.shards_data_parallel:
        return []
    what = f"{groups} data-parallel ranks"
    return [indivisible("replicas", replicas, groups, what, divisors(groups))]


def check_global_batch(
    trainer: TrainerConfig, num_ranks: int, num_data_ranks: int | None = None
) -> list[str]:
    """Check that trainer.global_batch_size is a multiple of the micro-batches of all ranks.

    `num_data_ranks`: ranks (or tensor-parallel groups) with different data; all if not given.
    """
    total = trainer.global_batch_size
    if total is None:
        return []
    groups = num_ranks if num_data_ranks is None else num_data_ranks
    packs = trainer.least_micro_batch * groups
    if total % packs == 0:
        return []
    fits = [str(fit) for fit in (total // packs * packs, total // packs * packs + packs) if fit]
    together = num_ranks // groups
    who = f"{groups} ranks"
    if together > 1:
        who = f"{groups} groups of ranks ({num_ranks} ranks / {together} that get the same rows)"
    return [
        f"trainer.global_batch_size={total} is not a multiple of micro_batch_size "
        f"{trainer.least_micro_batch} x {who} = {packs}; "
        f"type trainer.global_batch_size={' or '.join(fits)}"
    ]


When = Callable[[Any, Devices], object]
"""whether a row applies to settings `c` and the devices `d` that they request"""

OPTIONS = {
    "adapter": "name",
    "attention": "backend",
    "objective": "name",
    "quantization": "method",
    "strategy": "name",
}
"""group -> the setting with its option, of which {group} is what to type"""


class Conflict(NamedTuple):
    """A row: settings that cannot be combined.

    Its texts may contain the settings {c}, the devices {d}, what `when` {found} (of a list, each
    element in a conflict of its own), the groups of OPTIONS, {labels}, and what its group names.
    """

    when: When
    why: str
    instead: str
    """what to type instead"""
    is_of_machine: bool = False
    """whether the conflict depends on the machine"""


class Group(NamedTuple):
    """Rows that apply only `when` their subject is set.

    Their texts call it {name}, and what to type so that it is not {without}.
    """

    when: When
    name: str = ""
    without: str = ""
    rows: tuple[Conflict, ...] = ()


def find_conflicts(
    groups: Iterable[Group], config: Any, devices: Devices
) -> Iterator[tuple[Conflict, str]]:
    """Yield each row that applies, and what it says."""
    words: dict[str, Any] = {
        group: f"{group}={getattr(getattr(config, group), option)}"
        for group, option in OPTIONS.items()
        if group in config.__dataclass_fields__
    }
    words["labels"] = f"model.labels=[{', '.join(config.model.labels)}]"
    words |= {"c": config, "d": devices}
    for group in groups:
        for row in group.rows if group.when(config, devices) else ():
            found = row.when(config, devices)
            name = group.name.format(**words)
            for each in found if isinstance(found, list) else [found] * bool(found):
                text = f"{row.why}; type {row.instead}"
                yield row, text.format(**words, found=each, name=name, without=group.without)


def is_installed(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    # flash-attn-4 without flash-attn leaves a folder flash_attn that is not a package.
    return spec is not None and spec.origin is not None


class _Unused(NamedTuple):
    """When a setting has no effect; `why` and `instead` may refer to the settings, as {c}."""

    key: str
    is_unused: Callable[[Any], bool]
    why: str
    instead: str


def _has_one_dataset(config: TrainConfig) -> bool:
    return len(config.data.datasets) == 1


def _ranks_nothing(config: TrainConfig) -> bool:
    trainer = config.trainer
    uses = trainer.early_stopping_patience is not None or trainer.checkpoint.keep_best > 0
    return config.output.weights == "last" and not uses


def _measures_nothing(config: TrainConfig) -> bool:
    evaluation, data = config.evaluation, config.data
    answers = evaluation.answers_prompts and data.test_datasets
    return not (data.has_validation or answers or evaluation.tasks or evaluation.harness)


IN_TRAINING = (
    _Unused("objective.teacher_top_k", lambda c: c.objective.teacher_logits == "live",
            "with objective.teacher_logits=live", "objective.teacher_logits=cached, too"),
    _Unused("adapter.lora_plus_weight_decay", lambda c: c.adapter.lora_plus_ratio is None,
            "without adapter.lora_plus_ratio", "adapter.lora_plus_ratio=16, too"),
    _Unused("quantization.double_quant", lambda c: c.quantization.method != "nf4",
            "with quantization={c.quantization.method}", "quantization=nf4, too"),
    _Unused("recompute.every", lambda c: c.recompute.mode == "none",
            "with recompute=none", "recompute=full, too"),
    _Unused("recompute.num_layers", lambda c: c.recompute.mode == "none",
            "with recompute=none", "recompute=full, too"),
    _Unused("model.rope_scaling", lambda c: c.model.context_len is None,
            "without model.context_len", "model.context_len=N, too"),
    _Unused("data.roles_to_train", lambda c: c.data.train_on_inputs,
            "with data.train_on_inputs=true", "data.train_on_inputs=false"),
    _Unused("data.last_turn_only", lambda c: c.data.train_on_inputs,
            "with data.train_on_inputs=true", "data.train_on_inputs=false"),
    _Unused("data.mixture.temperature", _has_one_dataset,
            "with one data set", "further data.datasets"),
    _Unused("data.mixture.stop", _has_one_dataset, "with one data set", "further data.datasets"),
    _Unused("data.mixture.weights", _has_one_dataset, "with one data set", "further data.datasets"),
    _Unused("data.audit.max_overlap_share", lambda c: not c.data.audit.overlap,
            "with data.audit.overlap=false", "data.audit.overlap=true"),
    _Unused("packing.window", lambda c: c.packing.method == "none",
            "with packing=none", "packing=multipack, too"),
    _Unused("optimizer.base_batch_size", lambda c: c.optimizer.scale_lr == "none",
            "with optimizer.scale_lr=none", "optimizer.scale_lr=linear, too"),
    _Unused("optimizer.weight_decay", lambda c: c.adapter.name == "ia3",
            "with adapter=ia3, whose vectors never decay", "adapter=lora"),
    _Unused("schedule.decay_ratio", lambda c: c.schedule.shape != "wsd",
            "with schedule={c.schedule.shape}", "schedule=wsd, too"),
    _Unused("schedule.start_lr_ratio", lambda c: c.schedule.shape != "one_cycle",
            "with schedule={c.schedule.shape}", "schedule=one_cycle, too"),
    _Unused("schedule.min_lr_ratio", lambda c: c.schedule.shape == "constant",
            "with schedule=constant", "schedule=cosine, too"),
    _Unused("trainer.validate_every_steps", lambda c: not c.data.has_validation,
            "without validation rows", "data.val_set_size=0.05, too"),
    _Unused("trainer.checkpoint.keep_best", lambda c: not c.data.has_validation,
            "without validation rows, by which steps are ranked", "data.val_set_size=0.05, too"),
    _Unused("trainer.checkpoint.monitor", _ranks_nothing,
            "with output.from=last, without keep_best and early stopping", "output.from=best"),
    _Unused("strategy.topk_share", lambda c: c.strategy.compression != "topk",
            "with strategy.compression={c.strategy.compression}", "strategy.compression=topk"),
    _Unused("strategy.powersgd_rank", lambda c: c.strategy.compression != "powersgd",
            "with strategy.compression={c.strategy.compression}", "strategy.compression=powersgd"),
    _Unused("strategy.share_counts", lambda c: c.strategy.sites == 1,
            "with strategy.sites=1", "strategy.sites=2, too"),
    _Unused("strategy.offload_dir", lambda c: c.strategy.offload_optimizer != "disk",
            "with strategy.offload_optimizer={c.strategy.offload_optimizer}",
            "strategy.offload_optimizer=disk, too"),
    _Unused("strategy.stages_per_rank", lambda c: c.strategy.schedule != "interleaved",
            "with strategy.schedule={c.strategy.schedule}", "strategy.schedule=interleaved"),
    _Unused("strategy.reshard_after_forward", lambda c: not c.strategy.shards_data_parallel,
            "with strategy.shards_data_parallel=false", "strategy=fsdp_tp"),
    _Unused("strategy.sync_each_micro_batch", lambda c: not c.strategy.shards_data_parallel
            or c.strategy.name == "fsdp_pp",
            "with strategy={c.strategy.name}", "strategy=fsdp"),
    _Unused("strategy.reduce_dtype", lambda c: not saves_whole_model(c.adapter)
            or c.trainer.precision in ("bf16-pure", "fp32"),
            "with adapter={c.adapter.name} and trainer.precision={c.trainer.precision}",
            "adapter=full trainer.precision=bf16"),
    _Unused("strategy.replicas", lambda c: not c.strategy.shards_data_parallel,
            "with strategy.shards_data_parallel=false", "strategy=fsdp_tp"),
    _Unused("logger.details", lambda c: {c.logger.name, *c.logger.also} == {"csv"},
            "with logger=csv: metrics.csv always has them", "logger=tensorboard"),
    _Unused("evaluation.harness_dir", lambda c: not c.evaluation.harness,
            "without evaluation.harness", "evaluation.harness=[TASK], too"),
    _Unused("evaluation.task_dir", lambda c: not c.evaluation.tasks,
            "without evaluation.tasks", "evaluation.tasks=[{{name: mmlu}}], too"),
    _Unused("evaluation.during_rows", lambda c: c.evaluation.every_steps is None,
            "without evaluation.every_steps", "evaluation.every_steps=N, too"),
    _Unused("evaluation.max_regression", _measures_nothing,
            "without rows or tasks to compare by", "data.val_set_size=0.05, too"),
    _Unused("output.dtype", lambda c: not saves_whole_model(c.adapter),
            "with adapter={c.adapter.name}, which is saved as it was trained",
            "merge.dtype for the merge"),
)  # fmt: skip
ON_A_RESULT = (
    _Unused("merge.llama_cpp", lambda c: not c.merge.gguf,
            "without merge.gguf", "merge.gguf=true, too"),
    _Unused("evaluation.judge.reward_model", lambda c: c.evaluation.judge.questions is None,
            "without evaluation.judge.questions", "evaluation=mt_bench, too"),
    _Unused("evaluation.judge.url", lambda c: c.evaluation.judge.reward_model is not None,
            "with evaluation.judge.reward_model, which rates the answers instead",
            "evaluation.judge.reward_model=null"),
    _Unused("evaluation.judge.best_of", lambda c: c.evaluation.judge.reward_model is None,
            "without evaluation.judge.reward_model", "evaluation.judge.reward_model=RUN, too"),
    _Unused("evaluation.judge.temperature", lambda c: c.evaluation.judge.best_of == 1,
            "without evaluation.judge.best_of", "evaluation.judge.best_of=4, too"),
    _Unused("serve.max_waiting", lambda c: c.serve.engine == "vllm",
            "with serve.engine=vllm, which limits requests itself", "serve.engine=loft"),
    _Unused("serve.timeout_seconds", lambda c: c.serve.engine == "vllm",
            "with serve.engine=vllm, which limits requests itself", "serve.engine=loft"),
)  # fmt: skip


def find_unused(config: TrainConfig | TunedConfig) -> Iterator[str]:
    """Yield each setting that differs from its default and has no effect, and what to type."""
    for rule in IN_TRAINING if is_training(config) else ON_A_RESULT:
        *path, name = rule.key.split(".")
        if path[0] not in config.__dataclass_fields__:
            continue
        part = reduce(getattr, path, config)
        if is_set(part, name) and rule.is_unused(config):
            why, instead = (text.format(c=config) for text in (rule.why, rule.instead))
            value = as_typed(getattr(part, name))
            yield f"{rule.key}={value} has no effect {why}; type {instead}, or leave it out"


def is_set(part: Any, name: str) -> bool:
    """Return whether `part` has a setting of this name, with another value than its default."""
    field = part.__dataclass_fields__.get(name)
    return field is not None and getattr(part, name) != default_of(field)
