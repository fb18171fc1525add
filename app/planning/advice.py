"""Compare alternatives of a run: every strategy, quantization, recompute mode and micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from app.model.adapter import saves_whole_model
from app.model.quantization import QuantizationConfig
from app.model.recompute import BY_SPEED, RecomputeConfig
from app.planning import choose
from app.planning.hardware import HardwareConfig
from app.planning.memory import (
    GpuMemory,
    PlannedRun,
    estimate_gpu_memory,
    fits,
)
from app.planning.planned import check_planned, plan_run
from app.planning.planned_model import PlannedModel
from app.planning.speed import Speed, estimate_speed
from app.strategy import settings
from app.training.objective.settings import DistillConfig
from common.errors import UserError

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig

_SINGLE_GPU_STRATEGIES = ("single", "zero2_offload", "zero3_offload", "fsdp_offload")
"""strategies that are useful on one GPU"""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_METHODS = ("none", "nf4", "int8", "fp8")
_MAX_DOUBLINGS = 7
"""how often the number of GPUs is doubled if nothing fits"""
_MIN_GAIN = 0.01
"""smallest relative gain in speed for which a larger micro-batch is preferred"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    overrides: tuple[str, ...]
    """command-line overrides that turn the user's settings into this variant"""
    run: PlannedRun
    memory: GpuMemory
    speed: Speed
    fits: bool
    config: TrainConfig

    @property
    def kind(self) -> tuple[str, str]:
        """Strategy and quantization, of which a plan shows the fastest candidate."""
        return self.run.strategy.name, self.run.quantization.method


def list_candidates(
    config: TrainConfig,
    hardware: HardwareConfig,
    config_json: Mapping[str, Any],
    model: PlannedModel,
    strategies: Mapping[str, settings.StrategyConfig],
) -> list[Candidate]:
    """List the variants of a run that the couplings of settings allow.

    For each strategy, quantization and recompute mode: the requested micro-batch, and the smallest
    one that is about as fast as any. Variants that fit come first, then by speed.
    """
    found: list[Candidate] = []
    strategies = settings.with_states_of(config.strategy, strategies)
    if hardware.num_gpus == 1:
        strategies = {
            name: strategy
            for name, strategy in strategies.items()
            if name in (*_SINGLE_GPU_STRATEGIES, config.strategy.name)
        }
    for base, overrides in _shardings(config, hardware, strategies, model.expert_layers > 0):
        if check_planned(base, hardware, config_json):
            continue
        typed = replace(base, recompute=replace(base.recompute, mode=BY_SPEED[0]))  # not `auto`
        try:
            run, _ = plan_run(typed, hardware, config_json, model=model, strategies=strategies)
        except UserError:
            continue
        variants = [(base, run, overrides)]
        if once := choose.syncs_once(run.strategy, run):
            word, at_once = "strategy.sync_each_micro_batch=false", replace(base, strategy=once)
            variants.append((at_once, run.under(once), (*overrides, word)))
        for mode, (changed, each, words) in product(BY_SPEED, variants):
            if config.trainer.compile and mode == "selective":
                continue
            whole = _of_micro_batches(config, changed, each, mode, words)
            found += [*whole, *_with_fewest_layers(whole)]
    found = _worth_splitting(found, config.strategy)
    return sorted(
        found, key=lambda each: (not each.fits, -each.speed.tokens_per_second, len(each.overrides))
    )


def _worth_splitting(found: list[Candidate], typed: settings.StrategyConfig) -> list[Candidate]:
    """Leave out candidates that split rows or experts, other than `typed` does, without a gain."""
    sizes = settings.context_parallel_size(typed), settings.expert_parallel_size(typed)

    def speed(candidates: Iterable[Candidate]) -> float:
        return max((e.speed.tokens_per_second for e in candidates if e.fits), default=0.0)

    whole: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for each in found:
        if (each.run.context_size, each.run.expert_size) == sizes:
            whole[each.kind].append(each)
    return [
        each
        for each in found
        if (each.run.context_size, each.run.expert_size) == sizes
        or choose.is_clearly_faster(speed([each]), speed(whole[each.kind]))
    ]


