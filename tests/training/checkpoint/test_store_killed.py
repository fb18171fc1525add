"""A save killed at any operation, or by a power cut, leaves the old or the new checkpoint."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.process import faults
from app.training.checkpoint import disk
from app.training.checkpoint.store import CheckpointStore
from tests.training.checkpoint.saves import in_a_child, is_as_saved, killed_at, names_in, save

BLOCK = 256
"""bytes: a file then takes several writes"""
MOST = 500
"""more operations than any save here has"""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WRITE_BYTES", BLOCK)
    # A killed process loses nothing that it wrote; what power takes, PowerCut tells.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_store(run: Path, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", keep_last=1, keep_best=keep_best)


def newest_step(run: Path) -> int | None:
    """Return the newest good step; fail where it is not as saved, or anything is damaged."""
    good, damaged = make_store(run).newest_good()
    assert damaged == []
    assert good is None or is_as_saved(good)
    return None if good is None else good.step


def kill_everywhere(
    tmp_path: Path, prepare: Callable[[Path], None], step: int, allowed: set[int | None]
) -> list[int | None]:
    """Kill the save of `step` at each of its operations in turn; return what was then newest."""
    newest: list[int | None] = []
    for number in range(1, MOST):
        run = tmp_path / str(number)
        run.mkdir()
        prepare(run)
        if not killed_at(number, run, lambda run=run: save(make_store(run), step)):  # type: ignore[misc]
            return newest
        newest.append(newest_step(run))
        assert newest[-1] in allowed, number
        save(make_store(run), step + 10)  # the next save finds its way
        assert names_in(run / "checkpoints") == [f"step-{step + 10}"], number
        assert newest_step(run) == step + 10
        shutil.rmtree(run)
    raise AssertionError("the save has no end")


@pytest.mark.slow
def test_a_kill_at_any_operation_of_save_and_rotation_leaves_a_good_one(tmp_path: Path) -> None:
    def prepare(run: Path) -> None:
        """Save step 10, and leave what killed processes do behind of steps 5 and 20."""
        save(make_store(run), 10)
        folder = run / "checkpoints"
        shutil.copytree(folder / "step-10", folder / "step-5")
        (folder / "step-5" / "COMMITTED").unlink()
        shutil.copytree(folder / "step-10", folder / "step-20.tmp")

    newest = kill_everywhere(tmp_path, prepare, 20, {10, 20})
    assert len(newest) > 40
    assert newest == sorted(newest)  # from the old to the new once, and never back
    assert newest[0] == 10 and newest[-1] == 20
    assert newest.count(20) >= 8  # the rotation's own operations are among them


@pytest.mark.slow
def test_a_kill_in_the_first_save_leaves_none_or_a_good_one(tmp_path: Path) -> None:
    newest = kill_everywhere(tmp_path, lambda run: None, 10, {None, 10})
    assert newest[0] is None and newest[-1] == 10


@pytest.mark.slow
def test_a_kill_while_the_same_step_is_saved_again_leaves_one_of_the_two(tmp_path: Path) -> None:
    assert set(
        kill_everywhere(tmp_path, lambda run: save(make_store(run), 10) and None, 10, {10})
    ) == {10}


@pytest.mark.parametrize("point", faults.CHECKPOINT_POINTS)
def test_every_named_point_is_reached(tmp_path: Path, point: str) -> None:
    save(make_store(tmp_path), 10)

    def work() -> None:
        faults.arm_faults(faults.parse_faults([f"ckpt:{point}@20"])[0], tmp_path)
        save(make_store(tmp_path), 20)

    assert in_a_child(work) == -9
    reached_name = faults.CHECKPOINT_POINTS.index(point) >= faults.CHECKPOINT_POINTS.index(
        "after_rename"
    )
    assert newest_step(tmp_path) == (20 if reached_name else 10)
    assert (tmp_path / faults.NOTES_FILE).read_text() == f"ckpt:{point}@20\n"
    assert in_a_child(work) == 0  # it struck: a run that goes on does not die of it again
    assert newest_step(tmp_path) == 20


class PowerCut:
    """What a disk may hold after power is cut: names that no sync of their folder followed may be
    there or not, each for itself.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.durable: dict[Path, dict[str, bytes | Path]] = {}
        """of each folder, as it was first named, what is on the disk for certain"""
        self.operations: list[tuple[str, str]] = []
        self.after: list[tuple[dict, dict]] = []
        self._id: dict[Path, Path] = {}
        self._volatile: dict[Path, dict[str, bytes | Path]] = {}
        for name in (
            "make_folder",
            "write_file",
            "sync_folder",
            "replace",
            "remove_file",
            "remove_folder",
        ):
            monkeypatch.setattr(disk, name, self._recorded(name, getattr(disk, name)))

    def _recorded(self, name: str, operation: Callable) -> Callable:
        def recorded(path: Path, *rest: object) -> object:
            done = operation(path, *rest)
            self.operations.append((name, path.name))
            self._scan()
            if name == "sync_folder":
                self.durable[self._of(path)] = dict(self._volatile[self._of(path)])
            self.after.append((_copied(self.durable), _copied(self._volatile)))
            return done

        return recorded

    def _of(self, folder: Path) -> Path:
        # A folder keeps its identity when it is renamed.
        return Path(str(folder.stat().st_ino))

    def _scan(self) -> None:
        for folder in [self.root, *(path for path in self.root.rglob("*") if path.is_dir())]:
            identity = self._of(folder)
            self._volatile[identity] = {
                entry.name: self._of(entry) if entry.is_dir() else entry.read_bytes()
                for entry in folder.iterdir()
            }
            self.durable.setdefault(identity, {})

    def lay_out(self, index: int, target: Path, dice: random.Random) -> None:
        """Write a state that the disk may be in after operation `index`."""
        durable, volatile = self.after[index]
        favoured = dice.choice((0.0, 0.5, 1.0))

        def lay(identity: Path, folder: Path) -> None:
            folder.mkdir(parents=True)
            before, now = durable.get(identity, {}), volatile.get(identity, {})
            for name in sorted({*before, *now}):
                entry = (now if dice.random() < favoured else before).get(name)
                if isinstance(entry, bytes):
                    (folder / name).write_bytes(entry)
                elif entry is not None:
                    lay(entry, folder / name)

        lay(self._of(self.root), target)


