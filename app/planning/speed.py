"""Time of an optimizer step by arithmetic: products, memory traffic, messages; what bounds it.

Model FLOPs as in arXiv 2204.02311 (PaLM, appendix B), with causal attention counted by halves. What
the host takes to launch kernels is not in it: small models are slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.communication import Collective, list_collectives, sent_by_node
from app.planning.hardware import HardwareConfig
from app.planning.memory import PlannedRun
from app.strategy.settings import FsdpConfig, ZeroConfig
from app.training.memory import ModelSize, num_shares

PRODUCTS, ATTENTION, BANDWIDTH, LINKS = 0.71, 0.335, 0.78, 0.8
"""share of a datasheet's rate that large kernels reach: products in half precision, FlashAttention
2, kernels bound by memory (the assumptions of benchmarks/fake_device/rates.py for an H100), and
messages (assumed)"""
FUSED = {"norm": 31.9, "rope": 8.2, "gate": 16.0, "adds": 12.0, "layout": 5.0, "lora": 9.8}
PLAIN = {"norm": 253.0, "rope": 36.0, "gate": 28.0, "adds": 182.0, "layout": 20.0, "lora": 38.0}
"""bytes that a layer moves outside of products, a token and feature: hidden ones for norm, adds and
layout, heads' for rope, feed-forward's for gate, outputs of matrices with LoRA for lora; counted
for an 8B model by `make bench ONLY=gpu_ops` (results/2026-11-23_gpu-modelled.md), ours and plain
transformers + peft"""
LOSS_TRAFFIC = 6.8
"""bytes a token and logit, same source"""
RECOMPUTED_TRAFFIC = 0.38
"""share of a layer's traffic that recomputing it adds, same source"""
DEQUANTIZED = {"nf4": 0.53 + 2.0, "int8": 1.0 + 2.0}
"""bytes that a weight moves when it is dequantized"""
OPTIMIZER_PASSES = 7
"""numbers read and written for each that AdamW steps: weight, gradient, two states"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of a token, by what computes them."""

    products: float
    attention: float
    recomputed_products: float
    recomputed_attention: float

    @property
    def model(self) -> float:
        """What the method needs, without what is computed again: MFU counts it."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        """All that the hardware computes."""
        return self.model + self.recomputed_products + self.recomputed_attention


def estimate_flops(run: PlannedRun) -> Flops:
    """Count the FLOPs of a token whose document is as long as the sequence: the most it can be."""
    model, widths = run.model, run.model.widths
    frozen, trained = model.multiplied(trained=False), model.multiplied(trained=True)
    if model.is_pair:  # a token goes through one of the two stacks
        frozen, trained = frozen / 2, trained / 2
    layers = model.num_layers / (2 if model.is_pair else 1)
    attention = 2.0 * layers * widths.query * run.sequence_len
    head = 2.0 * model.head_weights
    forward = 2.0 * (frozen + trained)
    # The backward pass ends at the lowest layer that trains.
    reached = model.trained_layers / max(1, model.num_layers)
    products = forward + reached * forward + 2.0 * trained + 2 * head
    products += head if model.trains_head else 0.0
    every = 1 / run.recompute_every
    again = again_attention = 0.0
    if run.recompute in ("full", "offload"):
        again, again_attention = forward * every, attention * every
    elif run.recompute == "selective":
        wide = 2.0 * widths.hidden * widths.feed_forward * layers
        again = 2.0 * wide * every
    return Flops(
        products=products,
        attention=attention * (1 + 2 * reached),
        recomputed_products=again,
        recomputed_attention=again_attention,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Modelled times of an optimizer step, in seconds, and what follows from them."""

    products: float
    attention: float
    traffic: float
    """kernels that are bound by memory, dequantization, and the optimizer"""
    messages: float
    """between GPUs, all of them"""
    host: float
    """between GPUs and host memory"""
    step: float
    tokens_per_second: float
    """over all GPUs"""
    mfu: float
    """model FLOPs over the datasheet's rate"""
    verdict: str
    """what bounds the step, and by what"""

    @property
    def exposed(self) -> float:
        """Seconds of messages and copies for which a step waits."""
        return max(0.0, self.step - self.products - self.attention - self.traffic)


