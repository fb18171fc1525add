"""Estimate the time of an optimizer step from FLOPs, memory traffic and collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

from app.model.attention import gather_reason
from app.planning.activations import HALF
from app.planning.communication import (
    ALL_GATHER,
    CONTENTION,
    LINKS,
    MOST_CONTENTION,
    REDUCE_SCATTER,
    Collective,
    collective_seconds,
    exposed_seconds,
    list_collectives,
)
from app.planning.flops import Flops, estimate_flops, stages_of
from app.planning.hardware import HardwareConfig
from app.planning.memory import STREAMED_LAYERS, PlannedRun
from app.planning.planned_model import dtype_bytes
from app.planning.states import num_shards
from app.strategy.settings import FsdpConfig, PipelineConfig, ZeroConfig
from common.text import percent

_PRODUCTS, ATTENTION, BANDWIDTH = 0.72, 0.45, 0.69
"""share of the datasheet's rate that large kernels reach: half-precision matrix products, attention
and memory-bound kernels (measured on an H100 on 2026-11-27: benchmarks/results; other cards are
assumed to reach the same shares, in products in proportion to hardware.product_share)"""
MEASURED, KERNEL_ERROR = {"h100": 0.05, "h200": 0.1}, 0.15
"""relative error of the time of kernels, on cards where it was measured and on others"""
SPREAD = 0.015
"""standard deviation of the speed of GPUs of one model: they vary by 8 % (arXiv 2208.11035), taken
as the range of 99 % of them. All ranks wait for the slowest"""
_LAUNCHES, _LORA_LAUNCHES, _PLAIN_LAUNCHES = 42, 49, 2.5
"""kernels per layer and micro-batch, those that LoRA adds, and their factor without fused kernels
(results/2026-11-26_gpu-modelled.md)"""
_LAUNCH = 5e-6
"""seconds of the host per kernel (assumed)"""
_FASTEST_ATTENTION = 443e12
"""FLOP/s of cuDNN's attention on an H100, same source; on newer cards none was measured. It runs
for documents of equal lengths, which estimate_flops assumes. Others get FlashAttention 2, which
needs about twice the time per FLOP, but they have fewer FLOPs"""
_FUSED = {"norm": 31.9, "rope": 8.2, "gate": 16.0, "adds": 12.0, "layout": 5.0, "lora": 9.8}
_PLAIN = {"norm": 253.0, "rope": 36.0, "gate": 28.0, "adds": 182.0, "layout": 20.0, "lora": 38.0}
"""bytes of memory traffic per token, layer and feature outside of products; features are hidden
ones for norm, adds and layout, those of heads for rope, of the feed-forward for gate, and of the
outputs of matrices with LoRA for lora. Counted for an 8B model by `make bench ONLY=gpu_ops`
(results/2026-11-23_gpu-modelled.md), for our fused kernels and for plain transformers + peft"""
_GATHERED = 78.0
"""bytes of memory traffic per token of a row, layer and feature of the queries if context
parallelism gathers keys: of repeated heads, and of their gradients, which pieces of the row add.
Counted in simulated steps of Qwen2.5 1.5B and 7B (rows of 128k tokens on 8 H100)"""
_LOSS_TRAFFIC = 6.8
"""bytes of memory traffic per token and logit, same source"""
_LOGITS_TRAFFIC = 2.1
"""the same of a pass whose gradients come later or never, counted for dpo and kto on an 8B"""
_FORWARD_TRAFFIC = 0.38
"""share of the forward pass in a layer's memory traffic, which recomputing it adds, same source"""
_DEQUANTIZED = {"nf4": 0.53 + 2.0, "int8": 1.0 + 2.0}
"""bytes read and written to dequantize one weight"""
_FP8_PRODUCTS = 0.6
"""share of the datasheet's FP8 rate that products with a scale per row reach: 1,150 to 1,250 TFLOPS
are published for an H100; not measured"""
_FP8_INPUTS = 3.0
"""bytes read and written to quantize one value of an activation or a gradient in bf16, by one
kernel"""
_FP8_COLUMNS = 5.0
"""bytes to quantize one value along its column, which reads it twice"""
_FP8_TRANSPOSED = 2.0
"""bytes read and written to transpose one weight for the gradient of the input"""
_OPTIMIZER_PASSES = 7
"""elements that AdamW reads and writes per trainable weight: weight, gradient, two states"""
_HOST_STEP = 0.25e-9
"""seconds of a node's processors per trainable weight whose states are in their memory: 0.22 to
0.30 s for 1 to 8 billion weights on two Xeons (arXiv 2101.06840, table 4; ours was not measured)"""
_LINK_PASSES = {"none": 0, "cpu": 3, "disk": 4}
"""elements per trainable weight between GPU and host in a step, by strategy.offload_optimizer: two
states to the device and back with disk"""
_ACCUMULATION_PASSES = 3
"""elements read and written per trainable weight to add a micro-batch's gradient to the sum"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Estimated times of an optimizer step, in seconds, and derived figures."""

    products: float
    """matrix products"""
    attention: float
    traffic: float
    """memory-bound kernels, dequantization and the optimizer"""
    messages: float
    """all collectives, whether they overlap or not"""
    host: float
    """copies between GPUs and host memory"""
    exposed: float
    """what collectives, host copies, launches and the slowest GPU add to the computation"""
    step: float
    """the whole step"""
    tokens_per_second: float
    """throughput of all GPUs"""
    between: tuple[float, float]
    """lowest and highest throughput, as describe_range says"""
    mfu: float
    """model FLOPs utilization"""
    verdict: str
    """what bounds the step, with the reason"""
    idle: float = 0.0
    """waiting for the other stages of a pipeline, at the start and the end of a step"""


