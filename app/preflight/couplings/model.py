"""What cannot be combined with the base, its head, its attention and its adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from app.model.adapter import Ia3Config, LoraConfig, saves_whole_model
from app.model.attention import BACKEND_PACKAGES, GPU_ONLY, HALF_PRECISION_ONLY
from app.model.base import ModelConfig
from app.model.hub import COMMIT
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict
from app.preflight.couplings.devices import Devices, has_data, is_merge, is_training
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    StrategyConfig,
    ZeroConfig,
    context_parallel_size,
    expert_parallel_size,
    tensor_parallel_size,
)
from common.installation import verb_command

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig, TunedConfig

CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that subtract the initial adapter from the base's weights"""

MOST_BITS = 24
"""classes of a text that a label can hold: bits of a float32 that are exact"""


def find_conflicts(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield the conflicts of the settings `model`, `attention`, `quantization` and `adapter`."""
    yield from _of_device(config, devices)
    yield from _of_base(config)
    yield from _of_head(config, devices)
    if config.model.stream is not None:
        yield from _of_stream(config, devices)
    if is_training(config):
        yield from _of_adapter(config)
        if config.trainer.precision == "fp8":
            yield from _of_fp8(config, devices)


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
    if module is not None and devices.on_gpu and not conflict.is_installed(module):
        yield Conflict(
            f"attention={backend} needs the package {package}, which is not installed",
            "attention=varlen, which is part of PyTorch, or install the package",
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


def _of_stream(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of a base that is streamed to the device."""
    stream, method = config.model.stream, config.quantization.method
    name, without = f"model.stream={stream}", "model.stream=null"
    if devices.num_ranks > 1:
        yield Conflict(
            f"{name} streams all layers to one device, and {devices.num_ranks} ranks were "
            "requested",
            "trainer.devices=1, or strategy=fsdp model.stream=null, which shards the base",
        )
    if method == "int8":
        yield Conflict(
            f"{name}: layers of quantization=int8 keep copies of their weights",
            f"quantization=nf4, or {without}",
        )
    if stream == "disk" and method != "none":
        yield Conflict(
            f"{name} reads the base's files as they are, and quantization={method} packs weights "
            "when it loads them",
            "model.stream=host, or quantization=none with a base that is stored in 4 bits",
        )
    if not is_training(config):
        return
    adapter, strategy = config.adapter, config.strategy.name
    if saves_whole_model(adapter):
        yield Conflict(
            f"{name} streams a frozen base and copies nothing back, and adapter={adapter.name} "
            "trains it",
            f"adapter=lora, or {without}",
        )
    if isinstance(adapter, LoraConfig) and adapter.init in CHANGE_BASE:
        yield Conflict(
            f"{name}: adapter.init={adapter.init} changes the base, which a run loads again at "
            "its end",
            f"adapter.init=default, or {without}",
        )
    if strategy not in ("auto", "single"):
        yield Conflict(
            f"{name} is for one device, and strategy={strategy} for several",
            f"strategy=single, or {without}",
        )
    if config.trainer.compile:
        yield Conflict(
            f"{name} waits for weights between layers, which trainer.compile=true has not been "
            "tested with",
            f"trainer.compile=false, or {without}",
        )


def _of_labels(model: ModelConfig) -> Iterator[Conflict]:
    """Yield conflicts of the names of a head's outputs."""
    labels = model.labels
    given = f"model.labels=[{', '.join(labels)}]"
    if model.multi_label and not 2 <= len(labels) <= MOST_BITS:
        yield Conflict(
            f"model.multi_label=true: a text may have several of 2 to {MOST_BITS} classes, and "
            f"{given}",
            "model.labels=[NAME, NAME, ...], or model.multi_label=false",
        )
    if len({label.casefold() for label in labels}) < len(labels):
        yield Conflict(f"{given} has a name twice", "model.labels=[...] with each class once")


def _of_head(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of a head for classes or a reward."""
    labels = config.model.labels
    given = f"model.labels=[{', '.join(labels)}]"
    objective = config.objective if has_data(config) else None
    if objective is not None and objective.name == "reward" and len(labels) != 1:
        yield Conflict(f"{given}: a reward is one number, with a name", "model.labels=[reward]")
    yield from _of_labels(config.model)
    if not labels:
        return
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


def _of_fp8(config: TrainConfig, devices: Devices) -> Iterator[Conflict]:
    adapter, strategy = config.adapter, config.strategy
    if adapter.name != "full":
        yield Conflict(
            "trainer.precision=fp8 computes products with trained matrices in FP8, and "
            f"adapter={adapter.name} trains few of them",
            "quantization=fp8 for those of a frozen base, or adapter=full",
        )
    splits = {
        " that splits rows": context_parallel_size(strategy),
        " that splits matrices": tensor_parallel_size(strategy, devices.ranks_per_node),
        " that splits experts": expert_parallel_size(strategy),
    }
    split = "".join(words for words, size in splits.items() if size > 1)
    if split or type(strategy) not in (StrategyConfig, DdpConfig, FsdpConfig):
        yield Conflict(
            f"trainer.precision=fp8 has not been tried with strategy={strategy.name}{split}",
            "strategy=ddp or fsdp, or trainer.precision=bf16",
        )
    if config.trainer.compile:
        yield Conflict(
            "trainer.precision=fp8 and trainer.compile=true have not been tested together yet",
            "trainer.compile=false",
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
