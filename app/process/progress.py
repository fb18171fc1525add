"""A bar while something long is counted through; on a terminal alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from app.process.launch import is_first_rank

T = TypeVar("T")


def track(
    items: Iterable[T], what: str, total: int, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield `items` under a bar that counts `size` of each up to `total`, and goes with the last.

    Where stdout is no terminal, and on ranks above the first, they are just yielded.
    """
    if not is_first_rank() or not sys.stdout.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stdout),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task, size(item))
