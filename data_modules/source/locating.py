"""Resolve a path to files, on disk or remote, and detect that a file has changed.

Decides which files belong to a split and how a missing one is reported. Never reads a row.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from data_modules.messages import DataError, Problems, reason_of
from data_modules.source.corpus import CORPORA, SAMPLES
from data_modules.source.limits import Limits
from data_modules.source.opening import Chunk, File, ReadOptions, special_file, stem_of, suffix_of
from data_modules.source.remote import REMOTE_MARKS, Url, fresh_info, list_urls, query_remote
from data_modules.source.tables import read_arrow, read_csv, read_parquet, read_tsv
from data_modules.source.text import read_json, read_jsonl, read_txt

SAMPLE_PREFIX = "sample:"
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_BOUND = r"-?\d[\d_]*(?:\.\d+)?%?"
_PART = re.compile(rf"([\w.-]+)(?:\[({_BOUND})?:({_BOUND})?\])?")
READERS: dict[str, Callable[[File, ReadOptions], Iterator[Chunk]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_txt,
}


def name_of(path: str) -> str:
    """Return the default name of a data set: the file's name without suffix.

    For a pattern it is the part before the first wildcard, unless that is the name of a split.
    """
    file = Path(str(Url(path)) if is_url(path) else path.removeprefix(SAMPLE_PREFIX))
    while glob.has_magic(file.name):
        fixed = re.split(r"[*?[]", file.name)[0]
        stem = (stem_of(fixed) if is_readable(fixed) else fixed).rstrip("-_.")
        if stem and stem not in SPLITS:
            return stem
        file = file.parent
    if is_readable(file.name):
        return stem_of(file.name)
    return file.name or "data"


def is_generated(path: str) -> bool:
    """Return whether the rows of `path` are generated: it is one of the shipped base's corpora."""
    return path.startswith(SAMPLE_PREFIX) and path.removeprefix(SAMPLE_PREFIX) in CORPORA


def is_url(path: str) -> bool:
    """Return whether `path` is a URL for fsspec, as in s3://bucket/a.jsonl."""
    return "://" in path


def is_remote(path: str) -> bool:
    """Return whether the rows of `path` are downloaded: it is a URL or a hub id."""
    return is_url(path) or is_hub_id(path)


def is_hub_id(path: str) -> bool:
    """Return whether `path` names a data set of the Hugging Face hub: `owner/name`, not a file."""
    if is_url(path) or not _HUB_ID.fullmatch(path) or path.startswith("."):
        return False
    file = Path(path)
    return not file.exists() and not file.parent.exists() and not is_readable(file.name)


def files_of(path: str, split: str, limits: Limits | None = None) -> list[File]:
    """Return the files of one split; raises DataError if there is none that can be read."""
    if path.startswith(SAMPLE_PREFIX):
        return _named_by_split(path, [_sample_file(path)], split)
    if is_url(path):
        return _remote_files(Url(path, limits or Limits()), split)
    file = Path(path).expanduser()
    if glob.has_magic(path) and not file.exists():
        named = [Path(name) for name in sorted(glob.glob(str(file), recursive=True))]
        matches = _regular([match for match in named if is_readable(match.name)])
        if not matches:
            raise DataError(f"{path}: no file matches (searched from {_here()}){_beside(file)}")
        return _named_by_split(path, matches, split)
    try:
        if file.is_dir():
            return list(_files_in(file, split))
        exists = file.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}") from error
    if not exists:
        raise DataError(f"{path}: no such file (searched from {_here()}){_nearest(file)}")
    _check_readable(path, file.name)
    return _named_by_split(path, [file], split)


def stamp_of(file: File) -> object:
    """Return a value that changes with the file's content; None if there is none."""
    if isinstance(file, Path):
        try:
            stat = file.stat()
        except OSError as error:
            return str(error)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino
    info = query_remote(file, fresh_info)
    values = [str(info[key]) for key in REMOTE_MARKS if info.get(key)]
    return (info.get("size"), *values) if values else None


def size_of(file: File) -> int:
    """Return the stored size of a file in bytes; 0 if it is unknown."""
    if isinstance(file, Path):
        return file.stat().st_size
    info = query_remote(file, lambda fs, place: fs.info(place))
    return int(info.get("size") or 0)


def _check_readable(path: str, name: str) -> None:
    if not is_readable(name):
        known = ", ".join(READERS)
        suffix = Path(name).suffix or "a file without suffix"
        raise DataError(f"{path}: cannot read {suffix}; use {known} (also with .gz or .zst)")


