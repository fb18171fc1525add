"""What a killed merge, push or start leaves never looks whole, and the same command goes on.

What a refused one leaves is removed, if it is only its lock and its error.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.config.load import load_config
from app.process.reporting import REASON_FILE
from app.process.status import STATUS_FILE
from app.run.folder import (
    LOCK_FILE,
    UNFINISHED,
    OutputConfig,
    _has_steps,
    check_output,
    decide_run_dir,
    discard_unused,
    move_finished,
    open_unfinished,
)
from app.train import train
from tests.killed import killed_at
from tests.tiny import small_run

FILES = ("model.safetensors", "config.json", "config.yaml", "adapter/a.json", "README.md")


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_RUN_DIR", "")


def build(folder: Path) -> None:
    """Build a result as a merge does."""
    decide_run_dir(OutputConfig(dir=str(folder)))
    unfinished = open_unfinished(folder)
    for name in FILES:
        (unfinished / name).parent.mkdir(exist_ok=True)
        (unfinished / name).write_text("whole")
    move_finished(unfinished, last="config.json")


def test_a_result_killed_at_any_change_is_built_again_also_when_that_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out"
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        change = killed_at(number, folder, lambda: build(folder))
        if change is None:
            break
        for again in itertools.count(1):
            if (folder / "config.json").exists():
                assert {(folder / name).read_text() for name in FILES} == {"whole"}, change
            if not check_output(OutputConfig(dir=str(folder))):
                ended = killed_at(again, folder, lambda: build(folder)) is None
            else:
                ended = (folder / "config.json").exists()
                assert ended, (change, again)
            if ended:
                break
    assert number > 15


def test_only_what_was_being_moved_counts_as_of_a_killed_process(tmp_path: Path) -> None:
    unfinished = tmp_path / "out" / UNFINISHED
    unfinished.mkdir(parents=True)
    for name in ("../config.yaml", "../thesis.tex", "../../other"):
        (unfinished / name).write_text("mine")
    (unfinished / ".moved.json").write_text('{"config.yaml": true, "../other": true}')
    (problem,) = check_output(OutputConfig(dir=str(tmp_path / "out")))
    assert "do not belong to a run: thesis.tex;" in problem
    (tmp_path / "out" / "thesis.tex").unlink()
    build(tmp_path / "out")
    assert (tmp_path / "other").read_text() == "mine"


@pytest.mark.slow
def test_a_run_killed_at_any_third_change_before_its_first_step_starts_again(
    tmp_path: Path,
) -> None:
    words = small_run("trainer.max_steps=1", "data.val_set_size=0", "evaluation.exact_match=false")
    for number in itertools.count(1, 3):
        folder = tmp_path / str(number)
        config: Any = load_config("train", [*words, f"output.dir={folder}"])
        change = killed_at(number, folder, lambda config=config: train(config))
        if change is None or _has_steps(folder / "metrics.csv"):
            break
        assert check_output(config.output) == [], change
        assert check_output(config.output, resumes=True) == [], change
    assert number > 5


def test_a_log_beside_the_lock_is_of_a_run_that_was_killed(tmp_path: Path) -> None:
    config = OutputConfig(dir=str(tmp_path))
    (tmp_path / "train.log").write_text("2026-01-01 00:00:00,000 INFO loading libraries ...\n")
    (problem,) = check_output(config)
    assert "do not belong to a run: train.log;" in problem
    (tmp_path / "run.lock").write_text("{}")
    assert check_output(config) == check_output(config, resumes=True) == []


@pytest.mark.parametrize("more", ["", "metrics.csv"])
def test_a_folder_of_a_lock_and_an_error_alone_goes(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = decide_run_dir(OutputConfig(name="refused"))
    for name in filter(None, (LOCK_FILE, REASON_FILE, STATUS_FILE, more)):
        (folder / name).write_text("x")
    discard_unused()
    assert folder.exists() == bool(more)
    typed = decide_run_dir(OutputConfig(dir=str(tmp_path / "mine")))
    discard_unused()
    assert typed.exists()
