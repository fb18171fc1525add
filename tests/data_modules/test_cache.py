"""A cached folder is reused only if its key is unchanged and it is complete."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import DataError, DiskError
from data_modules.tokens.prepare import Key, open_or_make
from tests.processes import LONGEST

PARTS = {
    "data": "d",
    "tokenizer": "t",
    "template": "c",
    "settings": {"sequence_len": 8, "on_long": "drop"},
    "code": "v",
    "versions": {"tokenizers": "1"},
}
KEY = Key(path="a.jsonl", split="train", parts=PARTS)


def changed(**parts: object) -> Key:
    return dataclasses.replace(KEY, parts={**PARTS, **parts})


def make(folder: Path) -> None:
    (folder / "tokens").write_text("whole")


def refuse(folder: Path) -> None:
    raise AssertionError("made a second time")


def test_the_second_call_uses_the_cached_folder(tmp_path: Path) -> None:
    folder, how = open_or_make(tmp_path, KEY, make)
    assert (folder / "tokens").read_text() == "whole"
    assert how == "tokenized (now cached)"
    assert open_or_make(tmp_path, KEY, refuse) == (folder, "found in the cache")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (changed(data="e"), "the data changed"),
        (changed(template="x"), "the chat template changed"),
        (changed(tokenizer="x"), "the tokenizer changed"),
        (changed(code="w"), "the code changed"),
        (
            changed(settings={"sequence_len": 9, "on_long": "drop"}),
            "settings changed: sequence_len",
        ),
        (changed(versions={"tokenizers": "2"}), "library versions changed: tokenizers"),
        (dataclasses.replace(KEY, path="b.jsonl"), "now cached"),
        (dataclasses.replace(KEY, split="test"), "now cached"),
    ],
)
def test_a_cache_miss_reports_what_changed(tmp_path: Path, key: Key, why: str) -> None:
    open_or_make(tmp_path, KEY, make)
    _, how = open_or_make(tmp_path, key, make)
    assert how == f"tokenized ({why})"


def test_a_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        make(folder)
        raise DataError("a bad row")

    with pytest.raises(DataError, match="a bad row"):
        open_or_make(tmp_path, KEY, fail)
    assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]


def _make_slowly(folder: Path) -> None:
    (folder / "tokens").write_text("half")
    time.sleep(0.5)
    (folder / "tokens").write_text("whole")


def _open(root: Path, results: multiprocessing.Queue[tuple[str, str]], together: Barrier) -> None:
    together.wait(LONGEST)
    folder, how = open_or_make(root, KEY, _make_slowly)
    results.put((how, (folder / "tokens").read_text()))


def test_two_processes_build_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[str, str]] = context.Queue()
    arguments = (tmp_path, results, context.Barrier(3))
    processes = [context.Process(target=_open, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=LONGEST) for _ in processes)
    for process in processes:
        process.join()
    others = [("tokenized by another process", "whole")] * 2
    assert found == [("tokenized (now cached)", "whole"), *others]


def _make_forever(folder: Path) -> None:
    (folder / "tokens").write_text("half")
    time.sleep(60)


def test_a_killed_process_does_not_block_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=open_or_make, args=(tmp_path, KEY, _make_forever))
    process.start()
    while not list(tmp_path.glob("*.tmp-*/tokens")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    folder, how = open_or_make(tmp_path, KEY, make)
    assert (folder / "tokens").read_text() == "whole"
    assert how == "tokenized (now cached)"
    assert not list(tmp_path.glob("*.tmp-*"))


def test_any_flipped_byte_of_an_entry_is_noticed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = open_or_make(tmp_path, KEY, make)
    for name in ("tokens", "key.json"):
        whole = (folder / name).read_bytes()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            (folder / name).write_bytes(flipped)
            again = open_or_make(tmp_path, KEY, make)
            assert again == (folder, "tokenized (the entry was damaged)"), (name, place)
            assert (folder / name).read_bytes() == whole
    assert f"{folder} is damaged; its data is tokenized again" in caplog.text


@pytest.mark.parametrize("inodes", [0, 7])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EAGAIN])
def test_a_full_disk_is_not_the_fault_of_the_data(
    number: int, inodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    disk = SimpleNamespace(f_files=1000, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    kind = {errno.ENOSPC: DiskError, errno.EACCES: DataError}.get(number, OSError)
    with pytest.raises(kind) as caught:
        open_or_make(tmp_path, KEY, fail)
    assert type(caught.value) in (kind, BlockingIOError)
    is_full = number == errno.ENOSPC
    assert ("all its 1,000 inodes are used" in str(caught.value)) is (is_full and not inodes)
    assert ("set data.cache_dir=FOLDER" in str(caught.value)) is (number != errno.EAGAIN)


KINDS = ("pipe", "link", "folder")


def put(kind: str, place: Path, victim: Path) -> None:
    """Put something at a place that is not a regular file."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(victim)
    else:
        place.mkdir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_not_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    put(kind, tmp_path / f"{KEY.name}.lock", victim)
    with pytest.raises(DataError, match=r"lock: the cache needs a regular file there as a lock"):
        open_or_make(tmp_path, KEY, make)
    assert victim.read_text() == "mine"


NOTES = ("[]", "{}", '{"digests": 1}', '{"digests": {"tokens": []}}', "[" * 9**5)
DAMAGES = [
    *(("tokens", damage) for damage in ("who", "gone", *KINDS)),
    *(("key.json", damage) for damage in (*NOTES, "gone", *KINDS)),
    *((name, kind) for name in ("newest", "entry") for kind in KINDS),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_entry_is_rebuilt(name: str, damage: str, tmp_path: Path) -> None:
    folder, _ = open_or_make(tmp_path, KEY, make)
    (victim := tmp_path / "victim").write_bytes((folder / "tokens").read_bytes())
    place = {"newest": tmp_path / KEY.newest, "entry": folder}.get(name, folder / name)
    shutil.rmtree(place) if name == "entry" else place.unlink()
    if damage in KINDS:
        put(damage, place, victim)
    elif damage != "gone":
        place.write_text(damage)
    if name == "newest":
        shutil.rmtree(folder)
    how = "now cached" if name == "newest" else "the entry was damaged"
    assert open_or_make(tmp_path, KEY, make) == (folder, f"tokenized ({how})")
    assert (folder / "tokens").read_text() == "whole"
    assert not (folder / "tokens").is_symlink()
