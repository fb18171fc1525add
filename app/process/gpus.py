"""The NVIDIA GPUs of this machine by their driver's word, and whether a run can use them.

Read before PyTorch is imported, from the library that PyTorch asks too; no memory of a GPU is
taken. Needs the standard library alone: `make install` asks before anything is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
"""there for an NVIDIA GPU under Windows' Linux, where GPUs of all makers are /dev/dxg"""
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DRIVER_LIBRARY = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""attributes of a device, by CUDA's driver API"""
WHEELS = "https://download.pytorch.org/whl"
BUILDS = (((13, 0), "cu130", 580), ((12, 0), "cu126", 525))
"""CUDA that the driver serves, PyTorch's build for it, and the oldest driver of that CUDA; within a
major version a driver serves newer builds too (NVIDIA's minor version compatibility)"""
BF16_CAPABILITY = (8, 0)
OLDEST_OF_CUDA_13 = (7, 5)
MEMORY_TOLERANCE = 0.05
"""share by which the memory of equal GPUs may differ"""
HALF_OR_SINGLE = ("fp16", "fp32")
"""precisions that older GPUs compute in"""
ON_CPU = "type trainer.accelerator=cpu for a run on the CPU"

Version = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, or a slice of one."""

    name: str
    memory_gib: float
    capability: Version

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice, of which a process sees one."""
        return " MIG " in self.name

    @property
    def sm(self) -> str:
        """Return the capability as people write it."""
        return "{}.{}".format(*self.capability)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The GPUs of a machine, their driver, and the PyTorch that is to use them."""

    num_files: int = 0
    """device files"""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES"""
    driver: str | None = None
    """the driver's version, as 580.65.06"""
    cuda: Version | None = None
    """newest CUDA that the driver serves; None where its library cannot be loaded"""
    failure: str = ""
    """why the driver gives no GPU; empty where it does"""
    gpus: tuple[Gpu, ...] = ()
    """those that this process may use, in CUDA's order"""
    torch: str | None = None
    """version of PyTorch, None where it is not installed"""
    torch_cuda: Version | None = None
    """CUDA that it is built for, None for a build without"""


def num_device_files() -> int:
    """Count the NVIDIA device files of this machine."""
    files = sum(file.name[len("nvidia") :].isdigit() for file in DEVICES.glob("nvidia*"))
    return files or int(WSL_DRIVER.exists())


def num_visible(visible: str | None, num_files: int) -> int:
    """Return how many devices CUDA_VISIBLE_DEVICES names, of those that are there."""
    if visible is None:
        return num_files
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA ignores everything from the first invalid index on.
    until = chosen.index("-1") if "-1" in chosen else len(chosen)
    return min(until, num_files)


def read_machine() -> Machine:
    """Describe this machine; the driver is asked where there is a device file."""
    files = num_device_files()
    if not files:
        return Machine()
    torch, torch_cuda = _installed_torch()
    cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        failure = str(error)
    else:
        cuda, failure, gpus = ask_driver(library)
    return Machine(
        num_files=files,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=_driver_version(),
        cuda=cuda,
        failure=failure,
        gpus=gpus,
        torch=torch,
        torch_cuda=torch_cuda,
    )


def ask_driver(library: Any) -> tuple[Version, str, tuple[Gpu, ...]]:
    """Return CUDA's version, why there is no GPU, and the GPUs, by the driver API of `library`."""
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    if code := library.cuInit(0):
        words = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(words))
        return cuda, f"{(words.value or b'unknown error').decode()} (CUDA error {code})", ()
    library.cuDeviceGetCount(ctypes.byref(number))
    return cuda, "", tuple(_describe(library, index) for index in range(number.value))


def _describe(library: Any, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        memory_gib=memory.value / 2**30,
        capability=(major.value, minor.value),
    )


def _driver_version() -> str | None:
    try:
        text = DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found and found[0]


