"""Yield the rows behind a path, on disk or remote, with file and line.

Decides which files, hub rows and samples a path and a split refer to and which slice and shard is
read, and checks that files do not change meanwhile. Parsing is in text.py and tables.py. Never
interprets a row.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import MAX_PROBLEMS, DataError, Origin, RemoteError
from common.text import unreadable
from data_modules.source import locating, opening
from data_modules.source.hub import commit_of, hub_chunks
from data_modules.source.locating import Part, is_hub_id, is_remote, locate, size_of, stamp_of
from data_modules.source.opening import BadRow, Budget, Chunk, File, ReadLimits, ReadOptions, Url
from data_modules.source.tables import count_parquet_rows

_PLAIN_TEXT = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def read_chunks(
    path: str,
    *,
    split: str = "train",
    name: str | None = None,
    revision: str | None = None,
    budget: Budget | None = None,
    max_row_bytes: int = opening.MAX_ROW_BYTES,
    limits: ReadLimits | None = None,
    rows: tuple[int, int | None] = (0, None),
    shard: tuple[int, int] = (0, 1),
    streaming: bool = False,
) -> Iterator[Chunk]:
    """Yield the rows of a file, folder, glob, URL, hub id or `sample:` name in chunks.

    A chunk can be sent to another process and parsed there. With a `budget` only about that many
    bytes are read, of all files together; a slice of a large file that does not start at its first
    row is then skipped. `rows` (start, stop), from 0, selects rows of `split`; of these `shard`
    (index, count) takes every count-th, so that all shards together have each row once. `streaming`
    downloads a hub data set while it is read. `name` selects a configuration of a data set whose
    card declares several. Raises DataError if a file cannot be read to its end,
    changes meanwhile, or has no row; problems of single rows are in Chunk.rows.
    """
    options = ReadOptions(budget=budget, max_row_bytes=max_row_bytes, limits=limits or ReadLimits())
    if revision is not None and not is_hub_id(path):
        raise DataError(f"{path}: revision '{revision}' is given, but only a hub data set has one")
    parts = _parts(path, split)
    if is_hub_id(path):
        # Whole files can be assigned to shards only if all of their rows are read.
        is_whole = streaming and rows == (0, None) and split == parts[0].name
        by_file, shard = (shard, (0, 1)) if is_whole else ((0, 1), shard)
        read = functools.partial(hub_chunks, path, name, revision, options, by_file, streaming)
    else:
        read = functools.partial(_read_files, path, name, options)
    yield from locating.take(itertools.chain.from_iterable(map(read, parts)), *rows, shard)


def read_rows(path: str, max_rows: int | None = None) -> Iterator[tuple[dict[str, Any], Origin]]:
    """Yield the first rows behind `path` with their origins; DataError at a bad row."""
    rows = (row for chunk in read_chunks(path, rows=(0, max_rows)) for row in chunk.rows())
    for row in itertools.islice(rows, max_rows):
        if isinstance(row, BadRow):
            raise DataError(row.problem)
        yield row.values, row.origin


def find_files(
    path: str, split: str = "train", limits: ReadLimits | None = None, name: str | None = None
) -> list[File]:
    """Return the files behind `path`; raises DataError if there is none that can be read."""
    files: dict[str, File] = {}
    for part in _parts(path, split):
        files |= {str(file): file for file in locate(path, part.name, limits, name).files}
    return list(files.values())


def notes_on_files(
    path: str, split: str = "train", limits: ReadLimits | None = None, name: str | None = None
) -> list[str]:
    """Return in words which files of a folder or pattern were left out; none for a hub id."""
    if is_hub_id(path):
        return []
    parts = _parts(path, split)
    notes = [note for part in parts for note in locate(path, part.name, limits, name).notes]
    return list(dict.fromkeys(notes))


def text_bytes(path: str, split: str = "train", name: str | None = None) -> int | None:
    """Return the bytes of text behind `path`; None if that is unknown until they are read."""
    if is_remote(path) or "[" in split:
        return None
    files = find_files(path, split, name=name)
    if any(file.suffix not in _PLAIN_TEXT for file in files):
        return None
    return sum(map(size_of, files))


def resolved_revision(path: str, revision: str | None = None) -> str | None:
    """Return the commit that a hub id currently refers to; None for files, or if it is unknown.

    If the hub does not answer, it is the commit of the downloaded copy. Passed to `read_chunks` as
    `revision`, it ensures that no other commit is read.
    """
    return commit_of(path, revision) if is_hub_id(path) else None


def fingerprint(
    path: str,
    split: str = "train",
    revision: str | None = None,
    *,
    name: str | None = None,
    by_stamp: bool = False,
    limits: ReadLimits | None = None,
) -> str:
    """Return the sha256 of a file's bytes, or of the names and bytes of several files.

    It does not depend on where the data is. Remote files are identified by etag, or by size and
    time; a hub id by the commit of `resolved_revision`, "" if that is unknown. With `by_stamp` no
    bytes are read: files on disk are identified by name, size and time.
    """
    if is_hub_id(path):
        return commit_of(path, revision) or ""
    files = find_files(path, split, limits, name)
    if not by_stamp and len(files) == 1 and files[0] == Path(path).expanduser():
        return _sha256_of(files[0])
    local = [file.absolute() for file in files if isinstance(file, Path)]
    names = [str(file) for file in files]
    if len(local) == len(files):
        root = os.path.commonpath([file.parent for file in local])
        names = [str(file.relative_to(root)) for file in local]
    digest = hashlib.sha256()
    for file, inner in zip(files, names, strict=True):
        digest.update(repr((inner, _identity_of(file, by_stamp))).encode())
    return digest.hexdigest()


def _identity_of(file: File, by_stamp: bool) -> object:
    """Return what identifies a file's content: a stamp or its hash."""
    if isinstance(file, Url):
        stamp = stamp_of(file)
        if stamp is None:
            stamp = size_of(file) if by_stamp else _sha256_of(file)
        return stamp
    if not by_stamp:
        return _sha256_of(file)
    try:
        stat = file.stat()
    except OSError as error:
        raise DataError(unreadable(file, error)) from error
    return stat.st_size, stat.st_mtime_ns