def _remote_files(url: Url, split: str) -> list[File]:
    if "*" in url.address:
        found = query_remote(url, lambda fs, place: list_urls(url, fs, fs.glob(place)))
        files = [file for file in found if is_readable(file.name)]
        if not files:
            raise DataError(f"{url}: no file matches")
        return _named_by_split(str(url), files, split)
    if is_readable(url.name):
        # Checks that its package is installed before anything is read.
        query_remote(url, lambda fs, place: None)
        return _named_by_split(str(url), [url], split)
    if not query_remote(url, lambda fs, place: fs.isdir(place)):
        _check_readable(str(url), url.name)
    listed = query_remote(url, lambda fs, place: list_urls(url, fs, fs.ls(place, detail=False)))
    files = _of_split([file for file in listed if is_readable(file.name)], split)
    if not files:
        raise DataError(_no_split(str(url), split, [file.name for file in listed]))
    return files


def _sample_file(path: str) -> Path:
    name = path.removeprefix(SAMPLE_PREFIX)
    file = SAMPLES / name
    if Path(name).name == name and is_readable(name) and file.is_file():
        return file
    known = [*CORPORA, *(f.name for f in SAMPLES.iterdir() if is_readable(f.name))]
    raise DataError(f"{path}: no such sample; there are {', '.join(sorted(known))}")


def _files_in(folder: Path, split: str) -> list[File]:
    inner = folder / split
    if inner.is_dir():
        # The layout of DatasetDict.save_to_disk, and of many data sets on the hub.
        folder = inner
    entries = sorted(folder.iterdir())
    found = _regular(
        [f for f in entries if is_readable(f.name) and f.name not in _SAVED_BY_DATASETS]
    )
    files = found if folder == inner else _of_split(found, split)
    if not files:
        raise DataError(_no_split(str(folder), split, [f.name for f in entries]))
    return files


def _regular(files: Sequence[Path]) -> list[File]:
    """Return the files of a folder or a pattern; DataError for entries that are not regular files.

    Skipping them silently would lose a part of the data.
    """
    problems = Problems()
    for file in files:
        problem = special_file(file)
        if problem is None and not file.exists():
            problem = f"{file}: is a link to a missing file; restore the file"
        if problem is not None:
            problems.add(f"{problem}, or remove it from the data set")
    problems.raise_if_any()
    return list(files)


def _of_split(files: Sequence[File], split: str) -> list[File]:
    """Return the files whose name starts with `split`; all for train, if no name has a split."""
    if any(_split_of(file) for file in files):
        return [file for file in files if _split_of(file) == split]
    return list(files) if split == "train" else []


def _no_split(folder: str, split: str, names: Sequence[str]) -> str:
    found = ", ".join(sorted(names)[:8]) or "nothing"
    return f"{folder}: no data file for split '{split}' in this folder; found {found}"


def _named_by_split(path: str, files: Sequence[File], split: str) -> list[File]:
    """Return files given one by one, which are the train split whatever their names are."""
    named = [file for file in files if split in ("train", _split_of(file))]
    if not named:
        raise DataError(only_train(path, split))
    return named


def only_train(path: str, split: str) -> str:
    """Return the message that a single file, or files given one by one, are the train split."""
    return (
        f"{path}: no split '{split}': a single file, or files named one by one, are the train "
        "split; give a folder, or the file of that split"
    )


def _split_of(file: File) -> str | None:
    word = re.split(r"[-_.]", file.name)[0]
    return word if word in SPLITS else None


def _here() -> str:
    return str(Path.cwd().name) + "/"


def _beside(pattern: Path) -> str:
    """Describe the content of the folder in which a glob matched nothing."""
    folder = pattern.parent
    while glob.has_magic(str(folder)) or not folder.is_dir():
        if folder == folder.parent:
            return ""
        folder = folder.parent
    names = sorted(f.name for f in folder.iterdir())
    close = difflib.get_close_matches(pattern.name, names, 3, 0.3) or names[:8]
    return f"; {folder} has {', '.join(close) or 'nothing'}"


def _nearest(file: Path) -> str:
    folder = file.parent
    while not folder.is_dir():
        folder = folder.parent
    missing = file.relative_to(folder).parts[0]
    close = difflib.get_close_matches(missing, [f.name for f in folder.iterdir()], 3, 0.5)
    if not close or folder == folder.parent:  # never suggest an entry of the root folder
        return "; check data.datasets[].path"
    return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"


