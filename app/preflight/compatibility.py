"""ONE TABLE of what does not go together, and of the ranges of numbers: why, and what to type.

Judges values that are of the right type already. Needs no torch: devices are counted as files, and
`check_devices` and `check_global_batch` can be asked again once torch has counted them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from app.model.attention import IN_HALF, ON_GPU, PACKAGES
from app.strategy.settings import (
    DEEPSPEED_KEYS,
    HOMES,
    FsdpConfig,
    ZeroConfig,
    is_sharding,
    tensor_parallel_size,
)

COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE = ("full", "freeze")
"""adapters that train weights of the base"""
CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that take what they start from out of the base's weights"""
PYTORCHS_OWN = {
    "zero1": "fsdp_grad_op",
    "zero2": "fsdp_grad_op",
    "zero2_offload": "fsdp_offload",
    "zero3": "fsdp",
    "zero3_offload": "fsdp_offload",
    "zero3_nvme": "fsdp_offload",
    "zero3_hpz": "fsdp_hybrid",
    "zeropp": "fsdp_hybrid",
}
"""what of PyTorch comes nearest to a strategy of DeepSpeed"""


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """The settings, and what follows from them on this machine."""

    config: Any
    """TrainConfig or EvaluateConfig (made by the door, which stands above this room)"""
    num_gpus: int

    @property
    def on_gpu(self) -> bool:
        accelerator = self.config.trainer.accelerator
        return accelerator == "gpu" or (accelerator == "auto" and self.num_gpus > 0)

    @property
    def device(self) -> str:
        """The device as a person would say it."""
        if self.on_gpu:
            return f"{self.num_gpus} GPU{'s' * (self.num_gpus != 1)}"
        return "the CPU" if self.num_gpus else "the CPU (no GPU was found)"

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_node * int(self.config.trainer.num_nodes)

    @property
    def ranks_per_node(self) -> int:
        devices = self.config.trainer.devices
        if isinstance(devices, int):
            return devices
        return max(self.num_gpus, 1) if self.on_gpu else 1

    @property
    def num_data_ranks(self) -> int:
        """Ranks, or groups of ranks, that see data of their own."""
        size = tensor_parallel_size(self.config.strategy, self.ranks_per_node)
        return max(self.num_ranks // size, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Coupling:
    """One row: when it does not go together, why, and what to type instead."""

    reads: str
    """the settings that it reads; a row is skipped where one of them does not exist"""
    clashes: Callable[[Situation], bool]
    why: Callable[[Situation], str]
    instead: Callable[[Situation], str]
    is_of_machine: bool = False
    """whether another machine would change the answer"""


COUPLINGS = (
    Coupling(
        "trainer.accelerator",
        lambda s: s.config.trainer.accelerator == "gpu" and s.num_gpus == 0,
        lambda s: "trainer.accelerator=gpu, but no GPU was found",
        lambda s: "trainer.accelerator=cpu (CUDA_VISIBLE_DEVICES hides GPUs, too)",
        is_of_machine=True,
    ),
    Coupling(
        "trainer.precision trainer.accelerator",
        lambda s: s.config.trainer.precision == "fp16" and not s.on_gpu,
        lambda s: f"trainer.precision=fp16 needs a GPU, and this run is on {s.device}",
        lambda s: "trainer.precision=fp32 or bf16",
        is_of_machine=True,
    ),
    Coupling(
        "attention.backend trainer.accelerator",
        lambda s: s.config.attention.backend in ON_GPU and not s.on_gpu,
        lambda s: (
            f"attention={s.config.attention.backend} {_needs_gpu(s)}, and this run is on "
            f"{s.device}: attention that knows nothing of documents would let those of a pack see "
            "each other"
        ),
        lambda s: "attention=sdpa (document by document there, which keeps them apart, too)",
        is_of_machine=True,
    ),
    Coupling(
        "attention.backend trainer.precision",
        lambda s: s.config.attention.backend in IN_HALF and s.config.trainer.precision == "fp32",
        lambda s: (
            f"attention={s.config.attention.backend} computes in half precision alone, but "
            "trainer.precision=fp32"
        ),
        lambda s: "trainer.precision=bf16, or attention=sdpa",
    ),
    Coupling(
        "attention.backend trainer.accelerator",
        lambda s: s.config.attention.backend in PACKAGES and s.on_gpu and not _is_installed(s),
        lambda s: (
            f"attention={s.config.attention.backend} needs the package "
            f"{PACKAGES[s.config.attention.backend][1]}, which is not installed"
        ),
        lambda s: "attention=varlen, which comes with PyTorch, or install the package",
        is_of_machine=True,
    ),
    Coupling(
        "strategy.name trainer.accelerator trainer.devices trainer.num_nodes",
        lambda s: s.config.strategy.name == "single" and s.num_ranks > 1,
        lambda s: f"strategy=single runs on one device, but {s.num_ranks} ranks were asked for",
        lambda s: "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
    ),
    Coupling(
        "strategy.name trainer.accelerator",
        lambda s: isinstance(s.config.strategy, ZeroConfig) and not _has_deepspeed(),
        lambda s: (
            f"strategy={s.config.strategy.name} needs the package deepspeed, which is not installed"
        ),
        lambda s: (
            f"strategy={_by_pytorch(s.config.strategy.name, on_gpu=s.on_gpu)}, or "
            "DS_BUILD_OPS=0 pip install deepspeed "
            "(its operators are built when they are first used)"
        ),
        is_of_machine=True,
    ),
    Coupling(
        "strategy.stage strategy.offload_parameters",
        lambda s: s.config.strategy.stage < 3 and s.config.strategy.offload_parameters != "none",
        lambda s: (
            f"strategy.offload_parameters={s.config.strategy.offload_parameters} moves weights "
            f"that are spread over the ranks, and strategy.stage={s.config.strategy.stage} leaves "
            "all of them with every rank"
        ),
        lambda s: "strategy.stage=3, or strategy.offload_parameters=none",
    ),
    Coupling(
        "strategy.name",
        lambda s: s.config.strategy.name == "zero3_nvme",
        lambda s: (
            "strategy=zero3_nvme would keep weights and optimizer states on a disk, which is not "
            "there yet"
        ),
        lambda s: "strategy=zero3_offload, which keeps them in host memory",
    ),
    Coupling(
        "strategy.stage strategy.partition_within_node strategy.quantized_weights "
        "strategy.quantized_gradients",
        lambda s: (
            s.config.strategy.stage < 3
            and (
                s.config.strategy.partition_within_node
                or s.config.strategy.quantized_weights
                or s.config.strategy.quantized_gradients
            )
        ),
        lambda s: (
            "partition_within_node, quantized_weights and quantized_gradients say how weights that "
            f"are spread travel, and strategy.stage={s.config.strategy.stage} spreads none"
        ),
        lambda s: "strategy.stage=3, or strategy=zeropp",
    ),
    Coupling(
        "strategy.quantized_weights strategy.quantized_gradients strategy.name trainer.accelerator",
        lambda s: (
            not s.on_gpu
            and (s.config.strategy.quantized_weights or s.config.strategy.quantized_gradients)
        ),
        lambda s: (
            f"strategy={s.config.strategy.name} quantizes what travels by operators that DeepSpeed "
            f"has for GPUs alone, and this run is on {s.device}"
        ),
        lambda s: "strategy=zero3_hpz, which leaves the quantizing out",
        is_of_machine=True,
    ),
    Coupling(
        "strategy.config",
        lambda s: bool(_owned(s.config.strategy.config)),
        lambda s: (
            "strategy.config: "
            + ", ".join(
                f"{key} is {setting} here"
                for key, setting in _owned(s.config.strategy.config).items()
            )
        ),
        lambda s: (
            f"{', '.join(dict.fromkeys(_owned(s.config.strategy.config).values()))} instead, and "
            "leave it out of strategy.config"
        ),
    ),
    Coupling(
        "strategy.offload_parameters trainer.accelerator",
        lambda s: not s.on_gpu and s.config.strategy.offload_parameters is True,
        lambda s: (
            "strategy.offload_parameters=true keeps weights in host memory that is pinned for a "
            f"GPU, and this run is on {s.device}, where they are in host memory anyway"
        ),
        lambda s: "strategy=fsdp",
        is_of_machine=True,
    ),
    Coupling(
        "strategy.name strategy.offload_parameters",
        lambda s: s.config.strategy.offload_parameters is True and _cuts_matrices(s),
        lambda s: (
            f"strategy={s.config.strategy.name} splits matrices, whose ranks add up gradients on "
            "their devices, and strategy.offload_parameters=true keeps those in host memory"
        ),
        lambda s: "strategy=fsdp_offload, or strategy.offload_parameters=false",
    ),
    Coupling(
        "strategy.name trainer.precision",
        lambda s: _is_sharding(s) and s.config.trainer.precision == "fp16",
        lambda s: (
            f"strategy={s.config.strategy.name} and trainer.precision=fp16: whether a scaled step "
            "overflowed, each rank would judge by its own part of the gradients"
        ),
        lambda s: "trainer.precision=bf16, or strategy=ddp",
    ),
    Coupling(
        "strategy.name strategy.offload_optimizer trainer.precision",
        lambda s: (
            s.config.strategy.offload_optimizer != "none"
            and s.config.trainer.precision == "bf16-pure"
        ),
        lambda s: (
            f"strategy={s.config.strategy.name} and trainer.precision=bf16-pure: what steps weights"
            " in host memory keeps them in fp32"
        ),
        lambda s: "trainer.precision=bf16, or strategy.offload_optimizer=none",
    ),
    Coupling(
        "strategy.name trainer.compile",
        lambda s: _is_sharding(s) and s.config.trainer.compile,
        lambda s: (
            f"strategy={s.config.strategy.name} and trainer.compile=true are not tried together yet"
        ),
        lambda s: "trainer.compile=false, or strategy=ddp",
    ),
    Coupling(
        "strategy.name trainer.checkpoint",
        lambda s: _is_sharding(s) and s.config.trainer.checkpoint.asynchronous,
        lambda s: (
            "trainer.checkpoint.async=true copies what one rank holds, and strategy="
            f"{s.config.strategy.name} leaves parts of it with all: they gather and write together"
        ),
        lambda s: "trainer.checkpoint.async=false, or strategy=ddp",
    ),
    Coupling(
        "strategy.name optimizer.name",
        lambda s: _is_sharding(s) and not _steps_parts(s),
        lambda s: (
            f"optimizer={s.config.optimizer.name} does not step parts of weights, which are what "
            f"strategy={s.config.strategy.name} leaves with a rank"
        ),
        lambda s: "optimizer=adamw, or strategy=ddp",
    ),
    Coupling(
        "strategy.name strategy.stage quantization.method",
        lambda s: s.config.strategy.stage == 3 and s.config.quantization.method != "none",
        lambda s: (
            f"strategy={s.config.strategy.name} spreads weights as plain numbers while they are "
            f"loaded, and those of quantization={s.config.quantization.method} are packed and have "
            "scales beside them"
        ),
        lambda s: (
            "strategy=fsdp (with nf4), strategy=zero2 (each rank holds the whole quantized base), "
            "or quantization=none"
        ),
    ),
    Coupling(
        "strategy.name quantization.method",
        lambda s: (
            isinstance(s.config.strategy, FsdpConfig) and s.config.quantization.method == "int8"
        ),
        lambda s: (
            f"strategy={s.config.strategy.name} spreads weights as numbers of one floating type, "
            "and those of quantization=int8 are whole numbers with scales beside them"
        ),
        lambda s: "quantization=nf4, or strategy=zero2 or ddp",
    ),
    Coupling(
        "strategy.name quantization.method",
        lambda s: _cuts_matrices(s) and s.config.quantization.method == "nf4",
        lambda s: (
            f"strategy={s.config.strategy.name} splits matrices by their rows and columns, and "
            "quantization=nf4 packs weights in blocks that know neither"
        ),
        lambda s: "strategy=fsdp, or quantization=none",
    ),
    Coupling(
        "strategy.name adapter.use_dora",
        lambda s: _cuts_matrices(s) and s.config.adapter.use_dora,
        lambda s: (
            "adapter.use_dora=true measures whole columns of a matrix, and strategy="
            f"{s.config.strategy.name} leaves a rank parts of them"
        ),
        lambda s: "adapter.use_dora=false, or strategy=fsdp",
    ),
    Coupling(
        "strategy.name adapter.use_dora quantization.method",
        lambda s: (
            isinstance(s.config.strategy, FsdpConfig)
            and s.config.adapter.use_dora
            and s.config.quantization.method == "nf4"
        ),
        lambda s: (
            "adapter.use_dora=true measures the base's columns while it is built, and strategy="
            f"{s.config.strategy.name} builds it without its 4-bit weights on all ranks but one"
        ),
        lambda s: "adapter.use_dora=false, or strategy=ddp",
    ),
    Coupling(
        "trainer.compile recompute.mode",
        lambda s: s.config.trainer.compile and s.config.recompute.mode == "selective",
        lambda s: (
            "recompute=selective keeps single operations of a layer, and trainer.compile=true "
            "makes others of them"
        ),
        lambda s: "recompute=full, or trainer.compile=false",
    ),
    Coupling(
        "trainer.global_batch_size trainer.gradient_accumulation_steps",
        lambda s: (
            s.config.trainer.global_batch_size is not None
            and s.config.trainer.gradient_accumulation_steps
            != _default(s.config.trainer, "gradient_accumulation_steps")
        ),
        lambda s: (
            f"trainer.global_batch_size={s.config.trainer.global_batch_size} and trainer."
            f"gradient_accumulation_steps={s.config.trainer.gradient_accumulation_steps} "
            "decide the same thing"
        ),
        lambda s: "one of the two",
    ),
    Coupling(
        "schedule.warmup_steps trainer.max_steps",
        lambda s: (
            s.config.schedule.warmup_steps is not None
            and s.config.trainer.max_steps is not None
            and s.config.schedule.warmup_steps >= s.config.trainer.max_steps > 0
        ),
        lambda s: (
            f"schedule.warmup_steps={s.config.schedule.warmup_steps} leaves nothing of "
            f"trainer.max_steps={s.config.trainer.max_steps}"
        ),
        lambda s: f"schedule.warmup_steps={max(s.config.trainer.max_steps // 10, 0)}",
    ),
    Coupling(
        "model.path model.tokenizer_path model.revision model.trust_remote_code",
        lambda s: (
            s.config.model.trust_remote_code
            and not COMMIT.fullmatch(s.config.model.revision or "")
            and any(
                path is not None and not Path(path).is_dir()
                for path in (s.config.model.path, s.config.model.tokenizer_path)
            )
        ),
        lambda s: "model.trust_remote_code=true runs whatever stands on the hub that day",
        lambda s: "model.revision=COMMIT beside it (40 hex digits; branches and tags move)",
    ),
    Coupling(
        "evaluation.exact_match data.val_set_size data.test_datasets",
        lambda s: (
            s.config.evaluation.exact_match
            and not s.config.data.val_set_size
            and not s.config.data.test_datasets
        ),
        lambda s: "evaluation.exact_match=true, but there are no rows to ask",
        lambda s: "data.val_set_size=0.05, or data.test_datasets=[{path: FILE}]",
    ),
    Coupling(
        "data.streaming trainer.max_steps",
        lambda s: s.config.data.streaming and s.config.trainer.max_steps is None,
        lambda s: "data.streaming=true without trainer.max_steps: a stream has no end",
        lambda s: "trainer.max_steps=N, or data.streaming=false",
    ),
    Coupling(
        "data.streaming packing.window",
        lambda s: s.config.data.streaming and s.config.packing.window is not None,
        lambda s: (
            f"packing.window={s.config.packing.window} means nothing for data.streaming=true, "
            "which packs windows of its own"
        ),
        lambda s: "packing.window=null",
    ),
    Coupling(
        "quantization.method adapter.name",
        lambda s: s.config.quantization.method != "none" and s.config.adapter.name in WHOLE,
        lambda s: (
            f"quantization={s.config.quantization.method} freezes the weights in few bits, but "
            f"adapter={s.config.adapter.name} trains them"
        ),
        lambda s: "quantization=none, or adapter=lora",
    ),
    Coupling(
        "quantization.method model.from_scratch",
        lambda s: s.config.quantization.method != "none" and s.config.model.from_scratch,
        lambda s: (
            f"quantization={s.config.quantization.method} freezes the weights in few bits, but "
            "model.from_scratch=true starts from random ones, which have to be trained"
        ),
        lambda s: "quantization=none",
    ),
    Coupling(
        "optimizer.name adapter.lora_plus_ratio",
        lambda s: (
            s.config.optimizer.name == "muon" and s.config.adapter.lora_plus_ratio is not None
        ),
        lambda s: (
            f"adapter.lora_plus_ratio={s.config.adapter.lora_plus_ratio:g} sets the learning rate "
            "of every B, which optimizer=muon sets by the matrix's own size"
        ),
        lambda s: "optimizer=adamw, or adapter.lora_plus_ratio=null",
    ),
    Coupling(
        "adapter.lora_plus_weight_decay adapter.lora_plus_ratio",
        lambda s: (
            s.config.adapter.lora_plus_weight_decay is not None
            and s.config.adapter.lora_plus_ratio is None
        ),
        lambda s: "adapter.lora_plus_weight_decay means nothing without adapter.lora_plus_ratio",
        lambda s: "adapter.lora_plus_ratio=16 beside it, or optimizer.weight_decay",
    ),
    Coupling(
        "optimizer.name adapter.name",
        lambda s: s.config.optimizer.name == "muon" and s.config.adapter.name == "ia3",
        lambda s: "optimizer=muon moves matrices, and adapter=ia3 trains vectors alone",
        lambda s: "optimizer=adamw",
    ),
    Coupling(
        "optimizer.name schedule.shape",
        lambda s: (
            s.config.optimizer.name == "schedule_free" and s.config.schedule.shape != "constant"
        ),
        lambda s: (
            "optimizer=schedule_free averages its weights instead of lowering the learning rate, "
            f"which schedule={s.config.schedule.shape} lowers"
        ),
        lambda s: "schedule=constant (its warm-up stays), or optimizer=adamw",
    ),
    Coupling(
        "optimizer.name trainer.precision",
        lambda s: (
            s.config.optimizer.name == "schedule_free" and s.config.trainer.precision == "bf16-pure"
        ),
        lambda s: (
            "optimizer=schedule_free adds to an average of all steps, and trainer.precision="
            "bf16-pure has too few digits for the share of one step among hundreds"
        ),
        lambda s: "trainer.precision=bf16, or optimizer=adamw",
    ),
    Coupling(
        "optimizer.name optimizer.beta1",
        lambda s: s.config.optimizer.name == "schedule_free" and s.config.optimizer.beta1 == 0,
        lambda s: (
            "optimizer.beta1=0 leaves optimizer=schedule_free no share of the averaged weights"
        ),
        lambda s: "optimizer.beta1=0.9",
    ),
    Coupling(
        "optimizer.lr_by_pattern",
        lambda s: not all(0 < each.ratio <= 1000 for each in s.config.optimizer.lr_by_pattern),
        lambda s: (
            "optimizer.lr_by_pattern: a ratio is above 0 and at most 1000, and not "
            + ", ".join(
                f"{each.ratio:g} ({each.pattern})"
                for each in s.config.optimizer.lr_by_pattern
                if not 0 < each.ratio <= 1000
            )
        ),
        lambda s: "ratio: 0.1 (adapter=freeze keeps weights as they are)",
    ),
    Coupling(
        "schedule.decay_ratio schedule.shape",
        lambda s: (
            s.config.schedule.decay_ratio != _default(s.config.schedule, "decay_ratio")
            and s.config.schedule.shape != "wsd"
        ),
        lambda s: f"schedule.decay_ratio means nothing for schedule={s.config.schedule.shape}",
        lambda s: "schedule=wsd beside it",
    ),
    Coupling(
        "schedule.start_lr_ratio schedule.shape",
        lambda s: (
            s.config.schedule.start_lr_ratio != _default(s.config.schedule, "start_lr_ratio")
            and s.config.schedule.shape != "one_cycle"
        ),
        lambda s: f"schedule.start_lr_ratio means nothing for schedule={s.config.schedule.shape}",
        lambda s: "schedule=one_cycle beside it",
    ),
    Coupling(
        "schedule.shape schedule.warmup_ratio schedule.warmup_steps schedule.decay_ratio",
        lambda s: (
            s.config.schedule.shape == "wsd"
            and s.config.schedule.warmup_steps is None
            and s.config.schedule.warmup_ratio + s.config.schedule.decay_ratio > 1
        ),
        lambda s: (
            f"schedule.warmup_ratio={s.config.schedule.warmup_ratio:g} and schedule.decay_ratio="
            f"{s.config.schedule.decay_ratio:g} are more than all steps"
        ),
        lambda s: f"schedule.decay_ratio={1 - s.config.schedule.warmup_ratio:g}",
    ),
    Coupling(
        "adapter.init adapter.use_dora",
        lambda s: s.config.adapter.init in CHANGE_BASE and s.config.adapter.use_dora,
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            "adapter.use_dora=true learns the magnitudes of weights that are whole"
        ),
        lambda s: "adapter.init=default, or adapter.use_dora=false",
    ),
    Coupling(
        "adapter.init strategy.name",
        lambda s: s.config.adapter.init in CHANGE_BASE and _spreads_weights(s),
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            "is saved for the base as it was, which is read again and compared: strategy="
            f"{s.config.strategy.name} leaves no rank room for that"
        ),
        lambda s: "adapter.init=default, or strategy=ddp",
    ),
    Coupling(
        "adapter.init quantization.method",
        lambda s: s.config.adapter.init in CHANGE_BASE and s.config.quantization.method != "none",
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            f"weights of quantization={s.config.quantization.method} cannot hold what is left"
        ),
        lambda s: "adapter.init=default, or quantization=none",
    ),
    Coupling(
        "adapter.name model.added_tokens",
        lambda s: s.config.adapter.name == "ia3" and bool(s.config.model.added_tokens),
        lambda s: (
            f"model.added_tokens={s.config.model.added_tokens} need rows that train, and "
            "adapter=ia3 trains vectors alone"
        ),
        lambda s: "adapter=lora or adapter=full",
    ),
    Coupling(
        "model.from_scratch adapter.name",
        lambda s: s.config.model.from_scratch and s.config.adapter.name != "full",
        lambda s: (
            f"model.from_scratch=true with adapter={s.config.adapter.name}: small matrices beside "
            "random frozen weights learn nothing"
        ),
        lambda s: "adapter=full",
    ),
)
"""the table; an empty result means that nothing clashes"""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """One row: the values that a number may have; null is always left to whoever resolves it."""

    key: str
    holds: Callable[[Any], bool]
    text: str


