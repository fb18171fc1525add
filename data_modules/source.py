"""Read rows from files, folders, the Hugging Face hub and the samples; each keeps file and line.

Decides what is a readable row. Never looks at what a row means.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from data_modules.samples.corpus import CORPORA, read_corpus
from data_modules.types import DataError, Origin, Problems, Row, shown

SAMPLE_PREFIX = "sample:"
SAMPLES = Path(__file__).parent / "samples"
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_UTF8_MARK = b"\xef\xbb\xbf"
_SNIFFED_BYTES = 1 << 16
_JSON_KINDS = {
    "list": "a list",
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
}
_BLANK = re.compile(r"[ \t\r\n]*")


class _DuplicateKeyError(ValueError):
    pass


@dataclass(slots=True)
class Budget:
    """Count the bytes that may still be read; what lies beyond them is not looked at."""

    left: int

    @property
    def spent(self) -> bool:
        """Tell whether nothing more may be read."""
        return self.left <= 0


def read_rows(path: str, split: str = "train", budget: Budget | None = None) -> Iterator[Row]:
    """Yield the rows of a file, folder, glob, hub id or `sample:` name.

    With a `budget` only about so many bytes are read, of all files together. Raises DataError with
    all problems of a file when its good rows have been yielded.
    """
    if is_generated(path):
        for number, values in enumerate(read_corpus(path.removeprefix(SAMPLE_PREFIX)), 1):
            yield Row(dict(values), Origin(path, number))
        return
    if is_hub_id(path):
        yield from _read_hub(path, split)
        return
    for file in find_files(path, split):
        if budget is not None and budget.spent:
            return
        num_rows = 0
        for row in _READERS[_suffix(file)](file, budget):
            num_rows += 1
            yield row
        if not num_rows and not (budget is not None and budget.spent):
            raise DataError(f"{file}: 0 rows; give a file with at least one row")


def find_files(path: str, split: str = "train") -> list[Path]:
    """Return the files behind `path`; raises DataError when there is none that can be read."""
    if path.startswith(SAMPLE_PREFIX):
        return [_sample_file(path)]
    if glob.has_magic(path) and not Path(path).exists():
        files = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
        files = [file for file in files if _suffix(file) in _READERS]
        if not files:
            raise DataError(f"{path}: no file matches (looked from {_here()})")
        return files
    file = Path(path).expanduser()
    if file.is_dir():
        return _files_in(file, split)
    if not file.exists():
        raise DataError(f"{path}: no such file (looked from {_here()}){_nearest(file)}")
    if _suffix(file) not in _READERS:
        known = ", ".join(_READERS)
        raise DataError(
            f"{path}: cannot read {file.suffix or 'a file without suffix'}; use {known}"
        )
    return [file]


def fingerprint(path: str, split: str = "train") -> str:
    """Return the sha256 of the bytes behind `path` ("" for a hub id, whose bytes are elsewhere)."""
    if is_hub_id(path):
        return ""
    files = sorted(SAMPLES.glob("*.py")) if is_generated(path) else find_files(path, split)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def name_of(path: str) -> str:
    """Return what a data set is called where it has no name: the file's without its suffix."""
    file = Path(path.removeprefix(SAMPLE_PREFIX))
    while glob.has_magic(file.name):
        file = file.parent
    if _suffix(file) in _READERS:
        return file.name.removesuffix(".gz")[: -len(_suffix(file))]
    return file.name or "data"


def is_generated(path: str) -> bool:
    """Tell whether the rows of `path` are made while they are read: one of the base's corpora."""
    return path.startswith(SAMPLE_PREFIX) and path.removeprefix(SAMPLE_PREFIX) in CORPORA


def is_hub_id(path: str) -> bool:
    """Tell whether `path` names a data set of the Hugging Face hub: `owner/name`, not a file."""
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        return False
    file = Path(path)
    return not file.exists() and not file.parent.exists() and _suffix(file) not in _READERS


