"""Estimate the peak memory of one rank by part, from a meta model and the settings of a run.

Weights, gradients, optimizer states and gathered weights are computed; activations follow a rule of
thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.model.activation_memory import rows_per_chunk
from app.model.layer_kind import widths_of
from app.model.layers import decoder_layers
from app.model.quantization import QuantizationConfig
from app.strategy.settings import (
    MAX_UNSHARDED_SHARE,
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    StrategyConfig,
    ZeroConfig,
    tensor_parallel_size,
)
from app.strategy.tensor_plan import layer_plan, split_dim
from common.errors import UserError

if TYPE_CHECKING:
    import torch

STATES = {"adamw": 2, "schedule_free": 2, "muon": 1, "adafactor": 0, "paged_adamw8bit": 0}
"""optimizer states per weight, in the weight's dtype and on the device"""
VOCABULARY_STATES = {"muon": 2}
"""the same for the weights of embeddings and head, where they differ: AdamW updates them"""
EIGHT_BIT_STATES = {"adamw8bit": 2}
"""optimizer states per weight of one byte each, or in fp32 for embeddings"""
BITS = {"int8": 8.0, "nf4": 4.5}
"""bits per quantized weight including its scales (arXiv 2305.14314: 32 bits per 64 weights)"""
DOUBLE_QUANT_SAVED_BITS = 0.373
"""bits per weight that quantized scales save, same source"""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights of some modules before sharding; with tensor parallelism of one rank."""

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

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, factor: float) -> WeightBytes:
        return WeightBytes(*(getattr(self, name) * factor for name in self.__slots__))


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
    width: int
    """hidden size"""
    inner_width: int
    """hidden size of a feed-forward network"""
    vocab_size: int
    hidden_bytes: int
    """bytes per element of the hidden states between layers"""

    @property
    def whole(self) -> WeightBytes:
        """All weights."""
        return self.layer * self.num_layers + self.embedding + self.head + self.rest


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak memory of a rank by part, in bytes; a CUDA context and fragmentation come on top."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """weights gathered from other ranks at one time"""
    activations: float

    @property
    def total(self) -> float:
        """Sum of all parts, as if all peaked at the same time."""
        return sum(getattr(self, name) for name in self.__slots__)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.1f}" for name in self.__slots__)
        return f"{self.total / 2**30:.1f} GiB ({parts})"


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Precision, quantization and sharding, which determine the bytes of a weight on a rank."""

    precision: str
    quantization: QuantizationConfig | None = None
    num_shards: int = 1
    """number of shards that rows are divided into"""
    tensor_size: int = 1
    ends: frozenset[int] = frozenset()
    """ids of the weights of embedding and head, which are never quantized"""


def bytes_per_weight(weight: Any, quantization: QuantizationConfig | None) -> float:
    """Return the bytes per weight of a frozen matrix, including its scales."""
    if quantization is None or quantization.method == "none":
        return float(weight.element_size())
    saves = (
        DOUBLE_QUANT_SAVED_BITS if quantization.method == "nf4" and quantization.double_quant else 0
    )
    return (BITS[quantization.method] - saves) / 8


def sum_weight_bytes(
    weights: Mapping[str, Any], layout: WeightLayout, plan: Mapping[str, str]
) -> WeightBytes:
    """Sum the bytes of weights that FSDP gathers together, split by the tensor-parallel `plan`.

    `weights`: parameters, or objects with their shape, element_size(), numel() and requires_grad.
    """
    part = WeightBytes()
    in_bf16 = layout.precision == "bf16" and all(w.element_size() == 4 for w in weights.values())
    for name, weight in weights.items():
        dim = split_dim(plan, name)
        share = 1.0 if dim is None else 1 / layout.tensor_size
        size = num_bytes = float(weight.element_size())
        if not weight.requires_grad and weight.ndim >= 2 and id(weight) not in layout.ends:
            num_bytes = bytes_per_weight(weight, layout.quantization)
        number = weight.numel() * share
        trains = weight.requires_grad
        # A LoRA matrix of rank 16 gives each of 16 ranks one row, and further ranks nothing.
        rows = weight.shape[0] / (layout.tensor_size if dim == 0 else 1)
        held = number * num_bytes * math.ceil(rows / layout.num_shards) / rows
        part += WeightBytes(
            frozen=0.0 if trains else number * num_bytes,
            trained=number * size if trains else 0.0,
            gathered=number * (2.0 if in_bf16 else num_bytes),
            num_trained=number if trains else 0.0,
            held=held,
            held_trained=held if trains else 0.0,
        )
    return part


