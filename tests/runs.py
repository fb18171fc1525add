"""Compare two runs bit for bit, except for timings."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from app.training.checkpoint.store import CheckpointStore

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


def figures_of(run: Path) -> dict[str, float]:
    """Return metrics.json without time, memory, and perplexities, which follow from losses."""
    figures = json.loads((run / "metrics.json").read_text())
    return {
        key: value
        for key, value in figures.items()
        if not key.startswith(MEASURED) and "/perplexity" not in key
    }


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
