"""GPUs that a run cannot use are named before anything starts, on machines that are made up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import app.preflight.couplings.devices as devices
from app.process import gpus
from app.process.gpus import Gpu, Machine, find_gpu_problems, read_machine
from app.training.trainer import resolve_accelerator
from common.errors import DeviceError
from tests.in_process import make_words, run_command
from tests.machines import H100, TWO

L4 = Gpu(name="NVIDIA L4", memory_gib=22.0, capability=(8, 9))
T4 = Gpu(name="Tesla T4", memory_gib=14.6, capability=(7, 5))
V100 = Gpu(name="Tesla V100-SXM2-16GB", memory_gib=15.8, capability=(7, 0))
B200 = Gpu(name="NVIDIA B200", memory_gib=178.0, capability=(10, 0))
SLICE = Gpu(name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", memory_gib=39.5, capability=(8, 0))


def machine(**changed: Any) -> Machine:
    return replace(TWO, **changed)


OLD = {"driver": "550.54.15", "cuda": (12, 4)}
CU126 = "torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"
BAD: dict[str, tuple[Machine, int, str, tuple[str, ...]]] = {
    "a driver too old": (machine(**OLD,
        failure="the provided PTX was compiled with an unsupported toolchain."), 2, "auto",
        ("driver 550.54.15", "CUDA up to 12.4", "built for CUDA 13.0", "driver 580", CU126)),
    "a driver too old for any build": (machine(driver="470.82.01", cuda=(11, 4)), 1, "auto",
        ("CUDA up to 11.4", "driver 580 or newer; update the driver: it is too old")),
    "PyTorch for CPUs": (machine(torch="2.13.0+cpu", torch_cuda=None, **OLD), 2, "auto",
        ("PyTorch 2.13.0+cpu is built without CUDA", CU126, "trainer.accelerator=cpu")),
    "no driver": (machine(driver=None, cuda=None, gpus=(),
        failure="libcuda.so.1: cannot open shared object"), 2, "auto", ("2 NVIDIA devices",
        "libcuda.so.1: cannot open", "--gpus all", "trainer.accelerator=cpu")),
    "an empty CUDA_VISIBLE_DEVICES": (machine(visible="", gpus=()), 1, "auto",
        ("CUDA_VISIBLE_DEVICES= hides the 2", "unset CUDA_VISIBLE_DEVICES", "accelerator=cpu")),
    "a GPU that is not there": (machine(visible="7", gpus=()), 1, "auto",
        ("CUDA_VISIBLE_DEVICES=7: CUDA finds 0 of 1 GPUs; choose from 0 to 1",)),
    "device files of others": (machine(gpus=(H100,)), 2, "auto", ("CUDA finds 1 of 2 GPUs",
        "trainer.devices=1")),
    "two slices": (machine(gpus=(SLICE,)), 2, "auto", ("MIG 3g.40gb is a MIG slice",
        "trainer.devices=1")),
    "a GPU without bf16": (machine(gpus=(T4, T4)), 2, "auto",
        ("Tesla T4 has compute capability 7.5", "8.0 or newer", "trainer.precision=fp16")),
    "a GPU that CUDA 13 has left": (machine(gpus=(V100, V100)), 2, "fp16",
        ("V100-SXM2-16GB has compute capability 7.0", "CUDA 13, which supports 7.5", CU126)),
    "a GPU that is newer than CUDA 12.6": (machine(**OLD, torch="2.13.0+cu126", torch_cuda=(12, 6),
        gpus=(B200, B200)), 2, "auto", ("B200 has compute capability 10.0",
        "CUDA 12.6, which has no kernels", "driver 580")),
    "two of unlike memory": (machine(gpus=(L4, H100)), 2, "auto",
        ("differ in memory (NVIDIA L4 22 GiB, NVIDIA H100 80GB HBM3 79 GiB)",
        "CUDA_VISIBLE_DEVICES=1 before the command, and type trainer.devices=1")),
    "unlike memory among the visible": (machine(num_files=8, visible="2,3,5", gpus=(H100, L4,
        H100)), 3, "auto",
        ("CUDA_VISIBLE_DEVICES=2,5 before the command, and type trainer.devices=2",)),
}  # fmt: skip
GOOD: dict[str, tuple[Machine, int, str]] = {
    "two alike": (TWO, 2, "auto"),
    "the first of two unlike": (machine(gpus=(H100, L4)), 1, "auto"),
    "one slice of a machine of several": (machine(gpus=(SLICE,)), 1, "auto"),
    "older GPUs in fp16": (machine(gpus=(T4, T4)), 2, "fp16"),
    "an older driver, and a build for it": (
        machine(torch="2.13.0+cu126", torch_cuda=(12, 6), **OLD), 2, "auto",
    ),
    "one that was chosen": (machine(visible="1", gpus=(H100,)), 1, "auto"),
    "totals that differ by what a screen takes": (
        machine(gpus=(H100, replace(H100, memory_gib=78.9))), 2, "auto",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_keeps_gpus_from_a_run_is_said_with_what_to_do(name: str) -> None:
    (problem,) = find_gpu_problems(*BAD[name][:3])
    for words in BAD[name][3]:
        assert words in problem
    assert any(way in problem for way in ("type", "install", "update")), problem


def test_fp8_needs_a_gpu_with_fp8_products() -> None:
    (problem,) = find_gpu_problems(machine(gpus=(SLICE,)), 1, "auto", computes_in_fp8=True)
    assert "capability 8.0, but quantization=fp8 needs 8.9" in problem
    assert "type quantization=int8" in problem
    (problem,) = find_gpu_problems(machine(gpus=(SLICE,)), 1, "fp8")
    assert "trainer.precision=fp8 needs 8.9" in problem and "type trainer.precision=bf16" in problem
    assert find_gpu_problems(machine(gpus=(L4,)), 1, "auto", computes_in_fp8=True) == []


@pytest.mark.parametrize("name", GOOD)
def test_gpus_that_serve_are_let_through(name: str) -> None:
    assert find_gpu_problems(*GOOD[name]) == []


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    def use(machine: Machine) -> None:
        monkeypatch.setattr(devices, "read_machine", lambda: machine)

    return use


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return make_words(tmp_path)


def test_a_run_ends_with_the_environments_code_and_one_message(
    on_machine: Callable[[Machine], None], words: list[str]
) -> None:
    on_machine(BAD["a driver too old"][0])
    result = run_command(*words, gpus=2)
    assert result.code == 3
    assert result.config is None
    assert result.stderr.startswith(
        "error (the environment): the driver 550.54.15 supports CUDA up"
    )
    assert result.stderr.count("\n") == 1


def test_it_ends_the_same_way_where_no_gpu_would_have_been_used(
    on_machine: Callable[[Machine], None], words: list[str]
) -> None:
    on_machine(BAD["an empty CUDA_VISIBLE_DEVICES"][0])
    assert run_command(*words).code == 3
    assert run_command(*words, "trainer.accelerator=cpu").code == 0
    assert run_command(*words, verb="preview").code == 0  # it may be of a run for another machine
    evaluation = run_command(
        words[0], words[1].replace("datasets", "test_datasets"), verb="evaluate"
    )
    assert evaluation.code == 3, evaluation.stderr


def test_a_gpu_that_pytorch_cannot_use_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=RuntimeError("no kernels")))
    monkeypatch.setattr("app.training.trainer.count_gpus", lambda: 2)
    with pytest.raises(DeviceError, match="cannot use a GPU here: no kernels; "):
        resolve_accelerator("auto")


class FakeDriver:
    """CUDA's driver API for two GPUs, or one that does not start."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.all = code, (H100, L4)

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 12_080

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuGetErrorString(self, code: int, words: Any) -> None:
        words._obj.value = b"system not yet initialized"

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.all)

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = index

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = self.all[device.value].name.encode()

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> None:
        memory._obj.value = int(self.all[device.value].memory_gib * 2**30)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = self.all[device.value].capability[attribute - gpus.CAPABILITY_MAJOR]


