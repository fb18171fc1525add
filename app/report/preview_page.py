"""Render a preview as an HTML page, and in the terminal with or without colors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.process.logs import print_table, text_table, wrapped
from app.report.preview import DatasetView, PackView, Passage, Piece, Preview
from app.report.template import render_template

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_NUM_PAGE_COLORS = 6
"""colors of data sets in the CSS of the page"""
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_PACK_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LISTED = 6
"""documents of a pack that are listed in the terminal"""
COLORS = ("blue", "magenta", "yellow", "green", "cyan", "red")
"""colors of data sets in the terminal"""
TRAINED, SPECIAL = "bold green", "cyan"
"""styles of tokens in the terminal"""


def render_page(preview: Preview) -> str:
    return render_template(
        "preview", title=preview.title, preview=preview, num_colors=_NUM_PAGE_COLORS
    )


def print_preview(preview: Preview, console: Console, max_tokens: int) -> None:
    """Print a preview, with at most `max_tokens` tokens of each row."""
    from rich.text import Text

    def write(text: str | Text = "", style: str = "") -> None:
        shown = Text(wrapped(text), style=style) if isinstance(text, str) else text
        console.print(shown, soft_wrap=True)

    write(preview.title, style="bold")
    for fact in preview.facts:
        write(f"  {fact}")
    write(_legend(console))
    for dataset in preview.datasets:
        write()
        write(dataset.about, style="bold")
        for row in dataset.rows:
            heading = f"{row.num_tokens:,} tokens, {row.num_trained:,} trained on"
            write(f"-- {row.origin}: {heading}", style="bold")
            write(render_passage(row.tokens.cut(max_tokens), console))
            if row.targets is not None:
                write(f"-- {row.targets_are}:")
                write(render_passage(row.targets.cut(max_tokens), console))
    write("\npacks: one letter per document, its width in proportion to its length", style="bold")
    for pack in preview.packs:
        for line in _pack_lines(pack, preview, console):
            write(line)
    write(f"\nlengths in tokens, from 0 to {preview.longest:,}", style="bold")
    width = max(map(len, preview.names))
    for dataset in preview.datasets:
        write(_histogram_line(dataset, width, ascii_only=console.options.ascii_only))
    write(f"\nmixture over {preview.mixture_of}", style="bold")
    print_table(text_table(preview.mixture, box=None, pad_edge=False, header_style=""), console)
    write("\naudit", style="bold")
    for line in preview.audit.lines():
        style = "yellow" if line.startswith("warning:") else ""
        write(line, style="bold red" if line.startswith("problem:") else style)


def render_passage(passage: Passage, console: Console) -> Text:
    """Return a passage in which tokens that are trained on are marked by color or by « »."""
    from rich.text import Text

    text = Text()
    opening, closing = _marks(console)

    def add(pieces: Sequence[Piece]) -> None:
        # Consecutive tokens of one kind are marked together.
        for is_trained, run in itertools.groupby(pieces, lambda piece: piece.is_trained):
            if is_trained:
                inside = "".join(piece.text for piece in run)
                text.append(f"{opening}{inside}{closing}", style=TRAINED)
                continue
            for is_special, part in itertools.groupby(run, lambda piece: piece.is_special):
                inside = "".join(piece.text for piece in part)
                text.append(inside, style=SPECIAL if is_special else "")

    add(passage.head)
    if passage.num_omitted:
        text.append(f"\n[... {passage.num_omitted:,} tokens omitted ...]\n", style="italic")
    add(passage.tail)
    return text


def _has_colors(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _marks(console: Console) -> tuple[str, str]:
    if _has_colors(console):
        return "", ""
    return ("<<", ">>") if console.options.ascii_only else ("«", "»")


def _legend(console: Console) -> Text:
    from rich.text import Text

    opening, closing = _marks(console)
    text = Text("  below: ")
    text.append(f"{opening}trained on{closing}", style=TRAINED)
    text.append(", masked")
    if _has_colors(console):
        text.append(", ")
        text.append("special token", style=SPECIAL)
    return text


def _pack_lines(pack: PackView, preview: Preview, console: Console) -> list[str | Text]:
    """Return the heading of a pack, its bar, and its first documents."""
    from rich.text import Text

    width = min(console.width, 100) - 4
    bar, end = Text("  |"), 0
    for number, document in enumerate(pack.documents):
        start, end = end, end + document.num_tokens
        cells = round(end / pack.capacity * width) - round(start / pack.capacity * width)
        letter = _PACK_LETTERS[number % len(_PACK_LETTERS)]
        color = COLORS[document.dataset % len(COLORS)]
        bar.append(letter * cells, style=f"bright_{color}" if pack.shades[number] else color)
    bar.append(" " * (width - round(end / pack.capacity * width)) + "|")
    listed = [
        f"{_PACK_LETTERS[number % len(_PACK_LETTERS)]} {preview.names[document.dataset]} "
        f"{document.origin} {document.num_tokens:,} ({document.num_trained:,} trained on)"
        for number, document in enumerate(pack.documents[:_MAX_LISTED])
    ]
    if len(pack.documents) > len(listed):
        listed.append(f"and {len(pack.documents) - len(listed):,} more on the page")
    return [pack.heading, bar, *(f"    {line}" for line in listed)]


def _histogram_line(dataset: DatasetView, width: int, *, ascii_only: bool) -> str:
    """Return the histogram of lengths as a line of bars."""
    levels = ASCII_BARS if ascii_only else BARS
    highest = max(dataset.counts)
    bars = "".join(
        " " if not count else levels[min(len(levels) - 1, count * len(levels) // (highest + 1))]
        for count in dataset.counts
    )
    return f"  {dataset.name.ljust(width)} |{bars}| {dataset.lengths}"
