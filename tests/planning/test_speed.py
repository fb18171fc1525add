"""FLOPs and communication agree with published formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.config import load_config, settings_of
from app.model.quantization import QuantizationConfig
from app.planning.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CONTENTION,
    LINKS,
    Collective,
    collective_seconds,
    exposed_seconds,
    list_collectives,
)
from app.planning.flops import estimate_flops
from app.planning.hardware import HardwareConfig
from app.planning.memory import (
    PlannedRun,
    estimate_gpu_memory,
    estimate_host_memory,
    estimate_moments,
    fits,
)
from app.planning.planned_model import PlannedModel, build_planned_model
from app.planning.speed import describe_range, estimate_speed
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig

# GFLOP a token of a Llama 3.1 8B, at 2,048, 4,096 and 8,192 tokens.
PUBLISHED = {
    ("full", "none"): (46.6, 48.2, 51.5),
    ("full", "full"): (61.1, 63.3, None),
    ("lora", "none"): (31.9, 33.5, 36.7),
    ("lora", "full"): (46.4, 48.5, None),
}


@cache
def planned(model: str, *words: str) -> tuple[Any, PlannedModel]:
    config = load_config("train", [f"model={model}", "data=dolly", *words])
    precision = config.trainer.precision if config.trainer.precision != "auto" else "bf16"
    numbers = config.model.architecture
    return config, build_planned_model(config.model, numbers, config.adapter, precision)


def run_of(
    model: str,
    *words: str,
    strategy: StrategyConfig | None = None,
    gpus: int = 1,
    nodes: int = 1,
    card: str = "h100",
    **how: Any,
) -> PlannedRun:
    config, found = planned(model, *words)
    hardware: HardwareConfig = settings_of("hardware", card)
    precision = config.trainer.precision if config.trainer.precision != "auto" else "bf16"
    return PlannedRun(
        model=found,
        hardware=replace(hardware, gpus_per_node=gpus, num_nodes=nodes),
        strategy=strategy or StrategyConfig(name="single"),
        quantization=QuantizationConfig(),
        precision=precision,
        trains_base=config.adapter.name == "full",
        **{"recompute": "none", **how},
    )


@pytest.mark.parametrize(("adapter", "recompute"), PUBLISHED)
def test_flops_of_a_token(adapter: str, recompute: str) -> None:
    for length, expected in zip((2048, 4096, 8192), PUBLISHED[adapter, recompute], strict=True):
        run = run_of("llama8b", f"adapter={adapter}", recompute=recompute, sequence_len=length)
        if expected is not None:
            assert estimate_flops(run).total / 1e9 == pytest.approx(expected, rel=0.015)


def test_products_of_a_base_in_fp8_take_less_time_and_its_weights_half_the_bytes() -> None:
    plain = run_of("llama8b", sequence_len=4096)
    fast = replace(plain, quantization=QuantizationConfig(method="fp8"))
    # Six sevenths of the products are those of the base (head and adapter stay in bf16).
    assert 0.8 < estimate_flops(fast).frozen / estimate_flops(fast).products < 0.95
    assert estimate_flops(fast).frozen == pytest.approx(4 * 6.979e9, rel=0.01)
    half, whole = estimate_speed(fast), estimate_speed(plain)
    assert half.products < 0.7 * whole.products and half.step < whole.step
    # Measured on this card: bf16 alone.
    (low, high), (lowest, highest) = whole.between, half.between
    assert highest / lowest > 1.2 > high / low
    assert "assumed" in describe_range(fast) and "measured on this card" in describe_range(plain)
    saved = 6.979e9 * 31 / 32  # the last layer stays in bf16
    assert fast.size.whole.frozen == pytest.approx(plain.size.whole.frozen - saved, rel=0.001)


def test_full_tuning_in_fp8_takes_less_time_and_no_copies_of_the_inner_layers() -> None:
    plain = run_of("llama8b", "adapter=full", sequence_len=4096)
    fast = replace(plain, trains_in_fp8=True)
    assert fast.share_in_fp8 == 30 / 32
    quick, slow = estimate_speed(fast), estimate_speed(plain)
    assert 0.6 * slow.products < quick.products < 0.7 * slow.products and quick.step < slow.step
    copied, before = (max(at.copies for at in estimate_moments(run)) for run in (fast, plain))
    assert copied == pytest.approx(before / 16, rel=0.01)


def test_layers_below_the_lowest_adapter_get_no_gradients() -> None:
    whole = estimate_flops(run_of("llama8b", "adapter=freeze", "adapter.layers=all"))
    top = estimate_flops(run_of("llama8b", "adapter=freeze", "adapter.layers=top 8"))
    forward = 2 * (6.979e9 + 0.525e9)
    assert top.products == pytest.approx(forward + 2 * 0.525e9 + 4 * 6.979e9 / 4, rel=0.01)
    assert top.total < 0.6 * whole.total
    words = ("adapter=freeze", "adapter.layers=top 8")
    again = estimate_flops(run_of("llama8b", *words, recompute="full"))
    assert again.total - top.total == pytest.approx((top.forward - 2 * 0.525e9) / 4, rel=0.01)


def test_the_base_s_own_pass_is_a_forward_pass_of_the_frozen_products() -> None:
    alone = run_of("llama8b", sequence_len=4096)
    run = replace(alone, runs_base=True)
    added = estimate_flops(run).total - estimate_flops(alone).total
    attention = 2 * 32 * 4096 * 4096
    assert added == pytest.approx(2 * (6.979e9 + 0.525e9) + attention, rel=0.01)
    assert estimate_flops(run).model == estimate_flops(alone).model
    assert 1.2 < estimate_speed(run).step / estimate_speed(alone).step < 1.6
    for name in ("fsdp", "zero3"):
        sharded = run_of("llama8b", strategy=settings_of("strategy", name), gpus=8)
        gathers = [
            sum(each.sent for each in list_collectives(one) if "weights" in each.what)
            for one in (sharded, replace(sharded, runs_base=True))
        ]
        assert gathers[1] / gathers[0] == pytest.approx(1.5)


def test_the_other_rows_answers_of_kto_run_forward_only() -> None:
    alone = run_of("llama8b", sequence_len=4096, micro_batch_size=2)
    kto = replace(alone, runs_others=True)
    half = estimate_gpu_memory(replace(alone, micro_batch_size=1))
    found = estimate_gpu_memory(kto)
    assert found.activations == pytest.approx(half.activations, rel=1e-3)
    assert found.loss == half.loss
    flops, whole = estimate_flops(kto), estimate_flops(alone)
    backward = whole.total - whole.forward
    assert flops.total == pytest.approx(whole.total - backward / 2)
    assert flops.forward == whole.forward
    assert 0.6 < estimate_speed(kto).step / estimate_speed(alone).step < 0.9
    live = [
        replace(one, runs_base=True, strategy=settings_of("strategy", "zero3"))
        for one in (alone, kto)
    ]
    assert [one.num_forwards for one in live] == [2, 4]


def test_a_teacher_adds_its_weights_and_a_forward_pass() -> None:
    alone, teacher = run_of("llama1b", sequence_len=4096), run_of("llama8b").model
    run = replace(alone, teacher=teacher)
    added = estimate_flops(run).total - estimate_flops(alone).total
    assert added == pytest.approx(2 * (6.979e9 + 0.525e9) + 2 * 32 * 4096 * 4096, rel=0.01)
    assert estimate_flops(run).model == estimate_flops(alone).model
    more = estimate_gpu_memory(run).total - estimate_gpu_memory(alone).total
    assert more == pytest.approx(2 * 8.03e9, rel=0.01)
    packed = replace(run, teacher_quantization="nf4")
    assert estimate_gpu_memory(packed).teacher < 0.4 * more


def test_fsdp_shards_a_teacher_and_gathers_its_head_and_layers() -> None:
    alone = run_of("llama1b", strategy=FsdpConfig(name="fsdp"), gpus=8, accumulation=2)
    run = replace(alone, teacher=run_of("llama8b").model)
    assert estimate_gpu_memory(run).teacher == pytest.approx(2 * (8.03e9 / 8 + 0.525e9), rel=0.01)
    (added,) = (each for each in list_collectives(run) if each.what == "weights of the teacher")
    assert (added.times, added.num_ranks) == (2, 8)
    assert added.num_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    whole = replace(run, strategy=settings_of("strategy", "zero3"))
    assert estimate_gpu_memory(whole).teacher == pytest.approx(2 * 8.03e9, rel=0.01)


def streamed_70b(**hardware: float) -> tuple[PlannedRun, PlannedRun]:
    """Return QLoRA on 70B for a card of 24 GB, with its layers on the card and from the host."""
    how = {"recompute": "full", "sequence_len": 1024, "accumulation": 4}
    run = run_of("llama70b", card="rtx4090", **how)
    changed: Any = replace(run.hardware, **hardware)
    run = replace(run, hardware=changed, quantization=QuantizationConfig(method="nf4"))
    return run, replace(run, stream="host")


def test_a_streamed_base_takes_two_layers_on_the_card_and_all_on_the_host() -> None:
    resident, streamed = streamed_70b()
    layer = resident.size.layer.frozen
    assert layer == pytest.approx(856e6 * 4.127 / 8, rel=0.01)  # arXiv 2305.14314: 4.127 bits
    before, after = estimate_gpu_memory(resident), estimate_gpu_memory(streamed)
    assert before.weights - after.weights == pytest.approx(78 * layer)
    assert not fits(resident, before) and fits(streamed, after)
    assert estimate_host_memory(streamed).offloaded == pytest.approx(80 * layer)
    assert estimate_host_memory(resident).total == 0


def test_a_pass_takes_as_long_as_its_copies_if_the_link_is_slower() -> None:
    resident, fast = streamed_70b(host_link_gb_per_second=1e6)
    assert estimate_speed(fast).step == pytest.approx(estimate_speed(resident).step, rel=1e-3)
    _, slow = streamed_70b(host_link_gb_per_second=1.0)
    copied = 4 * 2 * 78 * resident.size.layer.frozen  # micro-batches, passes, layers
    assert estimate_speed(slow).step == pytest.approx(copied / (LINKS * 1e9), rel=0.01)
    assert estimate_speed(slow).verdict.startswith("bound by copies to and from host memory")
    # Between what the two passes need, only the forward pass waits.
    between = estimate_speed(streamed_70b(host_link_gb_per_second=20.0)[1])
    assert between.step > max(estimate_speed(resident).step, between.host) * 1.02


@pytest.mark.parametrize("nodes", [2, 16])
def test_zero3_between_nodes_by_the_rule_of_thumb(nodes: int) -> None:
    """48 x M / N bits per node and step: three collectives of M 16-bit weights on N nodes."""
    words, strategy = ("adapter=full", "trainer.precision=bf16-pure"), "zero3"
    run = run_of(
        "llama70b", *words, strategy=settings_of("strategy", strategy), gpus=8, nodes=nodes
    )
    # What a node has of each tensor, which the others need.
    bits = 8 * sum(each.num_bytes * each.times / nodes for each in list_collectives(run))
    assert bits == pytest.approx(48 * run.model.num_weights / nodes, rel=1e-3)


def test_bytes_sent_by_each_strategy() -> None:
    def sent(name: str, nodes: int = 1, **how: Any) -> tuple[float, float]:
        strategy = settings_of("strategy", name)
        words = ("adapter=full", "trainer.precision=bf16-pure")
        run = run_of("llama8b", *words, strategy=strategy, gpus=8, nodes=nodes, **how)
        weights = 2 * run.model.num_weights  # bytes
        found = list_collectives(run)
        inside, between = sum(e.sent for e in found), sum(e.sent_between_nodes for e in found)
        return inside / weights, between / weights

    # Of a ring of 8: 7/8 of a tensor for a gather, twice that for an all-reduce.
    for name, passes in (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("fsdp", 3)):
        assert sent(name)[0] == pytest.approx(passes * 7 / 8, rel=1e-3), name
    assert sent("fsdp_grad_op")[0] == pytest.approx(2 * 7 / 8, rel=1e-3)
    assert sent("zero2", accumulation=4)[0] == pytest.approx(5 * 7 / 8, rel=1e-3)
    assert sent("fsdp", accumulation=4)[0] == pytest.approx(12 * 7 / 8, rel=1e-3)
    assert sent("fsdp_grad_op", accumulation=4)[0] == pytest.approx(5 * 7 / 8, rel=1e-3)
    # Between two nodes: half of a tensor for each passage.
    assert sent("zero3", nodes=2)[1] == pytest.approx(3 / 2, rel=1e-3)
    assert sent("zero3_hpz", nodes=2)[1] == pytest.approx(2 / 2, rel=1e-3)
    # ZeRO++ halves the weights of a gather and sends gradients in 4 bits (arXiv 2306.10209).
    assert sent("zeropp", nodes=2)[1] == pytest.approx((0.5 + 0.25) / 2, rel=1e-3)
    # Each of the 8 GPUs of a node adds up its share with one of the other node.
    assert sent("fsdp_hybrid", nodes=2)[1] == pytest.approx(2 * 1 / 2 / 8, rel=1e-3)
    # The same, in fp32 instead of bf16, after every eighth step.
    assert sent("hsdp_local_sgd", nodes=2)[1] == pytest.approx(2 * 2 / 2 / 8 / 8, rel=1e-3)


def test_tensor_parallel_has_two_all_reduces_per_layer_and_pass() -> None:
    run = run_of("llama8b", strategy=settings_of("strategy", "tp"), gpus=4, sequence_len=1000)
    (only,) = list_collectives(run)
    assert (only.kind, only.times, only.num_ranks) == (ALL_REDUCE, 4 * 32, 4)
    assert only.num_bytes == 1000 * 4096 * 2


def test_context_parallel_splits_a_row_and_exchanges_its_heads_twice_per_layer_and_pass() -> None:
    sizes = [DdpConfig(context_parallel_size=size) for size in (1, 16)]
    whole, split = (run_of("llama8b", strategy=each, gpus=16, sequence_len=1600) for each in sizes)
    assert (split.tokens, split.num_data_ranks) == (100, 1)
    assert split.tokens_per_step == whole.tokens_per_step / 16  # one row instead of sixteen
    exchange = list_collectives(split)[-1]
    assert (exchange.kind, exchange.times, exchange.num_ranks) == (ALL_TO_ALL, 2 * 32, 16)
    # 8 key heads are repeated to 16: a rank gets one of them, and two of the 32 query heads.
    assert exchange.num_bytes == 100 * 2 * (32 + 16) * 128 * 2
    parts = [estimate_gpu_memory(run).activations for run in (split, whole)]
    assert parts[0] < parts[1] / 12
    odd = run_of("llama8b", strategy=DdpConfig(context_parallel_size=3), gpus=3, sequence_len=300)
    gather = list_collectives(odd)[-1]  # three ranks cannot share 32 heads
    assert (gather.kind, gather.times, gather.num_ranks) == (ALL_GATHER, 2 * 32, 3)
    assert gather.num_bytes == 300 * 2 * 8 * 128 * 2
    whole = run_of("llama8b", strategy=DdpConfig(), gpus=3, sequence_len=300)
    # Each has early and late tokens of the row.
    assert estimate_speed(odd).attention == pytest.approx(estimate_speed(whole).attention / 3)


def test_compression_sends_halves_or_values_and_indices_to_every_rank() -> None:
    def sent(gpus: int, **how: Any) -> float:
        run = run_of("llama8b", "adapter=full", strategy=DdpConfig(**how), gpus=gpus)
        return sum(each.sent for each in list_collectives(run))

    assert sent(8, compression="bf16") == pytest.approx(sent(8) / 2, rel=1e-3)
    # Value and place, 8 bytes instead of 4, to each of the others; a ring sends 2 x 7/8.
    for gpus, passes in ((8, 7 / (7 / 8)), (2, 2)):
        largest = sent(gpus, compression="topk", topk_share=0.01)
        assert largest == pytest.approx(sent(gpus) * 0.01 * passes, rel=1e-3)


def test_a_slow_network_bounds_a_step() -> None:
    strategy = FsdpConfig()
    fast = run_of("llama8b", "adapter=full", strategy=strategy, gpus=8, nodes=2, sequence_len=8192)
    slow = replace(fast, hardware=replace(fast.hardware, network_gb_per_second=1.0))
    assert estimate_speed(fast).verdict.startswith("compute-bound")
    assert "network-bound" in estimate_speed(slow).verdict
    assert estimate_speed(slow).exposed > 0


def test_rates_do_not_exceed_the_datasheet() -> None:
    for method, recompute in PUBLISHED:
        run = run_of("llama8b", f"adapter={method}", recompute=recompute, sequence_len=8192)
        assert 0.2 < estimate_speed(run).mfu < 0.71


def of_pass(run: PlannedRun, seconds: float, **how: Any) -> Collective:
    """Return a gather within a node that takes `seconds` of each micro-batch."""
    sent = seconds * 0.8e9 * run.hardware.link_gb_per_second
    size, times = sent * 8 / 7, run.accumulation
    each = Collective(what="w", kind=ALL_GATHER, num_bytes=size, times=times, num_ranks=8, **how)
    assert collective_seconds(run, each) == pytest.approx(seconds * run.accumulation, rel=1e-3)
    return each


def test_messages_slow_what_hides_them_and_hide_behind_their_own_pass_only() -> None:
    run = run_of("llama8b", strategy=FsdpConfig(), gpus=8, accumulation=4)
    ahead, behind = of_pass(run, 0.5, in_forward=1.0), of_pass(run, 0.5)
    slowed = pytest.approx(4 * CONTENTION * 0.5, rel=1e-3)
    assert exposed_seconds(run, [ahead], 1.0, 2.0) == slowed
    assert exposed_seconds(run, [behind], 1.0, 2.0) == slowed
    # A forward pass that is shorter than its gathers waits, whatever the backward pass has left.
    assert exposed_seconds(run, [ahead], 0.1, 2.0) == pytest.approx(4 * 0.4, rel=1e-3)
    # Nothing hides the first unit of each forward pass, or the step's last gradients.
    edge = of_pass(run, 0.5, in_forward=1.0, exposed_share=0.1)
    assert exposed_seconds(run, [edge], 1.0, 2.0, 0.0) == pytest.approx(4 * 0.05, rel=1e-3)
    last = of_pass(run, 0.5, exposed_share=0.1)
    assert exposed_seconds(run, [last], 1.0, 2.0, 0.0) == pytest.approx(0.05, rel=1e-3)
    # What is sent once per step has the last backward pass only.
    once = replace(of_pass(run, 3.0), times=1)
    assert exposed_seconds(run, [once], 1.0, 2.0) == pytest.approx(1.0, rel=1e-3)
    blocking = of_pass(run, 0.5, overlaps=False)
    assert exposed_seconds(run, [blocking], 1.0, 2.0) == pytest.approx(2.0, rel=1e-3)


def test_a_small_model_waits_for_its_launches() -> None:
    small = run_of("qwen3_0_6b", sequence_len=256)
    assert estimate_speed(small).verdict.startswith("host-bound")
    large = replace(small, micro_batch_size=64)
    assert not estimate_speed(large).verdict.startswith("host-bound")
    assert estimate_speed(large).tokens_per_second > 5 * estimate_speed(small).tokens_per_second


def test_the_range_widens_with_what_is_not_measured() -> None:
    def width(run: PlannedRun) -> float:
        speed = estimate_speed(run)
        lowest, highest = speed.between
        assert lowest < speed.tokens_per_second < highest
        return highest / lowest

    one = run_of("llama8b", "adapter=full", sequence_len=4096, accumulation=64)
    assert width(one) == pytest.approx(1.05 / 0.95, rel=0.01)
    other = run_of("llama8b", "adapter=full", sequence_len=4096, accumulation=64, card="l40s")
    assert width(other) == pytest.approx(1.15 / 0.85, rel=0.01)
    several = replace(one.hardware, gpus_per_node=8)
    assert width(replace(one, strategy=FsdpConfig(), hardware=several)) > width(one)
