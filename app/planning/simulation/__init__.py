"""Simulate the steps of a plan: the program's own code, on a fake GPU.

    device    the fake GPU, whose FakeTensors have shapes and storages, and no numbers
    kernels   stand-ins for what Triton would compute
    step      strategy, module, adapter, loss and optimizer, as rank 0 of fake ranks
    live      the bytes that are alive, by part
    counting  every kernel with its FLOPs and bytes, from which a step's time follows

`simulate` does it in a process of its own, which has the fake GPU until it ends.
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
from app.planning.simulation.device import (
    FakeDeviceError,
    find_obstacle,
    install,
    install_fake_streams,
)
from app.planning.speed import estimate_speed, kernel_seconds
from app.process.errors import UserError
from app.strategy.settings import DdpConfig, FsdpConfig, LocalSgdConfig, ZeroConfig

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig

WITHOUT = "or leave plan.simulate out: the arithmetic stands"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """What a step of a run was found to take on one GPU, by its own code."""

    parts: dict[str, int]
    """bytes at the peak, without what CUDA and its libraries take"""
    phase: str
    """of a step, that the peak is in: forward, backward or step"""
    compute_seconds: float
    """of a step's kernels, at the rates that the arithmetic takes"""
    step_seconds: float
    """with the messages that it waits for, which are those of the arithmetic"""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


def check_simulated(config: TrainConfig, run: PlannedRun) -> None:
    """Raise UserError where a run cannot be simulated, with what to do instead."""
    strategy, why = run.strategy, None
    if isinstance(strategy, ZeroConfig):
        other = "fsdp_grad_op" if strategy.stage < 3 else "fsdp"
        why = (
            "DeepSpeed's engine needs its ranks; type strategy="
            f"{other}, which shards alike and can be simulated,"
        )
    elif isinstance(strategy, DdpConfig) and strategy.compression != "none":
        why = "compressed gradients have numbers; type strategy=ddp,"
    elif isinstance(strategy, LocalSgdConfig) and strategy.uses_outer_optimizer:
        why = "outer steps are not followed; type strategy=fsdp_hybrid,"
    elif isinstance(strategy, FsdpConfig) and strategy.offload_parameters:
        why = "weights in host memory are not followed; type strategy=fsdp,"
    elif run.quantization.method == "int8":
        why = "weights in int8 are not known to a GPU that is not there; type quantization=nf4,"
    elif config.trainer.compile:
        why = "compiled layers are not known to it; type trainer.compile=false,"
    elif obstacle := find_obstacle():
        why = f"{obstacle}; install one, as by apt install g++,"
    if why is not None:
        raise UserError(f"plan.simulate=true: {why} {WITHOUT}")


def simulate(config: TrainConfig, run: PlannedRun) -> SimulatedStep:
    """Take a step of `run`, as it means `config`, in a process of its own.

    UserError where its code cannot run without a GPU.
    """
    check_simulated(config, run)
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            return process.submit(_simulate, config, run).result()
    except FakeDeviceError as reason:
        raise UserError(f"plan.simulate=true: {reason}; {WITHOUT}") from reason
    except BrokenProcessPool as error:
        raise UserError(
            f"plan.simulate=true: its process was killed, as where memory is short; {WITHOUT}"
        ) from error


def _simulate(config: TrainConfig, run: PlannedRun) -> SimulatedStep:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hardware = run.hardware
    install(hardware.name, hardware.memory_gib, hardware.gpus_per_node)
    install_fake_streams()
    from app.planning.simulation.kernels import install_kernels
    from app.planning.simulation.step import take_steps

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
