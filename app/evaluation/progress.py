"""Progress of an evaluation: a bar in a terminal, otherwise a line for each data set or task."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from app.process.launch import is_first_rank
from common.text import counted, duration


class Progress:
    """Shows the progress of the first rank, which stands for the others: their shares are equal."""

    def __init__(self, *, prints_lines: bool = True) -> None:
        self.prints_lines = prints_lines
        self.console = Console(file=sys.stdout, highlight=False)
        self.is_silent = not is_first_rank()
        self.bar: Bar | None = None
        self.tasks: dict[str, TaskID] = {}
        self.started = 0.0

    def __enter__(self) -> Progress:
        if not self.is_silent and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, key: str, done: int, total: int) -> None:
        """Show that `done` of `total` rows of a data set or task are done; the first call has 0."""
        if self.is_silent:
            return
        if not done:
            self.started = time.monotonic()
        if self.bar is not None:
            if key not in self.tasks:
                self.tasks[key] = self.bar.add_task(escape(key), total=total)
            self.bar.update(self.tasks[key], completed=done, total=total)
        elif done == total and self.prints_lines:
            seconds = time.monotonic() - self.started
            self.console.print(escape(f"{key}: {counted(total, 'row')} in {duration(seconds)}"))
