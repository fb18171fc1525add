"""Read text files in bounded memory: JSON lines, JSON arrays, lines and paragraphs.

Decides where a row starts and ends, and how an invalid row is reported.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from common.errors import DataError, Origin
from common.text import shown
from data_modules.source import opening
from data_modules.source.opening import BadRow, Chunk, Content, File, ReadLimits, ReadOptions
from data_modules.types import Row

_BLANKS = " \t\r\n\v\f"  # as for bytes.strip
_JSON_KINDS = {
    "list": "a list",
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
}
_LENIENT_DECODER = json.JSONDecoder(parse_int=str)
_GAP_BYTES = 64
_BLANK = re.compile(r"[ \t\r\n]*")
_LINE_END = re.compile(rb"\n")
_PARAGRAPH_END = re.compile(rb"\n[ \t\r\v\f]*\n")


class _RefusedObjectError(ValueError):
    """Why an object that is valid JSON is refused."""


@dataclass(frozen=True, slots=True)
class _TextChunk(Chunk):
    """Complete lines of a file as bytes; `kind` is json, line or paragraph.

    `kept` are the indices, from 0, of the chunk's rows that are used; None: all.
    """

    first_line: int
    data: bytes
    kind: str
    options: ReadOptions
    kept: range | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        text, is_utf8 = self._decoded()
        parts = self._parts(text)
        last = parts[-1][0] if parts and not self.data.endswith(b"\n") else 0
        for line, part in parts if self.kept is None else [parts[n] for n in self.kept]:
            origin = Origin(self.file, line)
            if not is_utf8:
                bad = opening.not_utf8(origin, part.encode(errors="surrogateescape"))
                if bad is not None:
                    yield bad
                    continue
            if size := _too_many_bytes(part, self.options.max_row_bytes):
                yield opening.too_large(origin, f"{size:,}", self.options.max_row_bytes, part)
            elif self.kind == "json":
                yield _parse_json_line(origin, part, line == last, self.options.limits)
            else:
                yield Row({"text": part.replace("\r\n", "\n").rstrip("\r\n")}, origin)

    def count(self) -> int:
        if self.kept is not None:
            return len(self.kept)
        if self.kind == "paragraph":
            return len(self._parts(self._decoded()[0]))
        return sum(map(bool, map(bytes.strip, self.data.split(b"\n"))))

    def select(self, kept: range) -> Chunk:
        before = range(self.count()) if self.kept is None else self.kept
        return replace(self, kept=before[kept.start : kept.stop : kept.step])

    def _decoded(self) -> tuple[str, bool]:
        """Return the text, with invalid bytes escaped, and whether it is valid UTF-8."""
        try:
            return self.data.decode(), True
        except UnicodeDecodeError:
            return self.data.decode(errors="surrogateescape"), False

    def _parts(self, text: str) -> list[tuple[int, str]]:
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


def _parse_json_line(origin: Origin, text: str, is_last: bool, limits: ReadLimits) -> Row | BadRow:
    raw, text = text, text.rstrip("\r\n")
    try:
        decoder = _decoder(limits.columns, limits.key_chars)
        # Faster than decode(), which strips blanks around the row first.
        values, end = decoder.raw_decode(text)
        if end != len(text):
            values = decoder.decode(text)
    except json.JSONDecodeError as error:
        is_at_end = error.pos >= len(text) or error.msg.startswith("Unterminated")
        is_open = text.startswith("{") and not text.endswith("}")
        if (is_at_end or is_open) and is_last and origin.line > 1:
            reason = "line is cut off (no newline); copy the file again?"
            return BadRow(origin, reason, raw[: opening.MAX_RAW])
        return BadRow(
            origin, _invalid_json(error.msg, text, error.pos), raw[: opening.MAX_RAW], error.colno
        )
    except (ValueError, RecursionError) as error:
        return BadRow(origin, _unreadable(error, limits), raw[: opening.MAX_RAW])
    return _row_of(values, origin, raw, 0, len(raw), limits)


def _parse_element(
    text: str, start: int, origin: Origin, options: ReadOptions
) -> tuple[Row | BadRow, int]:
    """Return the row at `start` of an array, and its end.

    Raises JSONDecodeError or DataError if the end cannot be found.
    """
    max_row_bytes, limits = options.max_row_bytes, options.limits
    try:
        values, end = _decoder(limits.columns, limits.key_chars).raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise DataError(f"{origin} {opening.too_deep(limits)}") from error
    except ValueError as error:
        # Only the value is refused; its end can still be found.
        _, end = _LENIENT_DECODER.raw_decode(text, start)
        return BadRow(origin, _unreadable(error, limits), text[start:end][: opening.MAX_RAW]), end
    if (end - start) * 4 > max_row_bytes and (
        size := _too_many_bytes(text[start:end], max_row_bytes)
    ):
        return opening.too_large(origin, f"{size:,}", max_row_bytes, text[start:end]), end
    return _row_of(values, origin, text, start, end, limits), end


def _too_many_bytes(text: str, most: int) -> int:
    """Return the size of a text of more than `most` bytes; 0 of others."""
    # Counting bytes takes time, and a character has at most four.
    size = len(text.encode()) if len(text) * 4 > most else 0
    return size if size > most else 0


def _row_of(
    values: Any, origin: Origin, text: str, start: int, end: int, limits: ReadLimits
) -> Row | BadRow:
    """Return the row of a JSON value, which is in `text` from `start` to `end`."""
    if not isinstance(values, dict):
        of_objects = isinstance(values, list) and values and isinstance(values[0], dict)
        hint = " (a file that is one array of rows is named .json)" if of_objects else ""
        kind = _JSON_KINDS[type(values).__name__]
        reason = f'is {kind}, not an object; a row is {{"column": value, ...}}{hint}'
        return BadRow(origin, reason, text[start:end][: opening.MAX_RAW])
    # Counting brackets is fast, and rules out deep nesting for nearly all rows.
    opened = text.count("{", start, end) + text.count("[", start, end)
    if opened > limits.nesting and (problem := opening.nesting_error(values, limits)):
        return BadRow(origin, problem, text[start:end][: opening.MAX_RAW])
    return Row(values, origin)


@functools.lru_cache(maxsize=4)
def _decoder(columns: int, key_chars: int) -> json.JSONDecoder:
    """Return a decoder that refuses duplicate keys and keys beyond a limit."""
    limits = ReadLimits(columns=columns, key_chars=key_chars)

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            times = Counter(name for name, _ in pairs)
            twice = next(name for name, count in times.items() if count > 1)
            raise _RefusedObjectError(f"key '{shown(twice)}' occurs twice; keep one of them")
        # The total length is counted fast, and small enough in nearly all objects.
        if (len(values) > columns or len("".join(values)) > key_chars) and (
            problem := opening.names_error(values, limits)
        ):
            raise _RefusedObjectError(problem)
        return values

    return json.JSONDecoder(object_pairs_hook=check)


def _invalid_json(what: str, text: str, position: int) -> str:
    """Return the message of a JSON error at `position` of `text`, quoting its surroundings."""
    return f"invalid JSON: {what}, near `{shown(text[max(0, position - 20) : position + 20])}`"


def _unreadable(error: Exception, limits: ReadLimits) -> str:
    if isinstance(error, _RefusedObjectError):
        return str(error)
    if isinstance(error, RecursionError):
        return opening.too_deep(limits)
    max_digits = sys.get_int_max_str_digits()
    return (
        f"has a number of more than {max_digits:,} digits, which Python refuses; write it as text"
    )


def _split_rows(data: Content, kind: str, options: ReadOptions) -> Iterator[Chunk]:
    """Yield chunks of complete rows; a row above `max_row_bytes` is skipped unbuffered."""
    end_of_row = _PARAGRAPH_END if kind == "paragraph" else _LINE_END
    max_row_bytes = options.max_row_bytes
    file, line = str(data.file), 1
    rest = bytearray()
    while block := data.read():
        # A row can only end in the new block, or in a gap that started just before it.
        searched_from = max(0, len(rest) - _GAP_BYTES)
        rest += block
        if kind == "paragraph":
            ends = [match.end() for match in end_of_row.finditer(rest, searched_from)]
            end = ends[-1] if ends else 0
        else:
            end = rest.rfind(b"\n", searched_from) + 1
        if end:
            text = bytes(rest[:end])
            if not text.isspace():
                yield _TextChunk(file, end, line, text, kind, options)
            line += text.count(b"\n")
            del rest[:end]
        elif len(rest) > max_row_bytes and rest.strip():
            raw = rest[: 4 * opening.MAX_RAW].decode(errors="replace")
            size, num_lines, after = _skip_row(data, bytes(rest), end_of_row)
            shown_size = f"more than {size:,}" if data.cut else f"{size:,}"
            bad = opening.too_large(Origin(file, line), shown_size, max_row_bytes, raw)
            yield opening.RowChunk(file, size, (bad,))
            line += num_lines
            rest = bytearray(after)
    if rest.strip() and not data.cut:
        yield _TextChunk(file, len(rest), line, bytes(rest), kind, options)


def _skip_row(data: Content, rest: bytes, end_of_row: re.Pattern[bytes]) -> tuple[int, int, bytes]:
    """Return the row's size, its number of lines, and the bytes after it."""
    size = num_lines = 0
    while True:
        match = end_of_row.search(rest)
        if match:
            num_lines += rest.count(b"\n", 0, match.end())
            return size + match.start(), num_lines, rest[match.end() :]
        # The blank line that ends a paragraph may be split between two blocks.
        at = rest.rfind(b"\n", max(0, len(rest) - _GAP_BYTES))
        tail = rest[at:] if at >= 0 and not rest[at:].strip() else b""
        size += len(rest) - len(tail)
        num_lines += rest.count(b"\n", 0, len(rest) - len(tail))
        block = data.read()
        if not block:
            return size, num_lines, b""
        rest = tail + block