def _installed_torch() -> tuple[str | None, Version | None]:
    """Return PyTorch's version and the CUDA that it is built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '(.*)'", text, re.M)
    built = re.search(r"^cuda\b.*'(\d+)\.(\d+)", text, re.M)
    return version and version[1], built and (int(built[1]), int(built[2]))


def judge(machine: Machine, wanted: int, precision: str) -> list[str]:
    """List why a run cannot use the GPUs of `machine`, with what to do; nothing where it can.

    `wanted`: GPUs that it would use; `precision`: trainer.precision. A machine without a device
    file has no GPU to speak of.
    """
    if not machine.num_files:
        return []
    problems = list(_of_installation(machine)) or list(_of_number(machine, wanted))
    return problems or list(_of_kind(machine, machine.gpus[:wanted], precision))


def _of_installation(machine: Machine) -> Iterator[str]:
    here = f"{machine.num_files} NVIDIA device{'s' * (machine.num_files != 1)}"
    driver = f"the driver {machine.driver}" if machine.driver else "the driver"
    if num_visible(machine.visible, machine.num_files) == 0:
        yield (
            f"CUDA_VISIBLE_DEVICES={machine.visible} hides the {here} of this machine; type: unset "
            f"CUDA_VISIBLE_DEVICES, or {ON_CPU}"
        )
    elif machine.torch_cuda is None and machine.torch is not None:
        yield (
            f"this machine has {here}, and PyTorch {machine.torch} is built without CUDA; "
            f"{_install(machine)}, or {ON_CPU}"
        )
    elif machine.cuda and machine.torch_cuda and machine.cuda[0] < machine.torch_cuda[0]:
        needs = next(oldest for cuda, _, oldest in BUILDS if cuda <= machine.torch_cuda)
        yield (
            f"{driver} serves CUDA up to {_dotted(machine.cuda)}, and PyTorch {machine.torch} is "
            f"built for CUDA {_dotted(machine.torch_cuda)}, which needs driver {needs} or newer; "
            f"update the driver, or {_install(machine)}"
        )
    elif machine.failure:
        yield (
            f"this machine has {here}, but {driver} does not start CUDA: {machine.failure}; "
            "nvidia-smi may say more, and a container needs its host's driver (docker run --gpus "
            f"all); else {ON_CPU}"
        )


def _of_number(machine: Machine, wanted: int) -> Iterator[str]:
    there, named = len(machine.gpus), num_visible(machine.visible, machine.num_files)
    slices = [gpu for gpu in machine.gpus if gpu.is_slice]
    if slices and wanted > 1:
        yield (
            f"{slices[0].name} is a MIG slice, of which a process uses one and ranks cannot use "
            f"several together; type trainer.devices=1, and CUDA_VISIBLE_DEVICES=MIG-... to choose "
            "it (nvidia-smi -L lists them), or end MIG: nvidia-smi -mig 0"
        )
    elif there < min(named, max(wanted, 1)) or (machine.visible is not None and there < named):
        typed = "" if machine.visible is None else f"CUDA_VISIBLE_DEVICES={machine.visible}: "
        fits = f"type trainer.devices={there}" if there else ON_CPU
        yield (
            f"{typed}CUDA finds {there} of {named} GPUs; choose from 0 to {machine.num_files - 1} "
            f"(or by the ids of nvidia-smi -L), or {fits}"
        )


def _of_kind(machine: Machine, gpus: tuple[Gpu, ...], precision: str) -> Iterator[str]:
    for gpu in gpus:
        what = f"{gpu.name} has compute capability {gpu.sm}"
        if gpu.capability < OLDEST_OF_CUDA_13 and (machine.torch_cuda or (0, 0)) >= (13, 0):
            yield (
                f"{what}, and PyTorch {machine.torch} is built for CUDA 13, which serves 7.5 and "
                f"newer; {_install(machine, BUILDS[1][1])} and {_older()}"
            )
            return
        if gpu.capability < BF16_CAPABILITY and precision not in HALF_OR_SINGLE:
            yield f"{what}, and bf16 and flash attention need 8.0 or newer; {_older()}"
            return
    sizes = [gpu.memory_gib for gpu in gpus]
    if sizes and min(sizes) < (1 - MEMORY_TOLERANCE) * max(sizes):
        listed = ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in gpus)
        yield (
            f"the GPUs differ in memory ({listed}), and each rank needs as much as the others: "
            f"the smallest would decide for all; for equal ones {_largest_of_one_size(machine)}"
        )


def _older() -> str:
    return f"type trainer.precision=fp16 (or fp32) for such GPUs, or {ON_CPU}"


def _largest_of_one_size(machine: Machine) -> str:
    """Return what to type for the GPUs of the size that has the most memory in all."""
    sizes = [round(gpu.memory_gib) for gpu in machine.gpus]
    size = max(sizes, key=lambda one: (one * sizes.count(one), one))
    names: list[str] = []
    if machine.visible is not None:
        names = [name.strip() for name in machine.visible.split(",")]
    chosen = [
        names[index] if names else str(index) for index, one in enumerate(sizes) if one == size
    ]
    return (
        f"put CUDA_VISIBLE_DEVICES={','.join(chosen)} before the command, and type "
        f"trainer.devices={len(chosen)}"
    )


def _install(machine: Machine, build: str | None = None) -> str:
    """Return how to install the build of PyTorch that this machine's driver serves."""
    build = build or build_for(machine.cuda)
    if build is None:
        return "update the driver: no PyTorch that this program takes serves one so old"
    version = (machine.torch or "").partition("+")[0]
    return (
        f"install PyTorch's build for this machine: pip install -c constraints.txt "
        f"torch=={version}+{build} --extra-index-url {WHEELS}/{build}"
    )


def cuda_of(driver: str | None) -> Version | None:
    """Return the oldest CUDA that a driver of this version surely serves; None for none of ours."""
    if driver is None:
        return None
    return next((cuda for cuda, _, oldest in BUILDS if int(driver.split(".")[0]) >= oldest), None)


def build_for(cuda: Version | None) -> str | None:
    """Return the name of PyTorch's build for a driver of this CUDA, None for one too old."""
    if cuda is None:
        return BUILDS[0][1]
    return next((build for least, build, _ in BUILDS if cuda >= least), None)


def _dotted(version: Version) -> str:
    return "{}.{}".format(*version)
