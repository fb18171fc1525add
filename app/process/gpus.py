"""The NVIDIA GPUs of this machine, as the driver reports them, and whether a run can use them.

They are read before PyTorch is imported, from the driver library that PyTorch uses too, without
taking GPU memory. Only the standard library is imported, so that `make install` can run this module
before anything is installed.
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

from common.installation import pip_install
from common.text import counted

DEVICES = Path("/dev")
_WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
"""exists if WSL has an NVIDIA GPU; its device file, /dev/dxg, is the same for all vendors"""
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_DRIVER_LIBRARY = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""device attributes of the CUDA driver API"""
WHEELS = "https://download.pytorch.org/whl"
BUILDS = (((13, 0), "cu130", 580), ((12, 0), "cu126", 525))
"""minimum CUDA version of the driver, PyTorch's build for it, and the oldest driver with that CUDA
version; a driver also runs newer builds of its major version (minor version compatibility)"""
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
_FP8_GPUS = "8.9 or newer (Ada, Hopper, Blackwell)"
OLDEST_OF_CUDA_13 = (7, 5)
BLACKWELL, CUDA_OF_BLACKWELL = (10, 0), (12, 8)
"""the first compute capability that earlier CUDA versions have no kernels for, and the version"""
_MEMORY_TOLERANCE = 0.05
"""share by which the memory of GPUs that count as equal may differ"""
_HALF_OR_SINGLE = ("fp16", "fp32")
"""precisions that older GPUs support"""
ON_CPU = "type trainer.accelerator=cpu for a run on the CPU"

Version = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU or a MIG slice."""

    name: str
    memory_gib: float
    capability: Version

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice; a process sees at most one."""
        return " MIG " in self.name

    @property
    def sm(self) -> str:
        """The compute capability, such as 9.0."""
        return "{}.{}".format(*self.capability)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The GPUs of a machine, their driver, and the installed PyTorch."""

    num_files: int = 0
    """number of device files"""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES"""
    driver: str | None = None
    """version of the driver, such as 580.65.06"""
    cuda: Version | None = None
    """newest CUDA version that the driver supports; None if its library cannot be loaded"""
    failure: str = ""
    """why CUDA does not start; empty if it does"""
    gpus: tuple[Gpu, ...] = ()
    """GPUs visible to this process, in CUDA's order"""
    torch: str | None = None
    """version of PyTorch; None if it is not installed"""
    torch_cuda: Version | None = None
    """CUDA version of PyTorch's build; None for a build without CUDA"""


def num_device_files() -> int:
    files = sum(file.name[len("nvidia") :].isdigit() for file in DEVICES.glob("nvidia*"))
    return files or int(_WSL_DRIVER.exists())


def num_visible(visible: str | None, num_files: int) -> int:
    """Return the number of existing devices that CUDA_VISIBLE_DEVICES selects."""
    if visible is None:
        return num_files
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA ignores everything from the first invalid index on.
    until = chosen.index("-1") if "-1" in chosen else len(chosen)
    return min(until, num_files)


def read_machine() -> Machine:
    """Describe this machine; the driver is queried only if there is a device file."""
    files = num_device_files()
    if not files:
        return Machine()
    torch, torch_cuda = _installed_torch()
    cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
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
    """Return CUDA's version, why CUDA does not start, and the GPUs, by the driver API `library`."""
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
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '(.*)'", text, re.M)
    built = re.search(r"^cuda\b.*'(\d+)\.(\d+)", text, re.M)
    return version and version[1], built and (int(built[1]), int(built[2]))


def find_gpu_problems(
    machine: Machine, wanted: int, precision: str, *, computes_in_fp8: bool = False
) -> list[str]:
    """List why a run cannot use the GPUs of `machine`, each with a fix; empty if it can.

    `wanted`: number of GPUs that the run uses; `precision`: trainer.precision. Without a device
    file there is no GPU, and no problem.
    """
    if not machine.num_files:
        return []
    problems = list(_installation_problems(machine)) or list(_count_problems(machine, wanted))
    used = machine.gpus[:wanted]
    return problems or list(_device_problems(machine, used, precision, computes_in_fp8))


def _installation_problems(machine: Machine) -> Iterator[str]:
    here = counted(machine.num_files, "NVIDIA device")
    driver = f"the driver {machine.driver}" if machine.driver else "the driver"
    if num_visible(machine.visible, machine.num_files) == 0:
        yield (
            f"CUDA_VISIBLE_DEVICES={machine.visible} hides the {here} of this machine; type: unset "
            f"CUDA_VISIBLE_DEVICES, or {ON_CPU}"
        )
    elif machine.torch_cuda is None and machine.torch is not None:
        yield (
            f"this machine has {here}, but PyTorch {machine.torch} is built without CUDA; "
            f"{_install(machine)}, or {ON_CPU}"
        )
    elif machine.cuda and machine.torch_cuda and machine.cuda[0] < machine.torch_cuda[0]:
        needs = next(oldest for cuda, _, oldest in BUILDS if cuda <= machine.torch_cuda)
        choice = "" if build_for(machine.cuda) is None else "update the driver, or "
        yield (
            f"{driver} supports CUDA up to {_dotted(machine.cuda)}, but PyTorch {machine.torch} is "
            f"built for CUDA {_dotted(machine.torch_cuda)}, which needs driver {needs} or newer; "
            f"{choice}{_install(machine)}"
        )
    elif machine.failure:
        yield (
            f"this machine has {here}, but {driver} does not start CUDA: {machine.failure}; "
            "nvidia-smi may say more, and a container needs its host's driver (docker run --gpus "
            f"all); else {ON_CPU}"
        )