def estimate_speed(run: PlannedRun) -> Speed:
    """Estimate the time of an optimizer step; that of a disk of optimizer states is not known."""
    if stages := stages_of(run):
        return _speed_of_pipeline(run, [estimate_speed(stage) for stage in stages])
    collectives = list_collectives(run)
    products, attention, traffic = _pass_seconds(run, collectives)
    computes, launches = products + attention + traffic, _launch_seconds(run)
    ranks, error = run.num_ranks, _kernel_error(run)
    slowest = 1 + SPREAD * NormalDist().inv_cdf(ranks / (ranks + 1))
    stepped = run.size.whole.trained / num_shards(run.strategy, ranks, run.num_nodes)[2]
    offload, link = run.strategy.offload_optimizer, run.hardware.host_link_gb_per_second
    rate = BANDWIDTH * run.hardware.memory_gb_per_second * 1e9
    optimizer = _OPTIMIZER_PASSES * stepped / rate
    if offload == "cpu" or _keeps_weights_on_host(run):
        optimizer = _HOST_STEP * run.size.whole.num_trained / run.num_nodes
    link *= LINKS * 1e9
    streamed = _streamed_bytes(run)
    host = (_host_copies(run) + run.accumulation * sum(streamed)) / link if link else 0.0
    waits = _LINK_PASSES[offload] * stepped / link if link else 0.0
    flops = estimate_flops(run)

    def step_seconds(contention: float = CONTENTION, slower: float = 1.0) -> float:
        passes = slowest * max(slower * computes, launches)
        forward = passes / run.accumulation * flops.forward / flops.total
        backward = passes / run.accumulation - forward
        added = exposed_seconds(run, collectives, forward, backward, contention)
        copying = zip(streamed, (forward, backward), strict=True)
        late = sum(max(0.0, copied / link - each) for copied, each in copying) if link else 0.0
        return max(passes + added + late * run.accumulation, host) + optimizer + waits

    step = step_seconds()
    longest, shortest = step_seconds(MOST_CONTENTION, 1 + error), step_seconds(0.0, 1 - error)
    messages = sum(collective_seconds(run, each) for each in collectives)
    traffic += optimizer
    gaps = launches if launches > computes else 0.0
    parts = (products + attention, traffic, messages, host + waits, gaps)
    return Speed(
        products=products,
        attention=attention,
        traffic=traffic,
        messages=messages,
        host=host + waits,
        exposed=step - computes - optimizer,
        step=step,
        tokens_per_second=run.tokens_per_step / step,
        between=(run.tokens_per_step / longest, run.tokens_per_step / shortest),
        mfu=run.tokens_per_step / step / peak_tokens_per_second(run),
        verdict=_verdict(run, parts, collectives),
    )


