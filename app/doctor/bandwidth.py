"""Measure the bandwidth between the launched ranks, and compare a step's communication with it.

Bus bandwidth as defined by NVIDIA's nccl-tests (doc/PERFORMANCE.md): it does not depend on the
number of ranks, so that it can be compared with a link's nominal bandwidth.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from app.config import PlanConfig, settings_of
from app.doctor.rows import OK, WARNING, Finding
from app.planning.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    list_collectives,
)
from app.planning.hardware import HardwareConfig, known_card, with_local_host
from app.planning.planned import load_strategies, plan_run, read_config_json
from app.planning.speed import estimate_speed
from app.process.collectives import all_gather
from app.process.gpus import Machine
from app.process.launch import local_rank, read_launch
from app.strategy.rendezvous import choose_gloo_interface
from app.training.machine import host_memory
from common.errors import ENVIRONMENT_ERROR, LOST_CONNECTION, DeviceError, UserError
from common.text import percent

if TYPE_CHECKING:
    import torch

COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
MIB = 2**20
_SIZE_FACTOR = 4
_SIZES = tuple(MIB * _SIZE_FACTOR**power for power in range(7))
"""1 MiB to 4 GiB"""
MAX_REPEATS, MIN_REPEATS = 20, 3
"""number of times that a message is sent for one figure"""
_TARGET_SECONDS = 0.5
"""duration of one measurement, unless MIN_REPEATS messages take longer"""
_MEMORY_SHARE = 0.25
"""share of a rank's free memory for its buffers; gloo keeps copies of them"""
_NUM_BUFFERS = 2
"""buffers of the size of a message: one to send and one to receive"""
_CONNECT_SECONDS = 120
_WAIT_SECONDS = 60.0
"""time beyond the expected duration after which a rank counts as hanging"""
_GOOD_SHARE = (0.80, 0.85)
"""share of a link's nominal bandwidth that large messages should reach (the rule of thumb of
stas00/ml-engineering, network/README.md)"""
_MAX_RATIO = 1.0
"""largest ratio of communication to computation that can overlap completely"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The launched ranks, and this rank's place among them."""

    rank: int
    num_ranks: int
    num_local_ranks: int
    """number of ranks on this machine"""
    device: torch.device

    @property
    def num_nodes(self) -> int:
        """Number of machines, which all have the same number of ranks."""
        return max(1, self.num_ranks // self.num_local_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The duration of one collective on the slowest rank."""

    kind: str
    num_bytes: int
    """bytes of the full tensor"""
    seconds: float
    num_ranks: int

    @property
    def gb_per_second(self) -> float:
        """Bus bandwidth in GB/s: what each rank's link carries in one direction."""
        message = Collective(
            what="", kind=self.kind, num_bytes=self.num_bytes, times=1, num_ranks=self.num_ranks
        )
        return message.sent / self.seconds / 1e9


def format_speed(gb_per_second: float) -> str:
    """Format GB/s with three significant digits."""
    return f"{gb_per_second:,.0f}" if gb_per_second >= 100 else f"{gb_per_second:.3g}"


def join_world() -> World:
    """Connect the ranks started by torchrun or srun; UserError if that is not possible."""
    import torch
    import torch.distributed as dist

    launch = read_launch()
    if launch.detected_by == "SLURM_NTASKS":
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "srun does not tell its ranks where rank 0 is; before srun, type: export "
                'MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
                "head -n 1)"
            )
        os.environ |= {
            "RANK": os.environ["SLURM_PROCID"],
            "WORLD_SIZE": os.environ["SLURM_NTASKS"],
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        }
        os.environ.setdefault("MASTER_PORT", "29500")
    num_ranks, own = int(os.environ["WORLD_SIZE"]), local_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        num_local_ranks, num_gpus = launch.num_local_ranks or own + 1, torch.cuda.device_count()
        if num_local_ranks > num_gpus:
            visible = f"{num_gpus} GPU{' is' if num_gpus == 1 else 's are'} visible"
            raise UserError(
                f"{num_local_ranks} ranks were started on this machine, but {visible}; type make "
                f"bandwidth RANKS={num_gpus}, or --nproc-per-node={num_gpus} "
                f"(--ntasks-per-node={num_gpus})"
            )
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
    # The number of machines is not known yet; 1 allows the loopback interface as well.
    choose_gloo_interface(os.environ["MASTER_ADDR"], 1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=_CONNECT_SECONDS))
    hosts = all_gather(os.uname().nodename)
    # torchrun sets the number of ranks on this machine; for srun they are counted.
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", hosts.count(os.uname().nodename)))
    return World(
        rank=dist.get_rank(), num_ranks=num_ranks, num_local_ranks=num_local, device=device
    )


