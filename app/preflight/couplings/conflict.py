"""The rows of the tables of settings, and how they are read.

A `Conflict` is of settings that cannot be combined; an `_Unused` of one that nothing reads because
of another setting. Settings that come with an option or an experiment as often as they are typed
are not among the latter, such as the length of answers that are not asked for: their docstrings say
when they are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from app.model.adapter import saves_whole_model
from app.preflight.couplings.devices import Devices, is_training
from common.facts import as_typed, default_of

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig

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
