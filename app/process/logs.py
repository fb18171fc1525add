"""Logging: a summary on the screen, everything in the run's folder.

The screen shows messages of level INFO and above, and with `--verbose` also DEBUG; `train.log` has
both, and all that `show` prints.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.launch import is_first_rank
from common.files import open_no_follow
from common.redaction import redact
from common.text import printable

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table
    from rich.text import Text

LOG_FILE = "train.log"
"""file in a run's folder with all messages of the run and their times"""
_WIDE = 1000
"""width of a table that nothing cuts, in characters"""
_OWN_LOGGERS = ("app", "common", "data_modules")
"""loggers whose DEBUG messages are logged; those of libraries are not"""
_NOISY_LOGGERS = ("bitsandbytes", "httpx", "httpx2")
"""loggers of libraries that log only errors"""

log = logging.getLogger(__name__)


class CleanFormatter(logging.Formatter):
    """Log messages without secrets, and with control characters in names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)), keep="\n")


class Screen(logging.StreamHandler):
    """Write to the current stdout, which a live progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return wrapped(super().format(record))


class RunLog(logging.Handler):
    """Write messages to the run's log file; keep them in memory until the run owns its folder.

    If the disk is full, the log is lost and the run continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
        self.file: Path | None = None
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.append(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - a malformed message must not stop the program
            self.handleError(record)
        if self.file is not None:
            self._write(self.file)

    def write_into(self, folder: Path) -> None:
        """Write the messages so far and all later ones to the log file in `folder`."""
        self.file = folder.absolute() / LOG_FILE
        self._write(self.file)

    def _write(self, file: Path) -> None:
        text = "".join(self._waiting)
        self._waiting.clear()
        with (
            contextlib.suppress(OSError),
            open_no_follow(file, "a", encoding="utf-8", errors="backslashreplace") as stream,
        ):
            stream.write(text)


_is_verbose = False
_run_log = RunLog()


def set_verbose(is_verbose: bool) -> None:
    """Choose whether the screen shows DEBUG messages; call before `start_logging`."""
    global _is_verbose
    _is_verbose = is_verbose


def is_verbose() -> bool:
    return _is_verbose


def start_logging() -> None:
    """Set up logging, with only warnings on ranks other than 0; call once per process."""
    global _run_log
    _run_log, screen = RunLog(), Screen()
    screen.setFormatter(CleanFormatter("%(message)s"))
    is_first = is_first_rank()
    screen.setLevel(logging.DEBUG if _is_verbose and is_first else logging.INFO)
    level = logging.INFO if is_first else logging.WARNING
    handlers: list[logging.Handler] = [screen, _run_log] if is_first else [screen]
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if is_first else logging.NOTSET)
    # DeepSpeed says so on a machine without GPU whenever a library imports it.
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: "Setting accelerator to CPU" not in str(record.msg)
    )
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # torch does this only at the end of its import: a signal before that would print statistics.
    logging.getLogger("torch").setLevel(logging.WARNING)


def open_run_log(folder: Path) -> None:
    """Write the log of this process into the `folder` of its run, on rank 0."""
    if is_first_rank():
        _run_log.write_into(folder)


def show(what: Table | str, *, is_copied: bool = False) -> None:
    """Print a text or a table, and write it into the run's log.

    A terminal gets it wrapped by words, unless it is a line to copy.
    """
    if isinstance(what, str):
        print(what if is_copied else wrapped(what), flush=True)
        record(what)
    else:
        print_table(what)
        record(laid_out(what))


def wrapped(text: str) -> str:
    """Wrap a text by words for a terminal, which would break them; a file gets whole lines."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        wrap.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrap.wrap(line) if len(line) > width else [line]
    return "\n".join(lines)


def text_table(
    cells: Sequence[Sequence[str]], title: str = "", texts: Sequence[str] = (), **style: Any
) -> Table:
    """Return a table of a heading row and rows, numbers on the right.

    `texts`: headings of columns with text, besides the first; `style`: further arguments of Table.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) or None, title_justify="left", **style)
    for heading in cells[0]:
        is_text = heading in (cells[0][0], *texts)
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(escape(heading), justify=justify, overflow="fold", no_wrap=not is_text)
    for row in cells[1:]:
        table.add_row(*map(escape, row))
    return table


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table as wide as it needs, on a terminal as `fitted` makes it."""
    from rich.console import Console

    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, Console(width=_WIDE).measure(table).maximum)
    console.print(fitted(table, console.width))


def fitted(table: Table, width: int) -> RenderableType:
    """Return a table of at most `width` characters without a broken word.

    The lines between columns go first, then columns of text shrink to their longest word, and not
    those of numbers with their units; rows of a table that is still too wide become lists.
    """
    from rich.cells import cell_len
    from rich.console import Console, Group

    def longest(texts: Sequence[Text], separator: str | None) -> int:
        parts = [part for text in texts for part in text.plain.split(separator)]
        return max(map(cell_len, parts), default=0)

    if Console(width=_WIDE).measure(table).maximum <= width:
        return table
    table.box, table.pad_edge = None, False
    needed = Console(width=_WIDE).measure(table).maximum
    texts = [[*map(_as_text, (column.header, *column.cells))] for column in table.columns]
    most = [longest(column, "\n") for column in texts]
    least = [
        longest(column, "\n" if shape.no_wrap or shape.justify == "right" else None)
        for shape, column in zip(table.columns, texts, strict=True)
    ]
    room = width - (needed - sum(most)) - sum(least)
    if room < 0:
        return Group(*_as_lists(table.title, texts))
    spare = [wide - narrow for wide, narrow in zip(most, least, strict=True)]
    for number, index in enumerate(sorted(range(len(spare)), key=spare.__getitem__)):
        given = min(spare[index], room // (len(spare) - number))
        table.columns[index].width = least[index] + given
        room -= given
    return table


def _as_lists(title: RenderableType | None, texts: Sequence[Sequence[Text]]) -> Iterator[Text]:
    from rich.text import Text

    headings, *rows = zip(*texts, strict=True)
    if title:
        yield Text(str(title), style="italic")
    for row in rows:
        for number, (heading, cell) in enumerate(zip(headings, row, strict=True)):
            named = (heading, ": ") if heading.plain else ()
            yield Text.assemble("  " if number else "", *named, cell)


def _as_text(cell: RenderableType) -> Text:
    from rich.text import Text

    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def laid_out(what: Table) -> str:
    """Return the lines of a table as wide as it needs: those of a log may have any width."""
    from rich.console import Console

    wide = Console(file=io.StringIO(), width=_WIDE, highlight=False)
    with wide.capture() as lines:
        wide.print(what)
    return lines.get()


def record(text: str) -> None:
    """Write a text into the run's log only."""
    if text.strip():
        _run_log.emit(logging.makeLogRecord({"msg": text.strip("\n"), "levelname": "INFO"}))


def print_loading() -> None:
    """Print that libraries are being loaded, which takes seconds without other output."""
    log.info("loading libraries ...")
