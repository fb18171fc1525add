"""Operators are built once; the lock of a killed build does not block the next."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

import pytest

from app.strategy import deepspeed as operators
from app.strategy.deepspeed import prepare_operator, remove_stale_lock
from common.errors import UserError


class Builder:
    """A fake of DeepSpeed's builder that creates a file instead of compiling."""

    name = "some_operator"

    def __init__(self, folder: Path, problem: Exception | None = None) -> None:
        self.folder, self.problem, self.is_there = folder / self.name, problem, True
        self.num_builds = 0

    def is_compatible(self, verbose: bool) -> bool:
        return self.is_there

    def load(self, verbose: bool) -> None:
        assert not (self.folder / "lock").exists(), "torch would wait for this without end"
        if self.problem is not None:
            raise self.problem
        self.num_builds += 1
        (self.folder / f"{self.name}.so").touch()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def leave_lock(folder: Path, seconds_ago: float) -> Path:
    folder.mkdir(exist_ok=True)
    lock = folder / "lock"
    lock.touch()
    then = time.time() - seconds_ago
    os.utime(lock, (then, then))
    return lock


def test_an_operator_is_built_once_and_the_lock_of_a_killed_build_is_removed(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder, lock = Builder(cache), leave_lock(cache / "some_operator", seconds_ago=60)
    with caplog.at_level(logging.INFO):
        prepare_operator(builder, "type strategy=zero3")
    assert "building DeepSpeed's some_operator" in caplog.text and not lock.exists()
    caplog.clear()
    prepare_operator(builder, "type strategy=zero3")
    assert builder.num_builds == 1 and not caplog.text


def test_a_recent_lock_is_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "STARTUP_SECONDS", 1.0)
    lock = leave_lock(cache / "some_operator", seconds_ago=0)
    began = time.monotonic()
    remove_stale_lock(lock.parent)
    assert not lock.exists() and time.monotonic() - began > 0.5


def test_the_lock_of_a_running_build_is_kept(cache: Path) -> None:
    lock = leave_lock(cache / "some_operator", seconds_ago=60)
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as compiler:
        try:
            remove_stale_lock(lock.parent)
            assert lock.exists()
        finally:
            compiler.kill()


def test_failed_builds_are_user_errors(cache: Path) -> None:
    builder = Builder(cache, RuntimeError("no compiler\nmore of it"))
    with pytest.raises(UserError, match=r"could not be built in .*: no compiler; type strategy=z"):
        prepare_operator(builder, "type strategy=zero3")
    builder.is_there = False
    with pytest.raises(UserError, match="cannot build its operator some_operator on this machine"):
        prepare_operator(builder, "type strategy=zero3")
