"""What `make install` adds on a machine with a CUDA GPU; runs before anything is installed.

Without a word it says what and why, with `index` it prints pip's options for PyTorch, with `extra`
what is added to the extras. Prints nothing on a machine without.
"""

from __future__ import annotations

import shutil
import sys

from app.process.gpus import (
    BUILDS,
    DRIVER_VERSION,
    OLDEST_OF_CUDA_13,
    WHEELS,
    Gpu,
    Machine,
    build_for,
    cuda_of,
    read_machine,
)

PACKAGES = {"gpu": "liger-kernel", "hybrid": "flash-linear-attention", "flash4": "flash-attn-4"}
FROM_THE_INDEX = BUILDS[0][1]
"""CUDA build of PyTorch on the package index"""
FLASH4_CAPABILITIES = (9, 10)
"""as in app/model/attention/varlen.py, which cannot be imported before PyTorch is installed"""


def has_gpu(machine: Machine) -> bool:
    """Return whether this machine has an NVIDIA GPU or its driver."""
    has_driver = DRIVER_VERSION.exists() or shutil.which("nvidia-smi") is not None
    return machine.num_files > 0 or has_driver


def _serves_flash4(gpu: Gpu) -> bool:
    return gpu.capability[0] in FLASH4_CAPABILITIES


def answer(machine: Machine, asked: str) -> str:
    """Return the text for a machine with a GPU."""
    cuda = machine.cuda or cuda_of(machine.driver)
    is_too_old = (cuda is None and machine.driver is not None) or build_for(cuda) is None
    build = FROM_THE_INDEX if is_too_old else build_for(cuda)
    if any(gpu.capability < OLDEST_OF_CUDA_13 for gpu in machine.gpus):
        build = BUILDS[1][1]
    extras = ["gpu", "hybrid"]
    if build == FROM_THE_INDEX and machine.gpus and all(map(_serves_flash4, machine.gpus)):
        extras.append("flash4")
    if asked == "extra":
        return "".join(f",{name}" for name in extras)
    if asked == "index":
        return "" if build == FROM_THE_INDEX else f"--extra-index-url {WHEELS}/{build}"
    driver = f"driver {machine.driver or 'of unknown version'}"
    oldest = {name: least for _, name, least in BUILDS}
    if is_too_old:
        least = min(oldest.values())
        return f"gpu: {driver} is too old for PyTorch: update it to {least} or newer, or to 580"
    said = f"gpu: {driver}: PyTorch's build {build} (driver {oldest[build or '']} or newer)"
    failed = f"; but CUDA does not start: {machine.failure}" if machine.failure else ""
    added = ", ".join(f"{name} ({PACKAGES[name]})" for name in extras)
    return f"{said}, and the extras {added}{failed}"


if __name__ == "__main__":
    machine = read_machine()
    if has_gpu(machine):
        print(answer(machine, sys.argv[1] if len(sys.argv) > 1 else ""))
