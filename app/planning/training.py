"""The plan of a training run on this machine.

It resolves `auto`, refuses runs that will not fit, and is compared with the peak memory and the
speed measured in the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.architecture import text_numbers
from app.model.recompute import BY_SPEED
from app.planning.advice import (
    MICRO_BATCHES,
    list_candidates,
    smallest_change,
    suggest_larger_changes,
)
from app.planning.flops import bounds_of_stages
from app.planning.hardware import (
    HardwareConfig,
    host_memory_gib,
    known_card,
    with_local_host,
)
from app.planning.memory import (
    GIB,
    GpuMemory,
    PlannedRun,
    estimate_disk_states,
    estimate_gpu_memory,
    estimate_host_memory,
    fits,
    usable_bytes,
)
from app.planning.planned import build_planned_run, is_stored_quantized
from app.planning.planned_model import model_from_config_json, model_from_meta, model_from_modules
from app.planning.speed import Speed, estimate_speed, peak_tokens_per_second
from app.process.environment import HEAP, host_bytes
from app.process.launch import is_first_rank
from app.strategy.settings import PipelineConfig, StrategyConfig
from app.training.checkpoint.disk import free_bytes
from app.training.machine import LOST, UTILIZATION
from common.errors import DiskError, UserError
from common.installation import verb_command

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig
    from app.training.module import FinetuneModule
    from app.training.trainer import Environment

log = logging.getLogger(__name__)

_OWN_CONTEXT_GIB = 1.0
"""memory of a GPU that this process's own CUDA context and libraries may take, in GiB"""
_KEPT_BY_MALLOC = 0.45
"""freed blocks that malloc keeps on a CPU, per byte of activations and loss: measured for 1 to 24
packs of the tiny base, with sft, dpo and kto (2026-11-29). With a malloc that returns them, dpo's
peak of 1.21 GiB was 0.96 (0.92 planned)"""
_FALLBACK_CARD = "a100_80gb"
"""card whose rates are used to rank alternatives if the GPU is unknown"""


def detect_hardware(
    env: Environment, num_nodes: int, settings_of: Callable[[str], HardwareConfig]
) -> HardwareConfig:
    """Return the hardware of this machine; `settings_of` loads the settings of a known card.

    An unknown card gets the rates of _FALLBACK_CARD under its driver's name. A CPU's memory is
    divided among its ranks.
    """
    if env.accelerator == "cpu":
        return HardwareConfig(
            name="cpu",
            memory_gib=host_memory_gib() / env.devices,
            gpus_per_node=env.devices,
            num_nodes=num_nodes,
        )
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(env.devices)]
    smallest = min(gpus, key=lambda gpu: gpu.total_memory)
    memory_gib = smallest.total_memory / GIB
    card = known_card(smallest.name, memory_gib)
    if env.num_ranks == 1:  # several ranks would read different numbers while they start
        memory_gib -= _gib_of_others()
    known = settings_of(card or _FALLBACK_CARD)
    return replace(
        with_local_host(known),
        name=card or smallest.name,
        memory_gib=memory_gib,
        gpus_per_node=env.devices,
        num_nodes=num_nodes,
    )