def _at_least_one(value: Any) -> bool:
    return bool(value >= 1)


def _share(value: Any) -> bool:
    return bool(0 <= value < 1)


RANGES = (
    Range("supervise.max_restarts", lambda v: v >= 0, "0 or more"),
    Range("supervise.hang_minutes", lambda v: 0 < v < math.inf, "above 0 (10 is usual), or null"),
    Range("recompute.every", _at_least_one, "1 or more (2 recomputes every other layer)"),
    Range("adapter.r", _at_least_one, "1 or more (8 to 64 is usual)"),
    Range("adapter.alpha", lambda v: 0 < v < math.inf, "above 0 (the rank or twice it is usual)"),
    Range("adapter.dropout", _share, "0 or more, below 1"),
    Range(
        "adapter.neftune_alpha", lambda v: 0 < v < math.inf, "above 0 (5 to 15 is usual), or null"
    ),
    Range(
        "adapter.lora_plus_ratio", lambda v: 0 < v <= 1000, "above 0, at most 1000 (16 is usual)"
    ),
    Range("adapter.lora_plus_weight_decay", lambda v: 0 <= v <= 10, "from 0 to 10"),
    Range(
        "optimizer.lr", lambda v: 0 < v <= 10, "above 0, at most 10 (2e-4 for LoRA, 2e-5 for full)"
    ),
    Range("optimizer.weight_decay", lambda v: 0 <= v <= 10, "from 0 to 10 (0 to 0.1 is usual)"),
    Range("optimizer.base_batch_size", _at_least_one, "1 or more"),
    Range("optimizer.beta1", _share, "0 or more, below 1"),
    Range("optimizer.beta2", _share, "0 or more, below 1"),
    Range("optimizer.eps", lambda v: 0 < v < 1, "above 0, below 1"),
    Range("optimizer.momentum", _share, "0 or more, below 1"),
    Range("optimizer.matrix_lr_ratio", lambda v: 0 < v <= 1000, "above 0, at most 1000"),
    Range("optimizer.beta2_decay", lambda v: -1 <= v < 0, "from -1, below 0 (-0.8 is usual)"),
    Range("optimizer.clip_threshold", lambda v: 0 < v < math.inf, "above 0 (1.0 is usual)"),
    Range("schedule.warmup_ratio", _share, "0 or more, below 1"),
    Range("schedule.warmup_steps", lambda v: v >= 0, "0 or more"),
    Range("schedule.min_lr_ratio", lambda v: 0 <= v <= 1, "from 0 to 1"),
    Range("schedule.start_lr_ratio", lambda v: 0 < v <= 1, "above 0, at most 1"),
    Range("schedule.decay_ratio", lambda v: 0 < v <= 1, "above 0, at most 1 (0.1 to 0.2 is usual)"),
    Range("trainer.micro_batch_size", _at_least_one, "1 or more"),
    Range("trainer.gradient_accumulation_steps", _at_least_one, "1 or more"),
    Range("trainer.global_batch_size", _at_least_one, "1 or more"),
    Range("trainer.num_epochs", _at_least_one, "1 or more"),
    Range("trainer.max_steps", _at_least_one, "1 or more"),
    Range("trainer.max_grad_norm", lambda v: 0 < v < math.inf, "above 0 (1.0 is usual)"),
    Range("trainer.max_skipped_steps", lambda v: v >= 0, "0 or more"),
    Range(
        "trainer.devices",
        lambda v: v == "auto" or (isinstance(v, int) and not isinstance(v, bool) and v >= 1),
        "auto, or a number of ranks from 1 up",
    ),
    Range("trainer.num_nodes", _at_least_one, "1 or more"),
    Range("trainer.validate_every_steps", _at_least_one, "1 or more"),
    Range("trainer.log_every_steps", _at_least_one, "1 or more"),
    Range("trainer.checkpoint.every_steps", _at_least_one, "1 or more, or null for ten times"),
    Range("trainer.checkpoint.keep_last", _at_least_one, "1 or more"),
    Range("trainer.checkpoint.keep_best", lambda v: v >= 0, "0 or more"),
    Range("evaluation.max_rows", _at_least_one, "1 or more"),
    Range("evaluation.max_new_tokens", _at_least_one, "1 or more"),
    Range("evaluation.batch_size", _at_least_one, "1 or more"),
    Range("preview.rows", _at_least_one, "1 or more"),
    Range("preview.packs", _at_least_one, "1 or more"),
    Range("preview.tokens", lambda v: v >= 2, "2 or more"),
    Range("strategy.stage", lambda v: v in (1, 2, 3), "1, 2 or 3"),
    Range(
        "strategy.offload_parameters",
        lambda v: isinstance(v, bool) or v in HOMES,  # FSDP has one place besides the device
        "none or cpu",
    ),
    Range("strategy.powersgd_rank", _at_least_one, "1 or more (1 to 32 is usual)"),
    Range("strategy.replicas", _at_least_one, "1 or more, or null for one a node"),
    Range("strategy.tensor_parallel_size", _at_least_one, "1 or more, or null for all of a node"),
    Range("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295"),
)


