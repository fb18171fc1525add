"""Read rows as items: source and format together, with every row that cannot be read named.

Decides what becomes of a bad row: an error, a line of a quarantine, or a count. Never tokenizes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from data_modules import format as formats
from data_modules import source
from data_modules.messages import MAX_PROBLEMS, DataError, Origin, Problems, listed
from data_modules.types import Item, Row

if TYPE_CHECKING:
    from data_modules.settings import DataConfig, DatasetConfig

GUESSED_ROWS = 100
"""so many first rows vote on the format of a data set"""
MAX_FIRST = 5
"""rows of a kind that are named, of any number"""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Hold a row that cannot be used: where it stands, why, and the beginning of its text.

    `columns` are its columns where it lacks one that its format needs. `is_empty` says that only
    its answer is empty.
    """

    origin: Origin
    problem: str
    raw: str
    columns: tuple[str, ...] | None = None
    is_empty: bool = False


def read_chunk(
    chunk: source.Chunk, format_name: str, columns: dict[str, str]
) -> Iterator[list[Item] | Rejected]:
    """Yield the items of each row of a chunk, or why there are none."""
    for row in chunk.rows():
        if isinstance(row, source.BadRow):
            yield Rejected(row.origin, row.problem, row.raw)
        else:
            yield convert(row, format_name, columns)


def convert(row: Row, format_name: str, columns: dict[str, str]) -> list[Item] | Rejected:
    """Return the items of a row, or why there are none."""
    try:
        return formats.convert_row(row, format_name, columns)
    except formats.RowError as error:
        lacks = isinstance(error, formats.MissingColumnError)
        return Rejected(
            row.origin,
            f"{row.origin} {error}",
            _text_of(row),
            tuple(row.values) if lacks else None,
            isinstance(error, formats.EmptyAnswerError),
        )


def reject(chunk: source.Chunk, problems: Mapping[int, str]) -> list[Rejected]:
    """Return rows of `chunk`, by their numbers from 0, as rejected for what `problems` say."""
    if not problems:
        return []
    return [
        Rejected(row.origin, problems[number], _text_of(row))
        for number, row in enumerate(chunk.rows())
        if number in problems and isinstance(row, Row)
    ]


def _text_of(row: Row) -> str:
    """Return a row as JSON, as far as a quarantine keeps it."""
    return json.dumps(row.values, ensure_ascii=False, default=str)[: source.MAX_RAW]


def find_format(
    dataset: DatasetConfig, chunks: Iterator[source.Chunk]
) -> tuple[str | None, Iterator[source.Chunk]]:
    """Return the format of a data set, and its chunks, of which the first may have been looked at.

    None where no row can be read.
    """
    if dataset.format is not None:
        return dataset.format, chunks
    seen: list[source.Chunk] = []
    for chunk in chunks:
        seen.append(chunk)
        rows = (row for row in chunk.rows() if isinstance(row, Row))
        first = list(itertools.islice(rows, GUESSED_ROWS))
        if first:
            return _guess(dataset, first), itertools.chain(seen, chunks)
    return None, iter(seen)


def chunks_of(
    dataset: DatasetConfig, data: DataConfig, budget: source.Budget | None = None
) -> Iterator[source.Chunk]:
    """Return the chunks of a data set, as its settings ask."""
    return source.read_chunks(
        dataset.path,
        split=dataset.split,
        revision=dataset.revision,
        budget=budget,
        max_row_bytes=data.max_row_bytes,
        limits=data.limits,
        streaming=data.streaming,
    )


def read_items(
    dataset: DatasetConfig,
    data: DataConfig,
    *,
    wanted: Collection[int] | None = None,
    max_rows: int | None = None,
) -> list[Item]:
    """Return the items of the first `max_rows` good rows, or of the rows with numbers `wanted`.

    Rows are numbered from 0 in the order of reading, bad ones too. Raises DataError where a row
    that is wanted is not there.
    """
    items: list[Item] = []
    if max_rows == 0 or (wanted is not None and not wanted):
        return items
    most = len(wanted) if wanted is not None else max_rows
    format_name, chunks = find_format(dataset, chunks_of(dataset, data))
    num_found = 0
    for number, row in enumerate(row for chunk in chunks for row in chunk.rows()):
        if isinstance(row, source.BadRow) or (wanted is not None and number not in wanted):
            continue
        found = convert(row, format_name or "", dataset.columns)
        if isinstance(found, Rejected):
            continue
        items += found
        num_found += 1
        if num_found == most:
            return items
    if wanted is not None:
        raise DataError(f"{dataset.path}: changed since it was tokenized; start again")
    return items


def check_first_rows(dataset: DatasetConfig, data: DataConfig, budget: source.Budget) -> list[str]:
    """Return what is wrong with the rows that `budget` allows to look at."""
    if source.is_remote(dataset.path) or source.is_generated(dataset.path):
        return []
    bad = BadRows(data)
    try:
        format_name, chunks = find_format(dataset, chunks_of(dataset, data, budget))
        for chunk in chunks:
            for found in read_chunk(chunk, format_name or "", dataset.columns):
                if isinstance(found, Rejected):
                    bad.add(found)
                else:
                    bad.add_good(format_name or "", found[0].origin)
    except DataError as error:
        bad.add_problems(error.problems)
    try:
        bad.raise_if_any()
    except DataError as error:
        return error.problems
    return []