def estimate_speed(run: PlannedRun, size: ModelSize | None = None) -> Speed:
    """Estimate the time of an optimizer step."""
    size = size or run.size
    hardware, split = run.hardware, run.tensor_size
    rate, flops = _full_rate(run), estimate_flops(run)
    tokens = run.tokens * run.accumulation
    bandwidth = BANDWIDTH * hardware.memory_gb_per_second * 1e9
    products = (flops.products + flops.recomputed_products) * tokens / split
    products /= PRODUCTS * rate
    # Few tokens: reading the weights takes longer than multiplying with them.
    products = max(products, _weight_reads(run) * run.accumulation / split / bandwidth)
    attention = (flops.attention + flops.recomputed_attention) * tokens / split
    attention /= ATTENTION * rate
    traffic = (_traffic(run) * tokens + _dequantized(run) * run.accumulation) / split / bandwidth
    stepped = size.whole.trained / num_shares(run.strategy, run.num_ranks, run.num_nodes)[2]
    offloads = isinstance(run.strategy, ZeroConfig) and run.strategy.offload_optimizer != "none"
    if not offloads:
        traffic += OPTIMIZER_PASSES * stepped / bandwidth
    collectives = list_collectives(run, size)
    messages = sum(_seconds(run, each) for each in collectives)
    beside = sum(_seconds(run, each) for each in collectives if each.overlaps)
    link = LINKS * hardware.host_link_gb_per_second * 1e9
    copied = _host_copies(run, size)
    host = copied / link if link else 0.0
    computes = products + attention + traffic
    waits = 3 * stepped / link if offloads and link else 0.0
    step = max(computes, beside, host) + (messages - beside) + waits
    speed = run.tokens_per_step / step
    return Speed(
        products=products,
        attention=attention,
        traffic=traffic,
        messages=messages,
        host=host + waits,
        step=step,
        tokens_per_second=speed,
        mfu=speed / tokens_at_full_rate(run),
        verdict=_verdict(run, products + attention, traffic, messages, host + waits, collectives),
    )


def kernel_seconds(
    hardware: HardwareConfig, kind: str, dtype: str, flops: float, num_bytes: float
) -> float:
    """Return the time of one kernel: what its arithmetic or its bytes take, whichever is more."""
    rate = hardware.half_tflops if dtype in ("bfloat16", "float16") else hardware.fp32_tflops
    share = ATTENTION if kind == "attention" else PRODUCTS
    bandwidth = BANDWIDTH * hardware.memory_gb_per_second * 1e9
    return max(flops / (share * rate * 1e12), num_bytes / bandwidth)


def tokens_at_full_rate(run: PlannedRun) -> float:
    """Return the tokens a second of all GPUs if each FLOP of their datasheet were the model's."""
    return run.num_ranks * _full_rate(run) / estimate_flops(run).model


def _full_rate(run: PlannedRun) -> float:
    """Return the FLOPs a second of a GPU's datasheet."""
    card = run.hardware
    return 1e12 * (card.fp32_tflops if run.precision == "fp32" else card.half_tflops)


def _weight_reads(run: PlannedRun) -> float:
    """Return the bytes of weights that a micro-batch's products read at least."""
    number = run.model.multiplied(trained=False) + run.model.multiplied(trained=True)
    passes = 3 if run.recompute in ("full", "offload") else 2
    return passes * 2.0 * (number + run.model.head_weights)


