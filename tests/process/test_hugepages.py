"""A training on a CPU begins with large pages, once, and where Linux gives them to who asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.process import hugepages as pages
from tests.conftest import ROOT
from tests.processes import LONGEST, TWO_RANKS, processes_of, start_train, wait_until_gone
from tests.tiny import small_run

SCRIPT = """
import os, sys
from app.process.hugepages import VARIABLE, take_large_pages
print(os.getpid(), sys.argv[1:], sys.flags.utf8_mode, os.environ.get(VARIABLE))
take_large_pages("begins")
print("goes on")
"""


@pytest.fixture
def by_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Linux says of large pages; in it, one who asks is heard."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(pages, "BY_REQUEST", file)
    monkeypatch.setattr(pages, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.delenv(pages.VARIABLE, raising=False)
    return file


def test_one_who_asks_is_heard(by_request: Path) -> None:
    variables = pages.large_pages()
    assert variables == {pages.VARIABLE: pages.TUNABLES}
    assert "glibc.malloc.hugetlb=1" in pages.TUNABLES.split(":")


@pytest.mark.parametrize("says", ["[always] madvise never", "always madvise [never]"])
def test_nothing_is_asked_where_it_would_change_nothing(by_request: Path, says: str) -> None:
    by_request.write_text(says)
    assert pages.large_pages() == {}


@pytest.mark.parametrize("library", ["glibc 2.34", "", None])
def test_a_library_that_cannot_ask_is_left_alone(
    by_request: Path, monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: library)
    assert pages.large_pages() == {}


def test_another_system_is_left_alone(by_request: Path) -> None:
    by_request.unlink()
    assert pages.large_pages() == {}


def test_a_machine_with_a_gpu_is_left_alone(by_request: Path) -> None:
    (by_request.parent / "nvidia0").touch()
    assert pages.large_pages() == {}


def test_settings_of_a_person_are_kept(by_request: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.VARIABLE, "glibc.malloc.check=1")
    assert pages.large_pages() == {}


def heard_here() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(pages.VARIABLE, raising=False)
        return pages.large_pages() != {}


here = pytest.mark.skipif(not heard_here(), reason="large pages are not for who asks here")


@pytest.fixture
def typed(tmp_path: Path) -> Callable[..., list[str]]:
    """Types words behind `python` where the module `begins` is SCRIPT; returns what it printed."""
    (tmp_path / "begins.py").write_text(SCRIPT)

    def type_words(*words: str) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if k != pages.VARIABLE}
        done = subprocess.run(
            [sys.executable, *words],
            env=environment | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    return type_words


@here
def test_a_program_begins_once_more_as_it_was_typed(typed: Callable[..., list[str]]) -> None:
    first, second, last = typed("-Xutf8", "-m", "begins", "a word", "key='ä b'")
    assert first.endswith(" 1 None")
    assert second == first.removesuffix("None") + pages.TUNABLES
    assert "['a word', \"key='ä b'\"]" in first
    assert last == "goes on"


@here
@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import runpy; runpy.run_module('begins', run_name='__main__')"),
        ("-m", "cProfile", "-m", "begins"),
        ("-c", SCRIPT),
    ],
)
def test_what_something_else_runs_goes_on_as_it_is(
    typed: Callable[..., list[str]], words: tuple[str, ...]
) -> None:
    first, last, *_ = typed(*words)
    assert first.endswith(" None")
    assert last == "goes on"


@here
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), TWO_RANKS], ids=["one process", "two ranks"])
def test_a_training_has_large_pages(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    process = start_train(
        *small_run("trainer.max_steps=100000", *words),
        f"output.dir={folder}",
        environment={pages.VARIABLE: None},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + LONGEST
        while not (folder / "metrics.csv").exists() and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.1)
        trained = [one for one in processes_of(folder) if not words or one != process.pid]
        assert len(trained) >= (2 if words else 1)
        for one in trained:
            # glibc has cut the text at its colons.
            began_with = (Path("/proc") / str(one) / "environ").read_bytes().replace(b"\0", b":")
            assert f"{pages.VARIABLE}={pages.TUNABLES}:".encode() in began_with
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONGEST) == 128 + signal.SIGTERM
    finally:
        process.kill()
        wait_until_gone(folder)
