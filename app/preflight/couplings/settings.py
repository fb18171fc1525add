"""What cannot be combined, whatever the strategy, from the base to measurements and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.model.adapter import Ia3Config, LoraConfig, continued_from, saves_whole_model
from app.model.attention import BACKEND_PACKAGES, GPU_ONLY, HALF_PRECISION_ONLY
from app.model.hub import COMMIT
from app.preflight.couplings import devices as requested
from app.preflight.couplings.devices import (
    Conflict,
    Devices,
    Group,
    has_data,
    is_merge,
    is_set,
    is_training,
    splits_matrices,
)
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    StrategyConfig,
    context_parallel_size,
    expert_parallel_size,
    shards_weights,
)
from common.errors import nearest
from common.facts import as_typed
from common.installation import install_extra, verb_command
from data_modules import dataset_names

CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that subtract the initial adapter from the base's weights"""

_MOST_BITS = 24
"""classes of a text that a label can hold: bits of a float32 that are exact"""


def changes_base(config: Any) -> bool:
    """Return whether the initial adapter is subtracted from the base's weights."""
    return isinstance(config.adapter, LoraConfig) and config.adapter.init in CHANGE_BASE


def uses_dora(config: Any) -> bool:
    """Return whether the adapter is a LoRA with learned magnitudes."""
    return isinstance(config.adapter, LoraConfig) and config.adapter.use_dora


def _missing_package(config: Any) -> str | None:
    module, package = BACKEND_PACKAGES.get(config.attention.backend, (None, None))
    return package if module is not None and not requested.is_installed(module) else None


def _from_hub(config: Any) -> set[str]:
    model = config.model
    return {path for path in (model.path, model.tokenizer_path) if path and not Path(path).is_dir()}


def _untried_in_fp8(config: Any, devices: Devices) -> str:
    """Return the strategy and its split, if FP8 has not been tried with them."""
    strategy = config.strategy
    splits = {
        " that splits rows": context_parallel_size(strategy) > 1,
        " that splits matrices": splits_matrices(config, devices),
        " that splits experts": expert_parallel_size(strategy) > 1,
    }
    split = "".join(words for words, is_split in splits.items() if is_split)
    is_tried = not split and type(strategy) in (StrategyConfig, DdpConfig, FsdpConfig)
    return "" if is_tried else strategy.name + split


def _asks_for_text(config: Any) -> tuple[str, str, str] | None:
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


def _wrong_class_weights(config: Any) -> int:
    given, classes = len(config.objective.class_weights), len(config.model.labels)
    return given if given != classes or classes < 2 else 0


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


