"""What a run takes of its machine, measured once a block of steps: waiting, memory, utilisation.

No device waits for it: times are the host's own, and a GPU is asked through its driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

GIB = 2**30
WAITS, WAITS_FOR = 0.2, 30.0
"""a warning is logged where the loop has waited for data more than this share of the training time,
measured over at least so many seconds; the first block, which warms up, does not count"""
BUSY = 0.9
"""utilisation of a GPU above which it costs nothing that the loop waits for data"""
LITTLE_MEMORY, LEAST_GIB = 0.05, 1.0
"""a warning is logged where less of the host's memory is left than this share of it, and than so
many GiB"""
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""of cgroup v2 and v1: the files of a container's memory limit, use and statistics, and the
statistic of file cache that can be given up"""
NAMES = (
    "speed/data_wait",
    "machine/host_memory_gib",
    "machine/host_left_gib",
    "machine/disk_left_gib",
)
ON_GPU = ("machine/gpu_utilization", "machine/gpu_memory_gib")
MFU = "speed/mfu"


class MachineWatch:
    """Measure a block of steps; `figures` is called at its end, in the order of the blocks."""

    def __init__(
        self,
        folder: Path,
        waited: Callable[[], float],
        *,
        gpu: GpuWatch | None = None,
        tokens_at_full_rate: float | None = None,
    ) -> None:
        """`waited` returns the seconds that the loop has waited for data so far.

        `tokens_at_full_rate`: tokens a second of all GPUs together, were each FLOP of theirs one of
        the model's; None where that is not known.
        """
        self.folder, self.waited, self.gpu = folder, waited, gpu
        self.tokens_at_full_rate = tokens_at_full_rate
        self.names = [*NAMES, *(ON_GPU if gpu is not None else ())]
        self.names += [MFU] if tokens_at_full_rate is not None else []
        self._waited_before = 0.0
        self._blocks = 0
        self._seconds = self._waiting = 0.0
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Begin a block: what the loop waited before it, for its first batch, is not of it."""
        self._waited_before = self.waited()

    def figures(self, seconds: float, tokens_per_second: float) -> dict[str, float]:
        """Return the figures of a block that took `seconds`; warn once of what is wrong."""
        waited = self.waited()
        waiting, self._waited_before = waited - self._waited_before, waited
        left, total = host_memory()
        found = {
            "speed/data_wait": min(1.0, waiting / max(seconds, 1e-9)),
            "machine/host_memory_gib": process_memory() / GIB,
            "machine/host_left_gib": left / GIB,
        }
        with suppress(OSError):  # a mount that is gone
            found["machine/disk_left_gib"] = shutil.disk_usage(self.folder).free / GIB
        if self.gpu is not None:
            found |= self.gpu.figures()
        if self.tokens_at_full_rate is not None:
            found[MFU] = tokens_per_second / self.tokens_at_full_rate
        if self._blocks:
            self._seconds += seconds
            self._waiting += waiting
        self._blocks += 1
        self._warn_of_waiting(found.get("machine/gpu_utilization"))
        self._warn_of_memory(left, total, found["machine/host_memory_gib"])
        return found

    def summary(self) -> dict[str, float]:
        """Return the share of the training time that was spent waiting, after the first block."""
        return {"speed/data_wait": self._waiting / self._seconds} if self._seconds else {}

    def _warn_of_waiting(self, utilization: float | None) -> None:
        if self._seconds < WAITS_FOR or self._waiting < WAITS * self._seconds:
            return
        if utilization is None or utilization < BUSY:
            self._warn_once(
                "waiting",
                f"speed: training waited for its data {self._waiting / self._seconds:.0%} "
                f"of the last {self._seconds:.0f} s; data.num_workers=4 or more prepares batches "
                "meanwhile",
            )

    def _warn_of_memory(self, left: float, total: float, own_gib: float) -> None:
        if left < LITTLE_MEMORY * total and left < LEAST_GIB * GIB:
            self._warn_once(
                "memory",
                f"host memory: {left / GIB:.2f} of {total / GIB:.1f} GiB are left, this process "
                f"takes {own_gib:.1f}; the system kills a process when none is: end others, or "
                "type a smaller data.num_workers or trainer.micro_batch_size",
            )

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", message)


class WaitClock:
    """Add up the time that the loop waits for its next batch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin to wait."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """End the wait."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


class GpuWatch:
    """Ask NVIDIA's management library (NVML) about the GPU of this process."""

    def __init__(self, device: int) -> None:
        """OSError where the library or the GPU is not there."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{properties.uuid}".encode()
        get = self._library.nvmlDeviceGetHandleByUUID
        failed = self._library.nvmlInit_v2() or get(uuid, ctypes.byref(self._handle))
        if failed:
            raise OSError(f"NVML error {failed}")

    def figures(self) -> dict[str, float]:
        """Return utilisation (of the last second or less) and memory taken, of all processes."""
        rates, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        found = {}
        if not self._library.nvmlDeviceGetUtilizationRates(self._handle, rates):
            found["machine/gpu_utilization"] = rates[0] / 100
        if not self._library.nvmlDeviceGetMemoryInfo(self._handle, memory):
            found["machine/gpu_memory_gib"] = memory[2] / GIB
        return found


def watch_gpu(device: int) -> GpuWatch | None:
    """Return a watch of a GPU; None where its driver tells nothing, as of a MIG slice."""
    try:
        return GpuWatch(device)
    except (OSError, AttributeError):
        return None


def process_memory() -> float:
    """Return the bytes of this process that are in memory."""
    pages = (PROC / "self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def host_memory() -> tuple[float, float]:
    """Return the bytes of memory left and in all, of this container or machine.

    File cache that counts against a container's limit is left: it can be given up.
    """
    numbers = {}
    for line in (PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        numbers[name] = float(value.split()[0]) * 1024
    left, total = numbers["MemAvailable"], numbers["MemTotal"]
    for limit_file, used_file, counts_file, kept_files in CONTAINERS:
        with suppress(OSError, ValueError, KeyError):  # no limit: "max", or the other version
            limit = float((CGROUP / limit_file).read_text())
            words = (CGROUP / counts_file).read_text().split()
            used = float((CGROUP / used_file).read_text())
            files = float(dict(zip(words[::2], words[1::2], strict=True))[kept_files])
            if limit < total:
                left, total = min(left, limit - used + files), limit
    return left, total
