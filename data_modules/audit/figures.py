"""Hold what an audit has found, and lay it out: a table, lines for the screen, files for the run.

Never counts and never judges.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_modules.messages import DataError, printable, redact, redacted

MAX_FILE = 32
"""letters of a file's path that are shown as they are"""
_PLACE = re.compile(r"(.+?):(\d+)(?= |$)")
HEADINGS = {
    "rows": "rows",
    "train": "train",
    "validation": "validation",
    "tokens": "tokens",
    "trained": "trained",
    "lost_tokens": "lost",
    "bad_rows": "bad",
    "dropped": "too long",
    "truncated": "truncated",
    "split": "split",
    "empty": "nothing to train on",
    "no_stop": "no stop",
    "double_bos": "two BOS",
    "duplicates": "duplicates",
    "repeated": "in both",
    "overlapping": "overlap",
}
"""count -> heading; a note on rows is headed by its kind"""
ALWAYS = ("rows", "train", "validation", "tokens", "trained")
"""columns that are shown even where they are zero"""
ON_SCREEN = (*ALWAYS, "lost_tokens")
"""columns that a screen shows; warnings say the others"""
SHORT_HEADINGS = {"validation": "val"}
"""where a run's start has further columns"""
MAX_LINE = 160
"""letters of a line on the screen, where two data sets go into so many"""


def relative(text: str) -> str:
    """Return `text` with the paths in it that lie below the working directory relative to it."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")


def short_file(file: str) -> str:
    """Return a file's path relative to here, or of a long one that lies elsewhere its end."""
    parts = file.replace("\\", "/").rsplit("/", 2)
    below = relative(file)
    if below != file or len(file) <= MAX_FILE or len(parts) < 3:
        return below
    return f".../{parts[1]}/{parts[2]}"


def short_paths(places: Iterable[str]) -> list[str]:
    """Return places, `file:line` and what follows, short; a file that was just named only `:line`.

    Other texts stay as they are.
    """
    named, shown = "", []
    for place in places:
        found = _PLACE.match(place)
        if found is None:
            shown.append(place)
            continue
        file, line = found.groups()
        shown.append(f"{'' if file == named else short_file(file)}:{line}{place[found.end() :]}")
        named = file
    return shown


@dataclass(kw_only=True, slots=True)
class DatasetAudit:
    """Count what a data set teaches. Tokens, `no_stop` and `duplicates` are those of training.

    rows          all that were read
    train         documents of training; a row is several where it was split
    trained       trained tokens
    bad_rows      rows that could not be read, in quarantine
    dropped       rows above the sequence length that were left out
    lost_tokens   tokens that were lost with long rows, left out or cut away
    lost_share    these as a share of all tokens of the data set, from 0 to 1
    empty         rows with nothing to train on, left out
    no_stop       documents whose last trained token is no stop token
    duplicates    documents that stand in training already, to the token
    repeated      validation documents that also stand in training, to the token
    overlapping   validation documents that share words with training
    notes         kind of a note -> rows
    """

    name: str
    path: str
    rows: int
    train: int
    validation: int
    tokens: int
    trained: int
    bad_rows: int = 0
    dropped: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    lost_share: float = 0.0
    split: int = 0
    empty: int = 0
    no_stop: int = 0
    double_bos: int = 0
    duplicates: int = 0
    repeated: int = 0
    overlapping: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        """Return the share of its tokens that is trained on, from 0 to 1."""
        return self.trained / max(1, self.tokens)


@dataclass(kw_only=True, slots=True)
class BenchmarkAudit:
    """Count the documents of a test data set that are the same as one of training, to the token
    (`repeated`), and those that share words with one (`overlapping`).
    """

    name: str
    rows: int
    repeated: int
    overlapping: int


