"""Read the files in a run's folder, also those of an unfinished or failed run.

A missing or damaged file is treated as empty, so that every run has a page.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

MAX_PREDICTIONS = 10
"""number of predictions that a page shows"""
NOT_DRAWN = ("/tokens/", "/share/", "experts/")
"""substrings of metric names that have no chart: shares of the mixture, and metrics per layer"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The content of the files in a run's folder; empty for a missing file."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """metrics.json, which only a finished run has"""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """column of metrics.csv -> its (step, value)"""
    predictions: Sequence[Mapping[str, Any]] = ()
    """some lines of predictions.jsonl"""
    mixture: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """why the run stopped"""

    @property
    def has_gpu(self) -> bool:
        """Whether the driver reported a GPU on the run's machine."""
        hardware = self.manifest.get("hardware")
        return isinstance(hardware, Mapping) and bool(hardware.get("gpus"))

    @property
    def last_step(self) -> int:
        """The last step with a row in metrics.csv."""
        return int(max((points[-1][0] for points in self.curves.values() if points), default=0))

    def latest(self, name: str) -> float | None:
        """Return a metric of the finished run, else the last value of its curve, else None."""
        if name in self.metrics:
            return self.metrics[name]
        points = self.curves.get(name)
        return points[-1][1] if points else None


def read_run_files(folder: Path) -> RunFiles:
    """Read all files that a page or a card needs."""
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
    """Return `MAX_PREDICTIONS` lines, taken from the data sets in turn.

    Lines whose answers differ between base and tuned come first.
    """
    by_dataset: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_dataset[str(line.get("data_set", ""))].append(line)
    for of_dataset in by_dataset.values():
        of_dataset.sort(key=lambda line: line.get("base") == line.get("tuned"))
    in_turn = chain.from_iterable(zip_longest(*by_dataset.values()))
    return list(islice(filter(None, in_turn), MAX_PREDICTIONS))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(file: Path, default: Any) -> Any:
    """Return the JSON value of a file, or `default` if it is damaged or of another type."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError):
        return default
    return value if isinstance(value, type(default)) else default


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    for text in _read_text(file).split("\n"):  # splitlines also splits at U+2028, inside texts
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # incomplete, or nested too deeply
            continue
        if isinstance(line, dict):
            yield line


def _read_curves(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return column -> (step, value), up to the first row that is incomplete."""
    curves: dict[str, list[tuple[float, float]]] = {}
    rows = _read_rows(file)
    header = next(rows, [])
    if "step" not in header:
        return curves
    step_column = header.index("step")
    drawn = [
        (column, curves.setdefault(name, []))
        for column, name in enumerate(header)
        if column != step_column and not any(part in name for part in NOT_DRAWN)
    ]
    for row in rows:
        try:
            step = float(row[step_column])
            for column, points in drawn:
                if row[column]:
                    points.append((step, float(row[column])))
        except (ValueError, IndexError):
            break
    return {name: points for name, points in curves.items() if points}


def _read_rows(file: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file, up to one that exceeds the csv module's field limit."""
    with contextlib.suppress(csv.Error):
        yield from csv.reader(_read_text(file).splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
