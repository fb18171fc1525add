"""Turn the bytes of one file into chunks of rows, in bounded memory: a reader for each format.

Decides how each format is cut into rows. Knows nothing of folders, splits or hubs, and never looks
at what a row means.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_modules.source import opening
from data_modules.source.chunks import (
    MAX_RAW,
    BadRow,
    BatchChunk,
    Chunk,
    RowChunk,
    TextChunk,
    grouped,
    invalid_json,
    json_features,
    not_utf8,
    parse_element,
    too_large,
)
from data_modules.source.limits import MAX_ROW_BYTES, Limits, too_deep, why_names
from data_modules.source.opening import (
    Budget,
    Content,
    File,
    check_expansion,
    open_seekable,
    open_text,
    reason_of,
    suffix_of,
    unreadable,
)
from data_modules.types import MAX_SHOWN, DataError, Origin, RemoteError, Row, listed, shown

_GAP_BYTES = 64
_MOST_ROWS = 4000
_BLANK = re.compile(r"[ \t\r\n]*")
_LINE_END = re.compile(rb"\n")
_PARAGRAPH_END = re.compile(rb"\n[ \t\r\v\f]*\n")


def is_readable(name: str) -> bool:
    """Tell whether a file of this name can be read."""
    return suffix_of(name) in READERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Say how much of a file is read, and which of its rows are too large."""

    budget: Budget | None = None
    max_row_bytes: int = MAX_ROW_BYTES
    limits: Limits = field(default_factory=Limits)


def read_file(
    file: File,
    budget: Budget | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    limits: Limits | None = None,
) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks.

    With a `budget` only about so many bytes are read. Raises DataError, after what could be read,
    where the rest of the file cannot be.
    """
    limits = limits or Limits()
    asked = Asked(budget=budget, max_row_bytes=max_row_bytes, limits=limits)
    try:
        yield from READERS[suffix_of(file.name)](file, asked)
    except DataError:
        raise
    except (EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read to its end: {error}; copy it again?") from error
    except Exception as error:
        # Each remote file system has errors of its own.
        if not isinstance(file, Path):
            raise RemoteError(unreadable(file, error)) from error
        if not isinstance(error, OSError):
            raise
        raise DataError(unreadable(file, error)) from error


def count_rows(file: File, max_row_bytes: int = MAX_ROW_BYTES, limits: Limits | None = None) -> int:
    """Return how many rows `read_file` yields, good and bad."""
    limits = limits or Limits()
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet

        with open_seekable(file, limits) as source, _arrow_errors(file, "parquet"):
            return int(pyarrow.parquet.read_metadata(source).num_rows)
    return sum(chunk.count() for chunk in read_file(file, None, max_row_bytes, limits))


def _split_rows(data: Content, kind: str, asked: Asked) -> Iterator[Chunk]:
    """Yield chunks of whole rows; one above `max_row_bytes` is passed by, never held."""
    end_of_row = _PARAGRAPH_END if kind == "paragraph" else _LINE_END
    max_row_bytes = asked.max_row_bytes
    file, line = str(data.file), 1
    rest = bytearray()
    while block := data.read():
        # Only what is new, and the blanks before it that may begin the gap, can end a row.
        looked_at = max(0, len(rest) - _GAP_BYTES)
        rest += block
        end = _last_end(rest, looked_at, kind)
        if end:
            text = bytes(rest[:end])
            if not text.isspace():
                yield TextChunk(file, end, line, text, kind, max_row_bytes, asked.limits)
            line += text.count(b"\n")
            del rest[:end]
        elif len(rest) > max_row_bytes and rest.strip():
            raw = rest[: 4 * MAX_RAW].decode(errors="replace")
            size, num_lines, after = _skip_row(data, bytes(rest), end_of_row)
            said = f"more than {size:,}" if data.cut else f"{size:,}"
            bad = too_large(Origin(file, line), said, max_row_bytes, raw)
            yield RowChunk(file, size, (bad,))
            line += num_lines
            rest = bytearray(after)
    if rest.strip() and not data.cut:
        yield TextChunk(file, len(rest), line, bytes(rest), kind, max_row_bytes, asked.limits)


def _last_end(data: bytearray, start: int, kind: str) -> int:
    """Return where the last row ends that ends after `start`; 0 where none does."""
    if kind != "paragraph":
        return data.rfind(b"\n", start) + 1
    end = 0
    for match in _PARAGRAPH_END.finditer(data, start):
        end = match.end()
    return end


def _skip_row(data: Content, rest: bytes, end_of_row: re.Pattern[bytes]) -> tuple[int, int, bytes]:
    """Return the row's size, its lines and what follows it."""
    size = num_lines = 0
    while True:
        match = end_of_row.search(rest)
        if match:
            num_lines += rest.count(b"\n", 0, match.end())
            return size + match.start(), num_lines, rest[match.end() :]
        # The blank line that ends a paragraph may lie across two blocks.
        at = rest.rfind(b"\n", max(0, len(rest) - _GAP_BYTES))
        tail = rest[at:] if at >= 0 and not rest[at:].strip() else b""
        size += len(rest) - len(tail)
        num_lines += rest.count(b"\n", 0, len(rest) - len(tail))
        block = data.read()
        if not block:
            return size, num_lines, b""
        rest = tail + block