def _shardings(
    config: TrainConfig,
    hardware: HardwareConfig,
    strategies: Mapping[str, settings.StrategyConfig],
    has_experts: bool,
) -> Iterator[tuple[TrainConfig, tuple[str, ...]]]:
    """Yield the settings with each strategy and quantization, with the overrides for them.

    Strategies that `auto` splits rows, layers or experts under come with each such split, too.
    """
    quantizations = {config.quantization.method: config.quantization}
    if not saves_whole_model(config.adapter):
        for method in _METHODS:
            quantizations.setdefault(method, QuantizationConfig(method=method))
    for name, strategy in strategies.items():
        mine = config.strategy if config.strategy.name == name else strategy
        splits = choose.splits_of(mine, hardware, has_experts) if name in choose.SPLITTING else ()
        for each, (method, quantization) in product((mine, *splits), quantizations.items()):
            overrides: tuple[str, ...] = ()
            if name != config.strategy.name:
                overrides += (f"strategy={name}",)
            if each is not mine:
                overrides += tuple(settings.strategy_words(each).split()[1:])
            if method != config.quantization.method:
                overrides += (f"quantization={method}",)
            yield replace(config, strategy=each, quantization=quantization), overrides


def _of_micro_batches(
    config: TrainConfig,
    base: TrainConfig,
    run: PlannedRun,
    mode: str,
    overrides: tuple[str, ...],
) -> list[Candidate]:
    """Return the requested micro-batch if it fits, and the smallest that is about as fast as any.

    If none fits, only the smallest; for `auto`, only what a run would choose.
    """
    packs = run.micro_batch_size * run.accumulation
    if mode != config.recompute.mode:
        overrides += (f"recompute={mode}",)
    recompute = replace(config.recompute, mode=mode)
    if mode == "none":
        # Refused beside it, since they would have no effect.
        overrides += ("recompute.every=1",) if recompute.every > 1 else ()
        overrides += () if recompute.num_layers is None else ("recompute.num_layers=null",)
        recompute = RecomputeConfig(mode=mode)
    run = replace(
        run,
        recompute=mode,
        recompute_every=recompute.every,
        recompute_layers=recompute.num_layers,
    )
    base = replace(base, recompute=recompute)
    if config.trainer.micro_batch_size == "auto":
        number = choose.choose_micro_batch(run).size
        return [_candidate(base, run.with_micro_batch(number), overrides)]
    found: list[Candidate] = []
    for number in takewhile(lambda size: packs % size == 0, MICRO_BATCHES):
        each = run.with_micro_batch(number)
        typed, trainer = overrides, config.trainer
        if number != config.trainer.micro_batch_size:
            typed += (f"trainer.micro_batch_size={number}",)
            trainer = replace(trainer, micro_batch_size=number)
            if config.trainer.global_batch_size is None:
                typed += (f"trainer.gradient_accumulation_steps={each.accumulation}",)
                trainer = replace(trainer, gradient_accumulation_steps=each.accumulation)
        found.append(_candidate(replace(base, trainer=trainer), each, typed))
        if not found[-1].fits:
            break
    best, *larger = [each for each in found if each.fits] or found
    for other in larger:
        if other.speed.tokens_per_second > (1 + _MIN_GAIN) * best.speed.tokens_per_second:
            best = other
    return [one for one in found if one is best or (one.fits and one.overrides == overrides)]


