"""Text that a message quotes: printable, short and without secrets; numbers as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.redaction import redact

MAX_SHOWN = 80
_MAX_LISTED = 20


def reason_of(error: Exception, *, names_file: bool = True) -> str:
    """Return a library's error message in one line; of an OSError with its file, if any."""
    message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        has_file = names_file and error.filename is not None
        message = f"{error.strerror}: {error.filename}" if has_file else error.strerror
    # A library may quote an address with its password or token.
    return redact(message)


def unreadable(file: object, error: Exception) -> str:
    """Return the message that a file cannot be read, and why."""
    return f"{file}: cannot be read: {reason_of(error, names_file=False)}"


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with its control characters escaped: data must not control a terminal.

    Characters in `keep` stay, such as the line ends of a message of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """Return a share as text: 12.3 %; `sign="+"` also writes the sign of a positive one."""
    return formatted(share, f"{sign}.{digits}%")


def formatted(value: float, spec: str) -> str:
    """Return a number by a format spec; for percentages as `percent` does."""
    return format(value, spec).replace("%", " %")


def duration(seconds: float) -> str:
    """Return a time as text: 9.5 s, 46 s, 6.4 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.{int(seconds < 10)}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 1,200 rows."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shown(text: str) -> str:
    """Return at most 80 printable characters of `text`, to quote in a message."""
    return printable(text[:MAX_SHOWN])[:MAX_SHOWN]


def shortened(value: object) -> str:
    """Return a value as text of at most 80 characters, to quote in a message."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in cells
    ]


def listed(names: Iterable[object]) -> str:
    """Format a list of names for a message: the first 20, at most 80 characters each."""
    names = list(names)
    first = [str(name)[:MAX_SHOWN] for name in names[:_MAX_LISTED]]
    more = len(names) - len(first)
    return f"{first}" if not more else f"[{', '.join(map(repr, first))}, and {more:,} more]"
