"""Peak memory of one rank by part, by arithmetic: from a meta model and what a run asks for.

Weights, gradients and optimizer states are counted, what a strategy gathers follows from how it
does so, and activations are a rule of thumb.
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
from app.process.errors import UserError
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

if TYPE_CHECKING:
    import torch

STATES = {"adamw": 2, "schedule_free": 2, "muon": 1, "adafactor": 0, "paged_adamw8bit": 0}
"""states per weight, in its dtype and on the device"""
EIGHT_BIT_STATES = {"adamw8bit": 2}
"""states per weight of one byte each"""
BITS = {"int8": 8.0, "nf4": 4.5}
"""per quantized weight with its scales (arXiv 2305.14314: one of 32 bits for 64 weights)"""
DOUBLE_QUANT_SAVED_BITS = 0.373
"""bits per weight, same source"""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of some modules' weights before sharding; under tensor parallelism a rank's part."""

    frozen: float = 0.0
    trained: float = 0.0
    gathered: float = 0.0
    """in the dtype in which FSDP gathers them"""
    num_trained: float = 0.0
    """weights"""
    held: float = 0.0
    """on the fullest rank, where weights are shared out row by row"""
    held_trained: float = 0.0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, factor: float) -> WeightBytes:
        return WeightBytes(*(getattr(self, name) * factor for name in self.__slots__))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What the arithmetic needs to know of a model with its adapter."""

    layer: WeightBytes
    """the mean of its layers"""
    num_layers: int
    embedding: WeightBytes
    head: WeightBytes
    """nothing where it is the embedding's weight"""
    rest: WeightBytes
    width: int
    """hidden size"""
    inner_width: int
    """of a feed-forward"""
    vocab_size: int
    hidden_bytes: int
    """of a number of the hidden states between layers"""

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
    """weights of other ranks, in their turn"""
    activations: float

    @property
    def total(self) -> float:
        """All parts, as if their peaks were at one moment."""
        return sum(getattr(self, name) for name in self.__slots__)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.1f}" for name in self.__slots__)
        return f"{self.total / 2**30:.1f} GiB ({parts})"


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """What decides the bytes of a weight on a rank."""

    precision: str
    quantization: QuantizationConfig | None = None
    shares: int = 1
    """that rows are divided into"""
    tensor_size: int = 1
    ends: frozenset[int] = frozenset()
    """ids of the weights of embedding and head, which are not quantized"""


def bytes_per_weight(weight: Any, quantization: QuantizationConfig | None) -> float:
    """Return the bytes per weight of a frozen matrix, with its scales."""
    if quantization is None or quantization.method == "none":
        return float(weight.element_size())
    saves = (
        DOUBLE_QUANT_SAVED_BITS if quantization.method == "nf4" and quantization.double_quant else 0
    )
    return (BITS[quantization.method] - saves) / 8


