"""Hold some rows of a file, not parsed yet where that can wait, and parse them where asked.

Decides what one readable row is and what is said of one that is not; a bad row stays a bad row in
its place. Never opens a file, and never looks at what a row means.
"""

from __future__ import annotations

import functools
import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from data_modules.source import opening
from data_modules.source.limits import Limits, too_deep, why_names, why_nested
from data_modules.source.opening import reason_of
from data_modules.types import DataError, Origin, Row, shown

MAX_RAW = 2000
"""characters of a bad row's text that are kept"""
_CHUNK_ROWS = 1000
_BLANKS = " \t\r\n\v\f"  # what bytes.strip takes away
_JSON_KINDS = {
    "list": "a list",
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
}


class _RefusedObjectError(ValueError):
    """Say why an object is refused that is sound JSON."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """Stand in place of a row that cannot be read.

    `reason` is said without the place; `raw` is at most 2,000 characters of the row's text.
    """

    origin: Origin
    reason: str
    raw: str
    column: int | None = None

    @property
    def problem(self) -> str:
        """Return place and reason in one line."""
        column = "" if self.column is None else f":{self.column}"
        return f"{self.origin}{column} {self.reason}"


@dataclass(frozen=True, slots=True)
class Chunk(ABC):
    """Hold some rows of one file, not parsed yet where that can wait; cheap to pickle.

    `num_bytes` is about what was read for it, decompressed.
    """

    file: str
    num_bytes: int

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Parse and yield the rows, in order; one that cannot be read is a BadRow in its place."""

    @abstractmethod
    def count(self) -> int:
        """Return how many rows there are, good and bad, without parsing them."""

    @abstractmethod
    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""


@dataclass(frozen=True, slots=True)
class RowChunk(Chunk):
    """Hold rows that are read already."""

    read: tuple[Row | BadRow, ...]

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield the rows."""
        return iter(self.read)

    def count(self) -> int:
        """Return how many rows there are."""
        return len(self.read)

    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""
        return replace(self, read=tuple(self.read[number] for number in kept))


@dataclass(frozen=True, slots=True)
class TextChunk(Chunk):
    """Hold whole lines of a file as bytes; `kind` is json, line or paragraph.

    `kept` are the numbers, from 0, of the chunk's rows that are asked for; None = all.
    """

    first_line: int
    data: bytes
    kind: str
    max_row_bytes: int
    limits: Limits
    kept: range | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        """Parse and yield the rows."""
        text, is_utf8 = self._decoded()
        parts = self._parts(text)
        last = parts[-1][0] if parts and not self.data.endswith(b"\n") else 0
        for line, part in parts if self.kept is None else [parts[n] for n in self.kept]:
            origin = Origin(self.file, line)
            if not is_utf8:
                bad = not_utf8(origin, part.encode(errors="surrogateescape"))
                if bad is not None:
                    yield bad
                    continue
            # Counting bytes takes time: a row with few characters has few bytes too.
            if len(part) * 4 > self.max_row_bytes:
                size = len(part.encode())
                if size > self.max_row_bytes:
                    yield too_large(origin, f"{size:,}", self.max_row_bytes, part)
                    continue
            if self.kind == "json":
                yield _parse_json_line(origin, part, line == last, self.limits)
            else:
                yield Row({"text": part.replace("\r\n", "\n").rstrip("\r\n")}, origin)

    def count(self) -> int:
        """Return how many rows there are, good and bad."""
        if self.kept is not None:
            return len(self.kept)
        if self.kind == "paragraph":
            return len(self._parts(self._decoded()[0]))
        return sum(map(bool, map(bytes.strip, self.data.split(b"\n"))))

    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""
        before = range(self.count()) if self.kept is None else self.kept
        return replace(self, kept=before[kept.start : kept.stop : kept.step])

    def _decoded(self) -> tuple[str, bool]:
        """Return the text and whether it is UTF-8; bytes that are not are escaped."""
        try:
            return self.data.decode(), True
        except UnicodeDecodeError:
            return self.data.decode(errors="surrogateescape"), False

    def _parts(self, text: str) -> list[tuple[int, str]]:
        """Return first line and text of each row."""
        numbered = enumerate(text.split("\n"), self.first_line)
        filled = [(number, line) for number, line in numbered if line.strip(_BLANKS)]
        if self.kind != "paragraph":
            return filled
        parts: list[tuple[int, list[str]]] = []
        last = -1
        for number, line in filled:
            if number == last + 1:
                parts[-1][1].append(line)
            else:
                parts.append((number, [line]))
            last = number
        return [(number, "\n".join(lines)) for number, lines in parts]


@dataclass(frozen=True, slots=True)
class BatchChunk(Chunk):
    """Hold rows as an arrow record batch; `numbers` count them in their file, from 1."""

    numbers: range
    batch: Any
    max_row_bytes: int
    limits: Limits

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield the rows as Python values."""
        import pyarrow

        features = json_features(self.batch.schema.metadata)
        if self.batch.nbytes <= self.max_row_bytes:
            try:
                every = self.batch.to_pylist()
                for name, feature in features.items():
                    for values in every:
                        values[name] = self._decoded(values[name], feature)
            except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError):
                pass
            else:
                for number, values in zip(self.numbers, every, strict=True):
                    yield Row(values, Origin(self.file, number))
                return
        for index, number in enumerate(self.numbers):
            yield self._row(self.batch.slice(index, 1), Origin(self.file, number), features)

    def count(self) -> int:
        """Return how many rows there are."""
        return len(self.numbers)

    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""
        if kept.step == 1:
            batch = self.batch.slice(kept.start, len(kept))
        else:
            batch = self.batch.take(list(kept))
        return replace(self, numbers=self.numbers[kept.start : kept.stop : kept.step], batch=batch)

    def _row(self, batch: Any, origin: Origin, features: dict[str, Any]) -> Row | BadRow:
        import pyarrow

        if batch.nbytes > self.max_row_bytes:
            text = ", ".join(batch.schema.names)
            return too_large(origin, f"{batch.nbytes:,}", self.max_row_bytes, text)
        values = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values[name] = self._decoded(column[0].as_py(), features.get(name))
            except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError) as error:
                reason = (
                    f"column '{shown(name)}' ({column.type}) cannot be read: {reason_of(error)}"
                )
                return BadRow(origin, reason, str(batch.schema.names)[:MAX_RAW])
        return Row(values, origin)

    def _decoded(self, value: Any, feature: Any) -> Any:
        """Return a value with its JSON text decoded; raises ValueError where it is too deep."""
        if feature is None:
            return value
        value = _decode_json(value, feature)
        if problem := why_nested([value], self.limits):
            raise ValueError(problem)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled slice would carry all of the batch that it was cut from.
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        data = sink.getvalue().to_pybytes()
        kept = self.numbers, data, self.max_row_bytes, self.limits
        return _load_batch, (self.file, self.num_bytes, *kept)