def describe_range(run: PlannedRun) -> str:
    """Say on what the lowest and the highest throughput rest."""
    of_card = "measured" if run.hardware.name in MEASURED else "not measured"
    rests_on = f"{of_card} on this card"
    if run.computes_in_fp8:
        rests_on = "FP8 rates assumed, not measured"
    kernels = f"kernels +-{percent(_kernel_error(run), 0)} ({rests_on})"
    if run.num_ranks == 1:
        return kernels
    most = percent(MOST_CONTENTION, 0)
    return f"{kernels}; messages slow them by 0 to {most} while they overlap, as published"


def _kernel_error(run: PlannedRun) -> float:
    is_measured = run.hardware.name in MEASURED and not run.computes_in_fp8
    return MEASURED[run.hardware.name] if is_measured else KERNEL_ERROR


def _pass_seconds(run: PlannedRun, collectives: list[Collective]) -> tuple[float, float, float]:
    """Return seconds of products, attention and traffic in the passes of an optimizer step."""
    split, flops = run.tensor_size, estimate_flops(run)
    tokens = run.tokens * run.accumulation
    bandwidth = BANDWIDTH * run.hardware.memory_gb_per_second * 1e9
    products = _product_seconds(run, flops) * tokens / split
    # With few tokens, reading the weights takes longer than the products.
    products = max(products, _weight_reads(run) * run.accumulation / split / bandwidth)
    attention = flops.attention + flops.recomputed_scores + flops.recomputed_attention
    attention *= tokens / split
    attention /= min(ATTENTION * _full_rate(run), _FASTEST_ATTENTION)
    traffic = _traffic(run) * tokens + _dequantized(run) * run.accumulation / split
    traffic += _ACCUMULATION_PASSES * _summed_bytes(run)
    traffic += _copied_bytes(run, collectives)
    return products, attention, traffic / bandwidth


def _summed_bytes(run: PlannedRun) -> float:
    """Return the bytes of gradients that a step adds in passes of their own."""
    _, shards, _ = num_shards(run.strategy, run.num_ranks, run.num_nodes)
    size = run.size
    trained = size.whole.trained / (1 if run.keeps_gradients_whole else shards)
    if run.adds_in_products:
        trained -= size.layer.trained * size.num_layers
    return trained * (run.accumulation - 1)


def _copied_bytes(run: PlannedRun, collectives: list[Collective]) -> float:
    """Return the bytes read and written to copy weights and gradients out of and into messages."""
    copied = 0.0
    # Gradients in half precision are read as such, and written in the dtype of their sums.
    casts = run.gathers_half and not run.keeps_gradients_whole
    read = HALF / dtype_bytes(run.precision, trains=True) / run.sent_share if casts else 1.0
    for each in collectives:
        if each.overlaps and each.kind in (ALL_GATHER, REDUCE_SCATTER):
            passes = 1 + (read if each.kind == REDUCE_SCATTER else 1.0)
            copied += passes * each.num_bytes * each.times
    return copied


def _launch_seconds(run: PlannedRun) -> float:
    """Return the seconds of an optimizer step that the host takes to launch its kernels."""
    kernels: float = _LAUNCHES + _LORA_LAUNCHES * run.model.has_lora
    kernels *= 1 if run.execution.fuses_norm_and_gate else _PLAIN_LAUNCHES
    return _LAUNCH * kernels * run.model.num_layers * run.accumulation


def _speed_of_pipeline(run: PlannedRun, stages: list[Speed]) -> Speed:
    """Return the speed of the slowest stage, which waits until a micro-batch has passed the others.

    With equal stages a rank is idle for (p - 1) / (v m + p - 1) of a step (arXiv 2104.04473): `p`
    ranks, `v` stages on each, and `m` micro-batches.
    """
    assert isinstance(run.strategy, PipelineConfig)
    slowest = max(stages, key=lambda stage: stage.step)
    others = sum(stage.step for stage in stages) - slowest.step
    idle = others / (run.accumulation * run.strategy.stages_of_rank)
    step = slowest.step + idle
    share = slowest.step / step
    low, high = slowest.between
    waits = f"waiting for other stages takes {percent(1 - share, 0)} of a step"
    return replace(
        slowest,
        idle=idle,
        step=step,
        tokens_per_second=share * slowest.tokens_per_second,
        between=(share * low, share * high),
        mfu=share * slowest.tokens_per_second / peak_tokens_per_second(run),
        verdict=f"{slowest.verdict}; {waits}",
    )