def count_of(count: int, total: int) -> str:
    """Word a count and what it is a part of."""
    return f"{count:,} of {total:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditWarning:
    """Hold a warning about one data set: in parts for a screen, and in full as `text` for a file.

    It reads `count` of `total` `what` (rows, documents) `statement`; `share` is that of the tokens,
    from 0 to 1; `first` are the origins (file:line) of one example, joined by `joiner`; `advice`
    says what to do, `advice_in_full` at more length. `written` is a text of its own.
    """

    dataset: str
    count: int
    total: int
    what: str
    statement: str
    share: float | None = None
    first: tuple[str, ...] = ()
    joiner: str = " with "
    advice: str = ""
    advice_in_full: str = ""
    written: str = ""

    @property
    def text(self) -> str:
        """Return it in full: whole paths, and all that can be done."""
        whole = self.sentence(self.joiner.join(self.first), self.advice_in_full or self.advice)
        return self.written or whole

    def sentence(self, example: str, advice: str) -> str:
        """Return it in words, with the places of an example."""
        amount = "" if self.share is None else f" ({self.share:.0%} of the tokens)"
        first, then = example and f", first {example}", advice and f"; {advice}"
        return f"{self.dataset}: {self.counted} {self.what}{amount} {self.statement}{first}{then}"

    @property
    def counted(self) -> str:
        """Return the count and what it is a part of."""
        return count_of(self.count, self.total)

    @property
    def example(self) -> str:
        """Return the places of its example, short."""
        return self.joiner.join(short_paths(self.first))


