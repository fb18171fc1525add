"""Process-wide settings made before the libraries are imported.

Environment: no telemetry, no network access for local files, no meaningless warnings; how threads
wait and how many kernels are cached. Standard streams: printing survives a closed terminal and
never shows secrets. Memory: by default glibc returns freed memory to the kernel, which clears every
page when it is allocated again, and the kernel maps pages of 4 KiB. Keeping freed memory, in huge
pages, saved 16 % of the CPU time of the quickstart's steps (one thread, AMD EPYC).
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from app.process.gpus import DEVICES, num_device_files
from app.process.logs import start_logging
from app.process.signals import end_process, install_signal_handlers
from common.redaction import redact

_STATUS = Path("/proc/self/status")
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""parameters of glibc's mallopt, in bytes"""
_MADV_HUGEPAGE = 14
_RETURNED_BLOCK = 2**20
"""minimum size in bytes of the blocks that `return_freed_memory` gives separate mappings"""
_LARGEST_BLOCK = 2**25
"""maximum size in bytes of the blocks that malloc puts on the heap (a limit of glibc)"""
HEAP = 2**30
"""size in bytes that the heap may keep; only address space until it is used"""
_MEANINGLESS_WARNINGS = (
    # Batches are built in the main process on purpose; the number of workers is a setting.
    ".*does not have many workers.*",
    # The data plan decides the length and epochs of the loaders.
    ".*number of training batches.*smaller than the logging interval.*",
    ".*GPU available but not used.*",
    # Without srun this program starts the ranks itself, on a login node too.
    ".*srun. command is available on your system but is not used.*",
    # No validation rows were requested, or a resumed run has no step left.
    ".*Total length of `.*` across ranks is zero.*",
    # The loaders start at the checkpoint's step, by the data plan.
    ".*resuming from a checkpoint that ended before the epoch ended.*",
    # peft saves without a hub look-up; the base's name is in the manifest.
    ".*Could not find a config file in.*",
    # Download bars stay enabled on purpose, while weights are loaded without bars.
    ".*Cannot disable progress bars.*",
    # An error of this program says the same.
    ".*adapter keys while loading.*",
    ".*not initialized from the model checkpoint.*",
    # Lightning runs the schedule after the optimizer; torch cannot see it through our optimizer.
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*LeafSpec.*is deprecated.*",
)


class LastingFile(io.FileIO):
    """A file that discards whatever is written to it after the first failure."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes  # type: ignore[arg-type]


class CleanText(io.TextIOWrapper):
    """Text output with secrets redacted, also in what libraries print."""

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


def protect_streams() -> None:
    """Keep this process running when its output is closed; call before any file is opened."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed, as by `>&-`: the next opened file would receive the output
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _open(1, sys.stdout, by_line=os.isatty(1))
    sys.stderr = _open(2, sys.stderr, by_line=True)


def run_program(work: Callable[[], int]) -> NoReturn:
    """Run a verb as the program of this process, which ends with the exit code of `work`."""
    protect_streams()
    install_signal_handlers()
    end_process(work())


def _open(descriptor: int, before: TextIO | None, *, by_line: bool) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    raw = LastingFile(descriptor, "w", closefd=False)
    return CleanText(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=by_line,
    )


def retain_freed_memory() -> None:
    """Make malloc keep freed memory, in huge pages; call before any work.

    Does nothing if there is a GPU, or if the environment configures malloc.
    """
    is_configured = any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ)
    if sys.platform != "linux" or is_configured or any(DEVICES.glob("nvidia[0-9]*")):
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, HEAP)
    # Grown in one step: madvise does not apply to what is added later.
    libc.mallopt(M_TOP_PAD, HEAP - _LARGEST_BLOCK)
    start = libc.sbrk(0)
    libc.free(libc.malloc(_LARGEST_BLOCK // 2))
    end = libc.sbrk(0)
    if end > start:  # false if address space is limited or another malloc is preloaded
        libc.madvise(start, end - start, _MADV_HUGEPAGE)
    libc.mallopt(M_TOP_PAD, 2 * _LARGEST_BLOCK)


def return_freed_memory() -> None:
    """Make malloc return freed blocks of 1 MiB and more immediately; call before any work.

    By default glibc keeps blocks of up to 32 MB, and a merge would appear to need a third more
    memory than it does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, _RETURNED_BLOCK)


def configure_libraries(*, offline: bool) -> None:
    """Set the environment and warning filters of this process; call before torch is imported.

    `offline` forbids requests to the hub, which a local model does not need.
    """
    defaults = {
        # A waiting thread spins briefly, then sleeps: longer spinning makes a step many times
        # slower as soon as anything else runs; no spinning costs small models a third.
        "GOMP_SPINCOUNT": "1000",
        # oneDNN caches one kernel per shape of half-precision products. The default of 1024 can
        # double the memory of a small model; with too few, kernels are compiled again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        # A lost peer is reported once by this program; torch prints each connection's stack.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1" if offline else "0",
        "HF_HUB_OFFLINE": "1" if offline else "0",
    }
    if num_device_files() and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Packs of many lengths fragment fixed segments; expandable segments avoid that.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for message in _MEANINGLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Changes in a library's next version do not concern users: versions are pinned.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    start_logging()


def host_bytes(name: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS (current) or VmHWM (peak) memory."""
    lines = (line.split() for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{name}:")
