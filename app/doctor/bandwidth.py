"""How fast the launched ranks send each other messages, by collective and size.

Bus bandwidth as NVIDIA's nccl-tests define it (doc/PERFORMANCE.md): the same for any number of
ranks, so that it can be laid beside a link's nominal bandwidth.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from app.planning.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from app.process.errors import ENVIRONMENT_ERROR, LOST_CONNECTION, DeviceError, UserError
from app.process.launch import local_rank, read_launch
from app.strategy.rendezvous import choose_gloo_interface
from app.training.machine import host_memory

if TYPE_CHECKING:
    import torch

ALL_TO_ALL = "all-to-all"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
MIB = 2**20
SIZES = tuple(MIB * 4**power for power in range(7))
"""1 MiB to 4 GiB"""
GROWTH = 4
MOST_TIMES, LEAST_TIMES = 20, 3
"""that a message of a size is sent for a figure"""
AIMED_SECONDS = 0.5
"""of a figure, where a message takes less"""
MEMORY_SHARE = 0.25
"""of what is free on a rank, for its buffers; gloo keeps copies"""
BUFFERS = 2
"""of the size of a message: what is sent, and what comes"""
CONNECT_SECONDS = 120
WAIT_SECONDS = 60.0
"""that a message may take beyond what is expected, after which a rank hangs"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks that were launched."""

    rank: int
    num_ranks: int
    ranks_here: int
    """of this machine"""
    device: torch.device

    @property
    def num_nodes(self) -> int:
        """Machines, each with as many ranks."""
        return max(1, self.num_ranks // self.ranks_here)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One figure: how long a message took on the slowest rank."""

    kind: str
    num_bytes: int
    """of the whole tensor"""
    seconds: float
    num_ranks: int

    @property
    def gb_per_second(self) -> float:
        """Bus bandwidth."""
        return bus_bandwidth(self.kind, self.num_bytes, self.seconds, self.num_ranks)


def bus_bandwidth(kind: str, num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Return GB/s that each rank's link carries in one direction.

    `num_bytes` is the tensor that is reduced, the one that all have gathered or that is scattered,
    or what a rank sends to all, its own part included.
    """
    passes = 2 if kind == ALL_REDUCE else 1
    return passes * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def format_speed(gb_per_second: float) -> str:
    """Format GB/s with three digits, of slow links too."""
    return f"{gb_per_second:,.0f}" if gb_per_second >= 100 else f"{gb_per_second:.3g}"


def join_world() -> World:
    """Connect the ranks that torchrun or srun have started; UserError where that cannot be."""
    import torch
    import torch.distributed as dist

    launch = read_launch()
    if launch.detected_by == "SLURM_NTASKS":
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "srun starts ranks that must find each other; before it type: export MASTER_PORT="
                '29500 MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
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
        asked, num_gpus = launch.ranks_here or own + 1, torch.cuda.device_count()
        if asked > num_gpus:
            visible = f"{num_gpus} GPU{' is' if num_gpus == 1 else 's are'} visible"
            raise UserError(
                f"{asked} ranks were started on this machine, {visible}; type make bandwidth "
                f"RANKS={num_gpus}, or --nproc-per-node={num_gpus} (--ntasks-per-node={num_gpus})"
            )
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
    # Its hosts are not known yet: an interface that reaches rank 0 from another machine is right.
    choose_gloo_interface(os.environ["MASTER_ADDR"], 1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=CONNECT_SECONDS))
    hosts = gather(os.uname().nodename)
    # torchrun says how many it has started here; srun's are counted.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", hosts.count(os.uname().nodename)))
    return World(rank=dist.get_rank(), num_ranks=num_ranks, ranks_here=here, device=device)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure_skews() -> list[float]:
    """Return the seconds by which the clock of each rank is behind that of rank 0."""
    import torch.distributed as dist

    gather(None)  # the first message also connects
    dist.barrier()
    times = gather(time.time())
    return [times[0] - one for one in times]


def measure(world: World, seconds: float) -> list[Measured]:
    """Time each collective, from the smallest message to the largest that fits memory and time.

    What is measured next is the same on all ranks: it follows from times that are the slowest's.
    """
    found: list[Measured] = []
    spent, largest = 0.0, _largest_message(world)
    for size in SIZES:
        for index, kind in enumerate(KINDS):
            before = next((one for one in reversed(found) if one.kind == kind), None)
            expected = GROWTH * before.seconds if before is not None else 0.0
            share = (seconds - spent) / (len(KINDS) - index)
            if size > largest or (1 + LEAST_TIMES) * expected > share:
                continue
            if before is not None and before.num_bytes * GROWTH < size:
                continue  # the size before took too long
            times, took = _time(world, kind, size, expected)
            spent += took
            found.append(
                Measured(kind=kind, num_bytes=size, seconds=times, num_ranks=world.num_ranks)
            )
    return found


def _largest_message(world: World) -> int:
    """Return the bytes of a message for which the rank with the least memory has room."""
    import torch
    import torch.distributed as dist

    if world.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(world.device)[0])
    else:
        free = host_memory()[0] / world.ranks_here
    room = torch.tensor([MEMORY_SHARE * free / BUFFERS], dtype=torch.float64, device=world.device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    return int(room.item())


def _time(world: World, kind: str, size: int, expected: float) -> tuple[float, float]:
    """Return the seconds of one message, on the slowest rank, and of all that were sent."""
    import torch
    import torch.distributed as dist

    send = _operation(world, kind, size)
    limit = WAIT_SECONDS + MOST_TIMES * 10 * expected
    with _watched(kind, size, limit):
        # Once to warm up; what that takes also says how often to send.
        first = _slowest(world, _seconds(world, send, 1))
        times = round(AIMED_SECONDS / max(first, 1e-6))
        times = min(MOST_TIMES, max(LEAST_TIMES, times))
        taken = _slowest(world, _seconds(world, send, times))
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    return taken / times, first + taken


def _seconds(world: World, send: Callable[[], object], times: int) -> float:
    import torch
    import torch.distributed as dist

    is_on_gpu = world.device.type == "cuda"
    dist.barrier()
    if is_on_gpu:
        torch.cuda.synchronize(world.device)
    started = time.perf_counter()
    for _ in range(times):
        send()
    if is_on_gpu:
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - started


def _slowest(world: World, seconds: float) -> float:
    import torch
    import torch.distributed as dist

    time_of_all = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(time_of_all, op=dist.ReduceOp.MAX)
    return float(time_of_all.item())


def _operation(world: World, kind: str, size: int) -> Callable[[], object]:
    """Return what sends a message of `size` bytes, of numbers that stay finite when summed."""
    import torch
    import torch.distributed as dist

    ranks = world.num_ranks
    each = max(1, size // 4 // ranks)
    whole = torch.zeros(each * ranks, dtype=torch.float32, device=world.device)
    if kind == ALL_REDUCE:
        return lambda: dist.all_reduce(whole)
    if kind == ALL_TO_ALL:
        came = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(came, whole)
    part = torch.zeros(each, dtype=torch.float32, device=world.device)
    if kind == ALL_GATHER:
        return lambda: dist.all_gather_into_tensor(whole, part)
    return lambda: dist.reduce_scatter_tensor(part, whole)


@contextmanager
def _watched(kind: str, size: int, limit: float) -> Iterator[None]:
    """End this process with a sentence where the messages take longer than `limit` seconds."""

    def give_up() -> None:  # a collective does not return: no error could be raised
        print(
            f"error (the environment): bandwidth: {kind} of {size // MIB} MiB has not ended after "
            f"{limit:.0f} s: a rank hangs, or a link is cut; look at the ranks that print nothing",
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
def lost_ranks_named() -> Iterator[None]:
    """Raise a sentence for what torch says after another rank has ended.

    On the first two ranks alone, one of which is there: the others end without a word.
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
                "bandwidth: another rank has ended, or its machine cannot be reached; what it "
                "printed itself says why (torchrun names it by its exit code)"
            ]
        ) from error
