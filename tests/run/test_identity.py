"""A checkpoint is gone on from by its own run alone, unless another one's is typed and allowed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.config import load_config
from app.train import train
from common.errors import UserError
from tests.resumed import seal, start
from tests.tiny import small_run, train_into

WORDS = (
    "trainer.checkpoint.every_steps=1",
    "trainer.checkpoint.keep_last=9",
    "trainer.max_steps=3",
    "data.val_set_size=0",
    "logger=csv",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of three steps that differ by their seed, stopped before their end."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        name: train_into(folder / name, *WORDS, f"seed={seed}")
        for name, seed in (("ours", 1), ("theirs", 2))
    }
    for run in made.values():
        (run / "metrics.json").unlink()
        shutil.rmtree(run / "checkpoints" / "step-3", ignore_errors=True)
    return made


@pytest.fixture
def ours(runs: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(runs["ours"], tmp_path / "moved")


def put_in(theirs: Path, ours: Path, step: int = 2) -> Path:
    """Copy a checkpoint of another run into this one's folder."""
    target = ours / "checkpoints" / f"step-{step}"
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(theirs / "checkpoints" / "step-2", target)


def change(file: Path, how: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    how(content)
    file.write_text(json.dumps(content))


def test_a_checkpoint_of_another_seed_is_refused_by_name(runs: dict[str, Path], ours: Path) -> None:
    theirs = put_in(runs["theirs"], ours)
    with pytest.raises(UserError, match=r"step-2 was saved by another run \([0-9a-f]{8}, this"):
        start(f"resume={ours}")
    with pytest.raises(UserError, match=r"'resume_allow=\[checkpoint\]'"):
        start(f"resume={theirs}")
    with pytest.raises(UserError, match="was saved by another run"):  # not typed by its own name
        start(f"resume={ours}", "resume_allow=[checkpoint]")
    assert start(f"resume={theirs}", "resume_allow=[checkpoint]").step == 2
    assert start(f"resume={ours / 'checkpoints' / 'step-1'}").step == 1


def test_a_moved_run_goes_on_and_stays_itself(
    runs: dict[str, Path], ours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    os.environ.pop("LOFT_RUN_DIR", None)
    train(load_config("train", [*small_run(*WORDS, "seed=1"), f"output.dir={ours}", "resume=must"]))
    os.environ.pop("LOFT_RUN_DIR", None)
    before, after = (
        json.loads((run / "manifest.json").read_text()) for run in (runs["ours"], ours)
    )
    assert after["run"] == before["run"]
    assert after["earlier"][0]["plan"] == before["run"]["plan"]
    newest = json.loads((ours / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert newest["details"]["run"] == before["run"]
    assert "no id" not in caplog.text


def test_a_copy_that_was_trained_on_other_data_is_another_course(
    runs: dict[str, Path], ours: Path
) -> None:
    other = "0" * 32
    folder = ours / "checkpoints" / "step-2"
    change(folder / "manifest.json", lambda m: m["details"]["run"].update(plan=other))
    seal(folder)
    with pytest.raises(UserError, match="by a copy of this run that was trained on other data"):
        start(f"resume={ours}")
    # Unless this run has itself been on that plan, before what it was resumed with.
    change(ours / "manifest.json", lambda m: m.update(earlier=[{"plan": other}]))
    assert start(f"resume={ours}").step == 2


def test_a_manifest_whose_id_is_not_one_is_named(ours: Path) -> None:
    for bad in (7, {"id": 7}, {"id": "../../x", "plan": "0" * 32}):
        change(ours / "manifest.json", lambda manifest, bad=bad: manifest.update(run=bad))
        with pytest.raises(UserError, match=r"manifest\.json: run"):
            start(f"resume={ours}")
