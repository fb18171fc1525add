"""Say what was read: a line a data set on the screen, and the same for the run's manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from data_modules.types import DataError

if TYPE_CHECKING:
    from data_modules.settings import DataConfig


@dataclass(slots=True)
class Counts:
    """Count what became of the rows of a data set; origins are file:line."""

    rows: int = 0
    kept: int = 0
    chats: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    lost_tokens: int = 0
    empty: int = 0
    empty_origins: list[str] = field(default_factory=list)
    rejected: int = 0
    longest: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    stop_token_ids: list[int] = field(default_factory=list)
    largest_token: tuple[int, str] = (-1, "")

    def add_empty(self, origin: str) -> None:
        """Count a row that leaves nothing to learn."""
        self.empty += 1
        self.empty_origins = [*self.empty_origins, origin][:5]

    def add_length(self, tokens: int, origin: str) -> None:
        """Remember the row if it is one of the five longest."""
        if len(self.longest) < 5 or tokens > self.longest[-1][0]:
            self.longest = sorted([*self.longest, (tokens, origin)], key=_by_length)[:5]

    def add_note(self, kind: str, seen: str, count: int = 1) -> None:
        """Count a fact about a row; the first one seen is kept."""
        before, first = self.notes.get(kind, (0, seen))
        self.notes[kind] = (before + count, first)

    def merge(self, other: Counts) -> None:
        """Add the counts of the rows that come after these."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.empty_origins = [*self.empty_origins, *other.empty_origins][:5]
        for tokens, origin in other.longest:
            self.add_length(tokens, origin)
        for kind, (count, seen) in other.notes.items():
            self.add_note(kind, seen, count)
        self.stop_token_ids = sorted({*self.stop_token_ids, *other.stop_token_ids})
        self.largest_token = max(self.largest_token, other.largest_token)


_SUMMED = (
    "rows",
    "kept",
    "chats",
    "dropped",
    "truncated",
    "split",
    "lost_tokens",
    "empty",
    "rejected",
)


def _by_length(row: tuple[int, str]) -> int:
    return -row[0]


def check_dropped(counts: Counts, path: str, data: DataConfig, sequence_len: int) -> None:
    """Raise DataError when no row is left, or more are dropped than `data.max_dropped_share`."""
    tokens, origin = counts.longest[0] if counts.longest else (0, "")
    longest = f"the longest, {origin}, has {tokens:,} tokens"
    if data.on_long == "error" and counts.dropped:
        raise DataError(
            f"{path}: {counts.dropped:,} rows are longer than {sequence_len:,} tokens; "
            f"{longest}; raise data.sequence_len, or set data.on_long=split, truncate_right or drop"
        )
    lost = counts.dropped + counts.empty + counts.rejected
    num_rows = counts.rows + counts.rejected
    detail = f"{counts.dropped:,} are longer than {sequence_len:,} tokens"
    if counts.dropped:
        detail += (
            f" ({longest}; set data.sequence_len={tokens} or data.on_long=split or truncate_right)"
        )
    detail += f", {counts.empty:,} have nothing to learn"
    if counts.empty:
        detail += f" ({', '.join(counts.empty_origins)}: no answer, weight 0, or cut away)"
    if counts.truncated and counts.empty:
        detail += f"; {counts.truncated:,} were cut ({longest}; set data.sequence_len={tokens})"
    if counts.rejected:
        detail += f", {counts.rejected:,} are bad"
    if not counts.kept:
        raise DataError(f"{path}: no row of {counts.rows:,} is left: {detail}")
    share = data.max_dropped_share
    if share is not None and lost / num_rows > share:
        raise DataError(
            f"{path}: {lost:,} of {num_rows:,} rows are dropped ({lost / num_rows:.1%}"
            f"), data.max_dropped_share is {share}: {detail}"
        )


@dataclass(kw_only=True, slots=True)
class DatasetReport:
    """Say what a data set is and what is learned of it; tokens are those of training."""

    name: str
    path: str
    format: str
    format_guessed: bool
    sha256: str
    how: str
    rows: int
    train_rows: int
    validation_rows: int
    repeated_rows: int
    tokens: int
    trained_tokens: int
    rejected: int
    is_cut: bool
    is_streamed: bool
    asks_validation: bool

    def line(self) -> str:
        """Return it in one line."""
        guessed = ", guessed" if self.format_guessed else ""
        if self.is_streamed:
            return (
                f"{self.name}: streamed ({self.format}{guessed}), {self.validation_rows:,} of its "
                "first rows are for validation"
            )
        first = "the first " if self.is_cut else ""
        parts = [
            f"{first}{self.rows:,} rows ({self.format}{guessed})",
            f"{self.train_rows:,} train + {self.validation_rows:,} validation",
            self.how,
        ]
        if self.asks_validation and not self.validation_rows:
            parts.append("none could be held out: too few that differ")
        if self.repeated_rows:
            parts.append(f"{self.repeated_rows:,} left out that stand in validation")
        if self.rejected:
            parts.append(f"{self.rejected:,} bad rows left out")
        return f"{self.name}: {', '.join(parts)}"


@dataclass(kw_only=True, slots=True)
class Fingerprint:
    """Tell which rows the evaluation asks; `sha256` is "" for a hub id."""

    name: str
    path: str
    sha256: str


@dataclass(kw_only=True, slots=True)
class DataReport:
    """Say what was read, for the screen and for the run's manifest."""

    datasets: list[DatasetReport]
    template_note: str
    mixture: list[str] = field(default_factory=list)
    test_datasets: list[Fingerprint] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what is said aloud: a line a data set, their shares, and how turns are written."""
        note = [self.template_note] if self.template_note else []
        return [*(report.line() for report in self.datasets), *self.mixture, *note]
