"""Files are written whole and hashed on the way, and every operation is announced first."""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.process import faults, heartbeat
from app.training.checkpoint import disk


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


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        disk.write_file(tmp_path / "file", [b"other"])
    assert (tmp_path / "file").read_text() == "mine"


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


def test_a_fault_comes_before_the_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(point: str, step: int | None = None) -> None:
        raise OSError(point)

    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(faults, "fault_point", strike)
    for operation, arguments in (
        (disk.make_folder, ["new"]),
        (disk.write_file, ["new", [b"x"]]),
        (disk.replace, ["file", "new"]),
        (disk.remove_file, ["file"]),
        (disk.remove_folder, ["folder"]),
    ):
        paths = [
            tmp_path / argument if isinstance(argument, str) else argument for argument in arguments
        ]
        with pytest.raises(OSError, match=r"^disk\."):
            operation(*paths)  # type: ignore[operator]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
