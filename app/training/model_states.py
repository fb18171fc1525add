"""Memory of model states (weights, gradients, optimizer states), by which a strategy and recompute
are chosen: from the shapes of a meta model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.activation_memory import FP32, HALF, LOSS_BYTES, Kept, Widths, rows_per_chunk
from app.model.quantization import QuantizationConfig
from app.model.recompute import Memory
from app.strategy.build import STORED, Facts
from app.strategy.settings import FsdpConfig, StrategyConfig, ZeroConfig, tensor_parallel_size
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
    """gradients and optimizer states of the trainable parameters"""

    def on_a_rank(
        self, strategy: StrategyConfig, env: Environment, num_nodes: int, gathered_gib: float
    ) -> float:
        """Return what a rank keeps of it; `gathered_gib` are the weights gathered at a time."""
        ranks = env.num_ranks
        if isinstance(strategy, FsdpConfig):
            split = tensor_parallel_size(strategy, env.devices)
            shards = ranks // (strategy.replicas or num_nodes)
            shards = shards if strategy.shards_data_parallel else split
            if not strategy.reshard_after_forward:
                gathered_gib = self.weights_gib / split
            sharded = 0.0 if strategy.offload_parameters else self.weights_gib + self.states_gib
            return sharded / shards + (gathered_gib if shards > split else 0.0)
        if isinstance(strategy, ZeroConfig):
            states = 0.0 if strategy.offload_optimizer != "none" else self.states_gib / ranks
            if strategy.stage < 3:
                return self.weights_gib + states
            weights = 0.0 if strategy.offload_parameters != "none" else self.weights_gib / ranks
            if strategy.partition_within_node:
                weights += self.weights_gib / env.devices
            return weights + states + gathered_gib
        return self.weights_gib + self.states_gib


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


def gather_memory(
    env: Environment,
    strategy: StrategyConfig,
    num_nodes: int,
    footprint: Footprint | None,
    widths: Widths | None,
    kept: Kept,
) -> Memory:
    """Return what recompute is chosen by; `footprint` is None where the files are quantized."""
    import torch

    vocabulary, hidden, layers, matrices = 0, 0, 1, 0
    if widths is not None:
        vocabulary, hidden = widths.vocabulary, widths.hidden
        layers, matrices = widths.layers, widths.layers * widths.matrices
    ends = 2 * vocabulary * hidden * HALF / 2**30  # embedding and head
    if footprint is None:
        footprint = Footprint(matrices * BITS["nf4"] / 8 / 2**30 + ends, 0.0)
    # A layer is gathered while the one before it is in use.
    resident = footprint.on_a_rank(
        strategy, env, num_nodes, 2 * footprint.weights_gib / layers + ends
    )
    if kept.width < kept.residual:
        resident += footprint.weights_gib * kept.width / kept.residual  # autocast's copies
    chunk = rows_per_chunk(vocabulary, env.torch_device) * vocabulary if vocabulary else 0
    loss = chunk * LOSS_BYTES + 2 * kept.tokens * hidden * kept.width
    if kept.trains_base:
        loss += vocabulary * hidden * (FP32 + kept.width)
    gpus = map(torch.cuda.get_device_properties, range(env.devices))
    return Memory(
        device_gib=min(gpu.total_memory for gpu in gpus) / 2**30,
        resident_gib=resident,
        loss_gib=loss / 2**30,
        widths=widths,
        kept=kept,
    )


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
