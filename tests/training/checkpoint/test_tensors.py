"""Files of a checkpoint: tensors bit for bit, whole, hashed and synced, each by one rank."""

from __future__ import annotations

import hashlib
import io
import os
import random
import resource
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from app.process import faults, heartbeat
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint import checkpoint as checkpoint_module
from app.training.checkpoint import disk
from app.training.checkpoint.checkpoint import (
    file_bytes,
    load_checkpoint,
    rank_file_name,
    read_tensors,
    tensor_bytes,
    write_share,
    write_tensors,
    writer_ranks,
)
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.documents import MODEL, OPTIMIZER
from app.training.checkpoint.saving import StoredCheckpoints
from app.training.checkpoint.store import CheckpointStore
from app.training.metrics import check_finite_state
from common.errors import TrainingFault
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


@pytest.mark.parametrize("block_bytes", [16, 100, disk.WRITE_BYTES])
def test_tensors_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(disk, "WRITE_BYTES", block_bytes)
    tensors = of_every_type() | of_every_layout()
    file = tmp_path / "all.safetensors"
    written = write_tensors(file, tensors)
    assert_same(read_tensors(file), tensors)
    assert_same(load_file(file), tensors)
    content = file.read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.num_bytes == len(content) == file_bytes(tensors)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_writing_holds_no_copy_of_the_tensors(tmp_path: Path, layout: str) -> None:
    num_bytes = 64 * MEBIBYTE
    tensor = torch.ones(num_bytes // 4096, 1024)
    tensors = {"a": tensor if layout == "contiguous" else tensor.T}
    store = CheckpointStore(tmp_path / "checkpoints")
    store.begin(1)

    def write(name: str, tensors: dict[str, Tensor]) -> None:
        if layout == "transposed":  # a check of its numbers would copy it
            write_tensors(tmp_path / name, tensors)
        else:
            StoredCheckpoints(store).add_tensors(1, {name: tensors}, rank=0, num_ranks=1)

    child = os.fork()
    if child == 0:
        status = 1
        try:
            small = torch.ones(3000, 1000)
            write("warm", {"a": small, "b": small.T})  # code is memory too
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            write("file", tensors)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            status = 0 if grown <= num_bytes // 10 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shutil.rmtree(tmp_path)


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
    assert torch.cuda.max_memory_allocated() - before <= 2 * disk.WRITE_BYTES
    assert_same(read_tensors(tmp_path / "file"), tensors)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    points: list[str] = []
    monkeypatch.setattr(faults, "fault_point", lambda point, step=None: points.append(point))
    return points


def test_a_file_is_written_hashed_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: list[str]
) -> None:
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append((tmp_path / "file").stat().st_size)
    )
    blocks = [b"ab", memoryview(b"cd" * 500), b"", memoryview(bytearray(b"e"))]
    written = disk.write_file(tmp_path / "file", blocks)
    content = b"".join(bytes(block) for block in blocks)
    assert (tmp_path / "file").read_bytes() == content
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.sha256 == disk.read_hash(tmp_path / "file")
    assert written.num_bytes == len(content)
    assert synced == [len(content)]  # when all of it was written
    assert announced == ["disk.create", *["disk.write"] * 3, "disk.fsync"]


def test_a_long_write_is_a_sign_of_life_of_the_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(heartbeat, "send_to_supervisor", messages.append)
    monkeypatch.setattr(heartbeat, "_step", None)
    monkeypatch.setattr(heartbeat, "_num_beats", 4)
    disk.write_file(tmp_path / "before", [b"a", b"b"])
    assert messages == []  # from the first on, pauses count
    heartbeat.send_heartbeat(7)
    disk.write_file(tmp_path / "within", [b"a", b"b"])
    assert messages == ["beat 5 7"] * 3
    with ThreadPoolExecutor() as pool:
        pool.submit(disk.write_file, tmp_path / "beside", [b"a", b"b"]).result()
        assert len(messages) == 3
        with heartbeat.waiting_for_thread():
            pool.submit(disk.write_file, tmp_path / "waited for", [b"a", b"b"]).result()
    assert len(messages) == 5


class Slow(io.FileIO):
    """A file that takes three bytes at once, as a network disk may take a part."""

    def write(self, block: memoryview) -> int:  # type: ignore[override]
        return super().write(memoryview(block)[:3])


def test_a_disk_that_takes_a_part_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, buffering: Slow(path, mode))
        written = disk.write_file(file, [b"0123456789"])
    assert file.read_bytes() == b"0123456789"
    assert written.num_bytes == 10


