"""Resolve `auto` for strategy, recompute and micro-batch by what fits the hardware, with a
reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from app.model.recompute import BY_SPEED, WHOLE_LAYERS
from app.planning.hardware import FAST_NETWORK, HardwareConfig
from app.planning.memory import (
    GIB,
    GpuMemory,
    PlannedRun,
    estimate_gpu_memory,
    estimate_moments,
    fits,
    usable_bytes,
)
from app.planning.speed import KERNEL_ERROR, estimate_speed
from app.strategy.settings import (
    FsdpConfig,
    PipelineConfig,
    RanksConfig,
    StrategyConfig,
    can_probe_micro_batch,
    context_parallel_size,
    divisors,
    pipeline_parallel_size,
    strategy_words,
)
from common.text import counted

SPLITTING = ("ddp", "fsdp", "fsdp_hybrid", "fsdp_pp")
"""strategies of which those with shared rows, split experts or stages on nodes are considered"""
_UNTRIED_SHARE = 0.8
"""share of the memory for activations that is used if no micro-batch is tried on the device"""

_NEAR = 0.98
"""share of the highest speed that is enough for a split over fewer ranks"""

_MIN_GAIN = 1.01
"""factor by which gradients that are averaged once per step must be faster"""


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """A chosen mode, the number of layers that are recomputed, and the reason."""

    name: str
    reason: str
    num_layers: int | None = None
    """None: all"""

    def __str__(self) -> str:
        number = "" if self.num_layers is None else f" recompute.num_layers={self.num_layers}"
        return f"{self.name}{number} ({self.reason})"


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    strategy: StrategyConfig
    reason: str

    def __str__(self) -> str:
        return f"{strategy_words(self.strategy)} ({self.reason})"


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    size: int
    reason: str

    def __str__(self) -> str:
        return f"{counted(self.size, 'pack')} ({self.reason})"


def recompute_modes(typed: str, *, compiles: bool) -> list[str]:
    """Return the modes that the setting `typed` allows, fastest first with equal micro-batches.

    Compiled layers do not support `selective`.
    """
    if typed != "auto":
        return [typed]
    return [mode for mode in BY_SPEED if not (compiles and mode == "selective")]


def choose_strategy(
    run: PlannedRun,
    strategies: Mapping[str, StrategyConfig],
    modes: Sequence[str],
    *,
    is_stored: bool = False,
    has_deepspeed: bool = True,
    has_micro_batch: bool = False,
    allows: Callable[[PlannedRun], bool] = lambda _: True,
) -> StrategyChoice:
    """Choose the strategy with the least communication under which a rank fits its GPU.

    Ranks of a node share each row if otherwise nothing fits, or only with layers computed twice,
    or hold different experts, and nodes with slow links become stages, if that is worth it.
    `modes`: recompute modes that may be used. `is_stored`: whether the base's files are quantized.
    `has_micro_batch`: whether its size is given. `allows`: whether the other settings allow a
    split. The strategy of `run` itself is ignored.
    """
    name, why = _choose_whole(
        run, strategies, modes, is_stored=is_stored, has_deepspeed=has_deepspeed
    )
    whole = StrategyChoice(strategies[name], why)
    if run.num_ranks == 1 or not run.is_on_gpu:
        return whole
    expected = partial(_expected, modes=modes, has_micro_batch=has_micro_batch)
    without = expected(run.under(whole.strategy))
    once = syncs_once(whole.strategy, run)
    if once and without and (best := expected(run.under(once))) and run.hardware.has_known_rates:
        factor = _tokens_per_second(best) / _tokens_per_second(without)
        if factor > _MIN_GAIN:
            reason = f"gradients, averaged once per step, make it {factor:.2f} x as fast"
            whole, without = StrategyChoice(once, f"{why}; {reason}"), best
    if without is not None and not run.hardware.has_known_rates:
        return whole  # nobody knows what would be faster
    # Sharing rows takes the place of computing layers twice; the others, of sending weights.
    shares_rows = without is None or without.recompute in WHOLE_LAYERS
    shards = not is_stored and run.quantization.method != "int8"
    names = [name for name in SPLITTING if name in strategies and (shards or name == "ddp")]
    splits = [
        split
        for name in names
        for each in splits_of(strategies[name], run.hardware, run.model.expert_layers > 0)
        if (shares_rows or context_parallel_size(each) == 1)
        and allows(under := run.under(each))
        and (split := expected(under)) is not None
    ]
    most = max(map(_tokens_per_second, splits), default=0.0)
    best = next((each for each in splits if _tokens_per_second(each) >= _NEAR * most), None)
    if not is_clearly_faster(_tokens_per_second(best), _tokens_per_second(without)):
        return whole
    assert best is not None
    size = _describe_unsharded(replace(run, strategy=strategies["ddp"], recompute=modes[-1]))
    return StrategyChoice(best.strategy, f"{_split_reason(best, without)}: {size}")


def _split_reason(split: PlannedRun, without: PlannedRun | None) -> str:
    """Say what a split run gains; `without`: the run without the split, if that fits."""
    who = f"stages on the {split.num_nodes} nodes, whose links are slow,"
    if split.expert_size > 1:
        who = f"{split.expert_size} ranks that hold different experts"
    if split.context_size > 1:
        who = f"{split.context_size} ranks that share each row of {split.sequence_len:,} tokens"
    if without is None:
        return f"{who} fit, and nothing else does"
    factor = _tokens_per_second(split) / _tokens_per_second(without)
    other = f"{without.strategy.name} with recompute={without.recompute}"
    return f"{who} are an estimated {factor:.1f} x as fast as {other}"


def _tokens_per_second(run: PlannedRun | None) -> float:
    return 0.0 if run is None else estimate_speed(run).tokens_per_second


def syncs_once(strategy: StrategyConfig, run: PlannedRun) -> FsdpConfig | None:
    """Return FSDP with gradients that are averaged once per step; None if that changes nothing."""
    if not isinstance(strategy, FsdpConfig) or strategy.sync_each_micro_batch is not None:
        return None
    under = run.under(strategy)
    if under.keeps_gradients_whole or under.accumulation * under.micro_batch_size == 1:
        return None
    return replace(strategy, sync_each_micro_batch=False)


def splits_of(
    strategy: StrategyConfig, hardware: HardwareConfig, has_experts: bool
) -> Iterator[StrategyConfig]:
    """Yield a strategy with rows or experts split over ranks of a node, or stages on slow nodes.

    The fewest ranks come first. Tensor parallelism splits the matrices of a stage over its node.
    """
    nodes, ranks = hardware.num_nodes, hardware.gpus_per_node
    if isinstance(strategy, PipelineConfig):
        if nodes > 1 and hardware.network_gb_per_second < FAST_NETWORK:
            yield replace(strategy, pipeline_parallel_size=nodes, tensor_parallel_size=ranks)
    elif isinstance(strategy, RanksConfig) and context_parallel_size(strategy) == 1:
        for size in divisors(ranks)[1:]:
            yield replace(strategy, context_parallel_size=size)
        if isinstance(strategy, FsdpConfig) and has_experts and strategy.expert_parallel_size == 1:
            for size in divisors(ranks)[1:]:
                yield replace(strategy, expert_parallel_size=size)


def is_clearly_faster(speed: float, other: float) -> bool:
    """Return whether a speed is above another by more than the error of an estimate.

    `other`: 0 if that does not fit.
    """
    return speed > (1 + KERNEL_ERROR) * other


def with_fewest_layers(run: PlannedRun) -> PlannedRun:
    """Return the run with only as many layers recomputed as memory asks for.

    Unchanged if their number is given, or if they do not fit even if all are recomputed.
    """
    layers, is_free = run.model.num_layers, run.recompute_layers is None
    is_pipeline = pipeline_parallel_size(run.strategy) > 1
    if run.recompute == "none" or run.recompute_every > 1 or not is_free or is_pipeline:
        return run
    share = _usable_share(run)

    def is_enough(number: int) -> bool:
        return _Need.of(replace(run, recompute_layers=number), share).fits

    # Layers without a backward pass are the first ones, and need no recompute.
    numbers = range(layers - run.model.trained_layers + 1, layers)
    number = bisect_left(numbers, True, key=is_enough)
    return replace(run, recompute_layers=numbers[number]) if number < len(numbers) else run


def _expected(run: PlannedRun, modes: Sequence[str], has_micro_batch: bool) -> PlannedRun | None:
    """Return the run with the mode and the micro-batch that `auto` will take; None if none fits.

    The first mode that fits, or a later one if its larger micro-batches make it faster: weights are
    then gathered less often. Of a mode, the micro-batch with which recomputing only as many layers
    as memory asks for is the fastest.
    """
    best = None
    for mode in modes:
        each = replace(run, recompute=mode)
        if not fits(each, estimate_gpu_memory(each)):
            continue
        if has_micro_batch:
            return with_fewest_layers(each)
        largest = choose_micro_batch(each).size
        if not run.hardware.has_known_rates:
            return with_fewest_layers(each.with_micro_batch(largest))
        packs = run.micro_batch_size * run.accumulation
        sizes = [size for size in reversed(divisors(packs)) if size <= largest]
        variants = (with_fewest_layers(each.with_micro_batch(size)) for size in sizes)
        each = max(variants, key=_tokens_per_second)
        if best is None or is_clearly_faster(_tokens_per_second(each), _tokens_per_second(best)):
            best = each
    return best


def _choose_whole(
    run: PlannedRun,
    strategies: Mapping[str, StrategyConfig],
    modes: Sequence[str],
    *,
    is_stored: bool,
    has_deepspeed: bool,
) -> tuple[str, str]:
    """Choose the strategy of a run whose ranks have whole rows, and the whole model; say why."""
    has_deepspeed = has_deepspeed and "zero2" in strategies
    ranks, nodes, method = run.num_ranks, run.num_nodes, run.quantization.method
    if ranks == 1:
        return "single", "1 process"
    if not run.is_on_gpu:
        return "ddp", f"{ranks} processes on a CPU share its memory"
    if is_stored:
        return "ddp", "the base's files are quantized, and such weights cannot be sharded"

    def fits_under(name: str) -> bool:
        under = replace(run, strategy=strategies[name])
        variants = (replace(under, recompute=mode) for mode in modes)
        return any(fits(each, estimate_gpu_memory(each)) for each in variants)

    size = _describe_unsharded(replace(run, strategy=strategies["ddp"], recompute=modes[-1]))
    if fits_under("ddp"):
        return "ddp", f"everything fits each GPU: {size}"
    if method == "int8":
        why = f"int8 weights cannot be sharded (quantization=nf4 can): {size}"
        if has_deepspeed:
            return "zero2", f"only optimizer states can be sharded; {why}"
        return "ddp", why
    if not fits_under("fsdp"):
        if method == "none":
            return (
                "fsdp_offload",
                f"it does not fit all {ranks} GPUs together, but may fit with host memory: {size}",
            )
        return "fsdp", f"no strategy shards more, but memory will be tight: {size}"
    if nodes > 1 and run.hardware.network_gb_per_second < FAST_NETWORK:
        has_hpz = has_deepspeed and method == "none"
        return _choose_for_slow_network(fits_under, ranks, nodes, size, has_hpz=has_hpz)
    if method == "none" and fits_under("fsdp_grad_op"):
        return (
            "fsdp_grad_op",
            f"the weights fit a GPU, but not their optimizer states as well: {size}",
        )
    where = "a node" if nodes == 1 else f"{nodes} nodes with fast links"
    return "fsdp", f"it does not fit one GPU, but the {ranks} GPUs of {where}: {size}"


def _choose_for_slow_network(
    fits_under: Callable[[str], bool], ranks: int, nodes: int, size: str, *, has_hpz: bool
) -> tuple[str, str]:
    """Choose the strategy that communicates within the nodes as much as memory allows."""
    slow = "the links between nodes are slow (no InfiniBand was found)"
    if fits_under("fsdp_hybrid"):
        return (
            "fsdp_hybrid",
            f"it fits the {ranks // nodes} GPUs of a node, and {slow}: {size}",
        )
    # hpZ shards a second copy of the weights within each node, for the backward pass.
    if has_hpz and fits_under("zero3_hpz"):
        return "zero3_hpz", f"only the weights fit the GPUs of a node, and {slow}: {size}"
    return "fsdp", f"it needs all {ranks} GPUs: {size}"


def _describe_unsharded(run: PlannedRun) -> str:
    """Describe the memory of a rank that holds everything, for the reason of a choice."""
    peak = estimate_gpu_memory(run)
    states = peak.weights + peak.trainable + peak.optimizer + peak.gradients
    return (
        f"unsharded, weights, gradients and optimizer states take {states / GIB:.1f} GiB and a "
        f"whole step {peak.total / GIB:.1f}, of {usable_bytes(run.hardware) / GIB:.0f} usable "
        f"GiB of a GPU's {run.hardware.memory_gib:.0f}"
    )


def choose_recompute(
    run: PlannedRun, *, compiles: bool = False, has_micro_batch: bool = True
) -> RecomputeChoice:
    """Choose the fastest mode and number of layers that fit, else the mode with the least memory.

    Without `has_micro_batch`, a mode's speed is that with the micro-batches it leaves room for.
    """
    modes = recompute_modes("auto", compiles=compiles)
    first = _expected(run, modes, has_micro_batch=True)
    best = _expected(run, modes, has_micro_batch) or replace(run, recompute=modes[-1])
    need, whole = (_Need.of(each) for each in (best, replace(best, recompute="none")))
    rest = (
        f"plus {need.rest:.1f} for everything else on a GPU of {run.hardware.memory_gib:.0f} GiB, "
        f"with {best.tokens:,} tokens per micro-batch; estimated"
    )
    if best.recompute == "none":
        return RecomputeChoice("none", f"all activations fit: {need.activations:.1f} GiB {rest}")
    if first is None:
        why = f"no mode fits; this one takes the least: {need.activations:.1f} GiB activations"
        return RecomputeChoice(best.recompute, f"{why} {rest}")
    why = "the fastest mode that fits"
    if run.recompute_layers is None and best.recompute_layers is not None:
        why = f"the other {run.model.num_layers - best.recompute_layers} layers fit without"
    if best.recompute != first.recompute:
        other = _expected(run, [first.recompute], has_micro_batch)
        factor = _tokens_per_second(best) / _tokens_per_second(other)
        why = f"its larger micro-batches make it {factor:.1f} x as fast as {first.recompute}"
    saved = f"{need.activations:.1f} GiB activations instead of {whole.activations:.1f}"
    number = best.recompute_layers if run.recompute_layers is None else None
    return RecomputeChoice(best.recompute, f"{why}: {saved} {rest}", num_layers=number)


def choose_micro_batch(run: PlannedRun) -> MicroBatchChoice:
    """Choose how many of a rank's packs form a micro-batch, with the run's recompute mode.

    The largest divisor of a step's packs that fits. If no micro-batch will be tried on the device
    before the run, some memory is left free.
    """
    packs = run.micro_batch_size * run.accumulation
    share = _usable_share(run)
    needs: dict[int, _Need] = {}
    number = 1
    is_pipeline = pipeline_parallel_size(run.strategy) > 1
    for number in [1] if is_pipeline else reversed(divisors(packs)):
        needs[number] = _Need.of(run.with_micro_batch(number), share)
        if needs[number].fits:
            break
    chosen = needs[number]
    reason = (
        f"of the {packs} per rank and step: {chosen.activations:.1f} GiB activations with "
        f"recompute={run.recompute}, plus {chosen.rest:.1f} for everything else on a GPU of "
        f"{run.hardware.memory_gib:.0f} GiB; estimated"
    )
    if is_pipeline:
        reason = f"more would leave stages of the pipeline idle; {reason}"
    if not chosen.fits:
        is_tight = _Need.of(run.with_micro_batch(number)).fits
        why = "one pack barely fits" if is_tight else "not even one pack fits"
        reason = f"{why}; {reason}"
    elif larger := [other for other in needs if other > number]:
        other = larger[-1]
        reason += f"; {other}, the next divisor, would take {needs[other].activations:.1f}"
    return MicroBatchChoice(number, reason)


def _usable_share(run: PlannedRun) -> float:
    """Return the share of the memory for activations that may be used."""
    return 1.0 if can_probe_micro_batch(run.strategy) else _UNTRIED_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """The memory that a run needs on a GPU, in GiB, and whether it fits."""

    activations: float
    rest: float
    """all other parts at the moment with the most activations"""
    fits: bool

    @classmethod
    def of(cls, run: PlannedRun, share: float = 1.0) -> _Need:
        """Estimate the need; `share` of the memory left for activations may be used."""
        moments = estimate_moments(run)
        most = max(moments, key=lambda each: each.activations)
        counted: list[GpuMemory] = [
            replace(each, activations=each.activations / share) for each in moments
        ]
        peak = max(counted, key=lambda each: each.total)
        return cls(
            activations=most.activations / GIB,
            rest=(most.total - most.activations) / GIB,
            fits=fits(run, peak),
        )
