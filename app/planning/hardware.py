"""The machine that a plan is for: a card by its name, how many of them, and their links.

Numbers of known cards stand with their sources in conf/hardware; each can be typed.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from app.process.errors import DeviceError
from app.process.gpus import Machine, read_machine
from data_modules import setting

MANY = re.compile(r"(?:(?P<nodes>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d?)x(?P<card>[a-z].*)")
"""`8xh100`, or `2x8xh100`: two nodes of eight"""
NVIDIA_NAMES = (
    ("h200", "h200"),
    ("h100", "h100"),
    ("b200", "b200"),
    ("l40s", "l40s"),
    ("4090", "rtx4090"),
    ("3090", "rtx3090"),
    ("a100", "a100"),
    ("v100", "v100"),
)
"""parts of the names that NVIDIA's driver gives to cards, and ours for them"""
FABRIC = Path("/sys/class/infiniband")
"""where Linux lists InfiniBand, RoCE and EFA adapters"""
FAST_NETWORK, SLOW_NETWORK = 25.0, 1.25
"""GB/s of a node with one adapter of 200 Gb/s, from which links count as fast, and of one without
InfiniBand or its like, at 10 Gb/s"""
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""of a container's memory, where it is in one"""
GIB = 2**30


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """A machine, as far as a plan depends on it; 0 = not known."""

    name: str = "auto"
    """auto = the GPUs of this machine; a card, as h100; several, as 8xh100; nodes of them, as
    2x8xh100"""
    num_nodes: int = setting(1, ge=1, le=1024)
    """machines"""
    gpus_per_node: int = setting(1, ge=1, le=64)
    """GPUs of a machine"""
    memory_gib: float = setting(0.0, ge=0, le=4096)
    """memory of a GPU, as its driver reports it"""
    half_tflops: float = setting(0.0, ge=0)
    """dense products in bf16 (fp16 where it has no bf16), without sparsity, from the datasheet"""
    fp32_tflops: float = setting(0.0, ge=0)
    """arithmetic in fp32 outside tensor cores"""
    has_bf16: bool = True
    """false: half precision is fp16 (before compute capability 8.0)"""
    memory_gb_per_second: float = setting(0.0, ge=0)
    """bandwidth of a GPU's memory"""
    link_gb_per_second: float = setting(0.0, ge=0)
    """from one GPU to the others of its node, one direction"""
    network_gb_per_second: float = setting(0.0, ge=0)
    """from one node to the others, one direction, all its adapters together"""
    host_memory_gib: float = setting(0.0, ge=0)
    """memory of a machine beside its GPUs; 0 = not checked"""
    host_link_gb_per_second: float = setting(0.0, ge=0)
    """from a GPU to host memory, one direction"""
    nvme_gib: float = setting(0.0, ge=0)
    """disks of a machine, which checkpoints and the result are written to; 0 = not checked.
    Nothing is offloaded to them (--help strategy)"""
    price_per_hour: float | None = setting(None, gt=0)
    """of one GPU, in any currency; with it a plan tells the cost of a run"""

    @property
    def num_gpus(self) -> int:
        """All GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} x {self.name} ({self.memory_gib:.1f} GiB)"


def split_name(name: str) -> tuple[str, dict[str, int]]:
    """Return the card of `2x8xh100` or `8xh100`, and what its numbers set."""
    name = name.lower()
    many = MANY.fullmatch(name)
    if many is None:
        return name, {}
    numbers = {"num_nodes": int(many["nodes"])} if many["nodes"] else {}
    return many["card"], numbers | {"gpus_per_node": int(many["gpus"])}


def known_card(name: str, memory_gib: float) -> str | None:
    """Return our name for a card by its driver's name for it; None for one without numbers.

    A MIG slice has none: it is a part of a card.
    """
    if " mig " in f" {name.lower()} ":
        return None
    found = next((ours for part, ours in NVIDIA_NAMES if part in name.lower()), None)
    if found == "a100":
        return "a100_80gb" if memory_gib > 60 else "a100_40gb"
    if found == "v100":
        return "v100_32gb" if memory_gib > 24 else None
    return found


def detect_card(machine: Machine | None = None) -> tuple[str, float, int]:
    """Return card, memory in GiB and number of the GPUs here; DeviceError where there is none."""
    machine = read_machine() if machine is None else machine
    if not machine.gpus:
        raise DeviceError(
            [
                f"hardware=auto: no GPU was found on this machine{_why(machine)}; type the "
                "hardware that the plan is for, as hardware=8xh100 (--help hardware lists cards)"
            ]
        )
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_gib)
    card = known_card(smallest.name, smallest.memory_gib)
    if card is None:
        raise DeviceError(
            [
                f"hardware=auto: the specifications of {smallest.name} are not known; "
                f"{custom_hardware_advice()}"
            ]
        )
    return card, smallest.memory_gib, len(machine.gpus)


def _why(machine: Machine) -> str:
    return f" ({machine.failure})" if machine.failure else ""


def custom_hardware_advice() -> str:
    """Return how to type a card that has no file."""
    return (
        "describe one of your own beside the nearest, as hardware=a100_40gb hardware.memory_gib=31 "
        "hardware.half_tflops=119 hardware.memory_gb_per_second=768 (its datasheet has them; "
        "--help hardware lists all)"
    )


def check_hardware(config: HardwareConfig) -> list[str]:
    """List what a plan needs of a machine and is not known."""
    needed = ["memory_gib", "half_tflops", "fp32_tflops", "memory_gb_per_second"]
    if config.gpus_per_node > 1:
        needed.append("link_gb_per_second")
    if config.num_nodes > 1:
        needed.append("network_gb_per_second")
    missing = [f"hardware.{name}" for name in needed if not getattr(config, name)]
    if not missing:
        return []
    return [
        f"{', '.join(missing)}: not known of hardware={config.name}; {custom_hardware_advice()}"
    ]


def with_local_host(known: HardwareConfig) -> HardwareConfig:
    """Return a card's numbers with the host memory, network and free disk of this machine."""
    network = max(known.network_gb_per_second, FAST_NETWORK)
    return replace(
        known,
        host_memory_gib=host_memory_gib(),
        nvme_gib=shutil.disk_usage(Path.cwd()).free / GIB,
        network_gb_per_second=network if any(FABRIC.glob("*")) else SLOW_NETWORK,
    )


def host_memory_gib() -> float:
    """Return the memory of this machine, or of the container that this process is in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        limit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        sizes += [int(limit)] if limit.isdigit() else []
    return min(sizes) / GIB