def _traffic(run: PlannedRun) -> float:
    """Return the bytes a token moves outside of products."""
    widths, model = run.model.widths, run.model
    of = FUSED if run.execution.fuses_norm_and_gate else PLAIN
    has_lora = any(".lora_" in name for weights, _ in model.layers for name in weights)
    layer = (of["norm"] + of["adds"] + of["layout"]) * widths.hidden
    layer += of["rope"] * (widths.query + widths.key_value) + of["gate"] * widths.feed_forward
    layer += of["lora"] * widths.outputs * has_lora
    if run.recompute != "none":
        layer *= 1 + RECOMPUTED_TRAFFIC / run.recompute_every
    layers = model.num_layers / (2 if model.is_pair else 1)
    return layer * layers + LOSS_TRAFFIC * widths.vocabulary


def _dequantized(run: PlannedRun) -> float:
    """Return the bytes a micro-batch moves to dequantize the base."""
    if run.quantization.method == "none":
        return 0.0
    passes = 3 if run.recompute in ("full", "offload") else 2
    return passes * DEQUANTIZED[run.quantization.method] * run.model.multiplied(trained=False)


def _seconds(run: PlannedRun, each: Collective) -> float:
    """Return the time of a collective: inside a node or between them, whichever takes longer."""
    hardware = run.hardware
    inside = between = 0.0
    if each.num_ranks > each.num_nodes:
        inside = each.sent / (LINKS * hardware.link_gb_per_second * 1e9)
    if each.num_nodes > 1:
        between = sent_by_node(run, each) / (LINKS * hardware.network_gb_per_second * 1e9)
    return max(inside, between)


def _host_copies(run: PlannedRun, size: ModelSize) -> float:
    """Return the bytes a step copies between a GPU and its host while it computes."""
    copied, strategy = 0.0, run.strategy
    if run.recompute == "offload":
        of_layers = run.model.widths.hidden * run.execution.residual_bytes * run.model.num_layers
        copied += 2.0 * run.tokens * of_layers * run.accumulation
    whole = size.whole.frozen + size.whole.trained
    parameters = isinstance(strategy, FsdpConfig) and strategy.offload_parameters
    if isinstance(strategy, ZeroConfig):
        parameters = strategy.offload_parameters != "none"
    if parameters:
        shares, _, _ = num_shares(strategy, run.num_ranks, run.num_nodes)
        copied += 2.0 * whole / shares * run.accumulation
    return copied


def _verdict(
    run: PlannedRun,
    computes: float,
    traffic: float,
    messages: float,
    host: float,
    collectives: list[Collective],
) -> str:
    parts = {"compute": computes, "memory": traffic, "network": messages, "host link": host}
    bound = max(parts, key=lambda name: parts[name])
    share = parts[bound] / max(1e-12, computes + traffic)
    if bound == "compute":
        return f"compute-bound: products and attention take {computes / (computes + traffic):.0%}"
    if bound == "memory":
        return "memory-bound: kernels outside of products, and the optimizer, take the longest"
    if bound == "host link":
        return f"bound by copies to and from host memory: {share:.1f} x what computing takes"
    longest = max(collectives, key=lambda each: _seconds(run, each))
    return f"network-bound: {longest.what} ({longest.kind}), {share:.1f} x what computing takes"


def describe_batch(run: PlannedRun) -> str:
    """Return how much a larger micro-batch would still gain, and why it stops."""
    reads = _weight_reads(run) + _dequantized(run)
    bandwidth = BANDWIDTH * run.hardware.memory_gb_per_second * 1e9
    per_token = estimate_flops(run).total / (PRODUCTS * run.hardware.half_tflops * 1e12)
    enough = reads / bandwidth / max(1e-12, per_token)
    if run.tokens < enough:
        return (
            f"a micro-batch of {run.tokens:,} tokens is short: reading weights takes as long as "
            f"multiplying with them up to {enough:,.0f} tokens; a larger micro_batch_size helps"
        )
    return (
        f"a larger micro_batch_size gains little: from {enough:,.0f} tokens on the products take "
        f"longer than reading the weights, and a micro-batch has {run.tokens:,}"
    )