def measure_skews() -> list[float]:
    """Return the seconds by which the clock of each rank is behind that of rank 0."""
    import torch.distributed as dist

    all_gather(None)  # the first message also sets up connections
    dist.barrier()
    times = all_gather(time.time())
    return [times[0] - own for own in times]


def measure(world: World, seconds: float) -> list[Measurement]:
    """Time each collective, from the smallest message to the largest that fits memory and time.

    All ranks take the same decisions, since these depend on the times of the slowest rank.
    """
    measured: list[Measurement] = []
    left, largest = float(seconds), _largest_message(world)
    for size in _SIZES:
        expected = [_SIZE_FACTOR * each.seconds for each in measured[-len(COLLECTIVES) :]]
        if size > largest or (1 + MIN_REPEATS) * sum(expected) > left:
            break
        for index, kind in enumerate(COLLECTIVES):
            duration, total = _time(world, kind, size, expected[index] if expected else 0.0)
            left -= total
            measured.append(
                Measurement(kind=kind, num_bytes=size, seconds=duration, num_ranks=world.num_ranks)
            )
    return measured


def _largest_message(world: World) -> int:
    import torch

    if world.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(world.device)[0])
    else:
        free = host_memory()[0] / world.num_local_ranks
    return -int(_largest(world, -_MEMORY_SHARE * free / _NUM_BUFFERS))


def _largest(world: World, value: float) -> float:
    import torch
    import torch.distributed as dist

    largest = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def _time(world: World, kind: str, size: int, expected: float) -> tuple[float, float]:
    """Return the seconds of one message and of all messages sent, on the slowest rank."""
    import torch
    import torch.distributed as dist

    send, is_on_gpu = _operation(world, kind, size), world.device.type == "cuda"

    def seconds_of(times: int) -> float:
        dist.barrier()
        if is_on_gpu:
            torch.cuda.synchronize(world.device)
        started = time.perf_counter()
        for _ in range(times):
            send()
        if is_on_gpu:
            torch.cuda.synchronize(world.device)
        return _largest(world, time.perf_counter() - started)

    with _watched(kind, size, _WAIT_SECONDS + MAX_REPEATS * 10 * expected):
        first = seconds_of(1)  # a warm-up, which also determines the number of repeats
        times = min(MAX_REPEATS, max(MIN_REPEATS, round(_TARGET_SECONDS / max(first, 1e-6))))
        taken = seconds_of(times)
        if is_on_gpu:
            torch.cuda.empty_cache()
        dist.barrier()
    return taken / times, first + taken


def _operation(world: World, kind: str, size: int) -> Callable[[], object]:
    """Return a function that runs the collective on a tensor of `size` bytes of zeros."""
    import torch
    import torch.distributed as dist

    ranks = world.num_ranks
    each = max(1, size // 4 // ranks)
    whole = torch.zeros(each * ranks, dtype=torch.float32, device=world.device)
    if kind == ALL_REDUCE:
        return lambda: dist.all_reduce(whole)
    if kind == ALL_TO_ALL:
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole)
    part = torch.zeros(each, dtype=torch.float32, device=world.device)
    if kind == ALL_GATHER:
        return lambda: dist.all_gather_into_tensor(whole, part)
    return lambda: dist.reduce_scatter_tensor(part, whole)


