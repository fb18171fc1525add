"""Read csv and tsv files: a row may span lines, and each keeps the number of its first line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_modules.messages import MAX_SHOWN, DataError, Origin, shown
from data_modules.source.chunks import MAX_RAW, BadRow, Chunk, ReadOptions, grouped, not_utf8
from data_modules.source.limits import Limits, why_names
from data_modules.source.opening import Content, File, open_text
from data_modules.types import Row


class _RowTooLargeError(Exception):
    pass


@dataclass(slots=True)
class _CsvLines:
    """Hand the lines of a file to the csv reader; `bad` is what was wrong in the present row."""

    data: Content
    max_row_bytes: int
    line: int = 0
    row_bytes: int = 0
    bad: BadRow | None = None
    _rest: bytearray = field(default_factory=bytearray)
    _lines: list[bytes] = field(default_factory=list)

    def start_row(self) -> None:
        """Forget what was seen of the row before."""
        self.row_bytes, self.bad = 0, None

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._next_line()
        self.line += 1
        self.row_bytes += len(line)
        if self.row_bytes > self.max_row_bytes + len(b"\r\n"):
            raise _RowTooLargeError
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.bad = self.bad or not_utf8(Origin(str(self.data.file), self.line), line)
            return line.decode(errors="replace")

    def _next_line(self) -> bytes:
        while not self._lines:
            block = self.data.read()
            if not block:
                rest, self._rest = bytes(self._rest), bytearray()
                if not rest or self.data.cut:
                    raise StopIteration
                return rest
            self._rest += block
            if b"\n" in block:
                *lines, rest = bytes(self._rest).split(b"\n")
                self._rest = bytearray(rest)
                self._lines = [line + b"\n" for line in reversed(lines)]
            elif len(self._rest) > self.max_row_bytes:
                raise _RowTooLargeError
        return self._lines.pop()


def read_csv(file: File, options: ReadOptions) -> Iterator[Chunk]:
    """Yield the rows of a csv file."""
    with open_text(file, options.budget, options.limits) as data:
        yield from grouped(_csv_rows(data, ",", options), str(file))


def read_tsv(file: File, options: ReadOptions) -> Iterator[Chunk]:
    """Yield the rows of a tsv file."""
    with open_text(file, options.budget, options.limits) as data:
        yield from grouped(_csv_rows(data, "\t", options), str(file))


def _csv_rows(
    data: Content, delimiter: str, options: ReadOptions
) -> Iterator[tuple[int, Row | BadRow]]:
    csv.field_size_limit(1 << 30)
    file, max_row_bytes = str(data.file), options.max_row_bytes
    lines = _CsvLines(data, max_row_bytes)
    header: list[str] | None = None
    start = 1
    try:
        for cells in csv.reader(lines, strict=True, delimiter=delimiter):
            size, bad, origin = lines.row_bytes, lines.bad, Origin(file, start)
            lines.start_row()
            start = lines.line + 1
            if not cells:
                continue
            if header is None:
                header = cells
                _check_header(header, delimiter, file, bad, options.limits)
            elif bad is not None:
                yield size, bad
            elif len(cells) == len(header):
                yield size, Row(dict(zip(header, cells, strict=True)), origin)
            else:
                mark = "comma" if delimiter == "," else "tab"
                reason = f"{len(cells)} cells, the header has {len(header)} ({_names(header)})"
                raw = delimiter.join(cells)[:MAX_RAW]
                yield size, BadRow(origin, f"{reason}; quote cells that hold a {mark}", raw)
    except csv.Error as error:
        if not data.cut:
            found = f" (columns: {_names(header)})" if header else ""
            raise DataError(
                f"{file}:{start} broken CSV: {error}; is a quote not closed?{found}"
            ) from error
    except _RowTooLargeError as error:
        raise DataError(
            f"{file}:{start} row of more than {max_row_bytes:,} bytes, which is "
            "data.max_row_bytes; is a quote not closed? If the row is right, raise it"
        ) from error


def _check_header(
    header: list[str], delimiter: str, file: str, bad: BadRow | None, limits: Limits
) -> None:
    if bad is not None:
        raise DataError(bad.problem)
    if problem := why_names(header, limits):
        raise DataError(f"{file}:1 {problem}")
    times = Counter(header)
    twice = next((name for name in header if times[name] > 1), None)
    if twice is not None:
        raise DataError(
            f"{file}:1 column '{shown(twice)}' stands twice in the header ({_names(header)}); "
            "rename one of them"
        )
    other = next((mark for mark in ",;\t|" if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other is not None:
        fix = "name it .tsv" if other == "\t" else "save it with commas, as .csv"
        raise DataError(
            f"{file}:1 has one column, '{shown(header[0])}'; are its cells cut at {other!r}? {fix}"
        )


def _names(header: list[str]) -> str:
    return shown(", ".join(name[:MAX_SHOWN] for name in header[:MAX_SHOWN]))
