"""Load of the machine during a run: data wait, memory, disk, GPU utilization and MFU.

Measured once per block of steps without synchronizing a device: times are the host's, and a GPU's
figures come from its driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.text import percent

log = logging.getLogger(__name__)

GIB = 2**30
MAX_WAIT_SHARE, MIN_WAIT_SECONDS = 0.2, 30.0
"""a warning is logged if the loop waited for data for more than this share of the training time,
measured over at least this many seconds; the first block, which warms up, does not count"""
_BUSY_UTILIZATION = 0.9
"""GPU utilization above which waiting for data costs nothing"""
MIN_FREE_SHARE, MIN_FREE_GIB = 0.05, 1.0
"""a warning is logged if less than this share of the host's memory and less than this many GiB are
available"""
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
"""for cgroup v2 and v1: the files with a container's memory limit, usage and statistics, and the
name of the statistic that counts reclaimable file cache"""
MACHINE_METRICS = (
    "speed/data_wait",
    "machine/host_memory_gib",
    "machine/host_left_gib",
    "machine/disk_left_gib",
)
UTILIZATION = "machine/gpu_utilization"
_GPU_NAMES = (UTILIZATION, "machine/gpu_memory_gib")
MFU = "speed/mfu"
LOST = "speed/lost/"
"""prefix of the shares of a step that a cause costs"""


class MachineStats:
    """Measure blocks of steps; call `metrics` at the end of each block, in order."""

    def __init__(
        self,
        folder: Path,
        total_wait: Callable[[], float],
        *,
        gpu: GpuStats | None = None,
        peak_tokens_per_second: float | None = None,
    ) -> None:
        """`total_wait` returns the seconds that the loop has waited for data so far.

        `peak_tokens_per_second`: training throughput of all GPUs if every FLOP of their datasheets
        were one of the model's; None if it is not known.
        """
        self.folder, self.total_wait, self.gpu = folder, total_wait, gpu
        self.peak_tokens_per_second = peak_tokens_per_second
        self.names = [*MACHINE_METRICS, *(_GPU_NAMES if gpu is not None else ())]
        self.names += [MFU] if peak_tokens_per_second is not None else []
        self._wait_before = 0.0
        self._num_blocks = 0
        self._seconds = self._wait_seconds = self._busy_seconds = 0.0
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start the first block, or the one after a pause; earlier waits do not count."""
        self._wait_before = self.total_wait()

    def metrics(self, seconds: float, tokens_per_second: float) -> dict[str, float]:
        """Return the metrics of a block that took `seconds`; warn once of each problem."""
        wait = self.total_wait()
        block_wait, self._wait_before = wait - self._wait_before, wait
        available, total = host_memory()
        pages = (PROC / "self/statm").read_text().split()[1]  # those of this process in memory
        metrics = {
            "speed/data_wait": min(1.0, block_wait / max(seconds, 1e-9)),
            "machine/host_memory_gib": int(pages) * os.sysconf("SC_PAGE_SIZE") / GIB,
            "machine/host_left_gib": available / GIB,
        }
        with suppress(OSError):  # an unmounted disk
            metrics["machine/disk_left_gib"] = shutil.disk_usage(self.folder).free / GIB
        if self.gpu is not None:
            metrics |= self.gpu.metrics()
        if self.peak_tokens_per_second is not None:
            metrics[MFU] = tokens_per_second / self.peak_tokens_per_second
        if self._num_blocks:
            self._seconds += seconds
            self._wait_seconds += block_wait
            self._busy_seconds += seconds * metrics.get(UTILIZATION, 0.0)
        self._num_blocks += 1
        self._warn_of_data_wait(metrics.get(UTILIZATION))
        self._warn_of_low_memory(available, total, metrics["machine/host_memory_gib"])
        return metrics

    def summary(self) -> dict[str, float]:
        """Return shares of the training time after the first block: data wait, and a busy GPU."""
        if not self._seconds:
            return {}
        shares = {"speed/data_wait": self._wait_seconds / self._seconds}
        return shares | (
            {UTILIZATION: self._busy_seconds / self._seconds} if self._busy_seconds else {}
        )

    def _warn_of_data_wait(self, utilization: float | None) -> None:
        if self._seconds < MIN_WAIT_SECONDS or self._wait_seconds < MAX_WAIT_SHARE * self._seconds:
            return
        if utilization is None or utilization < _BUSY_UTILIZATION:
            self._warn_once(
                "data wait",
                "speed: training waited for data "
                f"{percent(self._wait_seconds / self._seconds, 0)} of the last "
                f"{self._seconds:.0f} s; prepare batches in parallel: type "
                "data.num_workers=4 or more",
            )

    def _warn_of_low_memory(self, available: float, total: float, own_gib: float) -> None:
        if available < MIN_FREE_SHARE * total and available < MIN_FREE_GIB * GIB:
            self._warn_once(
                "memory",
                f"host memory: only {available / GIB:.2f} of {total / GIB:.1f} GiB are available, "
                f"this process uses {own_gib:.1f} GiB; when no memory is left the system kills a "
                "process: end other processes, or type a smaller data.num_workers or "
                "trainer.micro_batch_size",
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("%s", message)


class GpuStats:
    """Read utilization and memory of a GPU from NVIDIA's management library (NVML)."""

    def __init__(self, device: int) -> None:
        """Raise OSError if the library or the GPU is not available."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{properties.uuid}".encode()
        get = self._library.nvmlDeviceGetHandleByUUID
        failed = self._library.nvmlInit_v2() or get(uuid, ctypes.byref(self._handle))
        if failed:
            raise OSError(f"NVML error {failed}")

    def metrics(self) -> dict[str, float]:
        """Return utilization (over the last second or less) and used memory, of all processes."""
        rates, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        metrics = {}
        if not self._library.nvmlDeviceGetUtilizationRates(self._handle, rates):
            metrics[UTILIZATION] = rates[0] / 100
        if not self._library.nvmlDeviceGetMemoryInfo(self._handle, memory):
            metrics["machine/gpu_memory_gib"] = memory[2] / GIB
        return metrics


def open_gpu_stats(device: int) -> GpuStats | None:
    """Return the statistics of a GPU; None if its driver has none, such as for a MIG slice."""
    try:
        return GpuStats(device)
    except (OSError, AttributeError):
        return None


def host_memory() -> tuple[float, float]:
    """Return the available and the total memory of this container or machine, in bytes.

    File cache that counts against a container's limit is available: it can be reclaimed.
    """
    numbers = {}
    for line in (PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        numbers[name] = float(value.split()[0]) * 1024
    available, total = numbers["MemAvailable"], numbers["MemTotal"]
    for limit_file, usage_file, statistics_file, cache_name in CONTAINERS:
        # The limit is "max" if there is none; the files are missing in the other cgroup version.
        with suppress(OSError, ValueError, KeyError):
            limit = float((CGROUP / limit_file).read_text())
            words = (CGROUP / statistics_file).read_text().split()
            used = float((CGROUP / usage_file).read_text())
            cache = float(dict(zip(words[::2], words[1::2], strict=True))[cache_name])
            if limit < total:
                available, total = min(available, limit - used + cache), limit
    return available, total
