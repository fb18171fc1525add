"""Tensors come back bit for bit from files that any reader of safetensors takes."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from app.training.checkpoint import disk
from app.training.checkpoint.checkpoint import (
    check_tensors,
    file_bytes,
    read_tensors,
    write_tensors,
)
from common.untrusted import SAFETENSORS_DTYPES

MEBIBYTE = 1 << 20


def as_bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach().resolve_neg().contiguous().cpu()
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert as_bytes(found[name]) == as_bytes(tensor), name


def of_every_type() -> dict[str, Tensor]:
    dice = np.random.default_rng(0)
    return {
        name: torch.frombuffer(bytearray(dice.bytes(48)), dtype=torch.uint8).view(
            getattr(torch, name)
        )
        if name != "bool"
        else torch.tensor([True, False, True])
        for name in SAFETENSORS_DTYPES
    }


def of_every_layout() -> dict[str, Tensor]:
    base = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    return {
        "transposed": base.T,
        "strided": base[::3, 1::2],
        "expanded": base[:1].expand(7, 10),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "one": torch.tensor([[[1.5]]]).bfloat16(),
        "offset": base.view(-1)[5:18],
        "trained": torch.nn.Parameter(base[3:].clone()),
        "permuted": base.view(4, 3, 10).permute(2, 0, 1),
        "negated": torch._neg_view(base),
        "column": base[:, 4],
        'naïve/名前 "quoted"': base[0].double(),
    }


@pytest.mark.parametrize("block_bytes", [16, 100, disk.BLOCK_BYTES])
def test_tensors_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", block_bytes)
    tensors = of_every_type() | of_every_layout()
    file = tmp_path / "all.safetensors"
    written = write_tensors(file, tensors)
    assert_same(read_tensors(file), tensors)
    assert_same(load_file(file), tensors)
    content = file.read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.num_bytes == len(content) == file_bytes(tensors)


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(3, dtype=torch.float16),
        "c": torch.ones(3, dtype=torch.float64),
        "d": torch.ones(1, dtype=torch.float32),
    }
    write_tensors(tmp_path / "file", tensors)
    for name, tensor in read_tensors(tmp_path / "file").items():
        assert tensor.data_ptr() % tensor.element_size() == 0, name


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {})
    assert read_tensors(tmp_path / "file") == {}
    check_tensors(tmp_path / "file")


def test_what_was_read_may_be_changed_and_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_tensors(file, {"a": torch.ones(4)})
    before = file.read_bytes()
    found = read_tensors(file)["a"]
    found.mul_(3)
    assert file.read_bytes() == before
    file.unlink()
    assert found.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "tensor", [torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex128)]
)
def test_a_tensor_that_the_format_does_not_know_is_named(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="odd/one: a torch"):
        write_tensors(tmp_path / "file", {"odd/one": tensor})
    assert not (tmp_path / "file").exists()


def test_a_file_that_is_none_of_the_format_is_named(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x04pickle", b"\xff" * 100):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.safetensors is not a safetensors file"):
            check_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_writing_holds_no_copy_of_the_tensors(tmp_path: Path, layout: str) -> None:
    num_bytes = 128 * MEBIBYTE
    tensor = torch.ones(num_bytes // 4096, 1024)
    tensors = {"a": tensor if layout == "contiguous" else tensor.T}
    child = os.fork()
    if child == 0:
        status = 1
        try:
            small = torch.ones(3000, 1000)
            write_tensors(tmp_path / "warm", {"a": small, "b": small.T})  # code is memory too
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            write_tensors(tmp_path / "file", tensors)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            status = 0 if grown <= num_bytes // 10 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (tmp_path / "file").unlink()


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_written_without_a_copy_there(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(64, MEBIBYTE, device="cuda"),
        "b": torch.randn(300, 700, device="cuda").T,
        "c": torch.randn(9, device="cuda").bfloat16(),
    }
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    write_tensors(tmp_path / "file", tensors)
    assert torch.cuda.max_memory_allocated() - before <= 2 * disk.BLOCK_BYTES
    assert_same(read_tensors(tmp_path / "file"), tensors)
