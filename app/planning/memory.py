"""Estimate the memory of a run: of its GPUs by part, at the moments of a step; of host and disk.

Model states and gathered weights come from `states`, activations from `activations`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from app.model.attention.backends import MAX_FLASH_HEAD_DIM
from app.model.layers import num_layers_in_fp8
from app.model.quantization import QuantizationConfig
from app.model.recompute import FEED_FORWARD_TOKENS, WHOLE_LAYERS
from app.planning.activations import (
    FP32,
    HALF,
    LayerExecution,
    autocast_copy_bytes,
    estimate_activations,
    estimate_loss,
)
from app.planning.flops import Stage, stages_of
from app.planning.hardware import HardwareConfig
from app.planning.planned_model import PlannedModel, dtype_bytes
from app.planning.states import (
    ModelSize,
    ModelStates,
    estimate_states,
    feedback_bytes,
    gathered_by_fsdp,
    keeps_gradients_whole,
    num_shards,
    optimizer_state_bytes,
    outer_state_bytes,
    size_for,
)
from app.strategy import settings

GIB = 2**30
USABLE_SHARE = 0.92
"""usable share of a GPU's memory; the rest is lost to fragmentation"""
STREAMED_LAYERS = 2
"""layers of a streamed base that are on the GPU at one time"""
CONTEXT_GIB = 1.5
"""memory of a GPU that CUDA and NCCL take"""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The settings of a run that determine its memory and speed; every `auto` is resolved."""

    model: PlannedModel
    hardware: HardwareConfig
    strategy: settings.StrategyConfig
    quantization: QuantizationConfig
    recompute: str
    recompute_every: int = 1
    recompute_layers: int | None = None
    """the number of layers, counted from the first, that may be recomputed; None: all"""
    precision: str = "bf16"
    """fp32, bf16, bf16-pure or fp16"""
    trains_in_fp8: bool = False
    """whether all decoder layers except the first and the last train with products in FP8"""
    optimizer: str = "adamw"
    micro_batch_size: int = 1
    sequence_len: int = 2048
    accumulation: int = 1
    trains_base: bool = False
    drops_inputs: bool = False
    """whether each adapter applies its own dropout to its input"""
    fuses_adapters: bool = True
    fuses_norm_and_gate: bool = True
    fuses_loss: bool = True
    """whether one kernel computes the losses of a chunk"""
    keeps_scores: bool = False
    """whether attention is not one kernel and saves its scores"""
    groups_documents: bool = False
    """whether attention copies the tensors of each document, as for sdpa"""
    repeats_heads: bool = False
    """whether attention needs keys and values repeated for each query head"""
    runs_base: bool = False
    """whether the base computes each micro-batch, too, in a forward pass without its adapter"""
    runs_others: bool = False
    """whether half of the tokens are other rows' answers, which no backward pass reads (kto)"""
    recomputes_head: bool = False
    """whether the backward pass computes logits again, as a loss of whole answers needs"""
    teacher: PlannedModel | None = None
    """the model that runs forward on each micro-batch, too"""
    teacher_quantization: str = "none"
    num_checkpoints: int = 2
    """number of checkpoints that are kept on disk"""
    is_on_gpu: bool = True
    stream: str | None = None
    """where layers are copied from to the GPU, two at a time: host, disk; None if all are there"""
    stage: Stage | None = None
    """what a rank of a pipeline needs in addition; None for a whole model"""

    @property
    def computes_in_fp8(self) -> bool:
        """Whether products are in FP8, whose rates are assumed: none was measured."""
        return self.trains_in_fp8 or self.quantization.method == "fp8"

    @property
    def share_in_fp8(self) -> float:
        """Share of the decoder layers that train with products in FP8."""
        inner = max(0, self.model.num_layers - 2)
        return self.trains_in_fp8 * inner / max(1, self.model.num_layers)

    @property
    def base_share_in_fp8(self) -> float:
        """Share of the decoder layers whose frozen matrices are in FP8."""
        is_in_fp8 = self.quantization.method == "fp8"
        return is_in_fp8 * num_layers_in_fp8(self.model.num_layers) / max(1, self.model.num_layers)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, one per GPU."""
        return self.hardware.num_gpus

    @property
    def num_nodes(self) -> int:
        return self.hardware.num_nodes

    @property
    def tensor_size(self) -> int:
        """Number of ranks that split each matrix and see the same data."""
        return settings.tensor_parallel_size(self.strategy, self.hardware.gpus_per_node)

    @property
    def num_data_ranks(self) -> int:
        """Number of groups with different data, whose ranks split matrices, rows or layers."""
        stages = 1 if self.stage else settings.pipeline_parallel_size(self.strategy)
        return max(1, self.num_ranks // (self.tensor_size * self.context_size * stages))

    @property
    def context_size(self) -> int:
        """Number of ranks that hold slices of the same rows."""
        return settings.context_parallel_size(self.strategy)

    @property
    def expert_size(self) -> int:
        """Number of ranks that hold different experts."""
        return settings.expert_parallel_size(self.strategy)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank; for encoder-decoders those of both sides."""
        row = self.sequence_len * (2 if self.model.is_pair else 1)
        return self.micro_batch_size * row // self.context_size

    @property
    def trained_share(self) -> float:
        """Share of a micro-batch's tokens that have a backward pass."""
        return 0.5 if self.runs_others else 1.0

    @property
    def recomputed_layers(self) -> int:
        """Number of layers that are recomputed; only those with a backward pass are."""
        if self.recompute == "none":
            return 0
        layers, every = self.model.num_layers, self.recompute_every
        lowest = layers - self.model.trained_layers
        last = min(self.recompute_layers or layers, layers)
        return max(0, -(-last // every) - -(-lowest // every))

    @property
    def recomputes_last(self) -> bool:
        layers = self.model.num_layers
        is_counted = (layers - 1) % self.recompute_every == 0
        is_within = (self.recompute_layers or layers) >= layers
        return self.recomputed_layers > 0 and is_counted and is_within

    @property
    def recomputed_share(self) -> float:
        """Share of the layers with a backward pass that are recomputed."""
        return self.recomputed_layers / max(1, self.model.trained_layers)

    @property
    def share_computed_twice(self) -> float:
        """Share of the layers with a backward pass whose products are computed again."""
        return self.recomputed_share if self.recompute in WHOLE_LAYERS else 0.0

    @property
    def num_forwards(self) -> int:
        """Forward passes of a micro-batch, without those of recompute and a teacher."""
        return (1 + self.runs_base) * (1 + self.runs_others)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of a micro-batch between two layers."""
        return float(self.tokens * self.model.widths.hidden * self.execution.residual_bytes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step over all ranks."""
        return self.tokens * self.accumulation * self.num_data_ranks * self.context_size

    def under(self, strategy: settings.StrategyConfig) -> PlannedRun:
        """Return the run with `strategy` and as many packs per step over all ranks as before."""
        packs, other = self.accumulation * self.num_data_ranks, replace(self, strategy=strategy)
        return replace(other, accumulation=max(1, packs // other.num_data_ranks))

    def with_micro_batch(self, size: int) -> PlannedRun:
        """Return the run with `size` packs per micro-batch and as many packs per step as before."""
        packs = self.micro_batch_size * self.accumulation
        return replace(self, micro_batch_size=size, accumulation=packs // size)

    @cached_property
    def size(self) -> ModelSize:
        """The sizes of the model's weights on one rank."""
        return size_for(
            self.model,
            self.precision,
            self.quantization,
            self.strategy,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
        )

    @cached_property
    def teacher_size(self) -> ModelSize:
        """The sizes of the teacher's weights on one rank, which FSDP shards and others do not."""
        assert self.teacher is not None
        is_sharded = isinstance(self.strategy, settings.FsdpConfig)
        return size_for(
            self.teacher,
            self.precision,
            QuantizationConfig(method=self.teacher_quantization),
            self.strategy if is_sharded else settings.StrategyConfig(name="single"),
            num_ranks=self.num_ranks if is_sharded else 1,
            num_nodes=self.num_nodes if is_sharded else 1,
        )

    @property
    def fuses_layers(self) -> bool:
        """Whether a layer may read the weights of its modules without calling them.

        Not under tensor parallelism and ZeRO-3, which need a call of each module.
        """
        is_zero3 = isinstance(self.strategy, settings.ZeroConfig) and self.strategy.stage == 3
        return self.tensor_size == 1 and not is_zero3

    @property
    def keeps_gradients_whole(self) -> bool:
        """Whether a rank's gradients are whole between the micro-batches of a step."""
        if isinstance(self.strategy, settings.FsdpConfig):
            return keeps_gradients_whole(self.size.whole, self.strategy)
        return num_shards(self.strategy, self.num_ranks, self.num_nodes)[1] == 1

    @property
    def sent_share(self) -> float:
        """Bytes of gradients that FSDP sends, as a share of those of their own dtype."""
        is_bf16 = (
            isinstance(self.strategy, settings.FsdpConfig) and self.strategy.reduce_dtype == "bf16"
        )
        is_half = is_bf16 and self.gathers_half
        return HALF / dtype_bytes(self.precision, trains=True) if is_half else 1.0

    @property
    def adds_in_products(self) -> bool:
        """Whether products add gradients of the layers' matrices to those of earlier micro-batches.

        Under autocast gradients have another dtype than the sums.
        """
        is_alone = self.strategy.name == "single"
        is_whole = (
            isinstance(self.strategy, settings.FsdpConfig)
            and self.strategy.sync_each_micro_batch is False
        )
        is_autocast = self.precision in ("bf16", "fp16")
        return self.trains_base and self.fuses_layers and (is_alone or is_whole) and not is_autocast

    @property
    def feed_forward_share(self) -> float:
        """Share of a micro-batch whose feed-forward a recomputed layer has in memory at once."""
        is_chunked = self.recompute in WHOLE_LAYERS
        is_chunked &= self.fuses_layers and self.fuses_loss and not self.model.is_pair
        has_name = any("mlp." in name for weights, _ in self.model.layers for name in weights)
        if not (is_chunked and has_name) or self.model.widths.routed_copies:
            return 1.0
        return min(1.0, FEED_FORWARD_TOKENS / (self.trained_share * self.tokens))

    @property
    def gathers_half(self) -> bool:
        """Whether FSDP gathers weights in half precision, which autocast would copy otherwise."""
        if not isinstance(self.strategy, settings.FsdpConfig) or self.precision == "fp32":
            return False
        is_sharded = self.num_data_ranks > 1 or self.strategy.offload_parameters
        return is_sharded and self.strategy.shards_data_parallel

    @property
    def execution(self) -> LayerExecution:
        """How layers are computed, which determines the activations that they save."""
        is_half, gathers_half = self.precision != "fp32", self.gathers_half
        residual = dtype_bytes(self.precision, trains=self.trains_base)
        adapter_bytes = HALF if gathers_half else dtype_bytes(self.precision, trains=True)
        value_bytes = HALF if is_half else FP32
        is_autocast = adapter_bytes > value_bytes and not self.trains_base
        copies = int(is_autocast and not self.fuses_adapters)
        return LayerExecution(
            tokens=math.ceil(self.trained_share * self.tokens),
            value_bytes=value_bytes,
            residual_bytes=HALF if gathers_half else residual,
            fuses_norm_and_gate=self.fuses_norm_and_gate and self.model.widths.kind.has_rms_norms,
            trains_base=self.trains_base,
            drops_inputs=self.drops_inputs,
            # bitsandbytes' int8 product saves its own copy of the input as well.
            input_copies=copies + (self.quantization.method == "int8"),
            output_copies=2 * self.model.is_dora,
            keeps_scores=self.keeps_scores,
            sequence_len=self.sequence_len,
            groups_documents=self.groups_documents,
            # FlashAttention, which needs no repeated heads, does not support the latter two.
            repeats_heads=self.repeats_heads
            or (self.groups_documents and not is_half)
            or (self.groups_documents and self.model.widths.widest_head > MAX_FLASH_HEAD_DIM),
            rank_sum=self.model.adapter_ranks,
            scaled_inputs=self.model.scaled_features(of_inputs=True),
            scaled_outputs=self.model.scaled_features(of_inputs=False),
            adapter_value_bytes=adapter_bytes,
            merges_experts=self.model.widths.family.computes_all_experts
            and self.model.adapts_experts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Memory of a GPU by part, in bytes, at one moment of a step."""

    weights: float
    """frozen weights, including the scales of quantized ones"""
    teacher: float = 0.0
    """weights of a teacher"""
    trainable: float
    """trainable weights"""
    gradients: float
    """gradients, including DeepSpeed's communication bucket"""
    optimizer: float
    """optimizer states"""
    gathered: float
    """gathered weights of other ranks"""
    copies: float
    """autocast's half-precision copies of fp32 weights"""
    activations: float
    """saved activations, and temporaries of a layer's backward pass"""
    received: float
    """hidden states, and their gradients, from other stages of a pipeline"""
    loss: float
    """chunks of logits, and saved gradients of the head"""
    overhead: float
    """memory of CUDA, its libraries and NCCL"""
    moment: str
    """name of the moment"""

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part, without parts of size 0."""
        sizes = {name: getattr(self, name) for name in self.__slots__ if name != "moment"}
        return {name: value for name, value in sizes.items() if value > 0}

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


def usable_bytes(hardware: HardwareConfig) -> float:
    """Return the usable bytes of a GPU; the rest is lost to fragmentation."""
    return USABLE_SHARE * hardware.memory_gib * GIB


def fits(run: PlannedRun, memory: GpuMemory) -> bool:
    """Return whether a run fits its GPUs and the host memory of its machines."""
    return memory.total <= usable_bytes(run.hardware) and fits_host(run)


def fits_host(run: PlannedRun) -> bool:
    """Return whether a run fits the host memory of its machines; true if that is unknown."""
    available = run.hardware.host_memory_gib * GIB
    return not available or estimate_host_memory(run).total <= available


def estimate_gpu_memory(run: PlannedRun) -> GpuMemory:
    """Estimate the peak memory of the rank that needs the most."""
    return max(estimate_moments(run), key=lambda moment: moment.total)


def estimate_moments(run: PlannedRun) -> list[GpuMemory]:
    """Estimate the memory of the rank that needs the most, at each moment that may be the peak.

    During the backward pass activations shrink and gradients grow linearly, so that the peak is at
    one of its ends. A step first frees the gradients of the previous one.
    """
    if stages := stages_of(run):
        return max(map(estimate_moments, stages), key=lambda each: max(m.total for m in each))
    states = estimate_states(
        run.size,
        run.strategy,
        num_ranks=run.num_ranks,
        num_nodes=run.num_nodes,
        optimizer=run.optimizer,
        accumulation=run.accumulation,
    )
    execution, copies = run.execution, autocast_copy_bytes(run)
    # DeepSpeed holds as many bytes all the time.
    at_ends = at_loss = in_layers = at_first = at_step = states.gathered
    if isinstance(run.strategy, settings.FsdpConfig) and states.gathered:
        at_ends, at_loss, in_layers, at_first = gathered_by_fsdp(run.size, run.strategy)
        at_step = 0.0
    gradients = _gradients(run, states.gradients)
    layers = estimate_activations(run, execution)
    of_loss, kept_by_loss = estimate_loss(run, execution)
    trained_layers = max(1, run.model.trained_layers)
    before = {"gradients": gradients.at_loss, "activations": layers.all, "copies": copies}
    moments: dict[str, dict[str, float]] = {
        "embedding or head gathered": {"gathered": at_ends, "loss": 0.0, **before},
        "loss": {"gathered": at_loss, "loss": of_loss, **before},
        "backward pass of the last layer": {
            "gradients": gradients.at_last,
            "activations": layers.at_last,
            "copies": copies,
        },
        "backward pass of the second layer": {
            "gradients": gradients.at_first,
            "activations": layers.at_second,
        },
        "backward pass of the first layer": {
            "gathered": at_first,
            "gradients": gradients.at_first,
            "activations": layers.at_first,
        },
        "end of the backward pass": {"activations": layers.of_stream},
        "optimizer step": {"gathered": at_step, "copies": 0.0},
    }
    defaults = _constant_parts(run, states) | {
        "gathered": in_layers,
        "copies": copies / trained_layers if run.recompute == "none" else copies,
        "loss": kept_by_loss,
        "gradients": gradients.at_end,
        "activations": 0.0,
    }
    return [GpuMemory(**defaults | parts, moment=moment) for moment, parts in moments.items()]


def _constant_parts(run: PlannedRun, states: ModelStates) -> dict[str, float]:
    """Return the parts that stay the same during a step."""
    size, whole = run.size, run.size.whole
    trained_share, weights = whole.trained / max(1.0, whole.total), states.weights
    if isinstance(run.strategy, settings.ZeroConfig) and run.strategy.partition_within_node:
        weights += whole.total / run.hardware.gpus_per_node  # ZeRO++ hpZ's second copy
    stage = run.stage
    elsewhere = 0.0
    if run.stream is not None:
        elsewhere = size.layer.frozen * max(0, size.num_layers - STREAMED_LAYERS)
    return {
        "weights": weights * (1 - trained_share) - elsewhere,
        "teacher": _teacher_bytes(run),
        "trainable": weights * trained_share,
        "optimizer": states.optimizer,
        # PyTorch allocates a stage's buffers for all micro-batches.
        "received": stage.received * run.accumulation * run.hidden_bytes if stage else 0.0,
        "overhead": CONTEXT_GIB * GIB if run.is_on_gpu else 0.0,
    }


def _teacher_bytes(run: PlannedRun) -> float:
    """Return the bytes of a teacher's weights: with FSDP a shard, and the head during the loss."""
    if run.teacher is None:
        return 0.0
    size, strategy = run.teacher_size, run.strategy
    shards, _, _ = num_shards(strategy, run.num_ranks, run.num_nodes)
    if not isinstance(strategy, settings.FsdpConfig) or shards == 1:
        return size.whole.frozen
    own = size.whole.held - size.whole.held_trained
    return own + (size.head.gathered or size.embedding.gathered)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """Bytes of gradients at several moments of a step."""

    at_loss: float
    at_last: float
    """during the backward pass of the last layer"""
    at_first: float
    """during the backward pass of the first layer"""
    at_end: float


def _gradients(run: PlannedRun, gradients: float) -> _Gradients:
    """Return the gradients at each moment, including communication buffers.

    `gradients`: the bytes at the end of the backward pass.
    """
    size, strategy, accumulates = run.size, run.strategy, run.accumulation > 1
    whole = size.whole
    if isinstance(strategy, settings.ZeroConfig) and strategy.stage == 2 and gradients:
        # The bucket exists in backward passes only, and fills before a rank gets its own shard.
        own = whole.trained / num_shards(strategy, run.num_ranks, run.num_nodes)[1]
        bucket, kept = gradients - own, own if accumulates else 0.0
        before = own if accumulates else own * (1 - bucket / max(1.0, whole.trained))
        return _Gradients(
            at_loss=kept,
            at_last=kept + bucket + size.layer.trained,
            at_first=before + bucket,
            at_end=gradients,
        )
    end = size.head if size.head.gathered else size.embedding
    if isinstance(strategy, settings.DdpConfig) and accumulates:
        # The backward pass of a step's last micro-batch copies them into persistent buckets.
        return _Gradients(
            at_loss=2 * gradients,
            at_last=2 * gradients,
            at_first=gradients + size.embedding.trained + size.layer.trained,
            at_end=gradients,
        )
    if not accumulates and (strategy.name == "single" or isinstance(strategy, settings.FsdpConfig)):
        share = gradients / max(1.0, whole.trained)
        return _Gradients(
            at_loss=0.0,
            at_last=share * (end.trained + size.layer.trained),
            at_first=gradients - share * size.embedding.trained,
            at_end=gradients,
        )
    # The buffers of DDP and DeepSpeed persist, and so do gradients between micro-batches.
    return _Gradients(at_loss=gradients, at_last=gradients, at_first=gradients, at_end=gradients)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory of one machine, in bytes."""

    loading: float
    """while the base is loaded: one copy per node if weights are sharded over the GPUs"""
    offloaded: float
    """weights, gradients, optimizer states or layer inputs that are offloaded"""

    @property
    def total(self) -> float:
        """The larger of the memory for loading and for training."""
        return max(self.loading, self.offloaded)


def estimate_host_memory(run: PlannedRun) -> HostMemory:
    """Estimate a machine's host memory, without what the processes themselves take."""
    size = _with_all_experts(run)
    whole, strategy = size.whole, run.strategy
    per_node, nodes = run.hardware.gpus_per_node, run.num_nodes
    on_disk = strategy.offload_optimizer == "disk"
    all_states = whole.trained + (0.0 if on_disk else _state_bytes(run, size))
    loading = offloaded = 0.0
    if settings.shards_weights(strategy):
        loading = whole.total * run.tensor_size
    if run.stream == "host":
        loading, offloaded = whole.total, size.layer.frozen * size.num_layers
    if isinstance(strategy, settings.FsdpConfig) and strategy.offload_parameters:
        _, _, shares = num_shards(strategy, run.num_ranks, nodes)
        offloaded += (whole.total + all_states) / shares * per_node
    if isinstance(strategy, settings.ZeroConfig):
        if strategy.offload_optimizer != "none":
            offloaded += (all_states + whole.trained) / nodes
        if strategy.offload_parameters != "none":
            offloaded += whole.total / nodes
    if run.recompute == "offload":
        widths = run.model.widths
        layer_input = run.execution.tokens * widths.hidden * run.execution.residual_bytes
        offloaded += layer_input * run.recomputed_layers * per_node
    return HostMemory(loading=loading, offloaded=offloaded)


def _with_all_experts(run: PlannedRun) -> ModelSize:
    """Return the sizes of a model of which no rank has a part of the experts."""
    if isinstance(run.strategy, settings.FsdpConfig) and run.expert_size > 1:
        return replace(run, strategy=replace(run.strategy, expert_parallel_size=1)).size
    return run.size


def _state_bytes(run: PlannedRun, size: ModelSize) -> float:
    outer = size.whole.num_trained * outer_state_bytes(run.strategy)
    return outer + optimizer_state_bytes(size, run.optimizer)


def estimate_disk(run: PlannedRun) -> float:
    """Estimate the bytes of all checkpoints, of the result, and of a machine's states on disk.

    While a checkpoint is written, there is one more than are kept.
    """
    size = _with_all_experts(run)
    split = run.tensor_size
    trained = size.whole.trained * split
    checkpoint = trained + _state_bytes(run, size) * split
    if isinstance(run.strategy, settings.LocalSgdConfig):  # the mean, and the state of each node
        checkpoint *= 1 + (run.strategy.replicas or run.num_nodes)
    if isinstance(run.strategy, settings.DdpConfig) and run.strategy.compression == "topk":
        checkpoint += run.num_ranks * feedback_bytes(size, run.strategy)  # of each rank
    result = trained + (size.whole.frozen if run.trains_base else 0.0)
    result += estimate_disk_states(run)
    return checkpoint * (run.num_checkpoints + 1) + result


def estimate_disk_states(run: PlannedRun) -> float:
    """Estimate the bytes of a machine's optimizer states that are on a disk."""
    if run.strategy.offload_optimizer != "disk":
        return 0.0
    _, _, shares = num_shards(run.strategy, run.num_ranks, run.num_nodes)
    return _state_bytes(run, _with_all_experts(run)) / shares * run.hardware.gpus_per_node