def read_jsonl(file: File, options: ReadOptions) -> Iterator[Chunk]:
    with opening.open_text(file, options) as data:
        if data.head.lstrip().split(b"\n", 1)[0].strip() == b"[":
            raise DataError(f"{file}: holds a JSON array, not one row a line; name it .json")
        yield from _split_rows(data, "json", options)


def read_json(file: File, options: ReadOptions) -> Iterator[Chunk]:
    with opening.open_text(file, options) as data:
        head = data.head.lstrip()
        if head.startswith(b"["):
            yield from opening.grouped(_array_rows(data, options), str(file))
        elif head.split(b"\n", 1)[0].strip() == b"{":
            yield from _whole_object(data, options)
        else:
            yield from _split_rows(data, "json", options)


def _whole_object(data: Content, options: ReadOptions) -> Iterator[Chunk]:
    """Yield a row per line; raises DataError if the whole file is one object."""
    budget = None if options.budget is None else opening.Budget(options.budget.left)
    with opening.open_text(data.file, replace(options, budget=budget)) as copy:
        text = _decode(copy.read_all(), data.file)
    try:
        values = None if copy.cut else json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if values is None:
        return _split_rows(data, "json", options)
    lengths = {name: len(value) for name, value in values.items() if isinstance(value, list)}
    hint = f"; are its rows under '{shown(next(iter(lengths)))}'?" if lengths else ""
    if 1 < len(values) == len(lengths) and len({*lengths.values()}) == 1:
        hint = f"; '{shown(next(iter(lengths)))}' and the others are columns of a table"
    raise DataError(
        f"{data.file}: holds one object over several lines; give an array of rows, or one row a "
        f"line{hint}"
    )