def _gib_of_others() -> float:
    """Return the memory of this process's GPU that other processes use, in GiB; logs it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    used = (total - free - torch.cuda.memory_reserved()) / GIB
    if used <= _OWN_CONTEXT_GIB:
        return 0.0
    log.info(
        "GPU: other processes use %.1f of its %.1f GiB; planned with the rest",
        *(used - _OWN_CONTEXT_GIB, total / GIB),
    )
    return used - _OWN_CONTEXT_GIB


def plan_training(
    config: TrainConfig,
    env: Environment,
    hardware: HardwareConfig,
    *,
    whole: Mapping[str, Any],
    backend: str,
    sequence_len: int,
    build_on_meta: Callable[[], Any] | None,
) -> PlannedRun | None:
    """Return the planned run, before `auto` is resolved.

    None if the sizes of its layers are unknown or, on a CPU and without a pipeline, can be read
    only from its modules.
    `whole`: the base's config.json. `backend`: the attention backend. `build_on_meta`: builds the
    model on the meta device; None if the base's files are quantized.
    """
    from app.model.attention.varlen import VarlenKernel

    is_on_gpu, config_json = env.accelerator == "gpu", text_numbers(whole)
    name = config.model.path or "model.architecture"
    model = model_from_config_json(name, config_json, config.adapter, env.precision)
    reads_modules = is_on_gpu or isinstance(config.strategy, PipelineConfig)  # cut by its layers
    if model is None and reads_modules and build_on_meta is not None:
        model = model_from_modules(name, build_on_meta(), config_json)
    elif model is None and reads_modules:
        plain = {key: value for key, value in config_json.items() if key != "quantization_config"}
        model = model_from_meta(config.model, plain, config.adapter, env.precision)
    if model is None:
        return None
    has_liger = config.trainer.kernels == "auto" and find_spec("liger_kernel") is not None
    run = build_planned_run(
        config,
        hardware,
        model,
        precision=env.precision,
        sequence_len=sequence_len,
        keeps_scores=backend == "eager",
        groups_documents=is_on_gpu and backend == "sdpa" and not model.is_pair,
        fuses_norm_and_gate=is_on_gpu and (has_liger or config.trainer.compile),
        is_stored=is_stored_quantized(whole),
        is_on_gpu=is_on_gpu,
    )
    return replace(
        run,
        micro_batch_size=env.micro_batch_size,
        accumulation=env.accumulation,
        repeats_heads=is_on_gpu and backend == "varlen" and not VarlenKernel.installed().takes_gqa,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimated memory and speed of a run, to be compared with the measured ones."""

    memory: GpuMemory
    is_on_gpu: bool
    device_gib: float
    speed: Speed | None
    """None if the device's rates are unknown"""
    peak_tokens_per_second: float | None = None
    """tokens per second of all GPUs at an MFU of 1"""
    lost: dict[str, float] = field(default_factory=dict)
    """shares of a step that other settings would save, by metric"""
    stages: list[tuple[int, int]] = field(default_factory=list)
    """layers [first, stop) of each stage of a pipeline"""
    guessed: str = ""
    """the model type, if the activations of its layers have not been checked by a simulation"""

    @property
    def guess(self) -> str:
        """A note for a figure that includes a guess; empty if there is none."""
        return f"; activations of model type {self.guessed} are a guess" if self.guessed else ""

    def line(self, num_steps: int) -> str:
        """Return the log line at the start of a run of `num_steps` steps."""
        device = "GPU" if self.is_on_gpu else "rank"
        of = f"{self.memory.total / GIB:.2f} GiB of a {device}'s {self.device_gib:.1f}"
        speed = ""
        if self.speed is not None:
            hours = num_steps * self.speed.step / 3600
            speed = f", {self.speed.step:.3g} s per step, {hours:.1f} h for {num_steps:,}"
        at = f"at the peak of a step ({self.memory.moment})"
        return f"{of} {at}{speed}, by arithmetic{self.guess}"

    @property
    def peak_gib(self) -> float:
        """Peak GiB allocated by PyTorch, without CUDA's overhead; on a CPU all memory."""
        overhead = self.memory.overhead if self.is_on_gpu else 0.0
        return (self.memory.total - overhead) / GIB

    def compare(self, module: FinetuneModule) -> dict[str, float]:
        """Log planned and measured figures in one line; return them by name."""
        import torch

        from app.model.attention.mixers import mixers_run_by_document

        device = module.strategy.root_device
        is_on_cpu = device.type == "cpu"
        peak = host_bytes("VmHWM") if is_on_cpu else torch.cuda.max_memory_allocated(device)
        peak_gib = peak / GIB
        planned_gib = self.peak_gib + (module.transposed_bytes or 0) / GIB  # which no plan counts
        figures = {"memory/peak_gib": peak_gib, "memory/planned_peak_gib": planned_gib}
        speed = "no step"
        if seconds := module.metrics.train_seconds:
            figures["speed/steps_per_second"] = module.trainer.global_step / seconds
            speed = f"{figures['speed/steps_per_second']:.3g} steps/s measured"
        if self.speed is not None:
            figures["speed/planned_steps_per_second"] = 1 / self.speed.step
            figures["speed/planned_tokens_per_second"] = self.speed.tokens_per_second
            ends = dict(zip(("lowest", "highest"), self.speed.between, strict=True))
            figures |= {f"speed/planned_{end}": value for end, value in ends.items()} | self.lost
            is_slow = any(mixers_run_by_document(module.model))
            figures |= _measured_losses(module.metrics.summary(), by_document=is_slow)
            speed += f", {1 / self.speed.step:.3g} planned"
        log.info(
            "memory: peak %.2f GiB measured, %.2f planned (%+.0f %%); %s",
            peak_gib,
            planned_gib,
            100 * (planned_gib / max(peak_gib, 1e-9) - 1),
            speed,
        )
        return figures


def _measured_losses(metrics: Mapping[str, float], *, by_document: bool) -> dict[str, float]:
    """Return the shares of the training time that went into waiting and padding, by metric.

    `by_document`: whether recurrent layers launch their kernels for each group of documents.
    """
    wait = metrics.get("speed/data_wait", 0.0)
    idle = 1 - metrics.get(UTILIZATION, 1.0)
    shares = {
        "data_wait": wait,
        "mixers" if by_document else "launches": idle - wait,
        "padding": metrics.get("speed/padding", 0.0),
    }
    return {LOST + cause: max(0.0, share) for cause, share in shares.items()}


