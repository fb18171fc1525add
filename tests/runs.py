"""Compare two runs bit for bit, except for timings."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from app.training.checkpoint.store import CheckpointStore
from tests.conftest import read_column

MEASURED = ("speed/", "machine/", "memory/")
"""prefixes of metrics of time and memory, which differ between runs"""


def rows_of(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv as text, without time and memory."""
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if not key.startswith(MEASURED)}
            for row in csv.DictReader(file)
        ]


def losses_of(run: Path) -> list[float]:
    """Return the training loss of each step."""
    return [float(row["train/loss"]) for row in rows_of(run) if row["train/loss"]]


def metrics_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.json").read_text())


def adapter_of(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def figures_of(run: Path) -> dict[str, float]:
    """Return metrics.json without time, memory, and perplexities, which follow from losses."""
    return {
        key: value
        for key, value in metrics_of(run).items()
        if not key.startswith(MEASURED) and "/perplexity" not in key
    }


def check_close(
    run: Path, expected: Path, columns: Sequence[str], *, rel: float = 1e-5, abs: float = 1e-6
) -> None:
    """Compare columns of metrics.csv of two runs that split the same steps otherwise."""
    for column in columns:
        ours, theirs = (read_column(each, column) for each in (run, expected))
        assert ours == pytest.approx(theirs, rel=rel, abs=abs), column


def check_same_run(resumed: Path, uninterrupted: Path) -> None:
    assert rows_of(resumed) == rows_of(uninterrupted)
    assert figures_of(resumed) == figures_of(uninterrupted)
    saved = [next(run.glob("*/*model.safetensors")) for run in (resumed, uninterrupted)]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    last = [
        CheckpointStore(run / "checkpoints").checkpoints()[-1] for run in (resumed, uninterrupted)
    ]
    assert last[0].step == last[1].step
    files = [checkpoint.manifest["files"] for checkpoint in last]
    assert files[0].keys() == files[1].keys()
    for name in files[0]:
        if name != "training.json":  # contains timings
            assert files[0][name] == files[1][name], name
