"""Two runs beside each other: what must be the same to the bit, and what is only how fast."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from app.training.checkpoint.store import CheckpointStore

MEASURED = ("speed/", "machine/", "memory/")
"""what a machine took, beginnings of names: never the same twice"""


def rows_of(run: Path) -> list[dict[str, str]]:
    """All of metrics.csv as text, but for how fast it was."""
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if not key.startswith(MEASURED)}
            for row in csv.DictReader(file)
        ]


def figures_of(run: Path) -> dict[str, float]:
    """What was learned; without perplexities, for a loss says the same on a scale of its own."""
    figures = json.loads((run / "metrics.json").read_text())
    return {
        key: value
        for key, value in figures.items()
        if not key.startswith(MEASURED) and "/perplexity" not in key
    }


def check_same_run(resumed: Path, whole: Path) -> None:
    assert rows_of(resumed) == rows_of(whole)
    assert figures_of(resumed) == figures_of(whole)
    saved = [next(run.glob("*/*model.safetensors")) for run in (resumed, whole)]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    last = [CheckpointStore(run / "checkpoints").checkpoints()[-1] for run in (resumed, whole)]
    assert last[0].step == last[1].step
    files = [one.manifest["files"] for one in last]
    assert files[0].keys() == files[1].keys()
    for name in files[0]:
        if name != "training.json":  # it holds seconds
            assert files[0][name] == files[1][name], name