class FirstRows:
    """Yield chunks up to so many rows; `is_cut` says afterwards whether there were more."""

    def __init__(self, chunks: Iterator[source.Chunk], most: int | None) -> None:
        self._chunks, self._most = chunks, most
        self.is_cut = False

    def __iter__(self) -> Iterator[source.Chunk]:
        """Yield the chunks; None is no limit."""
        if self._most is None:
            yield from self._chunks
            return
        left = self._most
        for chunk in self._chunks:
            num_rows = chunk.count()
            if num_rows > left:
                self.is_cut = True
                if left:
                    yield chunk.select(range(left))
                return
            left -= num_rows
            yield chunk


class BadRows:
    """Collect the rows that cannot be used, and decide whether they stop the run.

    Rows that lack a column are named once for all rows with the same columns, beside how many rows
    are as they should be. Only the first ones are held: those that a quarantine takes are written
    to `file`, if there is one, a JSON line each.
    """

    def __init__(self, data: DataConfig, file: IO[str] | None = None) -> None:
        self._quarantines = data.on_bad_row == "quarantine"
        self._drops_empty = data.drop_empty
        self._problems = Problems()
        self._lacking: dict[tuple[str, ...], str] = {}
        self._num_lacking: Counter[tuple[str, ...]] = Counter()
        self._num_good, self._first_good = 0, ""
        self._file = file
        self.first_kept: list[str] = []
        """problems of the first rows that a quarantine takes"""
        self.num_kept = 0
        self.first_empty: list[Origin] = []
        """the first rows whose answer is empty, where those are dropped"""
        self.num_empty = 0

    def add(self, row: Rejected) -> None:
        """Note one bad row."""
        if row.is_empty and self._drops_empty:
            self.num_empty += 1
            self.first_empty = [*self.first_empty, row.origin][:MAX_FIRST]
        elif self._quarantines:
            self._set_aside(row)
        elif row.columns is None or self._is_of_too_many_kinds(row.columns):
            self._problems.add(row.problem)
        else:
            self._lacking.setdefault(row.columns, row.problem)
            self._num_lacking[row.columns] += 1

    def _set_aside(self, row: Rejected) -> None:
        self.num_kept += 1
        self.first_kept = [*self.first_kept, row.problem][:MAX_FIRST]
        if self._file is not None:
            line = {"origin": str(row.origin), "problem": row.problem, "row": row.raw}
            self._file.write(json.dumps(line) + "\n")

    def _is_of_too_many_kinds(self, columns: tuple[str, ...]) -> bool:
        return columns not in self._lacking and len(self._lacking) >= MAX_PROBLEMS

    def add_all(self, rows: Iterable[Rejected]) -> None:
        """Note several bad rows."""
        for row in rows:
            self.add(row)

    def add_good(self, format_name: str, origin: Origin) -> None:
        """Count a row that can be used."""
        self._num_good += 1
        self._first_good = self._first_good or f"of format {format_name}, first {origin}"

    def add_problems(self, problems: Iterable[str]) -> None:
        """Note what stops the run whatever becomes of bad rows."""
        for problem in problems:
            self._problems.add(problem)

    def raise_if_any(self) -> None:
        """Raise DataError with all problems that stop the run."""
        for columns, first in self._lacking.items():
            more = self._num_lacking[columns] - 1
            notes = [f"{more:,} more rows have these columns"] if more else []
            if self._num_good:
                notes.append(f"{self._num_good:,} rows are {self._first_good}")
            self._problems.add(f"{first} ({'; '.join(notes)})" if notes else first)
        self._lacking.clear()
        self._problems.raise_if_any()


def _guess(dataset: DatasetConfig, first: Sequence[Row]) -> str:
    """Return the format of most rows; raises DataError where the first, and most, are of none."""
    votes: Counter[str] = Counter()
    unknown: dict[int, str] = {}
    for number, row in enumerate(first):
        try:
            columns = formats.apply_columns(row.values, dataset.columns)
        except formats.MissingColumnError as error:
            unknown[number] = f"{row.origin} {error}"
            continue
        name = formats.guess_format(columns)
        if name is None:
            suggestion = formats.suggest_settings(row.values)
            example = "as in {instruction: question, output: answer}"
            unknown[number] = (
                f"{row.origin} columns {listed(row.values)}: format not recognized"
                f"{formats.near_field(columns)}; set data.datasets[].format to one of "
                f"{', '.join(formats.FORMATS)}, and name the columns by data.datasets[].columns"
                + (f"; try {suggestion}" if suggestion else f", {example}")
            )
        else:
            votes[name] += 1
    for name, count in votes.most_common(1):
        if count >= len(unknown) or 0 not in unknown:
            return name
    raise DataError(unknown[0])
