"""Show a preview in a terminal: with colours where it has them, and readable without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.report.preview import DatasetView, PackView, Preview, count
from app.report.token_text import Passage, Piece

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
PACK_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_LISTED = 6
"""documents of a pack that are listed one by one"""
COLOURS = ("blue", "magenta", "yellow", "green", "cyan", "red")
LEARNED, SPECIAL = "bold green", "cyan"


def print_preview(preview: Preview, console: Console, max_tokens: int) -> None:
    """Print all of a preview; of a row at most `max_tokens` tokens."""
    from rich.text import Text

    def say(text: str | Text = "", style: str = "") -> None:
        console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=True)

    say(preview.title, style="bold")
    for fact in preview.facts:
        say(f"  {fact}")
    say(_legend(console))
    for dataset in preview.datasets:
        say()
        say(dataset.about, style="bold")
        for row in dataset.rows:
            learned = f"{row.num_learned:,} learned"
            say(f"-- {row.origin}: {row.num_tokens:,} tokens, {learned}", style="bold")
            say(spell(row.tokens.cut(max_tokens), console))
            if row.targets is not None:
                say("-- to be said by the decoder:")
                say(spell(row.targets.cut(max_tokens), console))
    say("\npacks: a letter a document, as wide as its share", style="bold")
    for pack in preview.packs:
        for line in _pack_lines(pack, preview, console):
            say(line)
    say(f"\nlengths in tokens, from 0 to {preview.longest:,}", style="bold")
    width = max(map(len, preview.names))
    for dataset in preview.datasets:
        say(_histogram_line(dataset, width, ascii_only=console.options.ascii_only))
    say(f"\nmixture over {preview.mixture_of}", style="bold")
    for line in _aligned(preview.mixture):
        say(line)
    say("\naudit", style="bold")
    for line in preview.audit.lines():
        style = "yellow" if line.startswith("warning:") else ""
        say(line, style="bold red" if line.startswith("problem:") else style)


def spell(passage: Passage, console: Console) -> Text:
    """Return a passage with its learned tokens marked, by colour or by « »."""
    from rich.text import Text

    text = Text()
    opening, closing = _marks(console)

    def add(pieces: Sequence[Piece]) -> None:
        # A run of tokens of one kind at a time: a mark, or a colour, is said once for all of them.
        for is_learned, run in itertools.groupby(pieces, lambda piece: piece.is_learned):
            if is_learned:
                inside = "".join(piece.text for piece in run)
                text.append(f"{opening}{inside}{closing}", style=LEARNED)
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
    text.append(f"{opening}learned{closing}", style=LEARNED)
    text.append(", only seen")
    if _has_colours(console):
        text.append(", ")
        text.append("special token", style=SPECIAL)
    return text


def _pack_lines(pack: PackView, preview: Preview, console: Console) -> list[str | Text]:
    """Say what is in a pack, and draw it."""
    from rich.text import Text

    fill = pack.tokens / pack.capacity
    lines: list[str | Text] = [
        f"step {pack.step} pack {pack.number}: {count(len(pack.documents), 'document')}, "
        f"{pack.tokens:,} of {pack.capacity:,} tokens ({fill:.1%} full)"
    ]
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
        f"{document.origin} {document.tokens:,} ({document.learned:,} learned)"
        for number, document in enumerate(pack.documents[:MAX_LISTED])
    ]
    if len(pack.documents) > len(parts):
        parts.append(f"and {len(pack.documents) - len(parts):,} more, which the page shows")
    return [*lines, bar, *(f"    {part}" for part in parts)]


def _histogram_line(dataset: DatasetView, width: int, *, ascii_only: bool) -> str:
    """Draw how many documents are how long, as one row of bars."""
    levels = ASCII_BARS if ascii_only else BARS
    most = max(dataset.counts)
    bars = "".join(
        " " if not count else levels[min(len(levels) - 1, count * len(levels) // (most + 1))]
        for count in dataset.counts
    )
    return (
        f"  {dataset.name.ljust(width)} |{bars}| median {dataset.median:,}, "
        f"95 % up to {dataset.percentile_95:,}, longest {dataset.longest:,}"
    )


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