def _sample_file(path: str) -> Path:
    name = path.removeprefix(SAMPLE_PREFIX)
    file = SAMPLES / name
    if Path(name).name == name and _suffix(file) in _READERS and file.is_file():
        return file
    known = [*CORPORA, *(f.name for f in SAMPLES.iterdir() if _suffix(f) in _READERS)]
    raise DataError(f"{path}: no such sample; there are {', '.join(sorted(known))}")


def _files_in(folder: Path, split: str) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.is_file() and _suffix(f) in _READERS)
    named = {f: name for f in files if (name := _split_of(f)) is not None}
    if named:
        files = [f for f, name in named.items() if name == split]
    if not files:
        found = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
        raise DataError(f"{folder}: no data file for split '{split}' in this folder; found {found}")
    return files


def _split_of(file: Path) -> str | None:
    word = re.split(r"[-_.]", file.name)[0]
    return word if word in SPLITS else None


def _suffix(file: Path) -> str:
    name = file.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _here() -> str:
    return str(Path.cwd().name) + "/"


def _nearest(file: Path) -> str:
    folder = file.parent
    while not folder.is_dir():
        folder = folder.parent
    missing = file.relative_to(folder).parts[0]
    close = difflib.get_close_matches(missing, [f.name for f in folder.iterdir()], 3, 0.5)
    if not close:
        return "; check data.datasets[].path"
    return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"


def _open(file: Path) -> gzip.GzipFile | BufferedReader:
    try:
        stream = file.open("rb")
        magic = stream.read(2)
        stream.seek(0)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    zipped = magic == b"\x1f\x8b"
    if zipped != (file.suffix == ".gz"):
        stream.close()
        what = (
            "is gzip-compressed; name it" if zipped else "is not gzip-compressed; name it without"
        )
        raise DataError(f"{file}: {what} .gz")
    if magic in (b"\xff\xfe", b"\xfe\xff"):
        stream.close()
        raise DataError(f"{file}: is UTF-16; save it as UTF-8")
    return gzip.GzipFile(fileobj=stream) if zipped else stream


def _read_bytes(file: Path, budget: Budget | None) -> tuple[bytes, bool]:
    """Return what `budget` allows of a file, and whether there is more."""
    with _open(file) as stream:
        data = stream.read(-1 if budget is None else max(0, budget.left))
        cut = bool(stream.read(1))
    if budget is not None:
        budget.left -= len(data)
    return data, cut