def _read_jsonl(file: File, asked: Asked) -> Iterator[Chunk]:
    with open_text(file, asked.budget, asked.limits) as data:
        if data.head.lstrip().split(b"\n", 1)[0].strip() == b"[":
            raise DataError(f"{file}: holds a JSON array, not one row a line; name it .json")
        yield from _split_rows(data, "json", asked)


def _read_json(file: File, asked: Asked) -> Iterator[Chunk]:
    with open_text(file, asked.budget, asked.limits) as data:
        head = data.head.lstrip()
        if head.startswith(b"["):
            yield from grouped(_array_rows(data, asked), str(file))
        elif head.split(b"\n", 1)[0].strip() == b"{":
            yield from _whole_object(data, asked)
        else:
            yield from _split_rows(data, "json", asked)


def _whole_object(data: Content, asked: Asked) -> Iterator[Chunk]:
    """Yield rows a line, unless the file is one object: that raises DataError."""
    budget = None if asked.budget is None else Budget(asked.budget.left)
    with open_text(data.file, budget, asked.limits) as look:
        text = _decode(look.read_all(), data.file)
    try:
        values = None if look.cut else json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if values is None:
        return _split_rows(data, "json", asked)
    inner = next((name for name, value in values.items() if isinstance(value, list)), None)
    hint = f"; are its rows under '{shown(inner)}'?" if inner else ""
    raise DataError(
        f"{data.file}: holds one object over several lines; give an array of rows, or one row a "
        f"line{hint}"
    )


def _decode(data: bytes, file: File) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad = not_utf8(Origin(str(file), 1), data)
        raise DataError(bad.problem if bad else str(error)) from error


def _array_rows(data: Content, asked: Asked) -> Iterator[tuple[int, Row | BadRow]]:
    file = str(data.file)
    content = data.read_all()
    text = content.decode(errors="ignore") if data.cut else _decode(content, data.file)
    del content
    position = _skip_blank(text, text.find("[") + 1)
    one_line = "\n" not in text.strip()
    line, counted = 1, 0
    while text[position : position + 1] != "]":
        # In an array on one line the line says nothing: rows are counted there.
        line, counted = line + text.count("\n", counted, position), position
        origin, start = Origin(file, line), position
        try:
            row, end = parse_element(text, start, origin, asked.max_row_bytes, asked.limits)
            position = _after_element(text, end)
        except json.JSONDecodeError as error:
            if data.cut:
                return
            # What follows cannot be told apart any more: this is the file's problem, not a row's.
            reason = invalid_json(error.msg, text, error.pos)
            raise DataError(f"{file}:{error.lineno}:{error.colno} {reason}") from error
        yield end - start, row
        line += one_line


def _after_element(text: str, position: int) -> int:
    position = _skip_blank(text, position)
    if text[position : position + 1] == "]":
        return position
    if text[position : position + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' or ']' after this row", text, position)
    return _skip_blank(text, position + 1)


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _read_txt(file: File, asked: Asked) -> Iterator[Chunk]:
    """Yield a row a paragraph, or a row a line where the beginning has no blank line."""
    with open_text(file, asked.budget, asked.limits) as data:
        kind = "paragraph" if _PARAGRAPH_END.search(data.head.strip()) else "line"
        yield from _split_rows(data, kind, asked)


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


