"""Every damaged checkpoint is detected, reported with its file, and skipped; no pickle is run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.training.checkpoint.checkpoint import DamageError, load_checkpoint
from app.training.checkpoint.store import CheckpointStore
from common.errors import USER_ERROR, UserError, exit_code
from tests.training.checkpoint.saves import is_as_saved, names_in, save


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


def cut_off(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(1, file.stat().st_size))


def empty(file: Path, dice: random.Random) -> None:
    os.truncate(file, 0)


def remove(file: Path, dice: random.Random) -> None:
    file.unlink()


def add_bytes(file: Path, dice: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(dice.randbytes(dice.randrange(1, 100)))


def overwrite_a_block(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = dice.randrange(len(content))
    content[start : start + 16] = bytes(byte ^ 0xFF for byte in content[start : start + 16])
    file.write_bytes(content)


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip_a_bit,
    cut_off,
    empty,
    remove,
    add_bytes,
    overwrite_a_block,
]


def test_every_damage_is_found_and_named(whole: Path, tmp_path: Path) -> None:
    dice = random.Random(6)
    for name, damage in itertools.product(names_in(whole / "step-80"), DAMAGES):
        folder = shutil.copytree(whole, tmp_path / f"{name} {damage.__name__}")
        damage(folder / "step-80" / name, dice)
        sentence = sentence_on(folder)
        # What does not fit its marker is the manifest, whichever of the two was damaged.
        assert name in sentence or (name == "COMMITTED" and "manifest.json" in sentence)


def reseal(folder: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest and make the marker fit it, as an attacker would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(f"{hashlib.sha256(text).hexdigest()}\n")


def entry_of(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}


def damaged(name: str, damage: Callable[[Path, random.Random], None]) -> Callable[[Path], None]:
    return lambda step: damage(step / name, random.Random(0))


def name_a_file_outside(step: Path) -> None:
    outside = step.parent.parent / "outside.json"
    outside.write_text("{}")
    reseal(step, lambda m: m["files"].update({"../../outside.json": entry_of(outside)}))


def link_a_file(step: Path) -> None:
    file = step / "trainer.json"
    file.symlink_to(file.rename(step.parent.parent / "trainer.json"))


def with_manifest(content: bytes) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        (step / "manifest.json").write_bytes(content)
        (step / "COMMITTED").write_text(f"{hashlib.sha256(content).hexdigest()}\n")

    return change


OPTIMIZER = "optimizer.safetensors"
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (damaged(OPTIMIZER, flip_a_bit), f"sha256 of {OPTIMIZER}"),
    "an empty file": (damaged(OPTIMIZER, empty), f"{OPTIMIZER} has 0 of "),
    "a missing file": (damaged(OPTIMIZER, remove), f"{OPTIMIZER} is missing"),
    "no marker": (damaged("COMMITTED", remove), "(COMMITTED is missing)"),
    "an unknown file": (
        lambda step: (step / "extra.safetensors").write_bytes(b"") and None,
        "extra.safetensors is not in the manifest",
    ),
    "a file outside": (name_a_file_outside, "'../../outside.json' is not a valid file name"),
    "a link": (link_a_file, "trainer.json is not a regular file"),
    **{
        f"manifest {content!r}": (with_manifest(content), "manifest.json is unreadable")
        for content in (b"", b"[]", b"{}", b'{"format": 1}', b"\xff", b"null")
    },
}


@pytest.mark.parametrize(("change", "words"), CASES.values(), ids=CASES)
def test_the_damage_is_described(folder: Path, change: Callable[[Path], None], words: str) -> None:
    change(folder / "step-80")
    assert words in sentence_on(folder)


def test_a_folder_without_its_marker_is_not_listed(folder: Path) -> None:
    (folder / "step-80" / "COMMITTED").unlink()
    assert [checkpoint.step for checkpoint in CheckpointStore(folder).checkpoints()] == [60]


def test_a_checkpoint_of_another_step_is_not_taken(folder: Path) -> None:
    (folder / "step-80").rename(folder / "step-90")
    good, sentences = CheckpointStore(folder).newest_good()
    assert good is not None and good.step == 60
    assert sentences == [
        "step-90 damaged (manifest.json belongs to step 80); using step-60, 30 steps lost"
    ]


def test_all_damaged_checkpoints_are_listed(folder: Path) -> None:
    for step in (60, 80):
        (folder / f"step-{step}" / "model.safetensors").unlink()
    good, sentences = CheckpointStore(folder).newest_good()
    assert good is None
    assert sentences == [
        "step-80 damaged (model.safetensors is missing)",
        "step-60 damaged (model.safetensors is missing); no undamaged checkpoint is left",
    ]


def test_no_checkpoint_is_not_damage(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest_good() == (None, [])


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


def test_one_checkpoint_is_opened_by_its_folder(folder: Path, tmp_path: Path) -> None:
    elsewhere = (folder / "step-80").rename(tmp_path / "kept for later")
    assert is_as_saved(load_checkpoint(elsewhere))
    (elsewhere / "model.safetensors").unlink()
    with pytest.raises(DamageError, match=r"model\.safetensors is missing"):
        load_checkpoint(elsewhere)