@contextmanager
def _watched(kind: str, size: int, limit: float) -> Iterator[None]:
    """End this process with an error message if the context takes longer than `limit` seconds."""

    def give_up() -> None:  # a hanging collective does not return, so no error can be raised
        print(
            f"error (the environment): bandwidth: {kind} of {size // MIB} MiB has not ended after "
            f"{limit:.0f} s: a rank hangs, or a link is cut; check the ranks that print nothing",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ENVIRONMENT_ERROR)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def report_lost_ranks() -> Iterator[None]:
    """Replace torch's error after another rank has ended by a plain message.

    Only on the first two ranks, one of which is still alive; the others end silently.
    """
    try:
        yield
    except RuntimeError as error:
        if not LOST_CONNECTION.search(str(error)):
            raise
        if int(os.environ.get("RANK", "0")) > 1:
            raise SystemExit(ENVIRONMENT_ERROR) from error
        raise DeviceError(
            [
                "bandwidth: another rank has ended, or its machine cannot be reached; its own "
                "output has the reason (torchrun reports the rank and its exit code)"
            ]
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCost:
    """What one kind of collective sends in an optimizer step, and how long it takes."""

    what: str
    kind: str
    times: float
    """number of calls per optimizer step"""
    gb: float
    """GB that a rank sends per step"""
    models: float
    """the same in units of the model's weights, as rules of thumb count it"""
    seconds: float | None
    """time at the measured bandwidth"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationCost:
    """What an optimizer step sends between ranks, and its communication and compute times."""

    strategy: str
    collectives: tuple[CollectiveCost, ...]
    compute_seconds: float | None
    """estimated compute time of a step; None if the GPU is unknown"""

    @property
    def seconds(self) -> float:
        """Time of all collectives of a step without overlap."""
        return sum(each.seconds or 0.0 for each in self.collectives)


def hardware_of_ranks(
    typed: HardwareConfig, machine: Machine, ranks_per_node: int, num_nodes: int
) -> HardwareConfig:
    """Return the hardware of the launched ranks: of this machine's GPUs, or as overridden."""
    known = typed
    if typed.name == "auto" and not typed.memory_gib and machine.gpus:
        smallest = min(machine.gpus, key=lambda gpu: gpu.memory_gib)
        if (card := known_card(smallest.name, smallest.memory_gib)) is not None:
            known = with_local_host(settings_of("hardware", card))
    has_bf16 = known.has_bf16 and known.memory_gib > 0
    return replace(known, gpus_per_node=ranks_per_node, num_nodes=num_nodes, has_bf16=has_bf16)


def nominal_bandwidth(hardware: HardwareConfig) -> float:
    """Return the nominal GB/s of a rank's slowest link in one direction; 0 if unknown."""
    if hardware.num_nodes == 1:
        return hardware.link_gb_per_second
    # A node's adapters serve all its ranks; a ring enters and leaves each node once.
    return min(hardware.network_gb_per_second, hardware.link_gb_per_second or float("inf"))


def estimate_communication(
    config: PlanConfig, hardware: HardwareConfig, measured: Sequence[Measurement]
) -> CommunicationCost:
    """Estimate the communication of a step of `config` on the ranks of `hardware`."""
    strategies = load_strategies(settings_of)
    if not hardware.memory_gib:  # a CPU: `auto` as in a training run on CPUs
        trainer, recompute = config.trainer, config.recompute
        mode = "none" if recompute.mode == "auto" else recompute.mode
        config = replace(
            config,
            strategy=strategies["ddp"] if config.strategy.name == "auto" else config.strategy,
            recompute=replace(recompute, mode=mode),
            trainer=replace(trainer, micro_batch_size=trainer.least_micro_batch),
        )
    run, _ = plan_run(config, hardware, read_config_json(config.model), strategies=strategies)
    weights = run.size.whole.total
    computes = None
    if hardware.half_tflops:
        speed = estimate_speed(run)
        computes = speed.products + speed.attention + speed.traffic
    return CommunicationCost(
        strategy=run.strategy.name,
        collectives=tuple(_cost_of(each, weights, measured) for each in list_collectives(run)),
        compute_seconds=computes,
    )


def _cost_of(each: Collective, weights: float, measured: Sequence[Measurement]) -> CollectiveCost:
    best = best_bandwidth(measured, each.kind)
    return CollectiveCost(
        what=each.what,
        kind=each.kind,
        times=each.times,
        gb=each.sent / 1e9,
        models=each.sent / ((each.num_ranks - 1) / each.num_ranks) / weights,
        seconds=each.sent / 1e9 / best if best else None,
    )


def best_bandwidth(measured: Sequence[Measurement], kind: str) -> float:
    """Return the highest bus bandwidth of a collective in GB/s; 0 if it was not measured."""
    return max((each.gb_per_second for each in measured if each.kind == kind), default=0.0)


def list_link_rows(measured: Sequence[Measurement], hardware: HardwareConfig) -> list[Finding]:
    """Compare the best all-reduce with the link's nominal bandwidth."""
    best, nominal = best_bandwidth(measured, ALL_REDUCE), nominal_bandwidth(hardware)
    if not best or not nominal:
        return []
    share, (low, high) = best / nominal, _GOOD_SHARE
    found = (
        f"all-reduce reaches {format_speed(best)} GB/s, {percent(share, 0)} of the link's "
        f"nominal {format_speed(nominal)}; {percent(low, 0)} to {percent(high, 0)} is good"
    )
    if share >= low:
        return [Finding("link", OK, found)]
    fix = "NCCL_DEBUG=INFO shows the path that NCCL uses; nvidia-smi topo -m shows the links"
    return [Finding("link", WARNING, found, fix)]


def list_step_rows(cost: CommunicationCost) -> list[Finding]:
    """Say whether a step would wait for its communication."""
    if cost.compute_seconds is None or not cost.collectives:
        return []
    ratio = cost.seconds / cost.compute_seconds
    found = (
        f"a step under {cost.strategy} takes {cost.seconds:.3g} s of communication, and an "
        f"estimated {cost.compute_seconds:.3g} s of computation"
    )
    if ratio <= _MAX_RATIO:
        return [Finding("step", OK, found)]
    fix = "trainer.gradient_accumulation_steps=N, or a strategy that sends less: --help strategy"
    return [Finding("step", WARNING, found, fix)]