def sum_weight_bytes(
    weights: Mapping[str, Any], sharing: WeightLayout, plan: Mapping[str, str]
) -> WeightBytes:
    """Add up weights that FSDP gathers together, split as the tensor parallel `plan` says.

    They are parameters, or have their shape, element_size(), numel() and requires_grad.
    """
    part = WeightBytes()
    in_bf16 = sharing.precision == "bf16" and all(w.element_size() == 4 for w in weights.values())
    for name, weight in weights.items():
        dim = split_dim(plan, name)
        share = 1.0 if dim is None else 1 / sharing.tensor_size
        size = num_bytes = float(weight.element_size())
        if not weight.requires_grad and weight.ndim >= 2 and id(weight) not in sharing.ends:
            num_bytes = bytes_per_weight(weight, sharing.quantization)
        number = weight.numel() * share
        trains = weight.requires_grad
        # A LoRA of rank 16 gives each of 16 ranks a row, and the others nothing.
        rows = weight.shape[0] / (sharing.tensor_size if dim == 0 else 1)
        held = number * num_bytes * math.ceil(rows / sharing.shares) / rows
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
    """Add up the weights of a model that is not quantized yet; it may be on meta.

    For one rank of those of `strategy`, which must be resolved.
    """
    from app.strategy.tensor_parallel import can_split_head

    strategy = strategy or StrategyConfig(name="single")
    tensor_size = tensor_parallel_size(strategy, num_ranks // num_nodes)
    shares, _, _ = num_shards(strategy, num_ranks, num_nodes)
    plan = layer_plan(model) if tensor_size > 1 else {}
    names = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight) for end in (embedding, head) for weight in end.parameters()}
    shared = WeightLayout(precision, quantization, shares, tensor_size, frozenset(ends))

    def add_up(named: Iterable[tuple[str, torch.nn.Parameter]]) -> WeightBytes:
        return sum_weight_bytes(dict(named), shared, plan)

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
            "model.path: its config.json does not say how wide its layers are; the arithmetic "
            "knows hidden_size, num_hidden_layers and num_attention_heads by these names"
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
        # Under autocast an fp32 embedding makes them fp32, unless FSDP gathers it in bf16.
        hidden_bytes=4 if is_fp32 else 2,
    )


KEPT_WIDTHS, KEPT_INNER_WIDTHS = 8, 5
"""hidden and feed-forward states of a token, in bf16, that a layer with LoRA keeps for its backward
pass: 32 layers of a Llama 8B at 8192 tokens, traced, keep 46 GiB, and 35 with Liger's kernels"""
GRADIENT_WIDTHS, GRADIENT_INNER_WIDTHS = 2, 3
"""gradients of such states that are there at once in it"""
SELECTIVE_WIDTHS = 6
"""hidden states of a token and layer that recompute=selective keeps"""
LIVE_UNDER_ZERO3 = 1e9
"""weights that DeepSpeed keeps gathered (its stage3_max_live_parameters)"""
ZERO_BUCKET = 5e8
"""gradients that DeepSpeed sends at once (its reduce_bucket_size)"""


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

    `strategy` must be resolved, and `size` measured for it and its ranks.
    """
    of_weights, of_gradients, of_states = num_shards(strategy, num_ranks, num_nodes)
    whole = size.whole
    held = (whole.frozen + whole.trained) / of_weights
    gradients = whole.trained / of_gradients
    states = whole.trained * STATES.get(optimizer, 0)
    states += whole.num_trained * EIGHT_BIT_STATES.get(optimizer, 0)
    states += whole.num_trained * outer_state_bytes(strategy)
    states = states / of_states + feedback_bytes(size, strategy)
    gathered = 0.0
    if isinstance(strategy, ZeroConfig):
        states += whole.trained / of_states  # its own copy of what it steps
        bucket = min(ZERO_BUCKET, whole.num_trained) / max(whole.num_trained, 1)
        gradients += whole.trained * bucket
        states, gradients = (
            (0.0 if strategy.offload_optimizer != "none" else part) for part in (states, gradients)
        )
        if strategy.stage == 3:
            # In their own dtype; a model with fewer weights than these stays whole for the step.
            end = max(part.frozen + part.trained for part in (size.embedding, size.head))
            gathered = size.hidden_bytes * LIVE_UNDER_ZERO3 + end
            gathered = min(gathered, whole.frozen + whole.trained)
            held *= strategy.offload_parameters == "none"
    elif isinstance(strategy, FsdpConfig) and (of_weights > 1 or strategy.offload_parameters):
        if accumulation > 1 and whole.num_trained <= MAX_UNSHARDED_SHARE * _num_weights(whole):
            gradients = whole.trained
        else:
            gradients = whole.held_trained
        held = whole.held
        states *= whole.held_trained * of_states / max(whole.trained, 1.0)
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


def _num_weights(part: WeightBytes) -> float:
    """Return about how many weights there are: FSDP counts packed ones, as they are stored."""
    return part.num_trained + part.frozen / 2


def outer_state_bytes(strategy: StrategyConfig) -> int:
    """Return the bytes a trained weight that local SGD's outer steps keep: anchor and momentum."""
    return 8 if isinstance(strategy, LocalSgdConfig) and strategy.uses_outer_optimizer else 0


