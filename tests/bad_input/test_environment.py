"""Runs where little is as usual: paths, streams, home and scratch folder, what has started them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.training.checkpoint.store import CheckpointStore
from tests.processes import LONGEST, RUN, start_train
from tests.reliability.shell import Shell
from tests.runs import rows_of
from tests.tiny import SAMPLES, TINY_BASE, small_run


@pytest.mark.slow
def test_odd_paths_and_nothing_around_them(shell: Shell, tmp_path: Path) -> None:
    # Spaces, brackets and letters of other scripts in every path; no home, no scratch folder, no
    # terminal, the C locale, and a reader of the output that has left.
    odd = tmp_path / "ein Ordner [ü], 模型"
    odd.mkdir()
    shutil.copytree(TINY_BASE, odd / "bäse")
    shutil.copy(SAMPLES / "lists_test.json", odd / "dätä = 1.json")
    words = (
        f"model.path={odd / 'bäse'}",
        f"data.datasets=[{{path: '{odd / 'dätä = 1.json'}'}}]",
        "trainer.max_steps=4",
        "faults=[sigterm@2]",
    )
    bare = {"TMPDIR": str(tmp_path / "gone"), "LOFT_DATA_CACHE": str(odd / "cäche")}
    run = odd / "rün 1"
    said = shell.train_into(run, *small_run(*RUN, *words), environment=bare, code=143)
    assert "Traceback" not in said
    assert [one.step for one in CheckpointStore(run / "checkpoints").checkpoints()] == [2]
    none = {"HOME": None, "LC_ALL": "C", "LANG": None}
    process = start_train(f"resume={run}", environment=bare | none)
    assert process.stdout is not None
    process.stdout.close()  # as `| head` does
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(timeout=LONGEST) == 0, said
    assert said == ""
    assert [row["step"] for row in rows_of(run) if row["train/loss"]] == ["1", "2", "3", "4"]
    assert json.loads((run / "metrics.json").read_text())["val/loss"] > 0
