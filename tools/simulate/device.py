"""A fake CUDA device for FakeTensors on `cuda:0`, in forward and backward passes and autocast.

A process that has called `install` keeps the fake H100 until it ends, so tools that trace use a
separate process. Nothing is computed and no memory is allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("guard.cpp")
MEMORY_GIB = 80
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
_kernels: Any = None


class FakeDeviceError(Exception):
    """The fake device cannot be installed, or cannot run a model; the message says why."""


def find_obstacle() -> str | None:
    """Return why the fake device cannot be built on this machine, and the fix; None if it can."""
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++); install one, as by apt install g++"
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return (
            "this PyTorch is built for CUDA, and would use its real device; install PyTorch's CPU "
            "build in another environment"
        )
    return None


def install(name: str = "", memory_gib: float = MEMORY_GIB, num_devices: int = 1) -> None:
    """Install fake CUDA devices in torch; FakeDeviceError if that is not possible.

    All of them are `cuda:0`: an H100 with the given name and memory.
    """
    Properties.name = name or Properties.name
    Properties.total_memory, Properties.num_devices = int(memory_gib * 2**30), num_devices
    torch = _load_device()
    _patch_cuda(torch)


@functools.cache
def _load_device() -> Any:
    """Register the device's guard and operators in torch; return torch."""
    if obstacle := find_obstacle():
        raise FakeDeviceError(obstacle)
    _load_guard()
    # Imported before there is a device: with one, bitsandbytes would load CUDA's library.
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers
    from bitsandbytes import functional

    # Computed here, since bitsandbytes' quantization maps need real values.
    functional.create_dynamic_map = functools.cache(functional.create_dynamic_map)
    functional.name2qmap["dynamic"] = functional.create_dynamic_map(signed=True)
    functional.create_dynamic_map(signed=False)
    _patch_fake_tensors(torch)
    _patch_attention(torch)
    # For fake tensors transformers would skip work, such as reading whether a mask is needed.
    transformers.utils.import_utils.is_fake_tensor = lambda _: False
    return torch


def start() -> None:
    """Install the fake device and its kernels for a program; exit with code 3 if impossible."""
    warnings.simplefilter("ignore")
    try:
        install()
    except FakeDeviceError as reason:
        print(reason, file=sys.stderr)
        sys.exit(3)
    from tools.simulate.kernels import install_kernels

    install_kernels()


def _torch_folder() -> Path:
    """Return the folder of the installed PyTorch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _load_guard() -> None:
    """Build the guard into a temporary folder and load it, before torch starts its threads."""
    torch_folder = _torch_folder()
    libraries = torch_folder / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    include = torch_folder / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libguard.so"
        command = ["g++", "-std=c++20", "-fPIC", "-shared", str(SOURCE), "-o", str(library)]
        command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{libraries}"]
        done = subprocess.run(
            [*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FakeDeviceError(f"g++ does not build {SOURCE.name}: {done.stderr.strip()[-300:]}")
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Properties:
    """The result of `torch.cuda.get_device_properties`."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = CAPABILITY
    multi_processor_count = MULTIPROCESSORS
    total_memory = MEMORY_GIB << 30
    num_devices = 1
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536


class Event:
    """An event that completes as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, _: Any = None) -> None:
        """Do nothing: the event is complete."""

    wait = synchronize = record

    def query(self) -> bool:
        """Return True: the event is complete."""
        return True


class Stream:
    """A stream whose work is complete as soon as it is enqueued."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        """Return a completed event."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return False: no graph is being captured."""
        return False

    def wait_event(self, _: Event) -> None:
        """Do nothing: all work is done."""

    def wait_stream(self, _: Stream) -> None:
        """Do nothing: all work is done."""

    def synchronize(self) -> None:
        """Do nothing: all work is done."""


def _patch_cuda(torch: Any) -> None:
    """Patch `torch.cuda` to describe the fake device."""
    state = torch.zeros(16, dtype=torch.uint8)
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": Properties.major >= 8,
        "current_device": 0,
        "device_count": Properties.num_devices,
        "get_device_name": Properties.name,
        "get_device_capability": (Properties.major, Properties.minor),
        "get_device_properties": Properties,
        "mem_get_info": (Properties.total_memory, Properties.total_memory),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "get_rng_state": state,
    }
    nothing = (
        "_lazy_init",
        "manual_seed",
        "manual_seed_all",
        "set_device",
        "synchronize",
        "empty_cache",
        "set_rng_state",
    )
    for name, value in (values | dict.fromkeys(nothing)).items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_flash_attention_available = lambda: True


def install_fake_streams() -> None:
    """Install fake streams and events for FSDP; compiled layers need real ones."""
    import torch

    only_stream: Any = Stream()
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: only_stream,
        "default_stream": lambda *_: only_stream,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = replaced["current_stream"]


CUDA_KERNELS = ("silu_backward",)
"""operators that are one kernel on CUDA, and that a build without CUDA decomposes"""


def _patch_fake_tensors(torch: Any) -> None:
    """Let FakeTensors be created without a driver, be pinned, be moved and have an address."""
    global _kernels
    _kernels = torch.library.Library("aten", "IMPL")
    for name in CUDA_KERNELS:
        _kernels.impl(name, lambda *_: None, "CUDA")  # registered so that it exists; never called
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.weak import WeakIdKeyDictionary

    torch._C._set_only_lift_cpu_tensors(True)
    FakeTensorMode.avoid_device_init = property(lambda _: True)
    pinned = WeakIdKeyDictionary()

    def pin_memory(tensor: Any) -> Any:
        copy = tensor.clone()
        pinned[copy] = None
        return copy

    FakeTensor.pin_memory, FakeTensor.is_pinned = pin_memory, lambda tensor: tensor in pinned
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata
    values = torch.Tensor.data

    def set_values(tensor: Any, other: Any) -> None:
        values.__set__(tensor, other)
        tensor.fake_device = other.fake_device  # PyTorch leaves it as it was

    FakeTensor.data = property(values.__get__, set_values)


MAX_FLASH_HEAD_DIM = 256


def _patch_attention(torch: Any) -> None:
    """Have `scaled_dot_product_attention` call the kernel that CUDA would select.

    A build without CUDA has no such kernel, and would compute all scores.
    """
    own, kernels = torch.nn.functional.scaled_dot_product_attention, torch.ops.aten

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, **given: Any) -> Any:
        if query.device.type != "cuda":
            return own(query, key, value, attn_mask=attn_mask, **given)
        dtype = query.dtype
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        parts = [part.to(dtype) for part in (query, key, value)]
        dropout, is_causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
        takes_flash = attn_mask is None and dtype.itemsize == 2
        if takes_flash and max(part.shape[-1] for part in parts) <= MAX_FLASH_HEAD_DIM:
            flash = kernels._scaled_dot_product_flash_attention
            return flash(*parts, dropout, is_causal, False, scale=given.get("scale"))[0]
        if query.shape[1] != key.shape[1]:  # only FlashAttention supports grouped-query attention
            return own(*parts, attn_mask=attn_mask, **given)
        if attn_mask is not None:
            shape = (*parts[0].shape[:3], key.shape[2])
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -torch.inf)
            attn_mask = attn_mask.to(dtype).expand(shape)
        efficient = kernels._scaled_dot_product_efficient_attention
        return efficient(*parts, attn_mask, True, dropout, is_causal, scale=given.get("scale"))[0]

    torch.nn.functional.scaled_dot_product_attention = attend
