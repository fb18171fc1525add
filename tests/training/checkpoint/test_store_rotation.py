"""Which checkpoints of a run stay, and that a save leaves them whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path

import pytest

from app.training.checkpoint import store as store_module
from app.training.checkpoint.checkpoint import load_checkpoint
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.store import CheckpointStore
from tests.training.checkpoint.saves import (
    NOT_KILLED,
    in_a_child,
    is_as_saved,
    names_in,
    save,
    tensors_of,
)


def make_store(run: Path, keep_last: int = 2, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", keep_last=keep_last, keep_best=keep_best)


def steps_in(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def test_the_last_are_kept_by_step_not_by_name_or_time(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (8, 9, 10, 100):
        save(store, step)
    assert names_in(store.folder) == ["step-10", "step-100"]
    assert steps_in(store) == [10, 100]
    later = time.time() + 100
    for entry in (store.folder / "step-10", store.folder / "step-10" / "trainer.json"):
        os.utime(entry, (later, later))  # as a copy or a look into it may leave it
    newest, _ = make_store(tmp_path).newest_good()
    assert newest is not None and newest.step == 100


def test_the_best_are_kept_beside_the_last(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1, keep_best=2)
    for step, metric in ((10, 0.9), (20, 0.3), (30, 0.4), (40, None), (50, math.nan)):
        save(store, step, metric)
    save(store, 55, -math.inf)
    save(store, 60, 2.0)
    assert steps_in(store) == [20, 30, 60]
    save(store, 70, 0.1)
    assert steps_in(store) == [20, 70]


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "step-1"
    save(CheckpointStore(tmp_path / "elsewhere"), 1)
    store = make_store(tmp_path, keep_last=1)
    save(store, 10)
    others = ["notes.txt", "step-x", "step-1.bak", "my step-5"]
    for name in others:
        (store.folder / name).mkdir()
    (store.folder / "step-1").symlink_to(elsewhere, target_is_directory=True)
    save(store, 20)
    assert names_in(store.folder) == sorted([*others, "step-1", "step-20"])
    assert is_as_saved(load_checkpoint(elsewhere))


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1)
    save(store, 10, metric=1.0)
    save(store, 10, metric=0.5)
    assert names_in(store.folder) == ["step-10"]
    good, damaged = store.newest_good()
    assert good is not None and is_as_saved(good) and damaged == []
    assert (good.step, good.metric, good.details) == (10, 0.5, {"step": 10})


def test_what_is_newer_goes_when_a_run_went_on_from_before_it(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        save(store, step)
    save(store, 25)
    assert steps_in(store) == [20, 25]


def test_leftovers_are_removed_by_the_next_save_and_not_by_a_reader(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 10)
    store.begin(15)
    store.add_document(15, "trainer", {})
    save(make_store(tmp_path, keep_last=3), 20)
    (store.folder / "step-10" / "COMMITTED").unlink()
    (store.folder / "step-30.tmp").mkdir()
    before = names_in(store.folder)
    reader = make_store(tmp_path)
    reader.newest_good()
    reader.checkpoints()
    assert names_in(store.folder) == before == ["step-10", "step-20", "step-30.tmp"]
    save(reader, 40)
    assert names_in(store.folder) == ["step-20", "step-40"]


def test_the_manifest_tells_hashes_sizes_and_versions(tmp_path: Path) -> None:
    checkpoint = save(make_store(tmp_path), 10)
    manifest = json.loads((checkpoint.folder / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["versions"]["torch"]
    assert names_in(checkpoint.folder) == sorted([*manifest["files"], "manifest.json", "COMMITTED"])
    for name, entry in manifest["files"].items():
        content = (checkpoint.folder / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}


def test_other_ranks_add_their_own_files(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.begin(10)
    state = {"python": [1, 2, 3], "loss": 0.1}

    def add_as_rank_1() -> None:
        mine = make_store(tmp_path)
        mine.add_document(10, "random-rank-1", state)
        mine.add_tensors(10, "optimizer-rank-1", tensors_of(10, "optimizer"))

    assert in_a_child(add_as_rank_1) == NOT_KILLED
    store.add_document(10, "random-rank-0", {})
    store.commit(10)
    good, damaged = make_store(tmp_path).newest_good()
    assert good is not None and damaged == []
    assert good.names() == ["optimizer-rank-1", "random-rank-0", "random-rank-1"]
    assert good.document("random-rank-1") == state
    assert len(names_in(good.folder)) == 5


def test_a_file_of_another_rank_that_is_not_seen_here_makes_it_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "VISIBILITY_TIMEOUT", 0.0)
    store, both = make_store(tmp_path), ["random-rank-0", "random-rank-1"]
    for step in (10, 20):
        store.begin(step)
        store.add_document(step, "random-rank-0", {})
        if step == 10:
            make_store(tmp_path).add_document(step, "random-rank-1", {})
            store.commit(step, needed=both)
    with pytest.raises(SaveError, match=r"step 20 lacks random-rank-1\.json.*output\.dir"):
        store.commit(20, needed=both)
    assert names_in(store.folder) == ["step-10"]


def test_floats_of_a_document_keep_every_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    values = [0.1 + 0.2, 1e-310, -0.0, 1 / 3, 2.0**1000, math.inf]
    store.begin(1)
    store.add_document(1, "trainer", values)
    found = store.commit(1).document("trainer")
    assert [value.hex() for value in found] == [value.hex() for value in values]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checkpoint = save(make_store(tmp_path), 10)
    with pytest.raises(KeyError, match=r"has no scaler\.safetensors; it has model, optimizer"):
        checkpoint.tensors("scaler")
    with pytest.raises(ValueError, match="not a valid file name"):
        make_store(tmp_path).add_document(10, "../outside", {})


def test_a_run_folder_may_be_moved(tmp_path: Path) -> None:
    save(make_store(tmp_path), 10)
    moved = tmp_path / "moved ü [1]"
    (tmp_path / "checkpoints").rename(moved)
    good, _ = CheckpointStore(moved).newest_good()
    assert good is not None and is_as_saved(good)