def _with_fewest_layers(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Yield those that fit with only as many layers recomputed as memory asks for, if that is less.

    None of them fits without recompute.
    """
    for each in candidates:
        run = choose.with_fewest_layers(each.run) if each.fits else each.run
        number, without = run.recompute_layers, replace(run, recompute="none")
        if number == each.run.recompute_layers or fits(without, estimate_gpu_memory(without)):
            continue
        recompute = replace(each.config.recompute, num_layers=number)
        overrides = (*each.overrides, f"recompute.num_layers={number}")
        yield _candidate(replace(each.config, recompute=recompute), run, overrides)


def _candidate(config: TrainConfig, run: PlannedRun, overrides: tuple[str, ...]) -> Candidate:
    memory = estimate_gpu_memory(run)
    return Candidate(
        overrides=overrides,
        run=run,
        memory=memory,
        speed=estimate_speed(run),
        fits=fits(run, memory),
        config=config,
    )


def best_of_each(candidates: list[Candidate]) -> list[Candidate]:
    """Return the first candidate for each pair of strategy and quantization."""
    first: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.kind, candidate)
    return list(first.values())


def smallest_change(candidates: list[Candidate]) -> Candidate | None:
    """Return the fitting candidate with the fewest overrides.

    Of several, the fastest whose rates were measured.
    """
    fitting = [each for each in candidates if each.fits]

    def rank(each: Candidate) -> tuple[int, bool, float]:
        speed = each.speed.tokens_per_second
        return len(each.overrides), each.run.computes_in_fp8, -speed

    return min(fitting, key=rank, default=None)


def suggest_larger_changes(
    config: TrainConfig,
    hardware: HardwareConfig,
    config_json: Mapping[str, Any],
    model: PlannedModel,
    strategies: Mapping[str, settings.StrategyConfig],
    sequence_len: int,
) -> list[str]:
    """Return overrides for a run of which no variant fits.

    These are a teacher in 4 bits, optimizer states on a disk, a streamed base, shorter sequences,
    and more GPUs.
    """
    found = []

    def suggest(changed: TrainConfig, *first: str, on: HardwareConfig = hardware) -> bool:
        """Add the overrides with which a changed run fits; `first`: those for the change."""
        candidates = list_candidates(changed, on, config_json, model, strategies)
        if (change := smallest_change(candidates)) is None:
            return False
        found.append(" ".join((*first, *change.overrides)))
        return True

    objective, strategy = config.objective, config.strategy
    if isinstance(objective, DistillConfig) and objective.teacher_quantization == "none":
        packed = replace(objective, teacher_quantization="nf4")
        suggest(replace(config, objective=packed), "objective.teacher_quantization=nf4")
    if strategy.offload_optimizer == "none" and not isinstance(strategy, settings.ZeroConfig):
        on_disk = replace(config, strategy=replace(strategy, offload_optimizer="disk"))
        if suggest(on_disk):  # after the strategy that it is a setting of
            found[-1] = f"{found[-1]} strategy.offload_optimizer=disk".lstrip()
    if hardware.num_gpus == 1 and config.model.stream is None:
        streamed = replace(config, model=replace(config.model, stream="host"))
        suggest(streamed, "model.stream=host")
    length = sequence_len // 2
    while length >= 128:
        shorter = replace(config, data=replace(config.data, sequence_len=length))
        if suggest(shorter, f"data.sequence_len={length}"):
            break
        length //= 2
    more = hardware
    for _ in range(_MAX_DOUBLINGS):
        more, scaled = _double(more), config
        nodes = f"{more.num_nodes}x" if more.num_nodes > 1 else ""
        overrides = [f"hardware={nodes}{more.gpus_per_node}x{more.name}"]
        if (config.trainer.global_batch_size or more.num_gpus) < more.num_gpus:
            trainer = replace(config.trainer, global_batch_size=more.num_gpus)
            scaled = replace(config, trainer=trainer)
            overrides.append(f"trainer.global_batch_size={more.num_gpus}")
        if suggest(scaled, *overrides, on=more):
            break
    return found


def _double(hardware: HardwareConfig) -> HardwareConfig:
    if hardware.gpus_per_node < 8:
        return replace(hardware, gpus_per_node=min(8, 2 * hardware.gpus_per_node))
    return replace(hardware, num_nodes=2 * hardware.num_nodes)