def feedback_bytes(size: ModelSize, strategy: StrategyConfig) -> float:
    """Return the bytes that a rank keeps of gradients that compression has not sent yet.

    PowerSGD sends vectors whole, and its low-rank matrices, which are small, are not counted.
    """
    keeps = isinstance(strategy, DdpConfig) and strategy.compression in ("powersgd", "topk")
    return size.whole.trained if keeps else 0.0


def num_shards(strategy: StrategyConfig, num_ranks: int, num_nodes: int) -> tuple[int, int, int]:
    """Return into how many shares weights, gradients and optimizer states are divided."""
    if isinstance(strategy, FsdpConfig):
        groups = num_ranks // tensor_parallel_size(strategy, num_ranks // num_nodes)
        replicas = num_nodes if strategy.replicas is None else strategy.replicas
        shares = groups // replicas if strategy.shards_data_parallel else 1
        return shares, shares, shares
    if isinstance(strategy, ZeroConfig):
        return (
            num_ranks if strategy.stage == 3 else 1,
            num_ranks if strategy.stage >= 2 else 1,
            num_ranks,
        )
    return 1, 1, 1


def gathered_by_fsdp(size: ModelSize, strategy: FsdpConfig) -> tuple[float, float, float, float]:
    """Return the bytes of weights that are whole at once: while embedding or head arrive, at the
    loss, in a layer's backward, and in that of the first layer.

    A unit arrives in one buffer and is copied out of it, while the buffer of the unit before is
    kept. What has no unit of its own stays whole from forward to backward.
    """
    layer, root = size.layer.gathered, size.rest.gathered
    ends = [size.embedding.gathered, size.head.gathered]
    if not size.head.gathered:
        root, ends = root + size.embedding.gathered, [0.0, 0.0]
    if not strategy.reshard_after_forward:
        whole = root + sum(ends) + layer * (size.num_layers + 2)
        return whole, whole, whole, whole
    # No layer is there yet when the embedding is.
    at_ends = max(root + 2 * ends[0], root + layer + 2 * ends[1], 2 * root)
    # A layer, the next one's buffer, and as much of gradients on their way as it trains.
    trained = size.layer.trained / max(1.0, size.layer.frozen + size.layer.trained)
    # Before the first layer comes the embedding, which FSDP asks for even where it is frozen.
    at_first = root + (1 + trained) * layer + ends[0]
    return at_ends, root + 2 * ends[1], max(root + (2 + trained) * layer, 2 * root), at_first


def _activations(size: ModelSize, strategy: StrategyConfig, tokens: int, recompute: str) -> float:
    number = size.hidden_bytes
    if isinstance(strategy, FsdpConfig) and strategy.shards_data_parallel:
        number = 2
    one_input = tokens * size.width * number
    of_layer = 2 * tokens * (KEPT_WIDTHS * size.width + KEPT_INNER_WIDTHS * size.inner_width)
    working = of_layer + 2 * tokens * (
        GRADIENT_WIDTHS * size.width + GRADIENT_INNER_WIDTHS * size.inner_width
    )
    kept = {
        "none": of_layer,
        "selective": one_input + tokens * 2 * SELECTIVE_WIDTHS * size.width,
        "offload": 2 * one_input / size.num_layers,
    }.get(recompute, one_input)
    rows = min(tokens, rows_per_chunk(size.vocab_size, "cuda"))
    loss = float(rows * size.vocab_size * (4 + 2 + 2) + 2 * one_input)
    end = size.head if size.head.gathered else size.embedding
    if end.trained:  # its gradient in fp32, and a product of a chunk
        loss += end.num_trained * (4 + 2)
    return size.num_layers * kept + max(working, loss)
