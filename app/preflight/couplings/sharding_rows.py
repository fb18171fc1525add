"""Rows on strategies that leave a rank parts of a whole, and on what needs more than its part."""

from __future__ import annotations

from app.preflight.couplings.situation import Coupling, Situation
from app.strategy.settings import FsdpConfig, is_sharding, tensor_parallel_size

SHARDING_ROWS = (
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
)


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
