"""Render a preview: as an HTML page, and in a terminal, with or without colours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.report.preview import DatasetView, PackView, Passage, Piece, Preview

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NUM_HUES = 6
"""colours of data sets in the page's style"""
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
PACK_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_LISTED = 6
"""documents of a pack that are listed one by one"""
COLOURS = ("blue", "magenta", "yellow", "green", "cyan", "red")
TRAINED, SPECIAL = "bold green", "cyan"


def render_page(preview: Preview) -> str:
    """Return the page of a preview: one HTML file that needs no script, font or network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("preview.html.jinja")
    return template.render(preview=preview, num_hues=NUM_HUES)


def print_preview(preview: Preview, console: Console, max_tokens: int) -> None:
    """Print all of a preview; of a row at most `max_tokens` tokens."""
    from rich.text import Text

    def write(text: str | Text = "", style: str = "") -> None:
        console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=True)

    write(preview.title, style="bold")
    for fact in preview.facts:
        write(f"  {fact}")
    write(_legend(console))
    for dataset in preview.datasets:
        write()
        write(dataset.about, style="bold")
        for row in dataset.rows:
            trained = f"{row.num_trained:,} trained on"
            write(f"-- {row.origin}: {row.num_tokens:,} tokens, {trained}", style="bold")
            write(render_passage(row.tokens.cut(max_tokens), console))
            if row.targets is not None:
                write("-- decoder targets:")
                write(render_passage(row.targets.cut(max_tokens), console))
    write("\npacks: one letter per document, as wide as its share", style="bold")
    for pack in preview.packs:
        for line in _pack_lines(pack, preview, console):
            write(line)
    write(f"\nlengths in tokens, from 0 to {preview.longest:,}", style="bold")
    width = max(map(len, preview.names))
    for dataset in preview.datasets:
        write(_histogram_line(dataset, width, ascii_only=console.options.ascii_only))
    write(f"\nmixture over {preview.mixture_of}", style="bold")
    mixture = _table(preview.mixture)
    # As wide as it is: a table that is cut at the terminal's width cannot be read.
    console.print(mixture, width=console.measure(mixture).maximum, crop=False)
    write("\naudit", style="bold")
    for line in preview.audit.lines():
        style = "yellow" if line.startswith("warning:") else ""
        write(line, style="bold red" if line.startswith("problem:") else style)


def render_passage(passage: Passage, console: Console) -> Text:
    """Return a passage with its trained tokens marked, by colour or by « »."""
    from rich.text import Text

    text = Text()
    opening, closing = _marks(console)

    def add(pieces: Sequence[Piece]) -> None:
        # Neighbours of one kind share one mark.
        for is_trained, run in itertools.groupby(pieces, lambda piece: piece.is_trained):
            if is_trained:
                inside = "".join(piece.text for piece in run)
                text.append(f"{opening}{inside}{closing}", style=TRAINED)
                continue
            for is_special, part in itertools.groupby(run, lambda piece: piece.is_special):
                inside = "".join(piece.text for piece in part)
                text.append(inside, style=SPECIAL if is_special else "")

    add(passage.head)
    if passage.left_out:
        text.append(f"\n[... {passage.left_out:,} tokens left out ...]\n", style="italic")
    add(passage.tail)
    return text


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _marks(console: Console) -> tuple[str, str]:
    if _has_colours(console):
        return "", ""
    return ("<<", ">>") if console.options.ascii_only else ("«", "»")


def _legend(console: Console) -> Text:
    from rich.text import Text

    opening, closing = _marks(console)
    text = Text("  below: ")
    text.append(f"{opening}trained on{closing}", style=TRAINED)
    text.append(", masked")
    if _has_colours(console):
        text.append(", ")
        text.append("special token", style=SPECIAL)
    return text


def _pack_lines(pack: PackView, preview: Preview, console: Console) -> list[str | Text]:
    """Return the heading of a pack, its bar, and its documents."""
    from rich.text import Text

    width = min(console.width, 100) - 4
    bar, at = Text("  |"), 0
    for number, document in enumerate(pack.documents):
        start, at = at, at + document.tokens
        cells = round(at / pack.capacity * width) - round(start / pack.capacity * width)
        letter = PACK_LETTERS[number % len(PACK_LETTERS)]
        colour = COLOURS[document.dataset % len(COLOURS)]
        bar.append(letter * cells, style=f"bright_{colour}" if pack.shades[number] else colour)
    bar.append(" " * (width - round(at / pack.capacity * width)) + "|")
    parts = [
        f"{PACK_LETTERS[number % len(PACK_LETTERS)]} {preview.names[document.dataset]} "
        f"{document.origin} {document.tokens:,} ({document.trained:,} trained on)"
        for number, document in enumerate(pack.documents[:MAX_LISTED])
    ]
    if len(pack.documents) > len(parts):
        parts.append(f"and {len(pack.documents) - len(parts):,} more, which the page shows")
    return [pack.heading, bar, *(f"    {part}" for part in parts)]


def _histogram_line(dataset: DatasetView, width: int, *, ascii_only: bool) -> str:
    """Return the histogram of lengths as one row of bars."""
    levels = ASCII_BARS if ascii_only else BARS
    most = max(dataset.counts)
    bars = "".join(
        " " if not count else levels[min(len(levels) - 1, count * len(levels) // (most + 1))]
        for count in dataset.counts
    )
    return f"  {dataset.name.ljust(width)} |{bars}| {dataset.lengths}"


def _table(cells: Sequence[Sequence[str]]) -> Table:
    """Return a table with its headings: the first column to the left, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    for place, heading in enumerate(cells[0]):
        table.add_column(Text(heading), justify="right" if place else "left", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return table