def _sha256_of(file: File) -> str:
    digest = hashlib.sha256()
    try:
        with opening.open_stored(file) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        kind = RemoteError if isinstance(file, Url) else DataError
        raise kind(unreadable(file, error)) from error
    return digest.hexdigest()


def _parts(path: str, split: str) -> list[Part]:
    try:
        return locating.parse_split(split)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _read_files(path: str, name: str | None, options: ReadOptions, part: Part) -> Iterator[Chunk]:
    files, budget = locate(path, part.name, options.limits, name).files, options.budget
    stamps = [stamp_of(file) for file in files]
    total = None
    if part.needs_total:
        if budget is not None and sum(size_of(file) for file in files) > budget.left:
            # Too large to count its rows now: read what is surely in the slice, or nothing.
            if part.start:
                budget.left = 0
                return
            part = Part(part.name)
        else:
            total = sum(count_rows(file, options) for file in files)
    start, stop = locating.rows_of(path, part, total)
    try:
        chunks = _read_each(files, options)
        num_rows = yield from locating.take(chunks, start, stop)
    except DataError as error:
        _check_unchanged(files, stamps, error)
        raise
    _check_unchanged(files, stamps)
    if start and num_rows <= start and not (budget is not None and budget.spent):
        raise DataError(f"{path}: 0 rows in '{part}' of {num_rows:,} rows; give another slice")


def _read_each(files: Sequence[File], options: ReadOptions) -> Iterator[Chunk]:
    budget = options.budget
    for file in files:
        if budget is not None and budget.spent:
            return
        is_empty = True
        for chunk in read_file(file, options):
            is_empty = is_empty and not chunk.count()
            yield chunk
        if is_empty and not (budget is not None and budget.spent):
            raise DataError(f"{file}: 0 rows; give a file with at least one row")


def _check_unchanged(
    files: Sequence[File], stamps: Sequence[object], cause: DataError | None = None
) -> None:
    changed = [file for file, stamp in zip(files, stamps, strict=True) if stamp_of(file) != stamp]
    if changed:
        problems = [
            f"{file}: changed while it was being read; start again when it is complete"
            for file in changed
        ]
        raise DataError(problems[:MAX_PROBLEMS]) from cause


def read_file(file: File, options: ReadOptions) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks.

    Raises DataError after the last readable chunk if the rest of the file cannot be read.
    """
    try:
        yield from locating.READERS[opening.suffix_of(file.name)](file, options)
    except DataError:
        raise
    except (EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read to its end: {error}; copy it again?") from error
    except Exception as error:
        # Each remote file system raises errors of its own.
        if not isinstance(file, Path):
            raise RemoteError(unreadable(file, error)) from error
        if not isinstance(error, OSError):
            raise
        raise DataError(unreadable(file, error)) from error


def count_rows(file: File, options: ReadOptions) -> int:
    """Return the number of rows of a file, good and bad, regardless of the budget."""
    if file.suffix.lower() == ".parquet":
        return count_parquet_rows(file, options.limits)
    return sum(chunk.count() for chunk in read_file(file, replace(options, budget=None)))