def _decode(data: bytes, file: File) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad = opening.not_utf8(Origin(str(file), 1), data)
        raise DataError(bad.problem if bad else str(error)) from error


def _array_rows(data: Content, options: ReadOptions) -> Iterator[tuple[int, Row | BadRow]]:
    file = str(data.file)
    content = data.read_all()
    text = content.decode(errors="ignore") if data.cut else _decode(content, data.file)
    del content
    position = _skip_blank(text, text.find("[") + 1)
    one_line, is_ascii = "\n" not in text.strip(), text.isascii()
    line, counted = 1, 0
    while text[position : position + 1] != "]":
        # In an array on one line, rows are numbered instead of lines.
        line, counted = line + text.count("\n", counted, position), position
        origin, start = Origin(file, line), position
        try:
            row, end = _parse_element(text, start, origin, options)
            position = _after_element(text, end)
        except json.JSONDecodeError as error:
            if data.cut:
                return
            # The rows after it cannot be delimited, so the whole file is refused.
            reason = _invalid_json(error.msg, text, error.pos)
            raise DataError(f"{file}:{error.lineno}:{error.colno} {reason}") from error
        # The size includes the space between rows, a large part of an indented array.
        yield position - start if is_ascii else len(text[start:position].encode()), row
        line += one_line
    rest = _skip_blank(text, position + 1)
    if rest < len(text):
        place = json.JSONDecodeError("", text, rest)
        raise DataError(
            f"{file}:{place.lineno}:{place.colno} more than one JSON value; name it .jsonl or join "
            f"them, or remove what follows the array: `{shown(text[rest : rest + 20])}`"
        )


def _after_element(text: str, position: int) -> int:
    position = _skip_blank(text, position)
    if text[position : position + 1] == "]":
        return position
    if text[position : position + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' or ']' after this row", text, position)
    after = _skip_blank(text, position + 1)
    if text[after : after + 1] == "]":
        raise json.JSONDecodeError("trailing comma; remove it", text, position)
    return after


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def read_txt(file: File, options: ReadOptions) -> Iterator[Chunk]:
    """Yield a row per paragraph, or per line if the first block has no blank line."""
    with opening.open_text(file, options) as data:
        kind = "paragraph" if _PARAGRAPH_END.search(data.head.strip()) else "line"
        yield from _split_rows(data, kind, options)