@dataclass(kw_only=True, slots=True)
class Audit:
    """Hold what was found: `problems` stop a run, `findings` is said, `facts` only explain.

    `longest` are (tokens, file:line) of the longest rows, before any cut.
    """

    datasets: list[DatasetAudit]
    benchmarks: list[BenchmarkAudit] = field(default_factory=list)
    longest: list[tuple[int, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    findings: list[AuditWarning] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Return the warnings in full, one a data set and kind."""
        return [findings.text for findings in self.findings]

    def cells(self) -> list[list[str]]:
        """Return the whole table as text: headings, a row a data set, their total where several
        are. Columns that are zero everywhere are left out.
        """
        return _cells([asdict(dataset) for dataset in self.datasets], on_screen=False)

    def notes(self) -> list[str]:
        """Return what is said besides the table, in full, a line each."""
        longest = ", ".join(f"{origin} {tokens:,}" for tokens, origin in self.longest)
        lines = [f"longest rows, in tokens: {longest}"] if longest else []
        lines += [
            f"test data {test.name}: {test.overlapping:,} of {test.rows:,} documents overlap with "
            f"training, {test.repeated:,} are the same to the token"
            for test in self.benchmarks
        ]
        lines += self.facts
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"problem: {problem}" for problem in self.problems]
        return [printable(relative(line)) for line in lines]

    def remarks(self, *, warnings_alone: bool = False) -> list[str]:
        """Return what a screen shows besides the table, a line a kind of warning.

        `warnings_alone`: neither facts, nor the problems that `check` raises.
        """
        longest = (
            [] if warnings_alone else [f"{where} {tokens:,}" for tokens, where in self.longest]
        )
        lines = [f"longest rows, in tokens: {', '.join(short_paths(longest))}"] if longest else []
        same = [
            f"{test.name} {test.repeated:,} of {test.rows:,}"
            for test in self.benchmarks
            if test.repeated
        ]
        if same:
            named = ", ".join(same)
            lines.append(f"test documents are the same as one of training, to the token: {named}")
        lines += [] if warnings_alone else self.facts
        lines += [f"warning: {line}" for line in compact(self.findings)]
        lines += [] if warnings_alone else [f"problem: {problem}" for problem in self.problems]
        return [printable(line) for line in lines]

    def lines(self) -> list[str]:
        """Return what a screen shows: a narrow table, and the remarks."""
        cells = _cells([asdict(dataset) for dataset in self.datasets], on_screen=True)
        return [*(aligned(cells) if self.datasets else []), *self.remarks()]

    def brief(self, columns: Mapping[str, Sequence[str]]) -> list[str]:
        """Return what a run says at its start: the table, and what is wrong with the data.

        `columns`: heading -> a cell a data set, of what others know of them.
        """
        cells = _cells([asdict(dataset) for dataset in self.datasets], on_screen=True)
        cells[0] = [SHORT_HEADINGS.get(heading, heading) for heading in cells[0]]
        for heading, texts in columns.items():
            below = [*map(printable, texts), *[""] * (len(cells) - 1 - len(texts))]
            cells = [[*row, cell] for row, cell in zip(cells, [heading, *below], strict=True)]
        return [*(aligned(cells) if self.datasets else []), *self.remarks(warnings_alone=True)]

    def full_lines(self) -> list[str]:
        """Return the whole table, aligned, and all that is said, in full."""
        return [*(aligned(self.cells()) if self.datasets else []), *self.notes()]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        values = asdict(self)
        for dataset, counts in zip(self.datasets, values["datasets"], strict=True):
            counts["trained_share"] = round(dataset.trained_share, 6)
            counts["lost_share"] = round(dataset.lost_share, 6)
        values["longest"] = [{"tokens": t, "origin": origin} for t, origin in self.longest]
        del values["findings"]
        return values | {"warnings": self.warnings}

    def write(self, folder: Path) -> None:
        """Write audit.json and audit.txt into the run's folder."""
        text = json.dumps(redacted(self.as_dict()), indent=2, ensure_ascii=False)
        (folder / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        (folder / "audit.txt").write_text(
            redact("\n".join(self.full_lines())) + "\n", encoding="utf-8"
        )

    def check(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError(self.problems)


def compact(findings: Sequence[AuditWarning]) -> list[str]:
    """Return a line a kind of warning: of one data set a sentence, of several their counts."""
    kinds: dict[tuple[str, str, str], list[AuditWarning]] = {}
    for one in findings:
        kinds.setdefault((one.what, one.statement, one.advice), []).append(one)
    return [
        several[0].sentence(several[0].example, several[0].advice)
        if len(several) == 1
        else _listing(several)
        for several in kinds.values()
    ]


def _listing(several: Sequence[AuditWarning]) -> str:
    """Return the counts of several data sets in a line, the largest ones where it grows long."""
    ordered = sorted(several, key=lambda one: (-(one.share or 0), -one.count))
    first = ordered[0]
    example = f" (first {first.example})" if first.first else ""
    end = example + (f"; {first.advice}" if first.advice else "")
    of_tokens = "" if first.share is None else " (tokens lost)"
    start = f"{first.what} {first.statement}{of_tokens}: "
    for shown in range(len(ordered), 1, -1):
        listed = [
            f"{one.dataset} {one.counted}" + ("" if one.share is None else f" ({one.share:.0%})")
            for one in ordered[:shown]
        ]
        if shown < len(ordered):
            listed.append(f"and {len(ordered) - shown} more")
        line = start + ", ".join(listed) + end
        if len(line) <= MAX_LINE - len("warning: "):
            break
    return line


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in cells
    ]


def _cells(datasets: Sequence[Mapping[str, Any]], *, on_screen: bool) -> list[list[str]]:
    kinds = list(dict.fromkeys(kind for dataset in datasets for kind in dataset["notes"]))
    counts = [{**dataset, **dataset["notes"]} for dataset in datasets]
    headings = HEADINGS | {kind: kind.replace("_", " ") for kind in kinds}
    known = ON_SCREEN if on_screen else tuple(headings)
    shown = [key for key in known if key in ALWAYS or any(each.get(key, 0) for each in counts)]
    if len(counts) > 1:
        total = {key: sum(each.get(key, 0) for each in counts) for key in shown}
        counts.append({"name": "all", **total})
    cells = [["data set", *(printable(headings[key]) for key in shown)]]
    cells += [[printable(each["name"]), *(_cell(key, each) for key in shown)] for each in counts]
    return cells


def _cell(key: str, counts: Mapping[str, Any]) -> str:
    number = counts.get(key, 0)
    if key == "trained":
        return f"{number:,} ({number / max(1, counts['tokens']):.0%})"
    if key == "lost_tokens" and "lost_share" in counts and number:
        return f"{number:,} ({counts['lost_share']:.0%})"
    return f"{number:,}" if number or key in ALWAYS else "-"
