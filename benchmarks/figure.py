"""A measured number and its bar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure named `benchmark/what`; `better` says on which side of the bar it must be."""

    figure: str
    value: float
    bar: float
    better: Literal["lower", "higher"] = "lower"

    @property
    def ok(self) -> bool:
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def print_figures(figures: Sequence[Figure]) -> None:
    """Print a table, then a JSON line per figure."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("figure", "value", "bar", "better", "ok"):
        table.add_column(column, justify="right" if column in ("value", "bar") else "left")
    for figure in figures:
        ok = "yes" if figure.ok else "[red]NO[/red]"
        table.add_row(figure.figure, f"{figure.value:.4g}", f"{figure.bar:.4g}", figure.better, ok)
    Console().print(table)
    for figure in figures:
        value = float(f"{figure.value:.5g}")
        rounded = dataclasses.asdict(figure) | {"value": value, "ok": figure.ok}
        print(json.dumps(rounded))
