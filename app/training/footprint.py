"""Memory for weights, gradients and optimizer states, from the shapes of a meta model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.quantization import QuantizationConfig
from app.strategy.build import STORED, Facts
from app.training.optimizers import OptimizerConfig
from app.training.trainer import Environment, TrainerConfig

if TYPE_CHECKING:
    import torch

FABRIC = Path("/sys/class/infiniband")
"""where Linux lists InfiniBand, RoCE and EFA adapters"""
STATES = {"adamw": 2, "schedule_free": 2, "muon": 1, "adafactor": 0, "paged_adamw8bit": 0}
"""states per weight, in its dtype and on the device"""
EIGHT_BIT_STATES = {"adamw8bit": 2}
"""states per weight of one byte each"""
BITS = {"int8": 8.0, "nf4": 4.5}
"""per quantized weight with its scales (arXiv 2305.14314: one of 32 bits for 64 weights)"""
DOUBLE_QUANT_SAVED_BITS = 0.373
"""bits per weight, same source"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of the whole model, however it will be sharded."""

    weights_gib: float
    states_gib: float
    """gradients and optimizer states of what trains"""


def measure_footprint(
    model: Any, optimizer: str, quantization: QuantizationConfig | None = None
) -> Footprint:
    """Add up weights and states of a model that is not quantized yet; it may be on meta."""
    aside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    weights = states = 0.0
    for parameter in model.parameters():
        size = parameter.element_size()
        if parameter.requires_grad:
            kept = 1 + STATES.get(optimizer, 0)
            states += parameter.numel() * (kept * size + EIGHT_BIT_STATES.get(optimizer, 0))
        elif parameter.ndim >= 2 and id(parameter) not in aside:
            size = bytes_per_weight(parameter, quantization)
        weights += parameter.numel() * size
    return Footprint(weights / 2**30, states / 2**30)


def bytes_per_weight(
    parameter: torch.nn.Parameter, quantization: QuantizationConfig | None
) -> float:
    """Return the bytes per weight of a frozen matrix, with its scales."""
    if quantization is None or quantization.method == "none":
        return float(parameter.element_size())
    saves = (
        DOUBLE_QUANT_SAVED_BITS if quantization.method == "nf4" and quantization.double_quant else 0
    )
    return (BITS[quantization.method] - saves) / 8


def gather_facts(
    env: Environment,
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    quantization: QuantizationConfig,
    build: Callable[[], Any] | None,
) -> Facts:
    """Return what the strategy is chosen by.

    `build` makes the model on meta and not quantized; None where its files are quantized.
    """
    import torch

    facts = Facts(num_ranks=env.num_ranks, num_nodes=trainer.num_nodes)
    if env.accelerator == "cpu" or env.num_ranks == 1:
        return facts  # the size of the model decides nothing
    if build is None:
        return replace(facts, device_gib=0.0, quantization=STORED)
    footprint = measure_footprint(build(), optimizer.name, quantization)
    gpus = map(torch.cuda.get_device_properties, range(env.devices))
    return replace(
        facts,
        device_gib=min(gpu.total_memory for gpu in gpus) / 2**30,
        weights_gib=footprint.weights_gib,
        states_gib=footprint.states_gib,
        quantization=quantization.method,
        has_fast_links=any(FABRIC.glob("*")),
        has_deepspeed=importlib.util.find_spec("deepspeed") is not None,
    )