def kernel_seconds(
    hardware: HardwareConfig, kind: str, dtype: str, flops: float, num_bytes: float
) -> float:
    """Estimate the time of one kernel: the larger of its compute time and its memory time."""
    peak = hardware.half_tflops if dtype in ("bfloat16", "float16") else hardware.fp32_tflops
    rate = 1e12 * peak * _product_share(hardware)
    if kind == "attention":
        rate = min(1e12 * peak * ATTENTION, _FASTEST_ATTENTION)
    bandwidth = BANDWIDTH * hardware.memory_gb_per_second * 1e9
    return max(flops / rate, num_bytes / bandwidth)


def _product_seconds(run: PlannedRun, flops: Flops) -> float:
    """Return the seconds of a token's matrix products."""
    whole = flops.products + flops.recomputed_products
    rate = _product_share(run.hardware) * _full_rate(run)
    in_fp8 = run.base_share_in_fp8 * flops.frozen
    if run.share_in_fp8:
        in_fp8 = run.share_in_fp8 * (whole - 6.0 * run.model.head_weights)
    if not in_fp8:
        return whole / rate
    of_fp8 = _FP8_PRODUCTS * 1e12 * run.hardware.fp8_tflops
    return (whole - in_fp8) / rate + in_fp8 / of_fp8


def peak_tokens_per_second(run: PlannedRun) -> float:
    """Return the tokens per second of all GPUs at an MFU of 1."""
    return run.num_ranks * _full_rate(run) / estimate_flops(run).model


def _product_share(hardware: HardwareConfig) -> float:
    return _PRODUCTS * hardware.product_share / HardwareConfig().product_share


def _full_rate(run: PlannedRun) -> float:
    """Return the FLOPs per second of a GPU's datasheet."""
    card = run.hardware
    return 1e12 * (card.fp32_tflops if run.precision == "fp32" else card.half_tflops)


def _weight_reads(run: PlannedRun) -> float:
    """Return the bytes of weights that the products of a micro-batch must read."""
    number = run.model.multiplied(trained=False) + run.model.multiplied(trained=True)
    passes = run.num_forwards + 1 + run.share_computed_twice
    return passes * 2.0 * (number + run.model.head_weights)


def _traffic(run: PlannedRun) -> float:
    """Return the bytes of memory traffic per token on a rank, outside of products."""
    widths, model, split = run.model.widths, run.model, run.tensor_size
    rates = _FUSED if run.execution.fuses_norm_and_gate else _PLAIN
    layer = rates["rope"] * (widths.query + widths.key_value) + rates["gate"] * widths.feed_forward
    layer += rates["layout"] * widths.hidden + rates["lora"] * widths.outputs * model.has_lora
    # Tensor parallelism leaves the hidden states whole on each rank.
    layer = layer / split + (rates["norm"] + rates["adds"]) * widths.hidden
    if run.context_size > 1 and gather_reason(widths.heads, widths.key_heads, run.context_size):
        layer += _GATHERED * widths.query * run.context_size * (1 - model.recurrent_share)
    # Layers below the lowest trainable one have a forward pass only.
    reached = run.trained_share * model.reached
    forwards = 1 + run.runs_base + run.recomputed_share * reached
    layer *= _FORWARD_TRAFFIC * forwards + (1 - _FORWARD_TRAFFIC) * reached
    layers = model.num_layers / (2 if model.is_pair else 1)
    logit = _LOSS_TRAFFIC
    if run.recomputes_head:
        logit = run.trained_share * _LOSS_TRAFFIC + (1 + run.runs_base) * _LOGITS_TRAFFIC
    return layer * layers + logit * widths.vocabulary * model.has_head / split


def _dequantized(run: PlannedRun) -> float:
    """Return the bytes of memory traffic per micro-batch that quantization of the base adds."""
    if run.share_in_fp8:
        return run.share_in_fp8 * _quantized_in_training(run)
    if run.quantization.method == "none":
        return 0.0
    if run.quantization.method == "fp8":
        # Inputs of attention, o, the feed-forward and down in the forward pass, gradients of the
        # outputs of all matrices in the backward pass.
        widths, forwards = run.model.widths, 1 + run.runs_base + run.share_computed_twice
        inputs = 2 * widths.hidden + widths.query + widths.feed_forward
        values = run.model.num_layers * (forwards * inputs + widths.outputs)
        transposed = _FP8_TRANSPOSED * run.model.multiplied(trained=False)
        return run.base_share_in_fp8 * (transposed + _FP8_INPUTS * values * run.tokens)
    passes = run.num_forwards + 1 + run.share_computed_twice
    return passes * _DEQUANTIZED[run.quantization.method] * run.model.multiplied(trained=False)