def _read_csv(file: File, asked: Asked) -> Iterator[Chunk]:
    with open_text(file, asked.budget, asked.limits) as data:
        yield from grouped(_csv_rows(data, ",", asked), str(file))


def _read_tsv(file: File, asked: Asked) -> Iterator[Chunk]:
    with open_text(file, asked.budget, asked.limits) as data:
        yield from grouped(_csv_rows(data, "\t", asked), str(file))


def _csv_rows(data: Content, delimiter: str, asked: Asked) -> Iterator[tuple[int, Row | BadRow]]:
    csv.field_size_limit(1 << 30)
    file, max_row_bytes = str(data.file), asked.max_row_bytes
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
                _check_header(header, delimiter, file, bad, asked.limits)
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


@contextmanager
def _arrow_errors(file: File, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        raise DataError(
            f"{file}: is no {kind} file that can be read: {reason_of(error)}"
        ) from error


def _read_parquet(file: File, asked: Asked) -> Iterator[Chunk]:
    import pyarrow.parquet

    with open_seekable(file, asked.limits) as source, _arrow_errors(file, "parquet"):
        # Else all of a row group is held, which may be the whole file.
        table = pyarrow.parquet.ParquetFile(
            source, buffer_size=opening.CHUNK_BYTES, pre_buffer=False
        )
        _check_schema(file, table.schema_arrow, asked.limits)
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        num_rows = _rows_a_chunk(size, table.metadata.num_rows)
        stored = source.seek(0, io.SEEK_END)
        batches = table.iter_batches(num_rows)
        found = yield from _batches(file, batches, asked, lambda: stored)
        if found is not None and found != table.metadata.num_rows:
            raise DataError(
                f"{file}: says that it has {table.metadata.num_rows:,} rows and has {found:,}; "
                "copy it again?"
            )


def _read_arrow(file: File, asked: Asked) -> Iterator[Chunk]:
    import pyarrow

    with open_seekable(file, asked.limits) as source, _arrow_errors(file, "arrow"):
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(source)
            batches = iter(reader)
        _check_schema(file, reader.schema, asked.limits)
        yield from _batches(file, batches, asked, source.tell)


def _check_schema(file: File, schema: Any, limits: Limits) -> None:
    """Raise DataError where the columns of a file go beyond a limit, or cannot be told apart."""
    if problem := why_names(schema.names, limits):
        raise DataError(f"{file}: {problem}")
    times = Counter(schema.names)
    if twice := [name for name in times if times[name] > 1]:
        raise DataError(f"{file}: has several columns of the same name: {listed(twice)}")
    level = [column.type for column in schema]
    for _ in range(limits.nesting):
        level = [kind.field(i).type for kind in level for i in range(kind.num_fields)]
        if not level:
            break
    else:
        raise DataError(f"{file}: {too_deep(limits)}")
    try:
        json_features(schema.metadata)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _check_buffers(batch: Any) -> None:
    """Raise ArrowInvalid where the parts of a batch do not fit together: to read it could crash.

    Text that is not UTF-8 in a plain column is its row's problem.
    """
    import pyarrow

    plain = pyarrow.string(), pyarrow.large_string()
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if column.type not in plain or "UTF8" not in str(error):
                raise


def _batches(
    file: File, batches: Iterator[Any], asked: Asked, stored: Callable[[], int]
) -> Generator[Chunk, None, int | None]:
    """Yield record batches in pieces of about 1 MB; return how many rows, None if not all.

    `stored` tells how many bytes of the file they came from.
    """
    first, num_bytes, budget = 1, 0, asked.budget
    for batch in batches:
        _check_buffers(batch)
        num_bytes += batch.nbytes
        check_expansion(file, num_bytes, stored(), asked.limits)
        width = _rows_a_chunk(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, width):
            piece = batch.slice(start, width)
            numbers = range(first, first + piece.num_rows)
            first = numbers.stop
            bounds = asked.max_row_bytes, asked.limits
            yield BatchChunk(str(file), piece.nbytes, numbers, piece, *bounds)
            if budget is not None:
                budget.left -= piece.nbytes
                if budget.spent:
                    return None
    return first - 1


def _rows_a_chunk(num_bytes: int, num_rows: int) -> int:
    return max(1, min(_MOST_ROWS, opening.CHUNK_BYTES * max(1, num_rows) // max(1, num_bytes)))


READERS: dict[str, Callable[[File, Asked], Iterator[Chunk]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_txt,
}
