"""A fake CUDA device: FakeTensors on `cuda:0`, forward, backward and autocast.

A process that has called `install` has a fake H100 until it ends, so that a tool which traces needs
a process of its own. Nothing is computed and no memory is taken.
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
    """Says why there can be no fake device here."""


def find_obstacle() -> str | None:
    """Return why this machine cannot make the fake device, None where it can."""
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    return None


def install(name: str = "", memory_gib: float = MEMORY_GIB, num_devices: int = 1) -> None:
    """Give torch fake CUDA devices; FakeDeviceError with the reason where it cannot.

    All of them are `cuda:0`: an H100, with the name and memory that are given.
    """
    Properties.name = name or Properties.name
    Properties.total_memory, Properties.num_devices = int(memory_gib * 2**30), num_devices
    torch = _load_device()
    _pretend(torch)


@functools.cache
def _load_device() -> Any:
    """Give torch the device's guard and its operators, and return torch."""
    if obstacle := find_obstacle():
        raise FakeDeviceError(obstacle)
    _load_guard()
    # What asks for a device while it is imported must find none: bitsandbytes loads CUDA's library.
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers
    from bitsandbytes import functional

    # The table of its scales is computed once, by numbers that a fake would not have.
    functional.name2qmap["dynamic"] = functional.create_dynamic_map()
    if torch.version.cuda is not None:
        raise FakeDeviceError("this PyTorch is built for CUDA, whose own device would be taken")
    _teach_fakes(torch)
    _choose_attention(torch)
    # Else it would leave out what it does with real tensors, as reading whether a mask is needed.
    transformers.utils.import_utils.is_fake_tensor = lambda _: False
    return torch


def start() -> None:
    """Give a program the fake device and its kernels; exit code 3 where it cannot."""
    warnings.simplefilter("ignore")
    try:
        install()
    except FakeDeviceError as reason:
        print(reason, file=sys.stderr)
        sys.exit(3)
    from app.planning.simulation.kernels import install_kernels

    install_kernels()


def _load_guard() -> None:
    """Build the guard into a temporary folder and load it, before torch starts its threads."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder = Path(spec.origin).parent
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
    """What `torch.cuda.get_device_properties` says of the device."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = CAPABILITY
    multi_processor_count = MULTIPROCESSORS
    total_memory = MEMORY_GIB << 30
    num_devices = 1
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536


class Event:
    """A point in a stream's work, which is reached at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, _: Any = None) -> None:
        """Do nothing: it is reached."""

    wait = synchronize = record

    def query(self) -> bool:
        """Return True: it is reached."""
        return True


class Stream:
    """A queue of work that is done as soon as it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has been reached."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def wait_event(self, _: Event) -> None:
        """Do nothing: all work is done."""

    def wait_stream(self, _: Stream) -> None:
        """Do nothing: all work is done."""

    def synchronize(self) -> None:
        """Do nothing: all work is done."""


def _pretend(torch: Any) -> None:
    """Patch `torch.cuda` to answer for the fake device."""
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
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
    for name, value in (answers | dict.fromkeys(nothing)).items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_flash_attention_available = lambda: True


def install_fake_streams() -> None:
    """Let FSDP have streams and events; compiled layers would ask for a GPU's own."""
    import torch

    one: Any = Stream()
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: one,
        "default_stream": lambda *_: one,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = replaced["current_stream"]


HAS_A_KERNEL = ("silu_backward",)
"""operators that are one kernel on CUDA, where a build without CUDA takes them apart"""


def _teach_fakes(torch: Any) -> None:
    """Let FakeTensors be made without a driver, be page-locked, and have an address."""
    global _kernels
    _kernels = torch.library.Library("aten", "IMPL")
    for name in HAS_A_KERNEL:
        _kernels.impl(name, lambda *_: None, "CUDA")  # known to be there, and never called
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


WIDEST_FLASH_HEAD = 256


def _choose_attention(torch: Any) -> None:
    """Let `scaled_dot_product_attention` take the kernel that CUDA would: a build without CUDA
    knows none for it, and would multiply all scores.
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
        if takes_flash and max(part.shape[-1] for part in parts) <= WIDEST_FLASH_HEAD:
            flash = kernels._scaled_dot_product_flash_attention
            return flash(*parts, dropout, is_causal, False, scale=given.get("scale"))[0]
        if query.shape[1] != key.shape[1]:  # heads are shared by FlashAttention alone
            return own(*parts, attn_mask=attn_mask, **given)
        if attn_mask is not None:
            shape = (*parts[0].shape[:3], key.shape[2])
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -torch.inf)
            attn_mask = attn_mask.to(dtype).expand(shape)
        efficient = kernels._scaled_dot_product_efficient_attention
        return efficient(*parts, attn_mask, True, dropout, is_causal, scale=given.get("scale"))[0]

    torch.nn.functional.scaled_dot_product_attention = attend