def _copied(tree: dict) -> dict:
    return {key: dict(value) for key, value in tree.items()}


def test_a_power_cut_at_any_operation_leaves_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    cut = PowerCut(monkeypatch, run)
    save(make_store(run), 10)
    first = len(cut.after)
    save(make_store(run), 20)
    monkeypatch.undo()
    dice = random.Random(0)
    for index in range(first - 1, len(cut.after)):
        for trial in range(8):
            disk_after = tmp_path / f"{index}-{trial}"
            cut.lay_out(index, disk_after, dice)
            good, _ = make_store(disk_after).newest_good()
            assert good is not None, cut.operations[: index + 1]
            assert good.step in (10, 20) and is_as_saved(good)
            if index == len(cut.after) - 1:
                assert good.step == 20
            shutil.rmtree(disk_after)


def test_the_marker_comes_after_every_sync_and_the_name_after_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = PowerCut(monkeypatch, tmp_path)
    save(make_store(tmp_path), 10)
    operations = cut.operations
    marker = operations.index(("write_file", "COMMITTED"))
    written = [name for what, name in operations[:marker] if what == "write_file"]
    assert {"model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"} <= set(
        written
    )
    assert written[-1] == "manifest.json"
    assert operations[marker - 1] == ("sync_folder", "step-10.tmp")
    assert operations[marker + 1 :] == [
        ("sync_folder", "step-10.tmp"),
        ("replace", "step-10.tmp"),
        ("sync_folder", "checkpoints"),
    ]


def test_the_marker_goes_first_when_a_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_store(tmp_path), 10)
    cut = PowerCut(monkeypatch, tmp_path)
    save(make_store(tmp_path), 20)
    removal = cut.operations[cut.operations.index(("remove_file", "COMMITTED")) :]
    assert removal[:2] == [("remove_file", "COMMITTED"), ("sync_folder", "step-10")]
    assert removal[-1] == ("remove_folder", "step-10")
    assert ("replace", "step-20.tmp") in cut.operations[: -len(removal)]