def test_removing_a_folder_leaves_what_links_lead_to(tmp_path: Path, announced: list[str]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("")
    (folder / "link").symlink_to(outside, target_is_directory=True)
    disk.remove_folder(folder)
    assert not folder.exists()
    assert (outside / "file").read_text() == "kept"
    assert sorted(announced) == ["disk.rmdir"] * 2 + ["disk.unlink"] * 2


DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


class Rank:
    """One of several ranks that hold parts of `wholes`; knows in which order it has gathered."""

    def __init__(self, wholes: Mapping[str, Tensor], held: set[str]) -> None:
        self.gathered: list[str] = []
        self.tensors: dict[str, StateTensor] = {
            name: whole if name in held else self._scattered(name, whole)
            for name, whole in wholes.items()
        }

    def _scattered(self, name: str, whole: Tensor) -> ShardedTensor:
        def gather() -> Tensor:
            self.gathered.append(name)
            return whole.clone()

        return ShardedTensor(whole.shape, whole.dtype, gather)


def some_tensors(sizes: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer{place}.weight": torch.randint(100, (size, 3), generator=generator).to(
            DTYPES[place % len(DTYPES)]
        )
        for place, size in enumerate(sizes)
    }


def write_all(store: CheckpointStore, ranks: list[Rank]) -> None:
    """Write every rank's share; the first begins, and commits at the end."""
    store.begin(1)
    for rank, one in enumerate(ranks):
        own = store if rank == 0 else CheckpointStore(store.folder)
        write = partial(own.add_tensors, 1)
        write_share(write, "model", one.tensors, lambda _: None, rank=rank, num_ranks=len(ranks))
    store.commit(1)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_tensor_is_written_once_and_comes_back(tmp_path: Path, num_ranks: int) -> None:
    wholes = some_tensors([5, 1, 4, 2, 7, 3, 0])
    ranks = [Rank(wholes, held={"layer1.weight"}) for _ in range(num_ranks)]
    store = CheckpointStore(tmp_path / "checkpoints")
    write_all(store, ranks)
    checkpoint = load_checkpoint(store.folder / "step-1")
    expected = {f"{rank_file_name('model', rank)}.safetensors" for rank in range(num_ranks)}
    assert set(checkpoint.manifest["files"]) == expected
    read = checkpoint.tensors("model")
    assert read.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert read[name].dtype == whole.dtype
        assert torch.equal(read[name], whole)
    # All ranks took part in every gather, in the same order, or they would wait for each other.
    assert {tuple(one.gathered) for one in ranks} == {tuple(ranks[0].gathered)}
    assert set(ranks[0].gathered) == wholes.keys() - {"layer1.weight"}


def test_shares_are_even_up_to_one_tensor() -> None:
    dice = random.Random(0)
    for num_ranks in (1, 2, 3, 6) * 5:
        sizes = [dice.randrange(41) for _ in range(dice.randrange(1, 31))]
        tensors = Rank(some_tensors(sizes), held=set()).tensors
        owner = writer_ranks(tensors, num_ranks)
        assert owner.keys() == tensors.keys()
        shares = [0] * num_ranks
        for name, rank in owner.items():
            shares[rank] += tensor_bytes(tensors[name])
        assert max(shares) - min(shares) <= max(map(tensor_bytes, tensors.values()))


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    wholes = some_tensors([5, 1, 4, 2])
    wholes["layer3.weight"][0] = float("inf")
    rank = Rank(wholes, held=set())
    store = CheckpointStore(tmp_path / "checkpoints")
    store.begin(1)
    write, check = partial(store.add_tensors, 1), partial(check_finite_state, 1)
    with pytest.raises(TrainingFault, match=r"layer3\.weight has non-finite values"):
        write_share(write, "model", rank.tensors, check, rank=0, num_ranks=1)
    assert sorted(rank.gathered) == sorted(wholes)


def test_a_rank_that_only_gathers_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[bool] = []
    monkeypatch.setattr(checkpoint_module, "refresh_liveness", lambda: beats.append(True))
    one = Rank(some_tensors([5, 1, 4]), held=set())
    write_share(lambda *_: None, "model", one.tensors, lambda _: None, rank=4, num_ranks=5)
    assert len(one.gathered) == len(beats) == 3


def test_a_rank_that_cannot_write_one_file_helps_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {name: Rank(some_tensors([5, 1, 4]), held=set()) for name in (MODEL, OPTIMIZER)}
    store = CheckpointStore(tmp_path / "checkpoints")
    written = []

    def full(step: int, name: str, tensors: Mapping[str, StateTensor]) -> None:
        written.append(name)
        raise SaveError("no room")

    monkeypatch.setattr(store, "add_tensors", full)
    tensors = {name: rank.tensors for name, rank in ranks.items()}
    with pytest.raises(SaveError, match="no room"):
        StoredCheckpoints(store).add_tensors(1, tensors, rank=1, num_ranks=2)
    assert written[0] == rank_file_name(MODEL, 1)
    for rank in ranks.values():
        assert sorted(rank.gathered) == sorted(rank.tensors)