def _count_problems(machine: Machine, wanted: int) -> Iterator[str]:
    there, named = len(machine.gpus), num_visible(machine.visible, machine.num_files)
    slices = [gpu for gpu in machine.gpus if gpu.is_slice]
    if slices and wanted > 1:
        yield (
            f"{slices[0].name} is a MIG slice: a process can use one, and ranks cannot use several "
            "together; type trainer.devices=1, and CUDA_VISIBLE_DEVICES=MIG-... to choose one "
            "(nvidia-smi -L lists them), or disable MIG: nvidia-smi -mig 0"
        )
    elif there < min(named, max(wanted, 1)) or (machine.visible is not None and there < named):
        typed = "" if machine.visible is None else f"CUDA_VISIBLE_DEVICES={machine.visible}: "
        fits = f"type trainer.devices={there}" if there else ON_CPU
        yield (
            f"{typed}CUDA finds {there} of {named} GPUs; choose from 0 to {machine.num_files - 1} "
            f"(or by the ids of nvidia-smi -L), or {fits}"
        )


def _device_problems(
    machine: Machine, gpus: tuple[Gpu, ...], precision: str, computes_in_fp8: bool
) -> Iterator[str]:
    built = machine.torch_cuda or (0, 0)
    older = f"type trainer.precision=fp16 (or fp32) for such GPUs, or {ON_CPU}"
    for gpu in gpus:
        if gpu.capability < OLDEST_OF_CUDA_13 and built >= (13, 0):
            why = (
                f"PyTorch {machine.torch} is built for CUDA 13, which supports 7.5 and newer; "
                f"{_install(machine, BUILDS[1][1])} and {older}"
            )
        elif gpu.capability >= BLACKWELL and built < CUDA_OF_BLACKWELL:
            why = (
                f"PyTorch {machine.torch} is built for CUDA {_dotted(built)}, which has no kernels "
                f"for it; {_install(machine, BUILDS[0][1])}, which needs driver {BUILDS[0][2]} or "
                "newer"
            )
        elif gpu.capability < BF16_CAPABILITY and precision not in _HALF_OR_SINGLE:
            why = f"bf16 and flash attention need 8.0 or newer; {older}"
        elif precision == "fp8" and gpu.capability < FP8_CAPABILITY:
            why = f"trainer.precision=fp8 needs {_FP8_GPUS}; type trainer.precision=bf16"
        elif computes_in_fp8 and gpu.capability < FP8_CAPABILITY:
            why = (
                f"quantization=fp8 needs {_FP8_GPUS}; type quantization=int8 for as many bytes a "
                "weight, or quantization=none"
            )
        else:
            continue
        yield f"{gpu.name} has compute capability {gpu.sm}, but {why}"
        return
    sizes = [gpu.memory_gib for gpu in gpus]
    if sizes and min(sizes) < (1 - _MEMORY_TOLERANCE) * max(sizes):
        listed = ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in gpus)
        yield (
            f"the GPUs differ in memory ({listed}), but all ranks need the same amount, so the "
            f"smallest would limit all; for equal GPUs {_largest_of_one_size(machine)}"
        )


def _largest_of_one_size(machine: Machine) -> str:
    """Return what to type to use the group of equal GPUs with the most memory in total."""
    sizes = [round(gpu.memory_gib) for gpu in machine.gpus]
    size = max(sizes, key=lambda gib: (gib * sizes.count(gib), gib))
    names: list[str] = []
    if machine.visible is not None:
        names = [name.strip() for name in machine.visible.split(",")]
    chosen = [
        names[index] if names else str(index) for index, gib in enumerate(sizes) if gib == size
    ]
    return (
        f"put CUDA_VISIBLE_DEVICES={','.join(chosen)} before the command, and type "
        f"trainer.devices={len(chosen)}"
    )


def _install(machine: Machine, build: str | None = None) -> str:
    build = build or build_for(machine.cuda)
    if build is None:
        return "update the driver: it is too old for every PyTorch that this program supports"
    version = (machine.torch or "").partition("+")[0]
    return (
        f"install PyTorch's build for this machine: {pip_install()} "
        f"torch=={version}+{build} --extra-index-url {WHEELS}/{build}"
    )


def cuda_of(driver: str | None) -> Version | None:
    """Return the CUDA version in `BUILDS` that this driver supports; None if it is too old."""
    if driver is None:
        return None
    return next((cuda for cuda, _, oldest in BUILDS if int(driver.split(".")[0]) >= oldest), None)


def build_for(cuda: Version | None) -> str | None:
    """Return PyTorch's build for a driver with this CUDA version; None if it is too old."""
    if cuda is None:
        return BUILDS[0][1]
    return next((build for least, build, _ in BUILDS if cuda >= least), None)


def _dotted(version: Version) -> str:
    return "{}.{}".format(*version)
