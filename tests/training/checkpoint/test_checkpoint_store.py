"""Which checkpoints stay; damage, a full disk and a read-only one lose none, and are reported.

No pickle is run.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import random
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.process import faults
from app.training.checkpoint import disk
from app.training.checkpoint import store as store_module
from app.training.checkpoint.checkpoint import load_checkpoint
from app.training.checkpoint.disk import SaveError, check_space, describe_shortage
from app.training.checkpoint.store import CheckpointStore
from common.errors import ENVIRONMENT_ERROR, USER_ERROR, UserError, exit_code
from tests.mutations import mutate_bytes
from tests.resumed import entry_of, write_manifest
from tests.training.checkpoint.saves import (
    is_as_saved,
    names_in,
    save,
)


def make_store(run: Path, keep_last: int = 2, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", keep_last=keep_last, keep_best=keep_best)


def steps_in(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def test_the_last_are_kept_by_step_not_by_name_or_time(tmp_path: Path) -> None:
    run = tmp_path / "ü [1]"
    run.mkdir()
    store = make_store(run)
    for step in (8, 9, 10, 100):
        save(store, step)
    assert names_in(store.folder) == ["step-10", "step-100"]
    assert steps_in(store) == [10, 100]
    later = time.time() + 100
    for entry in (store.folder / "step-10", store.folder / "step-10" / "trainer.json"):
        os.utime(entry, (later, later))  # as a copy or a look into it may leave it
    newest, _ = make_store(run).newest_good()
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 60 and 80, undamaged."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    store = CheckpointStore(folder)
    save(store, 60)
    save(store, 80)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "checkpoints")


def sentence_on(folder: Path) -> str:
    """Return the sentence about step 80; step 60 must be used, and no file be changed."""
    before = names_in(folder)
    good, sentences = CheckpointStore(folder).newest_good()
    assert good is not None and good.step == 60 and is_as_saved(good)
    assert names_in(folder) == before
    (sentence,) = sentences
    assert sentence.startswith("step-80 damaged (")
    assert sentence.endswith("); using step-60, 20 steps lost")
    return sentence


def flip_a_bit(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def mutate(file: Path, dice: random.Random) -> None:
    file.write_bytes(mutate_bytes(file.read_bytes(), dice))


def empty(file: Path, dice: random.Random) -> None:
    os.truncate(file, 0)


def remove(file: Path, dice: random.Random) -> None:
    file.unlink()


DAMAGES: list[Callable[[Path, random.Random], None]] = [flip_a_bit, mutate, empty, remove]


def test_every_damage_is_found_and_named(whole: Path, tmp_path: Path) -> None:
    dice = random.Random(6)
    damages = enumerate([*DAMAGES, *[mutate] * 3])
    for name, (number, damage) in itertools.product(names_in(whole / "step-80"), damages):
        folder = shutil.copytree(whole, tmp_path / f"{name} {number}")
        damage(folder / "step-80" / name, dice)
        sentence = sentence_on(folder)
        # What does not fit its marker is the manifest, whichever of the two was damaged.
        assert name in sentence or (name == "COMMITTED" and "manifest.json" in sentence)


def reseal(step: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((step / "manifest.json").read_text())
    change(manifest)
    write_manifest(step, json.dumps(manifest).encode())


def name_a_file_outside(step: Path) -> None:
    outside = step.parent.parent / "outside.json"
    outside.write_text("{}")
    reseal(step, lambda m: m["files"].update({"../../outside.json": entry_of(outside)}))


def link_a_file(step: Path) -> None:
    file = step / "trainer.json"
    file.symlink_to(file.rename(step.parent.parent / "trainer.json"))


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an unknown file": (
        lambda step: (step / "extra.safetensors").write_bytes(b"") and None,
        "extra.safetensors is not in the manifest",
    ),
    "a file outside": (name_a_file_outside, "'../../outside.json' is not a valid file name"),
    "a link": (link_a_file, "trainer.json is not a regular file"),
    "a manifest": (lambda step: write_manifest(step, b'{"format": 1}'), "manifest.json is unr"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGED.values(), ids=DAMAGED)
def test_the_damage_is_described(folder: Path, change: Callable[[Path], None], words: str) -> None:
    change(folder / "step-80")
    assert words in sentence_on(folder)


def test_damaged_checkpoints_are_listed_and_never_taken_for_another_step(folder: Path) -> None:
    assert CheckpointStore(folder / "none").newest_good() == (None, [])
    (folder / "step-80").rename(folder / "step-90")
    good, sentences = CheckpointStore(folder).newest_good()
    assert good is not None and good.step == 60
    other = "step-90 damaged (manifest.json belongs to step 80)"
    assert sentences == [f"{other}; using step-60, 30 steps lost"]
    (folder / "step-60" / "model.safetensors").unlink()
    good, sentences = CheckpointStore(folder).newest_good()
    missing = "step-60 damaged (model.safetensors is missing)"
    assert good is None
    assert sentences == [other, f"{missing}; no undamaged checkpoint is left"]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(folder: Path) -> None:
    (folder / "step-80" / "model.safetensors").unlink()
    store = CheckpointStore(folder)
    save(store, 80)
    good, damaged = store.newest_good()
    assert good is not None and good.step == 80 and is_as_saved(good) and damaged == []


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.file, "w")


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer.pkl"])
def test_a_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path, name: str) -> None:
    file = folder / "step-80" / name
    file.write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    reseal(folder / "step-80", lambda manifest: manifest["files"].update({name: entry_of(file)}))
    assert name in sentence_on(folder)
    assert not (tmp_path / "trapped").exists()


def test_a_newer_format_is_refused_with_both_versions(folder: Path) -> None:
    def change(manifest: dict) -> None:
        manifest["format"] = 7
        manifest["versions"]["loft"] = "9.1"
        manifest["shards"] = []  # of which this version knows nothing

    reseal(folder / "step-80", change)
    for read in (CheckpointStore(folder).newest_good, lambda: load_checkpoint(folder / "step-80")):
        with pytest.raises(
            UserError, match=r"by loft 9\.1 as format 7.*format 1; upgrade"
        ) as caught:
            read()
        assert exit_code(caught.value) == USER_ERROR
    # Resuming from the older one by name works, and saving does not fail on the newer one.
    assert is_as_saved(load_checkpoint(folder / "step-60"))
    save(CheckpointStore(folder), 70)


NUM_POINTS = 20
Usage = namedtuple("Usage", "total used free")


def plan_faults(run: Path, text: str) -> None:
    armed, problems = faults.parse_faults([text])
    assert not problems
    faults.arm_faults(armed, run)


def test_a_full_disk_at_any_point_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "WRITE_BYTES", 128)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the fault comes before it
    steps: list[int] = []
    while True:
        run = tmp_path / f"run-{len(steps)}"
        run.mkdir()
        store = CheckpointStore(run / "checkpoints", keep_last=1)
        save(store, 10)
        plan_faults(run, f"enospc:{len(steps) + 1}@20")
        try:
            save(store, 20)
            break
        except SaveError as error:
            assert exit_code(error) == ENVIRONMENT_ERROR
            assert "No space left on device; it needs " in str(error)
        good, damaged = store.newest_good()
        assert good is not None and is_as_saved(good) and damaged == []
        steps.append(good.step)
        assert not [name for name in names_in(store.folder) if name.endswith(".tmp")]
        save(store, 30)  # the fault strikes once: somebody made room
        assert names_in(store.folder) == ["step-30"]
    # Only the last, the sync of its name, comes when it is whole already.
    assert steps == [10] * (len(steps) - 1) + [20] and len(steps) >= NUM_POINTS


FULL = (
    r"it needs \d\.\d MiB, but 1\.5 GiB are free; step-10 is kept; free disk space, or type "
    r"trainer\.checkpoint\.keep_last=1$"
)


@pytest.mark.parametrize(
    ("number", "words"),
    [*((number, FULL) for number in disk.DISK_FULL), (errno.EIO, "put error; step-10 is kept$")],
)
def test_a_disk_that_fails_is_reported_and_a_full_one_with_need_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 << 30, 0, 3 << 29))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveError, match="checkpoint of step 20 could not be written: .*" + words):
        save(store, 20)
    assert names_in(store.folder) == ["step-10"]


def test_a_disk_that_takes_no_more_files_is_not_told_to_lack_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_files=1000, f_favail=0, f_frsize=1, f_bavail=1, f_bfree=1, f_blocks=1)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    said = describe_shortage(tmp_path / "checkpoints", "1.0 GiB")
    assert said.startswith("all 1,000 inodes of its disk are used")


def test_a_folder_that_cannot_be_written_is_reported_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(SaveError, match=r"cannot be written here: .*output\.dir=FOLDER"):
        check_space(tmp_path / "checkpoints", 1000, 2)
    with pytest.raises(SaveError, match=r"be written: Not a directory.*; there is no earlier one$"):
        save(CheckpointStore(tmp_path / "checkpoints" / "inner"), 10)


def test_room_is_counted_for_one_more_than_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3 << 30))
    check_space(folder, 1 << 30, 2)
    with pytest.raises(
        SaveError,
        match=r"3 checkpoints and the one being written need 4\.0 GiB \(1\.0 GiB each\), "
        r"but 3\.0 GiB are free; free disk space",
    ):
        check_space(folder, 1 << 30, 3)
    assert names_in(folder) == []
    store = CheckpointStore(folder)
    save(store, 10)  # its room will be free
    (folder / "step-10" / "trainer.json").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1_000_000))
    check_space(folder, 1_000_000, 2)
    with pytest.raises(SaveError):
        check_space(folder, 2_000_000, 2)


def test_what_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 10)
    with monkeypatch.context() as patch:
        # As on a network disk, where a file that is still read keeps its folder from going.
        patch.setattr(Path, "rmdir", lambda _: (_ for _ in ()).throw(OSError(39, "not empty")))
        save(store, 20)
    assert "step-10 cannot be removed: not empty" in caplog.text
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [20]
    save(store, 30)
    assert names_in(store.folder) == ["step-30"]
