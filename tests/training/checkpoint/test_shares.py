"""Tensors sharded over ranks are written whole and once; all ranks gather in the same order."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.process import heartbeat
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint.checkpoint import (
    load_checkpoint,
    num_bytes,
    rank_file_name,
    write_share,
    writer_ranks,
)
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.documents import MODEL, OPTIMIZER
from app.training.checkpoint.saving import StoredCheckpoints
from app.training.checkpoint.store import CheckpointStore
from app.training.nonfinite import check_finite
from common.errors import TrainingFault

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
    random = torch.Generator().manual_seed(0)
    return {
        f"layer{place}.weight": torch.randint(100, (size, 3), generator=random).to(
            DTYPES[place % len(DTYPES)]
        )
        for place, size in enumerate(sizes)
    }


def write_all(store: CheckpointStore, ranks: list[Rank], name: str = "model") -> None:
    """Write every rank's share; the first begins, and commits at the end."""
    store.begin(1)
    for rank, one in enumerate(ranks):
        own = store if rank == 0 else CheckpointStore(store.folder)

        def write(
            file: str, tensors: Mapping[str, StateTensor], own: CheckpointStore = own
        ) -> None:
            own.add_tensors(1, file, tensors)

        write_share(write, name, one.tensors, _no_check, rank=rank, num_ranks=len(ranks))
    store.commit(1)


def _no_check(tensors: Mapping[str, Tensor]) -> None:
    pass


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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 6))
def test_shares_are_even_up_to_one_tensor(sizes: list[int], num_ranks: int) -> None:
    tensors = Rank(some_tensors(sizes), held=set()).tensors
    owner = writer_ranks(tensors, num_ranks)
    assert owner.keys() == tensors.keys()
    shares = [0] * num_ranks
    for name, rank in owner.items():
        shares[rank] += num_bytes(tensors[name])
    assert max(shares) - min(shares) <= max(map(num_bytes, tensors.values()))


def test_a_rank_that_cannot_write_helps_the_others_first() -> None:
    rank = Rank(some_tensors([5, 1, 4, 2]), held=set())

    def full(file: str, tensors: Mapping[str, StateTensor]) -> None:
        next(iter(tensors.values())).gather()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_share(full, "model", rank.tensors, _no_check, rank=0, num_ranks=2)
    assert sorted(rank.gathered) == sorted(rank.tensors)


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    wholes = some_tensors([5, 1, 4, 2])
    wholes["layer3.weight"][0] = float("inf")
    rank = Rank(wholes, held=set())
    store = CheckpointStore(tmp_path / "checkpoints")
    store.begin(1)

    def check(tensors: Mapping[str, Tensor]) -> None:
        check_finite(1, tensors)

    def write(file: str, tensors: Mapping[str, StateTensor]) -> None:
        store.add_tensors(1, file, tensors)

    with pytest.raises(TrainingFault, match=r"layer3\.weight has non-finite values"):
        write_share(write, "model", rank.tensors, check, rank=0, num_ranks=1)
    assert sorted(rank.gathered) == sorted(wholes)


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


def test_a_rank_that_only_gathers_for_others_sends_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(heartbeat, "send_to_supervisor", messages.append)
    monkeypatch.setattr(heartbeat, "_step", 7)
    monkeypatch.setattr(heartbeat, "_thread", threading.current_thread())
    rank = Rank(some_tensors([5, 1, 4]), held=set())
    written: list[str] = []

    def write(file: str, tensors: Mapping[str, StateTensor]) -> None:
        written.append(file)

    write_share(write, "model", rank.tensors, _no_check, rank=4, num_ranks=5)
    assert (written, len(rank.gathered), len(messages)) == ([], 3, 3)