ROWS_OF_SETTINGS = (
    Group(lambda c, d: True, rows=(
        Conflict(lambda c, d: c.trainer.accelerator == "gpu" and d.num_gpus == 0,
                 "trainer.accelerator=gpu, but no GPU was found",
                 "trainer.accelerator=cpu (CUDA_VISIBLE_DEVICES hides GPUs, too)",
                 is_of_machine=True),
        Conflict(lambda c, d: c.trainer.precision == "fp16" and not d.on_gpu,
                 "trainer.precision=fp16 needs a GPU, but this run is on {d}",
                 "trainer.precision=fp32 or bf16",
                 is_of_machine=True),
        Conflict(lambda c, d: c.attention.backend in GPU_ONLY and not d.on_gpu and (
                     "computes gradients on NVIDIA GPUs only" if c.attention.backend == "flex"
                     else "needs an NVIDIA GPU"),
                 "{attention} {found}, but this run is on {d}: attention without a document mask "
                 "would let the documents of a pack attend to each other",
                 "attention=sdpa (which computes each document separately on a CPU)",
                 is_of_machine=True),
        Conflict(lambda c, d: c.attention.backend in HALF_PRECISION_ONLY
                 and c.trainer.precision == "fp32",
                 "{attention} computes in half precision only, but trainer.precision=fp32",
                 "trainer.precision=bf16, or attention=sdpa"),
        Conflict(lambda c, d: d.on_gpu and _missing_package(c),
                 "{attention} needs the package {found}, which is not installed",
                 "attention=varlen, which is part of PyTorch, or install the package",
                 is_of_machine=True),
        Conflict(lambda c, d: c.model.trust_remote_code and _from_hub(c)
                 and not COMMIT.fullmatch(c.model.revision or ""),
                 "model.trust_remote_code=true runs whatever code is on the hub at that time",
                 "model.revision=COMMIT, too (40 hex digits; branches and tags move)"),
        Conflict(lambda c, d: c.model.trust_remote_code and len(_from_hub(c)) > 1,
                 "model.trust_remote_code=true runs whatever code is in {c.model.tokenizer_path} "
                 "at that time: model.revision is a commit of model.path only",
                 "model.tokenizer_path=FOLDER, with a copy of it"),
        Conflict(lambda c, d: c.quantization.method != "none" and c.model.from_scratch,
                 "{quantization} freezes the weights in few bits, but model.from_scratch=true "
                 "starts from random weights, which must be trained",
                 "quantization=none"),
    )),
    Group(lambda c, d: has_data(c), rows=(
        Conflict(lambda c, d: c.objective.name == "reward" and len(c.model.labels) != 1,
                 "{labels}: a reward is one number, with a name",
                 "model.labels=[reward]"),
    )),
    Group(lambda c, d: True, rows=(
        Conflict(lambda c, d: c.model.multi_label and not 2 <= len(c.model.labels) <= _MOST_BITS,
                 f"model.multi_label=true: a text may have several of 2 to {_MOST_BITS} classes, "
                 "and {labels}",
                 "model.labels=[NAME, NAME, ...], or model.multi_label=false"),
        Conflict(lambda c, d: len({*map(str.casefold, c.model.labels)}) < len(c.model.labels),
                 "{labels} has a name twice",
                 "model.labels=[...] with each class once"),
        Conflict(lambda c, d: c.model.labels and not has_data(c) and not is_merge(c),
                 "{labels}: a model with a head for classes or a reward writes no text",
                 f"{verb_command('evaluate')} or {verb_command('merge')} run=FOLDER"),
    )),
    Group(lambda c, d: c.model.labels and has_data(c), rows=(
        Conflict(lambda c, d: not c.objective.has_own_head,
                 "{labels} replaces the language model's head, which {objective} trains",
                 "objective=classify, or model.labels=[]"),
        Conflict(lambda c, d: c.objective.name == "classify" and _wrong_class_weights(c),
                 "objective.class_weights has {found} numbers, and {labels}",
                 "objective.class_weights=[1.0, ...] with a number for each class"),
        Conflict(lambda c, d: _asks_for_text(c),
                 "{found[0]}={found[1]} asks for answers, and a model with {labels} writes no text",
                 "{found[0]}={found[2]}"),
    )),
    Group(lambda c, d: c.model.labels, rows=(
        Conflict(lambda c, d: bool(c.model.added_tokens),
                 "{labels} and model.added_tokens are not built together yet",
                 "model.added_tokens=[]"),
    )),
    Group(lambda c, d: c.model.labels and is_training(c), rows=(
        Conflict(lambda c, d: not isinstance(c.adapter, LoraConfig) and c.adapter.name != "full",
                 "{labels}: the head is trained whole, which {adapter} does not do",
                 "adapter=lora or full"),
        Conflict(splits_matrices,
                 "{strategy} splits the head by tokens of the vocabulary, and {labels} has none",
                 "strategy=fsdp"),
        Conflict(lambda c, d: c.quantization.method == "fp8",
                 "quantization=fp8 has not been tried with {labels}",
                 "quantization=nf4, or none"),
    )),
    Group(lambda c, d: c.model.stream is not None,
          "model.stream={c.model.stream}", "model.stream=null", (
        Conflict(lambda c, d: d.num_ranks > 1,
                 "{name} streams all layers to one device, and {d.num_ranks} ranks were requested",
                 "trainer.devices=1, or strategy=fsdp {without}, which shards the base"),
        Conflict(lambda c, d: c.quantization.method == "int8",
                 "{name}: layers of quantization=int8 keep copies of their weights",
                 "quantization=nf4, or {without}"),
        Conflict(lambda c, d: c.model.stream == "disk" and c.quantization.method != "none",
                 "model.stream=disk reads the base's files as they are, and {quantization} packs "
                 "weights when it loads them",
                 "model.stream=host, or quantization=none with a base that is stored in 4 bits"),
    )),
    Group(lambda c, d: c.model.stream is not None and is_training(c),
          "model.stream={c.model.stream}", "model.stream=null", (
        Conflict(lambda c, d: saves_whole_model(c.adapter),
                 "{name} streams a frozen base and copies nothing back, and {adapter} trains it",
                 "adapter=lora, or {without}"),
        Conflict(lambda c, d: changes_base(c),
                 "{name}: adapter.init={c.adapter.init} changes the base, which a run loads again "
                 "at its end",
                 "adapter.init=default, or {without}"),
        Conflict(lambda c, d: c.strategy.name not in ("auto", "single"),
                 "{name} is for one device, and {strategy} for several",
                 "strategy=single, or {without}"),
        Conflict(lambda c, d: c.trainer.compile,
                 "{name} waits for weights between layers, which trainer.compile=true has not been "
                 "tested with",
                 "trainer.compile=false, or {without}"),
    )),
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: c.quantization.method != "none" and saves_whole_model(c.adapter),
                 "{quantization} freezes the weights in few bits, but {adapter} trains them",
                 "quantization=none, or adapter=lora"),
        Conflict(lambda c, d: c.quantization.method == "fp8" and uses_dora(c),
                 "adapter.use_dora=true needs the norms of the base's columns, which peft cannot "
                 "read from weights of quantization=fp8",
                 "adapter.use_dora=false, or quantization=nf4"),
        Conflict(lambda c, d: c.quantization.method == "fp8" and c.trainer.precision == "fp16",
                 "trainer.precision=fp16 is for GPUs without bf16, but quantization=fp8 scales by "
                 "numbers that fp16 cannot hold",
                 "trainer.precision=bf16"),
        Conflict(lambda c, d: c.model.router_aux_loss and c.adapter.name != "full",
                 "model.router_aux_loss={c.model.router_aux_loss:g} balances trainable routers, "
                 "but {adapter} leaves them frozen",
                 "model.router_aux_loss=null, or adapter=full"),
        Conflict(lambda c, d: isinstance(c.adapter, Ia3Config) and bool(c.model.added_tokens),
                 "model.added_tokens={c.model.added_tokens} need trainable embedding rows, but "
                 "adapter=ia3 trains vectors only",
                 "adapter=lora or adapter=full"),
        Conflict(lambda c, d: c.model.from_scratch and c.adapter.name != "full",
                 "model.from_scratch=true with {adapter}: an adapter on random frozen weights "
                 "learns nothing",
                 "adapter=full"),
    )),
    Group(lambda c, d: is_training(c) and changes_base(c),
          "adapter.init={c.adapter.init} subtracts the initial adapter from the base's weights",
          "adapter.init=default", (
        Conflict(lambda c, d: c.adapter.use_dora,
                 "{name}, but adapter.use_dora=true learns the magnitudes of the unchanged weights",
                 "{without}, or adapter.use_dora=false"),
        Conflict(lambda c, d: shards_weights(c.strategy),
                 "{name}, and is saved relative to the original weights, which are loaded again "
                 "for it: {strategy} leaves no rank room for them",
                 "{without}, or strategy=ddp"),
        Conflict(lambda c, d: c.quantization.method != "none",
                 "{name}, but weights of {quantization} cannot represent the difference",
                 "{without}, or quantization=none"),
    )),
    Group(lambda c, d: is_training(c) and c.trainer.precision == "fp8", rows=(
        Conflict(lambda c, d: c.adapter.name != "full",
                 "trainer.precision=fp8 computes products with trained matrices in FP8, and "
                 "{adapter} trains few of them",
                 "quantization=fp8 for those of a frozen base, or adapter=full"),
        Conflict(_untried_in_fp8,
                 "trainer.precision=fp8 has not been tried with strategy={found}",
                 "strategy=ddp or fsdp, or trainer.precision=bf16"),
        Conflict(lambda c, d: c.trainer.compile,
                 "trainer.precision=fp8 and trainer.compile=true have not been tested together yet",
                 "trainer.compile=false"),
    )),
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
          and not c.objective.has_own_head, "{objective} adds up the log-probabilities of answers",
          rows=(
        Conflict(lambda c, d: set(c.data.roles_to_train) != {"assistant"}
                 and ", ".join(c.data.roles_to_train),
                 "data.roles_to_train=[{found}]: {name} only",
                 "data.roles_to_train=[assistant]"),
        Conflict(lambda c, d: c.data.train_on_eos == "all",
                 "data.train_on_eos=all: {name}, which do not include the stop tokens "
                 "of the prompt",
                 "data.train_on_eos=turn"),
    )),
    Group(lambda c, d: is_training(c) and c.objective.row_format == "classification",
          "{objective} reads the whole text, not a part that is trained on", rows=(
        Conflict(lambda c, d: [
                     (name, as_typed(getattr(c.data, name)), as_typed(right)) for name, right in (
                         ("roles_to_train", ["assistant"]), ("last_turn_only", False))
                     if getattr(c.data, name) != right],
                 "data.{found[0]}={found[1]}: {name}",
                 "data.{found[0]}={found[2]}"),
        Conflict(lambda c, d: c.data.train_on_eos != "turn",
                 "data.train_on_eos={c.data.train_on_eos}: {name}, with its stop tokens",
                 "data.train_on_eos=turn"),
        Conflict(lambda c, d: c.data.reasoning == "mask",
                 "data.reasoning=mask: {name}",
                 "data.reasoning=keep or strip"),
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
        Conflict(lambda c, d: c.quantization.method == "int8" and not d.on_gpu,
                 "quantization=int8 on a CPU rounds activations in validations but not in training "
                 "steps, with which {name} computes the base: its margins of validations would be "
                 "off by that rounding",
                 "objective.reference=base", is_of_machine=True),
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
                     and not requested.is_installed(tracker)],
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
