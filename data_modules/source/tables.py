"""Read tables: csv and tsv row by row, parquet and arrow files as record batches.

Decides how a file is cut into chunks, which columns hold JSON text, and that a null field of a
struct is a field that the row does not have: arrow gives every struct of a column the fields of all
others, and keeps no difference between a null that was written and one that it added.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import DataError, Origin
from common.text import MAX_SHOWN, listed, reason_of, shown
from data_modules.source import opening
from data_modules.source.opening import BadRow, Chunk, Content, File, ReadLimits, ReadOptions
from data_modules.types import Row, Struct

_MAX_CHUNK_ROWS = 4000
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
"""what may separate the cells of a row, and its name"""
_QUOTED = re.compile('"[^"]*"?')
_END_OF_STREAM_BYTES = 64
"""what an arrow file may have between its last batch and its footer: a marker, aligned"""


@dataclass(frozen=True, slots=True)
class BatchChunk(Chunk):
    """Rows as an arrow record batch; `numbers` are their numbers in the file, from 1."""

    numbers: range
    batch: Any
    options: ReadOptions

    def rows(self) -> Iterator[Row | BadRow]:
        import pyarrow

        features = _json_features(self.batch.schema.metadata)
        structs = (column.name for column in self.batch.schema if _holds_struct(column.type))
        features = dict.fromkeys(structs) | features
        if self.batch.nbytes <= self.options.max_row_bytes:
            try:
                every = self.batch.to_pylist()
                for name, feature in features.items():
                    for values in every:
                        values[name] = self._restored(values[name], feature)
            except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError):
                pass
            else:
                for number, values in zip(self.numbers, every, strict=True):
                    yield Row(values, Origin(self.file, number))
                return
        for index, number in enumerate(self.numbers):
            yield self._row(self.batch.slice(index, 1), Origin(self.file, number), features)

    def count(self) -> int:
        return len(self.numbers)

    def select(self, kept: range) -> Chunk:
        if kept.step == 1:
            batch = self.batch.slice(kept.start, len(kept))
        else:
            batch = self.batch.take(list(kept))
        return replace(self, numbers=self.numbers[kept.start : kept.stop : kept.step], batch=batch)

    def _row(self, batch: Any, origin: Origin, features: dict[str, Any]) -> Row | BadRow:
        import pyarrow

        if batch.nbytes > (most := self.options.max_row_bytes):
            return opening.too_large(
                origin, f"{batch.nbytes:,}", most, ", ".join(batch.schema.names)
            )
        values = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                value = column[0].as_py()
                values[name] = self._restored(value, features[name]) if name in features else value
            except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError) as error:
                reason = (
                    f"column '{shown(name)}' ({column.type}) cannot be read: {reason_of(error)}"
                )
                return BadRow(origin, reason, str(batch.schema.names)[: opening.MAX_RAW])
        return Row(values, origin)

    def _restored(self, value: Any, feature: Any) -> Any:
        """Return a value as it was before arrow; ValueError if its JSON is nested too deep."""
        value = restore(value, feature)
        if feature is not None and (problem := opening.nesting_error([value], self.options.limits)):
            raise ValueError(problem)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling a slice would include the whole batch that it was cut from.
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        data = sink.getvalue().to_pybytes()
        return _load_batch, (self.file, self.num_bytes, self.numbers, data, self.options)


def _load_batch(
    file: str, num_bytes: int, numbers: range, data: bytes, options: ReadOptions
) -> BatchChunk:
    import pyarrow

    batch = pyarrow.ipc.open_stream(data).read_next_batch()
    return BatchChunk(file, num_bytes, numbers, batch, options)


def _json_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the columns that Hugging Face `datasets` has written as JSON text, with their types.

    It does so if the values of a field have several types, as the arguments of tools do. `metadata`
    is that of the schema; raises ValueError if `datasets` did not write it so.
    """
    described = (metadata or {}).get(b"huggingface", b"")
    if b'"Json"' not in described:
        return {}
    try:
        features = json.loads(described)["info"]["features"]
        found = {name: kind for name, kind in features.items() if _holds_json(kind)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"its metadata 'huggingface' does not describe its columns ({reason_of(error)}); "
            "write the file again without it"
        ) from error
    return found


