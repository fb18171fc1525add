"""Read the files in a run's folder, also those of an unfinished or failed run.

A missing or damaged file is treated as empty, so that every run has a page.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from app.training.checkpoint.schema import differences
from app.training.run_documents import (
    AGAIN,
    CSV_FILE,
    METRICS,
    MIXTURE,
    OBJECT,
    SHOWN_CONFIG,
    SHOWN_MANIFEST,
    VERDICT,
    find_problem,
    read_curves,
    read_lines,
)
from common.errors import UserError

_MAX_PREDICTIONS = 10
"""number of predictions that a page shows"""
NOT_DRAWN = ("/tokens/", "/share/", "experts/", "/disk_left")
"""substrings of metric names that have no chart: shares of a mixture, figures per layer, disk"""


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
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """verdict.json, which a run has whose base and tuned model were compared"""
    mixture: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """why the run stopped"""
    problems: Sequence[str] = ()
    """files that are damaged or of another shape, and count as missing"""

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


def read_run_files(folder: Path, metrics: Mapping[str, Any] | None = None) -> RunFiles:
    """Read all files that a page or a card needs.

    `metrics`: those of a run that has not written metrics.json yet, its last file.
    """
    problems: list[str] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        for step, row in read_curves(folder / CSV_FILE):
            for name, value in row.items():
                if not any(part in name for part in NOT_DRAWN):
                    curves.setdefault(name, []).append((step, value))
    except UserError as error:
        problems += error.problems

    def read(name: str, shape: Any) -> Any:
        if not (folder / name).is_file():
            return {}
        content, problem = find_problem(folder / name, shape)
        if problem is not None:
            problems.append(f"{problem}; {AGAIN}")
        return {} if problem is not None else content

    return RunFiles(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        manifest=read("manifest.json", SHOWN_MANIFEST),
        metrics={
            name: value
            for name, value in (metrics or read("metrics.json", METRICS)).items()
            if value is not None and math.isfinite(value)
        },
        curves=curves,
        predictions=choose_predictions(read_lines(folder / "predictions.jsonl")),
        verdict=read("verdict.json", VERDICT),
        mixture=read("mixture.json", MIXTURE) or [],
        audit=read("audit.json", OBJECT),
        error=_read_text(folder / "error.txt"),
        problems=problems,
    )


def refuse_damaged(run: RunFiles) -> None:
    """Raise UserError if a file of the run is damaged, for whoever asks for a page or a card."""
    if run.problems:
        raise UserError(run.problems)


def choose_predictions(lines: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `_MAX_PREDICTIONS` lines, taken from the data sets in turn.

    Lines whose answers differ between base and tuned come first.
    """
    by_dataset: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_dataset[str(line.get("data_set", ""))].append(line)
    for of_dataset in by_dataset.values():
        of_dataset.sort(key=lambda line: line.get("base") == line.get("tuned"))
    in_turn = chain.from_iterable(zip_longest(*by_dataset.values()))
    return list(islice(filter(None, in_turn), _MAX_PREDICTIONS))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)  # the page of a running run is written after each validation
def _parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _read_config(file: Path) -> dict[str, Any]:
    """Return what config.yaml says of model and adapter, if it is readable."""
    try:
        config = _parse_yaml(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if next(differences(config, SHOWN_CONFIG, ""), None) is None else {}