def check_compatibility(
    config: Any, num_gpus: int | None = None, *, on_this_machine: bool = True
) -> list[str]:
    """List the numbers out of range, and if there are none, what does not go together.

    `num_gpus`: GPUs of this machine, counted when not given. `on_this_machine` False leaves out
    what another machine may have.
    """
    if num_gpus is None:
        num_gpus = count_gpus() if on_this_machine else 0
    situation = Situation(config, num_gpus)
    problems = [
        f"{row.key}={value}: expected {row.text}"
        for row in RANGES
        if (value := _value(config, row.key)) is not None and not row.holds(value)
    ]
    if problems:
        return problems
    problems = [
        f"{row.why(situation)}; type {row.instead(situation)}"
        for row in COUPLINGS
        if (on_this_machine or not row.is_of_machine)
        and all(_exists(config, key) for key in row.reads.split())
        and row.clashes(situation)
    ]
    if _exists(config, "trainer.devices"):
        if on_this_machine:
            on_gpu = situation.on_gpu
            problems += check_devices(config.trainer, situation.num_gpus if on_gpu else None)
        # A preview may be of a machine whose GPUs nobody has counted.
        if on_this_machine or isinstance(config.trainer.devices, int):
            problems += check_layout(config.strategy, config.trainer, situation.ranks_per_node)
        problems += check_global_batch(
            config.trainer, situation.num_ranks, situation.num_data_ranks
        )
    return problems