def _quantized_in_training(run: PlannedRun) -> float:
    """Return the bytes of memory traffic per micro-batch of all layers that train in FP8.

    Inputs and gradients of every matrix, and the matrices, are quantized by row and by column.
    """
    by_row = _FP8_INPUTS * (1 + run.share_computed_twice)
    widths, matrices = run.model.widths, run.model.multiplied(trained=True)
    values = (by_row + _FP8_COLUMNS) * widths.inputs + (_FP8_INPUTS + _FP8_COLUMNS) * widths.outputs
    return values * run.model.num_layers * run.tokens + (by_row + _FP8_COLUMNS) * matrices


def _host_copies(run: PlannedRun) -> float:
    """Return the bytes per step that are copied between a GPU and its host during computation."""
    copied = 0.0
    if run.recompute == "offload":
        of_layers = run.model.widths.hidden * run.execution.residual_bytes * run.recomputed_layers
        copied += 2.0 * run.execution.tokens * of_layers * run.accumulation
    if _keeps_weights_on_host(run):
        shares, _, _ = num_shards(run.strategy, run.num_ranks, run.num_nodes)
        copied += 2.0 * run.size.whole.total / shares * run.accumulation
    return copied


def _keeps_weights_on_host(run: PlannedRun) -> bool:
    strategy = run.strategy
    if isinstance(strategy, ZeroConfig):
        return strategy.offload_parameters != "none"
    return isinstance(strategy, FsdpConfig) and strategy.offload_parameters


def _streamed_bytes(run: PlannedRun) -> tuple[float, float]:
    """Return the bytes of layers that a micro-batch's forward passes copy, and its backward pass.

    The last two layers are still there when a backward pass begins, and the first two at its end;
    if it ends above them, it has copied one layer more than it runs.
    """
    if run.stream is None:
        return 0.0, 0.0
    layers, trained = run.model.num_layers, run.model.trained_layers
    forward, backward = layers, max(0, trained - 1)
    if trained >= layers - 1:
        forward = backward = max(0, layers - STREAMED_LAYERS)
    layer = run.size.layer.frozen
    return layer * (forward + layers * (run.num_forwards - 1)), layer * backward


def _verdict(run: PlannedRun, seconds: tuple[float, ...], collectives: list[Collective]) -> str:
    names = ("compute", "memory", "network", "host link", "launches")
    bound, longest = max(zip(names, seconds, strict=True), key=lambda part: part[1])
    share = longest / max(1e-12, seconds[0] + seconds[1])
    if bound == "compute":
        return f"compute-bound: products and attention take {percent(share, 0)}"
    if bound == "memory":
        return "memory-bound: kernels other than products, and the optimizer, take the longest"
    if bound == "host link":
        return f"bound by copies to and from host memory: {share:.1f} x the time of computation"
    if bound == "launches":
        return (
            "host-bound: launching kernels takes longer than running them; a larger "
            "trainer.micro_batch_size helps"
        )
    slowest = max(collectives, key=lambda each: collective_seconds(run, each))
    return f"network-bound: {slowest.what} ({slowest.kind}), {share:.1f} x the time of computation"


def describe_batch(run: PlannedRun) -> str:
    """Say whether a larger micro-batch would increase the throughput, and why."""
    reads = _weight_reads(run) + _dequantized(run)
    bandwidth = BANDWIDTH * run.hardware.memory_gb_per_second * 1e9
    rate = _product_share(run.hardware) * run.hardware.half_tflops * 1e12
    per_token = estimate_flops(run).total / rate
    enough = reads / bandwidth / max(1e-12, per_token)
    if run.tokens < enough:
        return (
            f"a micro-batch of {run.tokens:,} tokens is small: below {enough:,.0f} tokens, reading "
            "the weights takes longer than the products; a larger micro_batch_size helps"
        )
    return (
        f"a larger micro_batch_size gains little: above {enough:,.0f} tokens, the products take "
        f"longer than reading the weights, and a micro-batch has {run.tokens:,}"
    )
