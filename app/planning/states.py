"""Estimate a rank's memory of weights, gradients, optimizer states and gathered weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import add, attrgetter

from app.model.layers import num_layers_in_fp8
from app.model.quantization import QuantizationConfig
from app.planning.planned_model import EXPERTS, PlannedModel, Weights
from app.strategy.settings import (
    MAX_UNSHARDED_SHARE,
    STATE_BLOCK_BYTES,
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    PipelineConfig,
    StrategyConfig,
    ZeroConfig,
    expert_parallel_size,
    split_dim,
    tensor_parallel_size,
)
from app.training.optimizers import states_of_weights

_BITS = {"int8": 8.0, "nf4": 4.5, "fp8": 8.0}
"""bits per quantized weight including its scales (arXiv 2305.14314: 32 bits per 64 weights)"""
_DOUBLE_QUANT_SAVED_BITS = 0.373
"""bits per weight that quantized scales save, same source"""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights of some modules before sharding; of one rank if ranks split them."""

    frozen: float = 0.0
    trained: float = 0.0
    gathered: float = 0.0
    """all weights in the dtype in which FSDP gathers them"""
    num_trained: float = 0.0
    """number of trainable weights"""
    held: float = 0.0
    """bytes on the fullest rank after sharding by rows"""
    held_trained: float = 0.0
    """bytes of trainable weights on that rank"""
    experts: float = 0.0
    """the part of `gathered` that belongs to experts of which other ranks hold different ones"""
    experts_trained: float = 0.0
    """the part of `trained` that does"""

    @property
    def total(self) -> float:
        return self.frozen + self.trained

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(*map(add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> WeightBytes:
        return WeightBytes(*(value * factor for value in _values(self)))


_values = attrgetter(*WeightBytes.__slots__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes of a model with its adapter from which memory is estimated."""

    layer: WeightBytes
    """mean over the layers"""
    num_layers: int
    embedding: WeightBytes
    head: WeightBytes
    """zero if tied to the embedding"""
    rest: WeightBytes
    """weights outside of layers, embedding and head"""
    hidden_bytes: int
    """bytes per element of the hidden states between layers"""

    @property
    def whole(self) -> WeightBytes:
        return self.layer * self.num_layers + self.embedding + self.head + self.rest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Memory of a rank for the states of its model, in bytes by part."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """weights gathered from other ranks at one time"""


@dataclass(frozen=True, slots=True)
class _WeightLayout:
    """Precision, quantization and sharding, which determine the bytes of a weight on a rank."""

    precision: str
    quantization: QuantizationConfig
    num_shards: int
    """number of shards that rows are divided into"""
    tensor_size: int
    expert_size: int = 1


def _bytes_per_weight(num_bytes: int, quantization: QuantizationConfig) -> float:
    """Return the bytes per weight of a frozen matrix, including its scales.

    `num_bytes`: the bytes of a weight that is not quantized.
    """
    if quantization.method == "none":
        return num_bytes
    bits = _BITS[quantization.method]
    if quantization.method == "nf4" and quantization.double_quant:
        bits -= _DOUBLE_QUANT_SAVED_BITS
    return bits / 8


def _sum_weight_bytes(
    weights: Weights, layout: _WeightLayout, plan: Mapping[str, str]
) -> WeightBytes:
    """Sum the bytes of weights that FSDP gathers together, split by the tensor-parallel `plan`."""
    in_bf16 = layout.precision == "bf16" and all(w.num_bytes == 4 for w in weights.values())
    parts = []
    for name, weight in weights.items():
        dim, experts = split_dim(plan, name), layout.expert_size if EXPERTS in name else 1
        share = (1.0 if dim is None else 1 / layout.tensor_size) / experts
        size = num_bytes = float(weight.num_bytes)
        trains = weight.requires_grad
        if not trains and weight.ndim >= 2:
            num_bytes = _bytes_per_weight(weight.num_bytes, layout.quantization)
        number = weight.numel() * share
        # A LoRA matrix of rank 16 gives each of 16 ranks one row, and further ranks nothing.
        rows = weight.shape[0] / (layout.tensor_size if dim == 0 else 1)
        rows /= 1 if ".lora_B." in name else experts  # whose columns belong to experts
        held = number * num_bytes * math.ceil(rows * experts / layout.num_shards) / rows
        trained = number * size if trains else 0.0
        gathered = number * (2.0 if in_bf16 else num_bytes)
        part = WeightBytes(
            frozen=0.0 if trains else number * num_bytes,
            trained=trained,
            gathered=gathered,
            num_trained=number if trains else 0.0,
            held=held,
            held_trained=held if trains else 0.0,
            experts=gathered * (experts > 1),
            experts_trained=trained * (experts > 1),
        )
        parts.append(_values(part))
    return WeightBytes(*map(sum, zip(*parts, strict=True)))


def size_for(
    model: PlannedModel,
    precision: str,
    quantization: QuantizationConfig,
    strategy: StrategyConfig,
    *,
    num_ranks: int,
    num_nodes: int,
) -> ModelSize:
    """Return the sizes of a model on one rank of a strategy, which must be resolved."""
    tensor_size = tensor_parallel_size(strategy, num_ranks // num_nodes)
    weight_shards, _, _ = num_shards(strategy, num_ranks, num_nodes)
    experts = expert_parallel_size(strategy)
    layout = _WeightLayout(precision, quantization, weight_shards, tensor_size, experts)
    of_ends = replace(layout, quantization=QuantizationConfig())  # they are never quantized
    plan = model.plan if tensor_size > 1 else {}

    def sum_layers(layout: _WeightLayout) -> WeightBytes:
        parts = (
            _sum_weight_bytes(weights, layout, plan) * times for weights, times in model.layers
        )
        return sum(parts, WeightBytes())

    layers = sum_layers(layout)
    if quantization.method == "fp8":
        share = num_layers_in_fp8(model.num_layers) / model.num_layers
        layers = layers * share + sum_layers(of_ends) * (1 - share)
    is_fp32 = any(weight.num_bytes == 4 for weight in model.embedding.values())
    # Same condition as `can_split_head`: a bias would be a second weight.
    splits_head = len(model.head) == 1 and model.widths.vocabulary % tensor_size == 0
    head = _sum_weight_bytes(model.head, of_ends, {})
    return ModelSize(
        layer=layers * (1 / model.num_layers),
        num_layers=model.num_layers,
        embedding=_sum_weight_bytes(model.embedding, of_ends, {}),
        head=head * (1 / tensor_size) if splits_head else head,
        rest=_sum_weight_bytes(model.rest, layout, {}),
        hidden_bytes=4 if is_fp32 else 2,
    )


_LIVE_UNDER_ZERO3 = 1e9
"""number of weights that DeepSpeed keeps gathered (its stage3_max_live_parameters)"""
ZERO_BUCKET = 5e8
"""number of gradients that DeepSpeed reduces at once (its reduce_bucket_size)"""


def estimate_states(
    size: ModelSize,
    strategy: StrategyConfig,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    optimizer: str = "adamw",
    accumulation: int = 1,
) -> ModelStates:
    """Estimate the memory of one rank for the states of its model, at the peak of each.

    `strategy` must be resolved, and `size` measured for it and the same ranks.
    """
    weight_shards, gradient_shards, state_shards = num_shards(strategy, num_ranks, num_nodes)
    whole = size.whole
    held = whole.total / weight_shards
    gradients = whole.trained / gradient_shards
    states = optimizer_state_bytes(size, optimizer)
    states += whole.num_trained * outer_state_bytes(strategy)
    states = states / state_shards + feedback_bytes(size, strategy)
    if strategy.offload_optimizer == "disk":  # the moments' blocks, whatever the shards
        states = min(states, 2.0 * STATE_BLOCK_BYTES)
    gathered = 0.0
    if isinstance(strategy, ZeroConfig):
        states += whole.trained / state_shards  # its copy of the weights of its shard
        bucket = min(ZERO_BUCKET, whole.num_trained) / max(whole.num_trained, 1)
        gradients += whole.trained * bucket
        states, gradients = (
            (0.0 if strategy.offload_optimizer != "none" else part) for part in (states, gradients)
        )
        if strategy.stage == 3:
            # In the dtype of the weights; a smaller model stays gathered during the whole step.
            end = max(size.embedding.total, size.head.total)
            gathered = size.hidden_bytes * _LIVE_UNDER_ZERO3 + end
            gathered = min(gathered, whole.total)
            held *= strategy.offload_parameters == "none"
    elif isinstance(strategy, FsdpConfig) and (weight_shards > 1 or strategy.offload_parameters):
        if accumulation > 1 and keeps_gradients_whole(whole, strategy):
            gradients = whole.trained
            if strategy.reduce_dtype == "bf16":
                gradients = min(gradients, 2.0 * whole.num_trained)
        else:
            gradients = whole.held_trained
        held = whole.held
        if strategy.offload_optimizer == "none":
            states *= whole.held_trained * state_shards / max(whole.trained, 1.0)
        gathered = max(gathered_by_fsdp(size, strategy))
        if strategy.offload_parameters:
            held = states = 0.0
    return ModelStates(weights=held, gradients=gradients, optimizer=states, gathered=gathered)


def optimizer_state_bytes(size: ModelSize, optimizer: str) -> float:
    """Return the bytes of an optimizer's states before sharding."""
    parts = {
        "embedding": size.embedding,
        "head": size.head,
        "rest": size.layer * size.num_layers + size.rest,
    }
    return sum(
        states_of_weights(optimizer, name, part.num_trained, part.trained)
        for name, part in parts.items()
    )


def keeps_gradients_whole(part: WeightBytes, strategy: FsdpConfig) -> bool:
    """Return whether FSDP shards gradients only in the last micro-batch of a step.

    FSDP counts packed weights as stored, of which this is approximately the number.
    """
    if isinstance(strategy, PipelineConfig):
        return True
    if strategy.sync_each_micro_batch is not None:
        return not strategy.sync_each_micro_batch
    num_weights = part.num_trained + part.frozen / 2
    return part.num_trained <= MAX_UNSHARDED_SHARE * num_weights


def outer_state_bytes(strategy: StrategyConfig) -> int:
    """Return the bytes of anchor and momentum per trainable weight for outer steps of local SGD."""
    return 8 if isinstance(strategy, LocalSgdConfig) and strategy.uses_outer_optimizer else 0


def feedback_bytes(size: ModelSize, strategy: StrategyConfig) -> float:
    """Return the bytes of a rank's error feedback: gradients that compression has not sent yet.

    The low-rank matrices of PowerSGD are small and not counted.
    """
    has_feedback = isinstance(strategy, DdpConfig) and strategy.compression in ("powersgd", "topk")
    return size.whole.trained if has_feedback else 0.0


def num_shards(strategy: StrategyConfig, num_ranks: int, num_nodes: int) -> tuple[int, int, int]:
    """Return the numbers of shards of weights, gradients and optimizer states."""
    if isinstance(strategy, FsdpConfig):
        groups = num_ranks // tensor_parallel_size(strategy, num_ranks // num_nodes)
        replicas = num_nodes if strategy.replicas is None else strategy.replicas
        shards = groups // replicas if strategy.shards_data_parallel else 1
        return shards, shards, shards
    if isinstance(strategy, ZeroConfig):
        return (
            num_ranks if strategy.stage == 3 else 1,
            num_ranks if strategy.stage >= 2 else 1,
            num_ranks,
        )
    return 1, 1, 1


def gathered_by_fsdp(size: ModelSize, strategy: FsdpConfig) -> tuple[float, float, float, float]:
    """Return the bytes of gathered weights at four moments.

    These are: while embedding or head are gathered, at the loss, in the backward pass of a layer,
    and in that of the first layer. A unit is gathered into a buffer and copied out of it while the
    buffer of the previous unit still exists. Weights without their own unit stay gathered from
    forward to backward.
    """
    layer, root = size.layer.gathered, size.rest.gathered
    ends = [size.embedding.gathered, size.head.gathered]
    if not size.head.gathered:
        root, ends = root + size.embedding.gathered, [0.0, 0.0]
    if not strategy.reshard_after_forward:
        whole = root + sum(ends) + layer * (size.num_layers + 2)
        return whole, whole, whole, whole
    # No layer is gathered yet at the time of the embedding.
    at_ends = max(root + 2 * ends[0], root + layer + 2 * ends[1], 2 * root)
    # A layer, the buffer of the next one, and its gradients being reduced.
    trained = size.layer.trained / max(1.0, size.layer.total)
    # Before the first layer comes the embedding, which FSDP gathers even if it is frozen.
    at_first = root + (1 + trained) * layer + ends[0]
    return at_ends, root + 2 * ends[1], max(root + (2 + trained) * layer, 2 * root), at_first
