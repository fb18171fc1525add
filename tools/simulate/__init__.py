"""Simulate the steps of a plan: the program's own code on a fake GPU, to check the estimates.

    python -m tools.simulate +experiment=llama70b hardware=8x8xh100

Strategy, module, adapter, loss and optimizer are those of a run, as rank 0 of all ranks, but
tensors have shapes and no data, and nothing is sent. It takes minutes, a C++ compiler and a CPU
build of PyTorch.

    device    the fake GPU: FakeTensors with shapes and storages, but without values
    kernels   replacements of Triton kernels
    step      strategy, module, adapter, loss and optimizer, as rank 0 of fake ranks
    live      live memory by part
    counting  FLOPs and bytes of every kernel, from which the time of a step follows

`simulate` runs this in a separate process, since a fake GPU cannot be removed again.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.planning.memory import PlannedRun
from app.planning.speed import estimate_speed, kernel_seconds
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    ZeroConfig,
    pipeline_parallel_size,
)
from common.errors import UserError
from tools.simulate.device import (
    FakeDeviceError,
    find_obstacle,
    install,
    install_fake_streams,
)

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """Memory and time of a simulated step on one GPU."""

    parts: dict[str, int]
    """bytes at the peak by part, without the overhead of CUDA and its libraries"""
    phase: str
    """phase of the step with the peak: forward, backward or step"""
    compute_seconds: float
    """time of all kernels of a step, at the rates that the estimates assume"""
    step_seconds: float
    """time of a step, with the estimated communication that does not overlap"""

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


def check_simulated(config: TrainConfig, run: PlannedRun) -> None:
    """Raise UserError if a run cannot be simulated, with an alternative."""
    strategy, why = run.strategy, None
    if isinstance(strategy, ZeroConfig):
        other = "fsdp_grad_op" if strategy.stage < 3 else "fsdp"
        why = (
            "DeepSpeed's engine needs real ranks; type strategy="
            f"{other}, which shards the same states and can be simulated"
        )
    elif isinstance(strategy, DdpConfig) and strategy.compression != "none":
        why = "gradient compression needs the values of gradients; type strategy=ddp"
    elif isinstance(strategy, LocalSgdConfig) and strategy.uses_outer_optimizer:
        why = "outer optimizers cannot be simulated; type strategy=fsdp_hybrid"
    elif isinstance(strategy, FsdpConfig) and strategy.offload_parameters:
        why = "offloaded weights cannot be simulated; type strategy=fsdp"
    elif strategy.offload_optimizer == "disk":
        why = "states on a disk cannot be simulated; type strategy.offload_optimizer=none"
    elif run.stream == "disk":
        why = "files cannot be simulated; type model.stream=host"
    elif pipeline_parallel_size(strategy) > 1:
        why = "stages of a pipeline cannot be simulated; type strategy=fsdp"
    elif config.objective.has_own_head or config.objective.teacher_path is not None:
        why = f"objective={config.objective.name} cannot be simulated; type objective=sft"
    elif config.objective.reference_source == "cached":
        why = "stored values of a base cannot be simulated; type objective.reference=none"
    elif run.quantization.method == "int8":
        why = "int8 weights cannot be simulated; type quantization=nf4"
    elif config.trainer.compile:
        why = "compiled layers cannot be simulated; type trainer.compile=false"
    elif obstacle := find_obstacle():
        why = obstacle
    if why is not None:
        raise UserError(why)


def simulate(config: TrainConfig, run: PlannedRun) -> SimulatedStep:
    """Simulate a step of `run`, which `config` describes, in a separate process.

    UserError if the code of the step cannot run without a GPU.
    """
    check_simulated(config, run)
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            return process.submit(_simulate, config, run).result()
    except FakeDeviceError as reason:
        raise UserError(str(reason)) from reason
    except BrokenProcessPool as error:
        raise UserError(
            "the process of the simulation was killed, possibly because host memory ran out"
        ) from error


def _simulate(config: TrainConfig, run: PlannedRun) -> SimulatedStep:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hardware = run.hardware
    install(hardware.name, hardware.memory_gib, hardware.gpus_per_node)
    install_fake_streams()
    from tools.simulate.kernels import install_kernels
    from tools.simulate.step import take_steps

    install_kernels()
    steps = take_steps(config, run)
    compute = 0.0
    for kernel, times in steps.live.tally.kernels.items():
        each = kernel_seconds(hardware, kernel.kind, kernel.dtype, kernel.flops, kernel.num_bytes)
        per_step = 1.0 if kernel.phase == "step" else run.accumulation / steps.accumulated
        compute += each * times * per_step
    return SimulatedStep(
        parts={name: size for name, size in steps.live.peak.items() if size},
        phase=steps.live.peak_phase,
        compute_seconds=compute,
        step_seconds=compute + estimate_speed(run).exposed,
    )
