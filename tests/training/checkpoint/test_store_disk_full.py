"""A full or read-only disk loses no checkpoint, leaves no temporary files, and is reported."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.process import faults
from app.training.checkpoint import disk
from app.training.checkpoint.disk import SaveError, check_space
from app.training.checkpoint.store import CheckpointStore
from common.errors import ENVIRONMENT_ERROR, exit_code
from tests.training.checkpoint.saves import NOT_KILLED, in_a_child, is_as_saved, names_in, save

NUM_POINTS = 20
Usage = namedtuple("Usage", "total used free")


def plan_faults(run: Path, text: str) -> None:
    armed, problems = faults.parse_faults([text])
    assert not problems
    faults.arm_faults(armed, run)


def num_points(run: Path) -> int:
    """Count the operations of a save at which a disk may be full, rotation left out."""
    count = 0
    while True:
        folder = run / f"count-{count}"
        folder.mkdir()
        store = CheckpointStore(folder / "checkpoints", keep_last=1)
        save(store, 10)
        plan_faults(folder, f"enospc:{count + 1}@20")
        try:
            save(store, 20)
        except SaveError:
            count += 1
        else:
            return count


def test_a_full_disk_at_any_point_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", 128)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the fault comes before it
    total = num_points(tmp_path)
    assert total >= NUM_POINTS
    for number in range(1, total + 1):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        store = CheckpointStore(run / "checkpoints", keep_last=1)
        save(store, 10)
        plan_faults(run, f"enospc:{number}@20")
        with pytest.raises(SaveError) as caught:
            save(store, 20)
        good, damaged = store.newest_good()
        assert good is not None and is_as_saved(good) and damaged == []
        # Only the last, the sync of its name, comes when it is whole already.
        assert good.step == (20 if number == total else 10)
        assert not [name for name in names_in(store.folder) if name.endswith(".tmp")]
        assert exit_code(caught.value) == ENVIRONMENT_ERROR
        assert "No space left on device; it needs " in str(caught.value)
        save(store, 30)  # the fault strikes once: somebody made room
        assert names_in(store.folder) == ["step-30"]


def test_a_full_disk_is_reported_with_need_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 << 30, 0, 3 << 29))
    plan_faults(tmp_path, "enospc")
    with pytest.raises(
        SaveError,
        match=r"checkpoints: the checkpoint of step 20 could not be written: No space left on "
        r"device; it needs \d\.\d MiB, but 1\.5 GiB are free; step-10 is kept; free disk space, or "
        r"type trainer\.checkpoint\.keep_last=1",
    ):
        save(store, 20)


def test_a_disk_without_inodes_is_said_to_lack_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    full = SimpleNamespace(f_files=1000, f_favail=0, f_frsize=1, f_bavail=1, f_bfree=1, f_blocks=1)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    lacks = r"No space left on device; all 1,000 inodes of its disk are used, .* are free; "
    plan_faults(tmp_path, "enospc")
    with pytest.raises(SaveError, match=rf"step 20 could not be written: {lacks}step-10 is kept"):
        save(store, 20)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write_file", fail)
    with pytest.raises(SaveError, match=rf"cannot be written here: {lacks}"[:-2]):
        check_space(tmp_path, 1 << 20, 1)


@pytest.mark.parametrize("number", disk.DISK_FULL)
def test_a_quota_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveError, match=r"it needs .* are free; step-10 is kept"):
        save(store, 20)
    assert names_in(store.folder) == ["step-10"]


def test_another_failure_is_reported_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(SaveError, match=r"Input/output error; there is no earlier one$"):
        save(store, 20)


def test_a_folder_of_another_user_is_reported() -> None:
    def look() -> None:
        if os.geteuid() == 0:  # who may write anywhere
            os.setuid(65534)
        with pytest.raises(SaveError, match=r"^/no-folder-of-ours: checkpoints cannot be written"):
            check_space(Path("/no-folder-of-ours"), 1000, 2)

    assert in_a_child(look) == NOT_KILLED


def test_a_folder_that_cannot_be_written_is_reported_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(SaveError, match=r"cannot be written here: .*output\.dir=FOLDER"):
        check_space(tmp_path / "checkpoints", 1000, 2)
    with pytest.raises(SaveError, match="could not be written: Not a directory"):
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


def test_what_older_checkpoints_occupy_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    (store.folder / "step-10" / "trainer.json").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1_000_000))
    check_space(store.folder, 1_000_000, 2)
    with pytest.raises(SaveError):
        check_space(store.folder, 2_000_000, 2)


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