def measure_model(
    model: Any,
    precision: str,
    quantization: QuantizationConfig | None = None,
    strategy: StrategyConfig | None = None,
    *,
    num_ranks: int = 1,
    num_nodes: int = 1,
) -> ModelSize:
    """Return the sizes of a model for one rank of `strategy`, which must be resolved.

    The model must not be quantized yet; it may be on meta.
    """
    from app.strategy.tensor_parallel import can_split_head

    strategy = strategy or StrategyConfig(name="single")
    tensor_size = tensor_parallel_size(strategy, num_ranks // num_nodes)
    weight_shards, _, _ = num_shards(strategy, num_ranks, num_nodes)
    plan = layer_plan(model) if tensor_size > 1 else {}
    names = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight) for end in (embedding, head) for weight in end.parameters()}
    layout = WeightLayout(precision, quantization, weight_shards, tensor_size, frozenset(ends))

    def add_up(named: Iterable[tuple[str, torch.nn.Parameter]]) -> WeightBytes:
        return sum_weight_bytes(dict(named), layout, plan)

    layers = [add_up(model.get_submodule(name).named_parameters()) for name in names]
    others = {
        name: weight
        for name, weight in model.named_parameters()
        if id(weight) not in ends and not name.startswith(tuple(f"{layer}." for layer in names))
    }
    plan = {}
    head_share = 1 / tensor_size if can_split_head(head, tensor_size) else 1.0
    widths = widths_of(model.config)
    if widths is None:
        raise UserError(
            "model.path: config.json does not give the width of the layers; the memory estimate "
            "needs hidden_size, num_hidden_layers and num_attention_heads"
        )
    is_fp32 = next(iter(embedding.parameters())).element_size() == 4
    is_tied = {id(w) for w in embedding.parameters()} == {id(w) for w in head.parameters()}
    return ModelSize(
        layer=sum(layers, WeightBytes()) * (1 / len(layers)),
        num_layers=len(layers),
        embedding=add_up(embedding.named_parameters()),
        head=WeightBytes() if is_tied else add_up(head.named_parameters()) * head_share,
        rest=add_up(others.items()),
        width=widths.hidden,
        inner_width=widths.feed_forward,
        vocab_size=embedding.num_embeddings,
        # Under autocast an fp32 embedding makes hidden states fp32, unless FSDP gathers it in bf16.
        hidden_bytes=4 if is_fp32 else 2,
    )


KEPT_WIDTHS, KEPT_INNER_WIDTHS = 8, 5
"""hidden and feed-forward states per token, in bf16, that a layer with LoRA saves for its backward
pass: 32 layers of a Llama 8B at 8192 tokens were traced to save 46 GiB, 35 with Liger's kernels"""
GRADIENT_WIDTHS, GRADIENT_INNER_WIDTHS = 2, 3
"""gradients of such states that exist at the same time in the backward pass of a layer"""
SELECTIVE_WIDTHS = 6
"""hidden states per token and layer that recompute=selective saves"""
LIVE_UNDER_ZERO3 = 1e9
"""number of weights that DeepSpeed keeps gathered (its stage3_max_live_parameters)"""
ZERO_BUCKET = 5e8
"""number of gradients that DeepSpeed reduces at once (its reduce_bucket_size)"""