def _decode(data: bytes, file: Path, first_line: int = 1) -> str:
    try:
        return data.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = first_line + before.count(b"\n")
        column = error.start - before.rfind(b"\n")
        byte = data[error.start]
        raise DataError(
            f"{file}:{line} byte 0x{byte:02X} at column {column} is not UTF-8 (latin-1?); "
            "save the file as UTF-8"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKeyError(f"key '{shown(twice)}' occurs twice; keep one of them")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _read_json(file: Path, budget: Budget | None) -> Iterator[Row]:
    with _open(file) as stream:
        head = stream.read(_SNIFFED_BYTES).removeprefix(_UTF8_MARK).lstrip()
    if head.startswith(b"["):
        return _read_array(file, budget)
    if head.split(b"\n", 1)[0].strip() == b"{":
        _check_not_one_object(file, None if budget is None else Budget(budget.left))
    return _read_lines(file, budget)


def _check_not_one_object(file: Path, budget: Budget | None) -> None:
    data, cut = _read_bytes(file, budget)
    try:
        values = {} if cut else json.loads(_decode(data, file))
    except json.JSONDecodeError:
        return
    inner = next((name for name, value in values.items() if isinstance(value, list)), None)
    hint = f"; are its rows under '{shown(inner)}'?" if inner else ""
    raise DataError(
        f"{file}: holds one object over several lines; give an array of rows, or one row a line"
        f"{hint}"
    )


def _read_array(file: Path, budget: Budget | None) -> Iterator[Row]:
    data, cut = _read_bytes(file, budget)
    text = data.decode("utf-8-sig", "ignore") if cut else _decode(data, file)
    problems = Problems()
    position = _skip_blank(text, text.find("[") + 1)
    one_line = "\n" not in text.strip()
    line, counted = 1, 0
    while text[position : position + 1] != "]":
        # In an array on one line the line says nothing: rows are counted there.
        line, counted = line + text.count("\n", counted, position), position
        try:
            values, position = _DECODER.raw_decode(text, position)
            position = _after_element(text, position)
        except json.JSONDecodeError as error:
            if not cut:
                problems.add(_invalid(file, error.lineno, error.colno, error.msg, text, error.pos))
            break
        except _DuplicateKeyError as error:
            problems.add(f"{file}:{line} {error}")
            break
        if isinstance(values, dict):
            yield Row(values, Origin(str(file), line))
        else:
            problems.add(_not_an_object(file, line, values))
        line += one_line
    problems.raise_if_any()


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


def _read_lines(file: Path, budget: Budget | None) -> Iterator[Row]:
    problems = Problems()
    with _open(file) as stream:
        for line, data in enumerate(stream, 1):
            if budget is not None:
                if budget.spent:
                    break
                budget.left -= len(data)
            try:
                text = _decode(data, file, line).rstrip("\r\n")
                if not text.strip():
                    continue
                values = _DECODER.decode(text)
            except json.JSONDecodeError as error:
                at_the_end = error.pos >= len(text) or error.msg.startswith("Unterminated")
                if at_the_end and not data.endswith(b"\n") and line > 1:
                    problems.add(
                        f"{file}:{line} line is cut off (no newline); copy the file again?"
                    )
                else:
                    problems.add(_invalid(file, line, error.colno, error.msg, text, error.pos))
                continue
            except _DuplicateKeyError as error:
                problems.add(f"{file}:{line} {error}")
                continue
            except DataError as error:
                problems.add(error.problems[0])
                continue
            if isinstance(values, dict):
                yield Row(values, Origin(str(file), line))
            else:
                problems.add(_not_an_object(file, line, values))
    problems.raise_if_any()


def _invalid(file: Path, line: int, column: int, what: str, text: str, position: int) -> str:
    snippet = shown(text[max(0, position - 20) : position + 20])
    return f"{file}:{line}:{column} invalid JSON: {what}, near `{snippet}`"


def _not_an_object(file: Path, line: int, value: Any) -> str:
    kind = _JSON_KINDS[type(value).__name__]
    return f'{file}:{line} is {kind}, not an object; a row is {{"column": value, ...}}'


def _read_csv(file: Path, budget: Budget | None) -> Iterator[Row]:
    data, cut = _read_bytes(file, budget)
    text = data.decode("utf-8-sig", "ignore") if cut else _decode(data, file)
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    problems = Problems()
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            start, line = line, reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = cells
            elif len(cells) == len(header):
                yield Row(dict(zip(header, cells, strict=True)), Origin(str(file), start))
            elif not (cut and line > text.count("\n")):
                names = shown(", ".join(header))
                what = f"{len(cells)} cells, the header has {len(header)} ({names})"
                problems.add(f"{file}:{start} {what}; quote cells that hold a comma")
    except csv.Error as error:
        if not cut:
            problems.add(f"{file}:{line} broken CSV: {error}; is a quote not closed?")
    problems.raise_if_any()


def _read_parquet(file: Path, budget: Budget | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    _open(file).close()
    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=4096):
            for values in batch.to_pylist():
                number += 1
                yield Row(values, Origin(str(file), number))
            if budget is not None:
                budget.left -= batch.nbytes
                if budget.spent:
                    return
    except pyarrow.ArrowException as error:
        what = str(error).splitlines()[0]
        raise DataError(f"{file}: is no parquet file that can be read: {what}") from error


def _read_hub(path: str, split: str) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path}: no such file here, and the hub gave no data set of that name "
            f"(split '{split}'): {str(error).splitlines()[0]}"
        ) from error
    for number, values in enumerate(rows, 1):
        yield Row(dict(values), Origin(path, number))


_READERS: dict[str, Callable[[Path, Budget | None], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
