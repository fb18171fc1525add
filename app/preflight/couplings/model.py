"""What cannot be combined with the base, its head, its attention and its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.model.adapter import Ia3Config, LoraConfig, saves_whole_model
from app.model.attention import BACKEND_PACKAGES, GPU_ONLY, HALF_PRECISION_ONLY
from app.model.hub import COMMIT
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict, Group
from app.preflight.couplings.devices import (
    Devices,
    has_data,
    is_merge,
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
from common.installation import verb_command

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
    return package if module is not None and not conflict.is_installed(module) else None


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
    """Return the number of the weights of classes, if the classes are not as many."""
    given, classes = len(config.objective.class_weights), len(config.model.labels)
    return given if given != classes or classes < 2 else 0


GROUPS = (
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
)  # fmt: skip
"""the rows of the settings `model`, `attention`, `quantization` and `adapter`"""