def _holds_json(kind: Any) -> bool:
    """Return whether a type of `datasets` holds JSON text; raises TypeError for anything else."""
    if isinstance(kind, list):  # how lists were described in older versions
        return _holds_json(kind[0])
    if not isinstance(kind, dict):
        raise TypeError(f"a column's type is {shown(str(kind))}")
    if isinstance(name := kind.get("_type"), str):
        return name == "Json" or ("feature" in kind and _holds_json(kind["feature"]))
    return any(map(_holds_json, kind.values()))


def _holds_struct(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return True
    if pyarrow.types.is_dictionary(kind):
        return _holds_struct(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _holds_struct(kind.storage_type)
    return any(_holds_struct(kind.field(i).type) for i in range(kind.num_fields))


def restore(value: Any, feature: Any = None, *, is_parsed: bool = False) -> Any:
    """Return `value` without the null fields of its structs, and with its JSON text parsed.

    `feature` is its type in `datasets`, None if no JSON text is in it; `is_parsed`: that text is
    parsed already. A null in it stays.
    """
    if isinstance(feature, list):
        feature = {"feature": feature[0]}
    if value is not None and feature is not None and feature.get("_type") == "Json":
        if is_parsed:
            return value
        if not isinstance(value, str):
            raise ValueError(
                f"its metadata declares JSON text, but it is of type {type(value).__name__}"
            )
        return json.loads(value)
    inner = None if feature is None else feature.get("feature", feature)
    if isinstance(value, list):
        return [restore(item, inner, is_parsed=is_parsed) for item in value]
    if isinstance(value, dict):
        kinds = inner if isinstance(inner, dict) else {}
        struct = Struct(
            (name, restore(item, kinds.get(name), is_parsed=is_parsed))
            for name, item in value.items()
            if item is not None
        )
        struct.nulls = frozenset(value.keys() - struct.keys())
        return struct
    return value


@contextmanager
def _arrow_errors(file: File, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        OverflowError,
        LookupError,
        MemoryError,  # a size that a damaged file claims
    ) as error:
        reason = reason_of(error, names_file=False)
        raise DataError(f"{file}: not a readable {kind} file: {reason}") from error


def read_parquet(file: File, options: ReadOptions) -> Iterator[Chunk]:
    import pyarrow.parquet

    with opening.open_seekable(file, options.limits) as source, _arrow_errors(file, "parquet"):
        # Without pre_buffer=False a whole row group, often the whole file, is kept in memory.
        table = pyarrow.parquet.ParquetFile(
            source, buffer_size=opening.CHUNK_BYTES, pre_buffer=False
        )
        _check_schema(file, table.schema_arrow, options.limits)
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        num_rows = _rows_per_chunk(size, table.metadata.num_rows)
        stored = source.seek(0, io.SEEK_END)
        _check_dictionaries(file, source, table.metadata, stored, options.limits)
        batches = table.iter_batches(num_rows)
        found = yield from _batches(file, batches, options, lambda: stored)
        if found is not None and found != table.metadata.num_rows:
            raise DataError(
                f"{file}: its metadata says {table.metadata.num_rows:,} rows, but it has "
                f"{found:,}; copy it again?"
            )
        if b"PAR1PAR1" in _read_gap(source, table.metadata, stored):
            raise DataError(_joined(file))


def _check_dictionaries(
    file: File, source: Any, metadata: Any, stored: int, limits: ReadLimits
) -> None:
    """Raise DataError if a small parquet file repeats the values of a dictionary too often.

    Read as a dictionary, a value takes memory only once, however often it occurs. A large file is
    checked while it is read.
    """
    if stored > opening.FREE_EXPANSION:
        return
    import pyarrow.parquet

    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    reader = pyarrow.parquet.ParquetFile(source, read_dictionary=texts, pre_buffer=False)
    for number in range(metadata.num_row_groups):
        # Raises for damaged metadata; row_group(number).column() would end the process.
        next(reader.iter_batches(1, row_groups=[number]), None)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    coded = {
        column.path_in_schema
        for column in columns
        if column.has_dictionary_page
        and column.physical_type == "BYTE_ARRAY"
        and column.num_values * column.total_uncompressed_size > opening.FREE_EXPANSION
    }
    if not coded:
        return
    num_bytes = 0
    for batch in reader.iter_batches(_MAX_CHUNK_ROWS, columns=sorted(coded)):
        num_bytes += sum(map(_expanded_bytes, batch.columns))
        opening.check_expansion(file, num_bytes, stored, limits)


def _expanded_bytes(array: Any) -> int:
    """Return the bytes of an array's values, each as often as a dictionary repeats it."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        size = array.dictionary.nbytes // max(1, len(array.dictionary))
        if kind.value_type not in (pyarrow.string(), pyarrow.binary()):
            return int(size * len(array))
        lengths = pyarrow.compute.binary_length(array.dictionary).take(array.indices)
        return int(pyarrow.compute.sum(lengths).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(map(_expanded_bytes, array.flatten()))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _expanded_bytes(array.flatten())
    return int(array.nbytes)


def _joined(file: File) -> str:
    return (
        f"{file}: more follows its rows, as if several files were joined byte by byte; give each "
        "file on its own"
    )


def _read_gap(source: Any, metadata: Any, stored: int) -> bytes:
    """Return what is between a parquet file's last column and its footer: indexes, or a file."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    sizes = [column.total_compressed_size for column in columns]
    end = max(map(sum, zip(starts, sizes, strict=True)), default=0)
    source.seek(end)
    gap = stored - 2 * len(b"PAR1") - metadata.serialized_size - end
    data: bytes = source.read(max(0, min(gap, opening.FREE_EXPANSION)))
    return data


def count_parquet_rows(file: File, limits: ReadLimits) -> int:
    import pyarrow.parquet

    with opening.open_seekable(file, limits) as source, _arrow_errors(file, "parquet"):
        return int(pyarrow.parquet.read_metadata(source).num_rows)


def read_arrow(file: File, options: ReadOptions) -> Iterator[Chunk]:
    import pyarrow

    with opening.open_seekable(file, options.limits) as source, _arrow_errors(file, "arrow"):
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(source)
            batches = iter(reader)
        _check_schema(file, reader.schema, options.limits)
        found = yield from _batches(file, batches, options, source.tell)
        end = source.tell()
        if found is not None and source.seek(0, io.SEEK_END) - end > _end_bytes(source, is_file):
            raise DataError(_joined(file))


def _end_bytes(source: Any, is_file: bool) -> int:
    """Return the most bytes that may follow the last batch of an arrow file or stream."""
    if not is_file:
        return 0
    source.seek(-len(b"....ARROW1"), io.SEEK_END)
    footer = int.from_bytes(source.read(4), "little")
    return footer + len(b"....ARROW1") + _END_OF_STREAM_BYTES


def _check_schema(file: File, schema: Any, limits: ReadLimits) -> None:
    """Raise DataError if a file's columns exceed a limit or have the same name."""
    if problem := opening.names_error(schema.names, limits):
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
        raise DataError(f"{file}: {opening.too_deep(limits)}")
    try:
        _json_features(schema.metadata)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _check_buffers(batch: Any) -> None:
    """Raise ArrowInvalid if the buffers of a batch are inconsistent: reading it could crash.

    Invalid UTF-8 in a plain text column is left to be reported as a bad row.
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
    file: File, batches: Iterator[Any], options: ReadOptions, stored: Callable[[], int]
) -> Generator[Chunk, None, int | None]:
    """Yield record batches in pieces of about 1 MB; return the number of rows, None if cut short.

    `stored` returns the bytes of the file that were read for them.
    """
    first, num_bytes, budget = 1, 0, options.budget
    for batch in batches:
        _check_buffers(batch)
        num_bytes += max(batch.nbytes, sum(map(_expanded_bytes, batch.columns)))
        opening.check_expansion(file, num_bytes, stored(), options.limits)
        width = _rows_per_chunk(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, width):
            piece = batch.slice(start, width)
            numbers = range(first, first + piece.num_rows)
            first = numbers.stop
            yield BatchChunk(str(file), piece.nbytes, numbers, piece, options)
            if budget is not None:
                budget.left -= piece.nbytes
                if budget.spent:
                    return None
    return first - 1


def _rows_per_chunk(num_bytes: int, num_rows: int) -> int:
    num_fitting = opening.CHUNK_BYTES * max(1, num_rows) // max(1, num_bytes)
    return max(1, min(_MAX_CHUNK_ROWS, num_fitting))


class _RowTooLargeError(Exception):
    pass


@dataclass(slots=True)
class _CsvLines:
    """The lines of a file, for the csv reader; `bad` is set if the current row is invalid."""

    data: Content
    max_row_bytes: int
    line: int = 0
    row_bytes: int = 0
    bad: BadRow | None = None
    _rest: bytearray = field(default_factory=bytearray)
    _lines: list[bytes] = field(default_factory=list)

    def first(self) -> str:
        """Return the first line that is not blank, which is read again as a row; maybe none."""
        read: list[bytes] = []
        with suppress(StopIteration):
            while not read or not read[-1].strip():
                read.append(self._next_line())
        self._lines += reversed(read)
        return read[-1].decode(errors="replace") if read else ""

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
            self.bad = self.bad or opening.not_utf8(Origin(str(self.data.file), self.line), line)
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


def read_csv(file: File, options: ReadOptions, separator: str = ",") -> Iterator[Chunk]:
    """Yield the rows of a table in text, whose header may show another separator."""
    with opening.open_text(file, options) as data:
        yield from opening.grouped(_csv_rows(data, separator, options), str(file))


def _csv_rows(
    data: Content, delimiter: str, options: ReadOptions
) -> Iterator[tuple[int, Row | BadRow]]:
    csv.field_size_limit(1 << 30)
    file, max_row_bytes = str(data.file), options.max_row_bytes
    lines = _CsvLines(data, max_row_bytes)
    header: list[str] | None = None
    start = 1
    try:
        delimiter = _separator(lines.first(), delimiter)
        for cells in csv.reader(lines, strict=True, delimiter=delimiter):
            size, bad, origin = lines.row_bytes, lines.bad, Origin(file, start)
            lines.row_bytes, lines.bad = 0, None
            start = lines.line + 1
            if not cells:
                continue
            if header is None:
                header = cells
                _check_header(header, file, bad, options.limits)
            elif bad is not None:
                yield size, bad
            elif cells == header and len(header) > 1:
                reason = "repeats the header, as if two files were joined; remove this line"
                yield size, BadRow(origin, reason, delimiter.join(cells)[: opening.MAX_RAW])
            elif len(cells) == len(header):
                yield size, Row(dict(zip(header, cells, strict=True)), origin)
            else:
                mark = _SEPARATORS[delimiter]
                reason = f"{len(cells)} cells, the header has {len(header)} ({_names(header)})"
                raw = delimiter.join(cells)[: opening.MAX_RAW]
                yield size, BadRow(origin, f"{reason}; quote cells that hold a {mark}", raw)
    except csv.Error as error:
        if not data.cut:
            found = f" (columns: {_names(header)})" if header else ""
            raise DataError(
                f"{file}:{start} broken CSV: {error}; is a quote not closed?{found}"
            ) from error
    except _RowTooLargeError as error:
        raise DataError(
            f"{file}:{start} row of more than {max_row_bytes:,} bytes (data.max_row_bytes); is a "
            "quote not closed? If the row is right, raise it"
        ) from error


def _separator(header: str, expected: str) -> str:
    """Return the separator of a header line: the expected one, else the one that it has most of."""
    unquoted = _QUOTED.sub("", header)
    if expected in unquoted:
        return expected
    found = max(_SEPARATORS, key=unquoted.count)
    return found if found in unquoted else expected


def _check_header(header: list[str], file: str, bad: BadRow | None, limits: ReadLimits) -> None:
    if bad is not None:
        raise DataError(bad.problem)
    if problem := opening.names_error(header, limits):
        raise DataError(f"{file}:1 {problem}")
    times = Counter(header)
    twice = next((name for name in header if times[name] > 1), None)
    if twice is not None:
        raise DataError(
            f"{file}:1 column '{shown(twice)}' is twice in the header ({_names(header)}); "
            "rename one of them"
        )


def _names(header: list[str]) -> str:
    return shown(", ".join(name[:MAX_SHOWN] for name in header[:MAX_SHOWN]))
