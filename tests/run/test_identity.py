"""A checkpoint is gone on from by its own run alone, unless another one's is typed and allowed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from tests.in_process import make_words
from tests.resumed import go_on, make_run, seal, start
from tests.tiny import train_into


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A killed run with checkpoints of steps 2 and 4."""
    return make_run(tmp_path / "run", *make_words(tmp_path), "trainer.max_steps=4")


def change(file: Path, how: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    how(content)
    file.write_text(json.dumps(content))


def change_run(checkpoint: Path, **identity: str) -> None:
    """Change which run a checkpoint says to be of."""
    change(checkpoint / "manifest.json", lambda m: m["details"]["run"].update(identity))
    seal(checkpoint)


def test_a_checkpoint_of_another_run_is_refused_by_name(ours: Path) -> None:
    theirs = ours / "checkpoints" / "step-4"
    change_run(theirs, id="c" * 32)
    with pytest.raises(
        UserError, match=r"step-4 was saved by another run \(c{8}, this one is a{8}"
    ):
        start(f"resume={ours}")
    with pytest.raises(UserError, match=r"'resume_allow=\[checkpoint\]'"):
        start(f"resume={theirs}")
    with pytest.raises(UserError, match="was saved by another run"):  # not typed by its own name
        start(f"resume={ours}", "resume_allow=[checkpoint]")
    assert start(f"resume={theirs}", "resume_allow=[checkpoint]").step == 4
    assert start(f"resume={ours / 'checkpoints' / 'step-2'}").step == 2


def test_a_moved_run_goes_on_and_stays_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = ("trainer.checkpoint.every_steps=1", "trainer.max_steps=2", "data.val_set_size=0")
    whole = train_into(tmp_path / "run", *words, "logger=csv")
    moved = shutil.copytree(whole, tmp_path / "moved")
    (moved / "metrics.json").unlink()
    shutil.rmtree(moved / "checkpoints" / "step-2")
    go_on(moved)
    before, after = (json.loads((run / "manifest.json").read_text()) for run in (whole, moved))
    assert after["run"] == before["run"]
    assert after["earlier"][0]["plan"] == before["run"]["plan"]
    newest = json.loads((moved / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert newest["details"]["run"] == before["run"]
    assert "no id" not in caplog.text


def test_a_copy_that_was_trained_on_other_data_is_another_course(ours: Path) -> None:
    other = "0" * 32
    change_run(ours / "checkpoints" / "step-4", plan=other)
    with pytest.raises(UserError, match="by a copy of this run that was trained on other data"):
        start(f"resume={ours}")
    # Unless this run has itself been on that plan, before what it was resumed with.
    change(ours / "manifest.json", lambda m: m.update(earlier=[{"plan": other}]))
    assert start(f"resume={ours}").step == 4