@dataclass(frozen=True, slots=True)
class _Bound:
    """One end of a slice: a row number, counted from the end if negative, or a percentage."""

    value: Fraction
    is_percent: bool

    @property
    def needs_total(self) -> bool:
        """Return whether it depends on the number of rows."""
        return self.is_percent or self.value < 0

    def resolve(self, total: int) -> int:
        """Return the row number, from 0; a percentage gives the same row as start and as stop."""
        if self.is_percent:
            value = self.value + 100 if self.value < 0 else self.value
            return min(total, max(0, round(value * total / 100)))
        value = self.value + total if self.value < 0 else self.value
        return min(total, max(0, int(value)))


@dataclass(frozen=True, slots=True)
class Part:
    """The name of a split and a slice of its rows."""

    name: str
    start: _Bound | None = None
    stop: _Bound | None = None

    @property
    def needs_total(self) -> bool:
        """Return whether the slice depends on the number of rows."""
        return any(bound is not None and bound.needs_total for bound in (self.start, self.stop))

    @property
    def is_sliced(self) -> bool:
        """Return whether it is a slice and not the whole split."""
        return self.start is not None or self.stop is not None

    def resolve(self, total: int | None) -> tuple[int, int | None]:
        """Return the first row, from 0, and the row after the last (None: to the end)."""
        known = total if total is not None else 1 << 62
        start = 0 if self.start is None else self.start.resolve(known)
        return start, None if self.stop is None else self.stop.resolve(known)

    def __str__(self) -> str:
        def text(bound: _Bound | None) -> str:
            if bound is None:
                return ""
            return f"{float(bound.value):g}%" if bound.is_percent else str(bound.value)

        cut = f"[{text(self.start)}:{text(self.stop)}]" if self.is_sliced else ""
        return f"{self.name}{cut}"


def check_split(split: str) -> list[Part]:
    """Return the parts of `split`, as in `train[:90%]+validation`; raises ValueError."""
    return [_parse_part(part) for part in split.split("+")]


def rows_of(path: str, part: Part, total: int | None) -> tuple[int, int | None]:
    """Return the first row of the slice, from 0, and the row after the last; raises DataError."""
    if not part.is_sliced:
        return 0, None
    start, stop = part.resolve(total)
    if start == total or (stop is not None and stop <= start):
        rows = "" if total is None else f" of {total:,} rows"
        raise DataError(f"{path}: 0 rows in '{part}'{rows}; give another slice")
    return start, stop


def take(
    chunks: Iterator[Chunk], start: int, stop: int | None, shard: tuple[int, int] = (0, 1)
) -> Generator[Chunk, None, int]:
    """Yield every count-th of the rows from `start` to `stop`; return the number of rows read.

    Rows are not counted if all of them are taken.
    """
    index, count = shard
    position = 0
    if start == 0 and stop is None and count == 1:
        yield from chunks
        return position
    for chunk in chunks:
        num_rows = chunk.count()
        first = max(start - position, 0)
        last = num_rows if stop is None else min(stop - position, num_rows)
        offset = (index - (position + first - start)) % count
        kept = range(num_rows)[first:last][offset::count]
        position += num_rows
        if len(kept) == num_rows:
            yield chunk
        elif kept:
            yield chunk.select(kept)
        if stop is not None and position >= stop:
            break
    return position


def _parse_part(text: str) -> Part:
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"split '{text}' cannot be read; use NAME, NAME[:90%], NAME[100:200] or NAME+NAME"
        )
    start, stop = (
        None if bound is None else _parse_bound(bound, text) for bound in match.groups()[1:]
    )
    # -10 and 90 cannot be compared until the rows are counted.
    if (
        start is not None
        and stop is not None
        and (start.is_percent, start.value < 0) == (stop.is_percent, stop.value < 0)
        and start.value >= stop.value
    ):
        raise ValueError(f"split '{text}' has no row: its end is not after its start")
    return Part(match[1], start, stop)


def _parse_bound(text: str, whole: str) -> _Bound:
    is_percent = text.endswith("%")
    value = Fraction(text.removesuffix("%").replace("_", ""))
    if is_percent and abs(value) > 100:
        raise ValueError(f"split '{whole}' has {text}; use a percentage up to 100")
    if not is_percent and value.denominator != 1:
        raise ValueError(f"split '{whole}' has row {text}; use a whole number, or a percentage")
    return _Bound(value, is_percent)


def is_readable(name: str) -> bool:
    """Return whether a file of this name can be read."""
    return suffix_of(name) in READERS