def estimate_memory(
    size: ModelSize,
    strategy: StrategyConfig,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    optimizer: str = "adamw",
    tokens: int,
    recompute: str,
    accumulation: int = 1,
) -> RankMemory:
    """Estimate the peak memory of one rank for micro-batches of `tokens`.

    `strategy` must be resolved, and `size` measured for it and the same ranks.
    """
    weight_shards, gradient_shards, state_shards = num_shards(strategy, num_ranks, num_nodes)
    whole = size.whole
    held = (whole.frozen + whole.trained) / weight_shards
    gradients = whole.trained / gradient_shards
    states = optimizer_state_bytes(size, optimizer)
    states += whole.num_trained * outer_state_bytes(strategy)
    states = states / state_shards + feedback_bytes(size, strategy)
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
            end = max(part.frozen + part.trained for part in (size.embedding, size.head))
            gathered = size.hidden_bytes * LIVE_UNDER_ZERO3 + end
            gathered = min(gathered, whole.frozen + whole.trained)
            held *= strategy.offload_parameters == "none"
    elif isinstance(strategy, FsdpConfig) and (weight_shards > 1 or strategy.offload_parameters):
        if accumulation > 1 and whole.num_trained <= MAX_UNSHARDED_SHARE * _num_weights(whole):
            gradients = whole.trained
        else:
            gradients = whole.held_trained
        held = whole.held
        states *= whole.held_trained * state_shards / max(whole.trained, 1.0)
        gathered = max(gathered_by_fsdp(size, strategy))
        if strategy.offload_parameters:
            held = states = 0.0
    return RankMemory(
        weights=held,
        gradients=gradients,
        optimizer=states,
        gathered=gathered,
        activations=_activations(size, strategy, tokens, recompute),
    )


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


def states_of_weights(optimizer: str, part: str, num_trained: float, num_bytes: float) -> float:
    """Return the bytes of the optimizer states that some weights have on the device.

    part: "embedding", "head" or "rest" of the model; num_bytes: what the weights themselves take.
    """
    states = STATES.get(optimizer, 0)
    if part != "rest":
        states = VOCABULARY_STATES.get(optimizer, states)
    each = 4 if part == "embedding" else 1
    return states * num_bytes + EIGHT_BIT_STATES.get(optimizer, 0) * each * num_trained


def _num_weights(part: WeightBytes) -> float:
    """Return the approximate number of stored elements: FSDP counts packed weights as stored."""
    return part.num_trained + part.frozen / 2


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
    trained = size.layer.trained / max(1.0, size.layer.frozen + size.layer.trained)
    # Before the first layer comes the embedding, which FSDP gathers even if it is frozen.
    at_first = root + (1 + trained) * layer + ends[0]
    return at_ends, root + 2 * ends[1], max(root + (2 + trained) * layer, 2 * root), at_first


def _activations(size: ModelSize, strategy: StrategyConfig, tokens: int, recompute: str) -> float:
    element_bytes = size.hidden_bytes
    if isinstance(strategy, FsdpConfig) and strategy.shards_data_parallel:
        element_bytes = 2
    one_input = tokens * size.width * element_bytes
    layer_bytes = 2 * tokens * (KEPT_WIDTHS * size.width + KEPT_INNER_WIDTHS * size.inner_width)
    working = layer_bytes + 2 * tokens * (
        GRADIENT_WIDTHS * size.width + GRADIENT_INNER_WIDTHS * size.inner_width
    )
    saved = {
        "none": layer_bytes,
        "selective": one_input + tokens * 2 * SELECTIVE_WIDTHS * size.width,
        "offload": 2 * one_input / size.num_layers,
    }.get(recompute, one_input)
    rows = min(tokens, rows_per_chunk(size.vocab_size, "cuda"))
    loss = float(rows * size.vocab_size * (4 + 2 + 2) + 2 * one_input)
    end = size.head if size.head.gathered else size.embedding
    if end.trained:  # its gradient in fp32, and the product of one chunk
        loss += end.num_trained * (4 + 2)
    return size.num_layers * saved + max(working, loss)