def _load_batch(
    file: str, num_bytes: int, numbers: range, data: bytes, max_row_bytes: int, limits: Limits
) -> BatchChunk:
    import pyarrow

    batch = pyarrow.ipc.open_stream(data).read_next_batch()
    return BatchChunk(file, num_bytes, numbers, batch, max_row_bytes, limits)


def json_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the columns that Hugging Face `datasets` has written as JSON text, with their types.

    It does so where the values of a field are of several types, as the arguments of tools are.
    `metadata` is a schema's; raises ValueError where that is not what `datasets` writes.
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
    """Tell whether a type of `datasets` holds JSON text; raises TypeError where it is none."""
    if isinstance(kind, list):  # how lists were described in older versions
        return _holds_json(kind[0])
    if not isinstance(kind, dict):
        raise TypeError(f"a column's type is {shown(str(kind))}")
    if isinstance(name := kind.get("_type"), str):
        return name == "Json" or ("feature" in kind and _holds_json(kind["feature"]))
    return any(map(_holds_json, kind.values()))


def _decode_json(value: Any, feature: Any) -> Any:
    """Return `value` with what is JSON text in it, by its type in `datasets`, as what it says."""
    if value is None or feature is None:
        return value
    if isinstance(feature, list):
        feature = {"feature": feature[0]}
    if feature.get("_type") == "Json":
        if not isinstance(value, str):
            raise ValueError(f"its metadata calls it JSON text, it is {type(value).__name__}")
        return json.loads(value)
    inner = feature.get("feature", feature)
    if isinstance(value, list):
        return [_decode_json(one, inner) for one in value]
    if isinstance(value, dict) and isinstance(inner, dict):
        return {name: _decode_json(one, inner.get(name)) for name, one in value.items()}
    return value


def grouped(rows: Iterator[tuple[int, Row | BadRow]], file: str) -> Iterator[RowChunk]:
    """Yield rows in chunks of about 1 MB; each row comes with its size."""
    group: list[Row | BadRow] = []
    total = 0
    try:
        for size, row in rows:
            group.append(row)
            total += size
            if total >= opening.CHUNK_BYTES or len(group) == _CHUNK_ROWS:
                yield RowChunk(file, total, tuple(group))
                group, total = [], 0
    except DataError:
        # What was read before the break is said too.
        if group:
            yield RowChunk(file, total, tuple(group))
        raise
    if group:
        yield RowChunk(file, total, tuple(group))


def too_large(origin: Origin, size: str, max_row_bytes: int, raw: str) -> BadRow:
    """Refuse a row; `size` is in bytes, as text."""
    reason = (
        f"row of {size} bytes; data.max_row_bytes is {max_row_bytes:,}; raise it, or leave the "
        "row out"
    )
    return BadRow(origin, reason, raw[:MAX_RAW])