def test_a_machine_is_read_from_its_files_and_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "DRIVER_VERSION", tmp_path / "version")
    assert read_machine().num_files == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "version").write_text("NVRM version: NVIDIA Kernel Module  535.161.08  Sat Feb 24")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    found = read_machine()
    assert (found.num_files, found.visible, found.driver) == (2, "1", "535.161.08")
    assert (found.torch, found.cuda, found.failure) == (torch.__version__, (12, 8), "")
    built = torch.version.cuda
    assert found.torch_cuda == (built and tuple(map(int, built.split("."))))
    rounded = [replace(gpu, memory_gib=round(gpu.memory_gib, 3)) for gpu in found.gpus]
    assert rounded == [H100, L4]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(802))
    found = read_machine()
    assert (found.failure, found.gpus) == ("system not yet initialized (CUDA error 802)", ())
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("cannot open it")))
    assert read_machine().failure == "cannot open it"


@pytest.mark.gpu
def test_the_driver_says_what_pytorch_says() -> None:
    found = read_machine()
    assert found.failure == ""
    assert len(found.gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(found.gpus):
        properties = torch.cuda.get_device_properties(index)
        assert (gpu.name, gpu.capability) == (properties.name, (properties.major, properties.minor))
        assert gpu.memory_gib == pytest.approx(properties.total_memory / 2**30, rel=0.01)
    assert found.cuda is not None and found.torch_cuda is not None
    assert found.cuda[0] >= found.torch_cuda[0]