def num_ranks(config: Any) -> int | None:
    """Return how many ranks the settings ask for; None for a verb that runs as one process."""
    if not _exists(config, "trainer.devices"):
        return None
    return Situation(config, count_gpus()).num_ranks


def ranks_per_node(config: Any) -> int:
    """Return how many ranks of a training the settings ask for on each machine."""
    return Situation(config, count_gpus()).ranks_per_node


def num_data_ranks(config: Any) -> int | None:
    """Return how many ranks, or groups of them, see data of their own; as `num_ranks` else."""
    if not _exists(config, "trainer.devices"):
        return None
    return Situation(config, count_gpus()).num_data_ranks


def check_devices(trainer: Any, num_gpus: int | None) -> list[str]:
    """Compare trainer.devices with the GPUs that are there; None where the run is on the CPU."""
    if not num_gpus or trainer.devices == "auto" or trainer.devices <= num_gpus:
        return []
    there = f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
    return [
        f"trainer.devices={trainer.devices}, but this machine has {there}; "
        f"type trainer.devices={num_gpus}"
    ]


def check_layout(strategy: Any, trainer: Any, ranks_per_node: int) -> list[str]:
    """Say by what the ranks cannot be divided into those that split matrices, and into replicas."""
    if not _exists(strategy, "tensor_parallel_size"):
        return []
    size = tensor_parallel_size(strategy, ranks_per_node)
    ranks = ranks_per_node * trainer.num_nodes
    if ranks % size:
        fits = [str(n) for n in range(2, ranks + 1) if ranks % n == 0 and n <= ranks_per_node]
        fitting = f"strategy.tensor_parallel_size={' or '.join(fits)}" if fits else "strategy=ddp"
        return [
            f"strategy.tensor_parallel_size={size} does not divide {ranks} rank"
            f"{'s' * (ranks != 1)} ({ranks} / {size} leaves {ranks % size}); type {fitting}, or "
            f"trainer.devices={size}"
        ]
    groups, replicas = ranks // size, strategy.replicas or trainer.num_nodes
    if groups % replicas == 0 or not strategy.shards_data_parallel:
        return []
    fits = [str(n) for n in range(1, groups + 1) if groups % n == 0]
    return [
        f"strategy.replicas={replicas} does not divide {groups} ranks that see data of their own "
        f"({groups} / {replicas} leaves {groups % replicas}); type strategy.replicas="
        f"{' or '.join(fits)}"
    ]


