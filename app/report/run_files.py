"""Read back what a run has written into its folder, as far as it has come.

A file that is missing or damaged leaves its part out: a page is made of failed runs, too.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

MAX_PREDICTIONS = 10
NOT_DRAWN = ("/tokens/", "/share/", "experts/")
"""parts of the names of columns that no chart has: the mixture's table, or one a layer"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What the files of a run's folder say; empty where there is none."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """figures of the whole run, of a finished one"""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """(step, value) of each column of metrics.csv"""
    predictions: Sequence[Mapping[str, Any]] = ()
    """a few, of each data set in turn"""
    mixture: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """why it stopped"""

    @property
    def has_gpu(self) -> bool:
        """Tell whether its machine had a GPU that its driver named."""
        machine = self.manifest.get("hardware")
        return isinstance(machine, Mapping) and bool(machine.get("gpus"))

    @property
    def last_step(self) -> int:
        """Return the last step that was written."""
        return int(max((points[-1][0] for points in self.curves.values() if points), default=0))

    def latest(self, name: str) -> float | None:
        """Return a figure: of the whole run, else the last of its curve, else None."""
        if name in self.metrics:
            return self.metrics[name]
        points = self.curves.get(name)
        return points[-1][1] if points else None


def read_run_files(folder: Path) -> RunFiles:
    """Read what `folder` holds."""
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        config = None
    metrics = _read_json(folder / "metrics.json", {})
    mixture = _read_json(folder / "mixture.json", [])
    return RunFiles(
        folder=folder,
        config=config if isinstance(config, dict) else {},
        manifest=_read_json(folder / "manifest.json", {}),
        metrics={name: value for name, value in metrics.items() if _is_number(value)},
        curves=_read_curves(folder / "metrics.csv"),
        predictions=choose_predictions(_read_lines(folder / "predictions.jsonl")),
        mixture=[row for row in mixture if isinstance(row, dict)],
        audit=_read_json(folder / "audit.json", {}),
        error=_read_text(folder / "error.txt"),
    )


def choose_predictions(lines: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `MAX_PREDICTIONS` lines, of each data set in turn.

    First those of a data set in which the answers differ: they show what training did.
    """
    by_dataset: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_dataset[str(line.get("data_set", ""))].append(line)
    for one in by_dataset.values():
        one.sort(key=lambda line: line.get("base") == line.get("tuned"))
    turns = zip_longest(*by_dataset.values())
    chosen = (line for turn in turns for line in turn if line is not None)
    return list(islice(chosen, MAX_PREDICTIONS))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(file: Path, default: Any) -> Any:
    """Return an object or a list as `default` is one; `default` where the file has none."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError):
        return default
    return value if isinstance(value, type(default)) else default


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    for text in _read_text(file).split("\n"):  # not at U+2028, which texts hold
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # cut off, or nested without end
            continue
        if isinstance(line, dict):
            yield line


def _read_curves(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (step, value) of each column that is drawn; rows that were cut off end them."""
    curves: dict[str, list[tuple[float, float]]] = {}
    rows = _rows(file)
    header = next(rows, [])
    if "step" not in header:
        return curves
    at = header.index("step")
    drawn = [
        (place, curves.setdefault(name, []))
        for place, name in enumerate(header)
        if place != at and not any(part in name for part in NOT_DRAWN)
    ]
    for row in rows:
        try:
            step = float(row[at])
            for place, points in drawn:
                if row[place]:
                    points.append((step, float(row[place])))
        except (ValueError, IndexError):
            break
    return {name: points for name, points in curves.items() if points}


def _rows(file: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file up to one with a field beyond the csv module's limit."""
    with contextlib.suppress(csv.Error):
        yield from csv.reader(_read_text(file).splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