def _planned_losses(run: PlannedRun) -> dict[str, float]:
    """Return the shares of a step that fused kernels and other settings save if they fit."""
    packs = run.micro_batch_size * run.accumulation
    sizes = [size for size in MICRO_BATCHES if size > run.micro_batch_size and packs % size == 0]
    variants = {
        "kernels": [replace(run, fuses_norm_and_gate=True)],
        "recompute": [replace(run, recompute=mode) for mode in BY_SPEED],
        "micro_batch": [run.with_micro_batch(size) for size in sizes],
    }
    step = estimate_speed(run).step
    shares = {}
    for cause, others in variants.items():
        fitting = [other for other in others if fits(other, estimate_gpu_memory(other))]
        fastest = min([step, *(estimate_speed(other).step for other in fitting)])
        shares[LOST + cause] = 1 - fastest / step
    return shares


def estimate_training(run: PlannedRun) -> Estimate:
    """Estimate memory and speed of a run per device; on a CPU, of the whole process."""
    memory = estimate_gpu_memory(run)
    if not run.is_on_gpu:
        kept = min(HEAP, _KEPT_BY_MALLOC * (memory.activations + memory.loss))
        memory = replace(memory, overhead=host_bytes("VmRSS") + kept)
    widths, has_speed = run.model.widths, run.is_on_gpu and run.hardware.has_known_rates
    return Estimate(
        memory=memory,
        is_on_gpu=run.is_on_gpu,
        device_gib=run.hardware.memory_gib,
        speed=estimate_speed(run) if has_speed else None,
        peak_tokens_per_second=peak_tokens_per_second(run) if has_speed else None,
        lost=_planned_losses(run) if has_speed else {},
        stages=bounds_of_stages(run) if isinstance(run.strategy, PipelineConfig) else [],
        guessed="" if widths.is_compared else widths.model_type,
    )


def check_room(
    run: PlannedRun, estimate: Estimate, enforce: str, suggest: Callable[[], str]
) -> None:
    """Check that a run will fit; UserError or a warning if not, depending on `enforce`.

    `suggest` returns overrides with which it would fit. An error if the estimate exceeds the whole
    memory; only a warning if it exceeds the usable share, since the run may still fit.
    """
    if enforce == "off":
        return
    need, memory = estimate.memory.total / GIB, run.hardware.memory_gib
    host_need, host = estimate_host_memory(run).total / GIB, run.hardware.host_memory_gib
    where = f"a GPU's {memory:.1f} GiB" if run.is_on_gpu else f"a rank's {memory:.1f} GiB"
    parts = ", ".join(f"{name} {part / GIB:.1f}" for name, part in estimate.memory.parts.items())
    problem = f"a step takes an estimated {need:.1f} of {where} ({parts}){estimate.guess}"
    exceeds_host = 0 < host < host_need
    if exceeds_host:
        problem = f"it takes an estimated {host_need:.1f} of a machine's {host:.1f} GiB host memory"
    if need <= usable_bytes(run.hardware) / GIB and not exceeds_host:
        return
    if enforce == "error" and (need > memory or exceeds_host):
        raise UserError(
            f"this run will not fit: {problem}; {suggest()}; or type plan.enforce=warn to try it"
        )
    if is_first_rank():
        log.warning("memory: this run may not fit: %s; %s", problem, suggest())


def check_disk(run: PlannedRun, folder: Path | None) -> None:
    """Check that the disk of `folder` has room for a machine's optimizer states; None: no check.

    DiskError before weights are loaded; the first step's file is allocated in full later.
    """
    need = estimate_disk_states(run) / GIB
    if folder is not None and need > (free := free_bytes(folder) / GIB):
        raise DiskError(
            f"{folder}: the optimizer states need {need:.2f} GiB of its disk, and {free:.2f} GiB "
            "are free; type strategy.offload_dir=FOLDER on a disk with room"
        )


def suggest_overrides(
    config: TrainConfig,
    run: PlannedRun,
    whole: Mapping[str, Any],
    known_strategies: Callable[[], Mapping[str, StrategyConfig]],
) -> str:
    """Return overrides with which the run would fit; `whole`: the base's config.json."""
    if not run.is_on_gpu:
        return (
            "type a shorter data.sequence_len, trainer.micro_batch_size=1, recompute=full, "
            "adapter=lora or a smaller base"
        )
    strategies, config_json = known_strategies(), text_numbers(whole)
    config = replace(config, data=replace(config.data, sequence_len=run.sequence_len))
    found = list_candidates(config, run.hardware, config_json, run.model, strategies)
    if (change := smallest_change(found)) is not None:
        return f"type {' '.join(change.overrides)}"
    others = suggest_larger_changes(
        config, run.hardware, config_json, run.model, strategies, run.sequence_len
    )
    suggestions = []
    for overrides in others:
        if not overrides.startswith("hardware="):
            suggestions.append(f"type {overrides}")
        elif run.hardware.has_known_rates:
            hardware = overrides.split()[0].removeprefix("hardware=")
            shows = f"{verb_command('plan')} hardware={hardware} shows more"
            suggestions.append(f"rent {hardware} ({shows})")
    return ", or ".join(suggestions) or "no known change makes it fit: use a smaller base"