def check_global_batch(
    trainer: Any, num_ranks: int, num_data_ranks: int | None = None
) -> list[str]:
    """Say by what trainer.global_batch_size cannot be divided among ranks and micro-batches.

    `num_data_ranks`: ranks, or groups of ranks, that see data of their own; all when not given.
    """
    groups = num_ranks if num_data_ranks is None else num_data_ranks
    total, packs = trainer.global_batch_size, trainer.micro_batch_size * groups
    if total is None or total % packs == 0:
        return []
    fits = [str(fit) for fit in (total // packs * packs, total // packs * packs + packs) if fit]
    together = num_ranks // groups
    who = f"{groups} ranks"
    if together > 1:
        who = f"{groups} groups of ranks ({num_ranks} ranks / {together} that split a matrix)"
    return [
        f"trainer.global_batch_size={total} is no multiple of micro_batch_size "
        f"{trainer.micro_batch_size} x {who} = {packs}; "
        f"type trainer.global_batch_size={' or '.join(fits)}"
    ]


def count_gpus() -> int:
    """Count the NVIDIA devices that this process may use, by their device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(file.name[len("nvidia") :].isdigit() for file in Path("/dev").glob("nvidia*"))
    present = present or int(Path("/dev/dxg").exists())  # Windows' GPU under WSL
    if visible is None:
        return present
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA ignores everything from the first invalid index on.
    until = chosen.index("-1") if "-1" in chosen else len(chosen)
    return min(until, present) if present else 0


def _value(config: Any, key: str) -> Any:
    """Return the setting `key`; None where the verb or the chosen option has no such setting."""
    return functools.reduce(getattr, key.split("."), config) if _exists(config, key) else None


def _exists(config: Any, key: str) -> bool:
    for name in key.split("."):
        if name not in {field.name for field in dataclasses.fields(config)}:
            return False
        config = getattr(config, name)
    return True


def _spreads_weights(situation: Situation) -> bool:
    config = situation.config.strategy
    return isinstance(config, FsdpConfig) or (isinstance(config, ZeroConfig) and config.stage == 3)


def _is_sharding(situation: Situation) -> bool:
    return is_sharding(situation.config.strategy)


def _cuts_matrices(situation: Situation) -> bool:
    return tensor_parallel_size(situation.config.strategy, situation.ranks_per_node) > 1


def _steps_parts(situation: Situation) -> bool:
    """Say whether the optimizer moves each number by itself, in the form that it finds them in."""
    by_itself = ["adamw"]
    if isinstance(situation.config.strategy, FsdpConfig) and not _cuts_matrices(situation):
        by_itself.append("schedule_free")
    return situation.config.optimizer.name in by_itself


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _by_pytorch(name: str, *, on_gpu: bool) -> str:
    nearest = PYTORCHS_OWN[name]
    return "fsdp" if nearest == "fsdp_offload" and not on_gpu else nearest


def _owned(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a DeepSpeed config that another setting says, and which setting."""
    owned: dict[str, str] = {}
    for key in _dotted(config, ""):
        for known, setting in DEEPSPEED_KEYS.items():
            if f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}."):
                owned.setdefault(key, setting)
    return owned


def _dotted(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _default(part: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(part) if field.name == name)


def _needs_gpu(situation: Situation) -> str:
    if situation.config.attention.backend == "flex":
        return "has a gradient on NVIDIA GPUs alone"
    return "runs on NVIDIA GPUs alone"


def _is_installed(situation: Situation) -> bool:
    module, _ = PACKAGES[situation.config.attention.backend]
    return importlib.util.find_spec(module) is not None
