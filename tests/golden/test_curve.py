"""A change that should not move numbers must give this curve again.

`python -m tests.golden.test_curve` writes it anew, for a change that means to move it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, TrainRun, read_column

CURVE = Path(__file__).with_name("quickstart_20_steps.json")
WORDS = ["+experiment=quickstart", "trainer.max_steps=20", "evaluation.exact_match=false"]
COLUMNS = ("train/loss", "train/grad_norm", "train/lr", "val/loss/orders", "val/loss")


def curve_of(folder: Path) -> dict[str, list[float]]:
    return {column: list(read_column(folder, column).values()) for column in COLUMNS}


def test_twenty_steps_of_the_default_give_the_golden_curve(train_run: TrainRun) -> None:
    golden = json.loads(CURVE.read_text())
    ours = curve_of(train_run(*WORDS))
    assert len(ours["train/loss"]) == 20
    for column in COLUMNS:
        # Kernels of other processors round differently; a real change moves far more.
        assert ours[column] == pytest.approx(golden[column], rel=2e-4), column


if __name__ == "__main__":
    from app.config import load_config
    from app.train import train

    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name:
        train(load_config("train", [*WORDS, f"output.dir={name}/run", "logger=csv"]))
        CURVE.write_text(json.dumps(curve_of(Path(name) / "run"), indent=1) + "\n")
    sys.exit(0)