def not_utf8(origin: Origin, data: bytes) -> BadRow | None:
    """Name the first byte that is not UTF-8; None where all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Origin(origin.file, origin.line + before.count(b"\n"))
        column = error.start - before.rfind(b"\n")
        reason = (
            f"byte 0x{data[error.start]:02X} at column {column} is not "
            "UTF-8 (latin-1?); save the file as UTF-8"
        )
        return BadRow(place, reason, data[: 4 * MAX_RAW].decode(errors="replace")[:MAX_RAW])
    return None


def _parse_json_line(origin: Origin, text: str, is_last: bool, limits: Limits) -> Row | BadRow:
    raw, text = text, text.rstrip("\r\n")
    try:
        decoder = _decoder(limits.columns, limits.key_chars)
        # Faster than decode(), which looks for blanks around the row first.
        values, end = decoder.raw_decode(text)
        if end != len(text):
            values = decoder.decode(text)
    except json.JSONDecodeError as error:
        at_the_end = error.pos >= len(text) or error.msg.startswith("Unterminated")
        is_open = text.startswith("{") and not text.endswith("}")
        if (at_the_end or is_open) and is_last and origin.line > 1:
            reason = "line is cut off (no newline); copy the file again?"
            return BadRow(origin, reason, raw[:MAX_RAW])
        return BadRow(origin, invalid_json(error.msg, text, error.pos), raw[:MAX_RAW], error.colno)
    except (ValueError, RecursionError) as error:
        return BadRow(origin, _unreadable(error, limits), raw[:MAX_RAW])
    if not isinstance(values, dict):
        return BadRow(origin, _not_an_object(values), raw[:MAX_RAW])
    # Counting letters is fast, and enough for nearly all rows.
    if text.count("{") + text.count("[") > limits.nesting and (
        problem := why_nested(values, limits)
    ):
        return BadRow(origin, problem, raw[:MAX_RAW])
    return Row(values, origin)


def parse_element(
    text: str, start: int, origin: Origin, max_row_bytes: int, limits: Limits
) -> tuple[Row | BadRow, int]:
    """Return the row that begins at `start` of an array, and where it ends.

    Raises JSONDecodeError, or DataError, where that cannot be told.
    """
    try:
        values, end = _decoder(limits.columns, limits.key_chars).raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise DataError(f"{origin} {too_deep(limits)}") from error
    except ValueError as error:
        # Its end can be told all the same.
        _, end = _LENIENT_DECODER.raw_decode(text, start)
        return BadRow(origin, _unreadable(error, limits), text[start:end][:MAX_RAW]), end
    if (end - start) * 4 > max_row_bytes:
        size = len(text[start:end].encode())
        if size > max_row_bytes:
            return too_large(origin, f"{size:,}", max_row_bytes, text[start:end]), end
    if not isinstance(values, dict):
        return BadRow(origin, _not_an_object(values), text[start:end][:MAX_RAW]), end
    opened = text.count("{", start, end) + text.count("[", start, end)
    if opened > limits.nesting and (problem := why_nested(values, limits)):
        return BadRow(origin, problem, text[start:end][:MAX_RAW]), end
    return Row(values, origin), end


@functools.lru_cache(maxsize=4)
def _decoder(columns: int, key_chars: int) -> json.JSONDecoder:
    """Return what reads a row and refuses keys that occur twice, or go beyond a limit."""
    limits = Limits(columns=columns, key_chars=key_chars)

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            times = Counter(name for name, _ in pairs)
            twice = next(name for name, count in times.items() if count > 1)
            raise _RefusedObjectError(f"key '{shown(twice)}' occurs twice; keep one of them")
        # Their letters together are counted fast, and are few enough in nearly all objects.
        if (len(values) > columns or len("".join(values)) > key_chars) and (
            problem := why_names(values, limits)
        ):
            raise _RefusedObjectError(problem)
        return values

    return json.JSONDecoder(object_pairs_hook=check)


_LENIENT_DECODER = json.JSONDecoder(parse_int=str)


def invalid_json(what: str, text: str, position: int) -> str:
    """Say what is wrong at `position` of `text`, and quote what stands there."""
    return f"invalid JSON: {what}, near `{shown(text[max(0, position - 20) : position + 20])}`"


def _unreadable(error: Exception, limits: Limits) -> str:
    if isinstance(error, _RefusedObjectError):
        return str(error)
    if isinstance(error, RecursionError):
        return too_deep(limits)
    # Python turns no more digits than these into a number.
    most = sys.get_int_max_str_digits()
    return f"holds a number of more than {most:,} digits, which cannot be read; write it as text"


def _not_an_object(value: Any) -> str:
    kind = _JSON_KINDS[type(value).__name__]
    of_objects = isinstance(value, list) and value and isinstance(value[0], dict)
    hint = " (a file that is one array of rows is named .json)" if of_objects else ""
    return f'is {kind}, not an object; a row is {{"column": value, ...}}{hint}'
