"""Hold what an audit has found, and lay it out: one aligned table, lines, audit.json.

Never counts and never judges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_modules.types import DataError, printable

HEADINGS = {
    "rows": "rows",
    "train": "train",
    "validation": "validation",
    "tokens": "tokens",
    "trained": "learned",
    "bad_rows": "bad",
    "dropped": "too long",
    "truncated": "truncated",
    "split": "split",
    "empty": "nothing to learn",
    "no_stop": "no stop",
    "double_bos": "two BOS",
    "duplicates": "duplicates",
    "repeated": "in both",
    "overlapping": "overlap",
}
"""count -> heading; a note on rows is headed by its kind"""
ALWAYS = ("rows", "train", "validation", "tokens", "trained")
"""columns that are shown even where they are zero"""


@dataclass(kw_only=True, slots=True)
class DatasetAudit:
    """Count what a data set teaches. Tokens, `no_stop` and `duplicates` are those of training.

    rows          all that were read
    train         documents of training; a row is several where it was split
    trained       learned tokens
    bad_rows      rows that could not be read, in quarantine
    dropped       rows above the sequence length that were left out
    empty         rows with nothing to learn, left out
    no_stop       documents whose last learned token is no stop token
    duplicates    documents that stand in training already, to the token
    repeated      validation documents that also stand in training, to the token
    overlapping   validation documents that share words with training
    notes         kind of a note -> rows
    """

    name: str
    path: str
    rows: int
    train: int
    validation: int
    tokens: int
    trained: int
    bad_rows: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    empty: int = 0
    no_stop: int = 0
    double_bos: int = 0
    duplicates: int = 0
    repeated: int = 0
    overlapping: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        """Return the share of its tokens that is learned, from 0 to 1."""
        return self.trained / max(1, self.tokens)


@dataclass(kw_only=True, slots=True)
class BenchmarkAudit:
    """Count the documents of a test data set that are the same as one of training, to the token
    (`repeated`), and those that share words with one (`overlapping`).
    """

    name: str
    rows: int
    repeated: int
    overlapping: int


@dataclass(kw_only=True, slots=True)
class Audit:
    """Hold what was found: `problems` stop a run, `warnings` are said, `facts` only explain.

    `longest` are (tokens, file:line) of the longest rows, before any cut.
    """

    datasets: list[DatasetAudit]
    benchmarks: list[BenchmarkAudit] = field(default_factory=list)
    longest: list[tuple[int, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def cells(self) -> list[list[str]]:
        """Return the table as text: headings, a row a data set, their total where several are.

        Columns that are zero everywhere are left out.
        """
        return _cells([asdict(dataset) for dataset in self.datasets])

    def notes(self) -> list[str]:
        """Return what is said besides the table, a line each."""
        lines = []
        if self.longest:
            longest = ", ".join(f"{origin} {tokens:,}" for tokens, origin in self.longest)
            lines.append(f"longest rows, in tokens: {longest}")
        lines += [
            f"test data {test.name}: {test.overlapping:,} of {test.rows:,} documents overlap with "
            f"training, {test.repeated:,} are the same to the token"
            for test in self.benchmarks
        ]
        lines += self.facts
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"problem: {problem}" for problem in self.problems]
        return [printable(line) for line in lines]

    def lines(self) -> list[str]:
        """Return the table, aligned, and all else that is to be said."""
        return [*aligned(self.cells()), *self.notes()]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        values = asdict(self)
        for dataset, counts in zip(self.datasets, values["datasets"], strict=True):
            counts["trained_share"] = round(dataset.trained_share, 6)
        values["longest"] = [{"tokens": t, "origin": origin} for t, origin in self.longest]
        return values

    def write(self, folder: Path) -> None:
        """Write audit.json and audit.txt into the run's folder."""
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False)
        (folder / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        (folder / "audit.txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def check(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError(self.problems)


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in cells
    ]


def _cells(datasets: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    kinds = list(dict.fromkeys(kind for dataset in datasets for kind in dataset["notes"]))
    counts = [{**dataset, **dataset["notes"]} for dataset in datasets]
    headings = HEADINGS | {kind: kind.replace("_", " ") for kind in kinds}
    shown = [key for key in headings if key in ALWAYS or any(each.get(key, 0) for each in counts)]
    if len(counts) > 1:
        total = {key: sum(each.get(key, 0) for each in counts) for key in shown}
        counts.append({"name": "all", **total})
    cells = [["data set", *(printable(headings[key]) for key in shown)]]
    cells += [[printable(each["name"]), *(_cell(key, each) for key in shown)] for each in counts]
    return cells


def _cell(key: str, counts: Mapping[str, Any]) -> str:
    number = counts.get(key, 0)
    if key == "trained":
        return f"{number:,} ({number / max(1, counts['tokens']):.0%})"
    return f"{number:,}" if number or key in ALWAYS else "-"
