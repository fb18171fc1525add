"""Say what was read: a line a data set on the screen, and the same for the run's manifest."""

from __future__ import annotations

from dataclasses import dataclass, field


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
