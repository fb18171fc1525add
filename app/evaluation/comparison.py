"""Base against tuned, data set by data set: the table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

WHO = ("base", "tuned")
MEASURES = {
    # name in metrics.json: heading, format
    "val/loss": ("loss", "{:.4f}"),
    "exact_match": ("exact match", "{:.1%}"),
}


def named(who: str, metrics: dict[str, float]) -> dict[str, float]:
    """Name a model's figures `base/...` or `tuned/...`; the tuned one's losses keep theirs too."""
    own_names = {name: value for name, value in metrics.items() if name.startswith("val/")}
    return {f"{who}/{name}": value for name, value in metrics.items()} | (
        own_names if who == "tuned" else {}
    )


def comparison_table(metrics: dict[str, float], dataset_names: list[str]) -> Table:
    """Table of every measure that `metrics` holds for a data set; `-` where one is missing.

    Held-out files with names of their own come after `dataset_names`.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="base against tuned", title_justify="left")
    table.add_column("data set")
    answered = [name for who in WHO for name in _names_after(f"{who}/exact_match/", metrics)]
    names = list(dict.fromkeys([*dataset_names, *answered]))
    shown = {
        measure: heading_and_format
        for measure, heading_and_format in MEASURES.items()
        if any(f"{who}/{measure}/{name}" in metrics for who in WHO for name in names)
    }
    for heading, _ in shown.values():
        table.add_column(f"{heading}: base", justify="right")
        table.add_column("tuned", justify="right")
    for name in names:
        cells = [
            "-" if value is None else form.format(value)
            for measure, (_, form) in shown.items()
            for value in (metrics.get(f"{who}/{measure}/{name}") for who in WHO)
        ]
        table.add_row(escape(name), *cells)
    return table


def _names_after(prefix: str, metrics: dict[str, float]) -> list[str]:
    return [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]


def print_comparison(metrics: dict[str, float], dataset_names: list[str]) -> None:
    """Print the table of `metrics`."""
    from rich.console import Console

    print()
    Console(highlight=False).print(comparison_table(metrics, dataset_names))


@contextmanager
def adapter_switched_off(model: Any) -> Iterator[Any]:
    """The base under an adapter: the same model while its adapter is disabled."""
    with model.disable_adapter():
        yield model
