"""The hardware that a plan is for: the GPU model, the number of GPUs, and their links.

The specifications of known cards are in conf/hardware, with their sources; each can be overridden.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from app.process.gpus import Machine, read_machine
from common.errors import DeviceError
from common.facts import setting

_MANY = re.compile(r"(?:(?P<nodes>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d?)x(?P<card>[a-z].*)")
"""`8xh100`, or `2x8xh100`: two nodes of eight"""
_CARDS = ("h200", "h100", "b200", "l40s", "rtx4090", "rtx3090", "a100", "v100")
"""options of conf/hardware; the driver has other words for some: `RTX 4090`"""
_FABRIC = Path("/sys/class/infiniband")
"""where Linux lists InfiniBand, RoCE and EFA adapters"""
FAST_NETWORK, _SLOW_NETWORK = 25.0, 1.25
"""GB/s of a node: with one 200 Gb/s adapter, which counts as fast, and with 10 Gb/s Ethernet, which
is assumed without InfiniBand, RoCE or EFA"""
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""files with the memory limit of a container"""
_GIB = 2**30


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """The hardware of a run, as far as a plan depends on it; 0 = unknown."""

    name: str = setting("auto", grants="nothing")
    """hardware to plan for: auto = the GPUs of this machine; a GPU, as h100; several GPUs, as
    8xh100; several nodes, as 2x8xh100"""
    num_nodes: int = setting(1, ge=1, le=1024)
    """number of machines"""
    gpus_per_node: int = setting(1, ge=1, le=64)
    """number of GPUs per machine"""
    memory_gib: float = setting(0.0, ge=0, le=4096)
    """memory of a GPU, as reported by its driver"""
    half_tflops: float = setting(0.0, ge=0)
    """peak rate of dense bf16 matrix products (fp16 if the GPU has no bf16), without sparsity, from
    the datasheet"""
    product_share: float = setting(0.803, gt=0, le=1)
    """share of half_tflops that the fastest matrix products reach: 0.803 on an H100"""
    fp8_tflops: float = setting(0.0, ge=0)
    """peak rate of dense FP8 matrix products that are summed in fp32; 0 = the GPU has none"""
    fp32_tflops: float = setting(0.0, ge=0)
    """peak rate of fp32 arithmetic outside of tensor cores"""
    has_bf16: bool = True
    """whether the GPU supports bf16 (compute capability 8.0 or newer); false = plan with fp16"""
    memory_gb_per_second: float = setting(0.0, ge=0)
    """bandwidth of a GPU's memory"""
    link_gb_per_second: float = setting(0.0, ge=0)
    """bandwidth from one GPU to the other GPUs of its node, in one direction"""
    network_gb_per_second: float = setting(0.0, ge=0)
    """bandwidth from one node to the others, in one direction, of all its network adapters"""
    host_memory_gib: float = setting(0.0, ge=0)
    """host memory of a machine; 0 = not checked"""
    host_link_gb_per_second: float = setting(0.0, ge=0)
    """bandwidth between a GPU and host memory, in one direction"""
    nvme_gib: float = setting(0.0, ge=0)
    """disk space of a machine for checkpoints, the result and strategy.offload_optimizer=disk; 0 =
    not checked"""
    price_per_hour: float | None = setting(None, gt=0)
    """price of one GPU per hour, in any currency; if set, a plan includes the cost of the run"""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def has_known_rates(self) -> bool:
        """Whether it is a card of conf/hardware, so that the speed of a run can be estimated."""
        return known_card(self.name, self.memory_gib) is not None

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} x {self.name} ({self.memory_gib:.1f} GiB)"


def split_name(name: str) -> tuple[str, dict[str, int]]:
    """Split `2x8xh100` or `8xh100` into the card and the settings that its numbers stand for."""
    name = name.lower()
    many = _MANY.fullmatch(name)
    if many is None:
        return name, {}
    numbers = {"num_nodes": int(many["nodes"])} if many["nodes"] else {}
    return many["card"], numbers | {"gpus_per_node": int(many["gpus"])}


def known_card(name: str, memory_gib: float) -> str | None:
    """Return the option of conf/hardware for its own or the driver's name; None if there is none.

    There is none for MIG slices, which are a part of a card.
    """
    if " mig " in f" {name.lower()} ":
        return None
    words = re.split(r"[^a-z0-9]+", name.lower())  # GH200 has its own specifications
    found = next((card for card in _CARDS if {card, card.removeprefix("rtx")} & {*words}), None)
    if found == "a100":
        return "a100_80gb" if memory_gib > 60 else "a100_40gb"
    if found == "v100":
        return "v100_32gb" if memory_gib > 24 else None
    return found


def detect_card(machine: Machine | None = None) -> tuple[str, float, int]:
    """Return card, memory in GiB and number of this machine's GPUs; DeviceError if unknown."""
    machine = read_machine() if machine is None else machine
    if not machine.gpus:
        why = f" ({machine.failure})" if machine.failure else ""
        problem = (
            f"hardware=auto: no GPU was found on this machine{why}; type the hardware to plan for, "
            "as hardware=8xh100 (--help hardware lists the cards)"
        )
        raise DeviceError([problem])
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_gib)
    card = known_card(smallest.name, smallest.memory_gib)
    if card is None:
        unknown = f"hardware=auto: the specifications of {smallest.name} are unknown"
        raise DeviceError([f"{unknown}; {custom_hardware_advice()}"])
    return card, smallest.memory_gib, len(machine.gpus)


def custom_hardware_advice() -> str:
    """Return the advice for a card that has no file in conf/hardware."""
    return (
        "override the values of the most similar card with those of the datasheet, as "
        "hardware=a100_40gb hardware.memory_gib=31 hardware.half_tflops=119 "
        "hardware.memory_gb_per_second=768 (--help hardware lists all settings)"
    )


def check_hardware(config: HardwareConfig) -> list[str]:
    """List the specifications that a plan needs and that are unknown."""
    needed = ["memory_gib", "half_tflops", "fp32_tflops", "memory_gb_per_second"]
    if config.gpus_per_node > 1:
        needed.append("link_gb_per_second")
    if config.num_nodes > 1:
        needed.append("network_gb_per_second")
    missing = [f"hardware.{name}" for name in needed if not getattr(config, name)]
    if not missing:
        return []
    return [f"{', '.join(missing)}: unknown for hardware={config.name}; {custom_hardware_advice()}"]


def with_local_host(card: HardwareConfig) -> HardwareConfig:
    """Return a card's specifications with host memory, network and free disk of this machine."""
    network = max(card.network_gb_per_second, FAST_NETWORK)
    return replace(
        card,
        host_memory_gib=host_memory_gib(),
        nvme_gib=shutil.disk_usage(Path.cwd()).free / _GIB,
        network_gb_per_second=network if any(_FABRIC.glob("*")) else _SLOW_NETWORK,
    )


def host_memory_gib() -> float:
    """Return the memory of this machine, or of the container of this process."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CONTAINER_LIMITS:
        limit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        sizes += [int(limit)] if limit.isdigit() else []
    return min(sizes) / _GIB
