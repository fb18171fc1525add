"""Find the files behind a path, on disk or remote, and yield their rows with file and line.

Decides which files, hub rows and samples a path and a split mean, which slice and shard of them is
read, and that a file stays the same meanwhile. How bytes become rows is in readers.py. Never looks
at what a row means.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from data_modules.samples.corpus import CORPORA, read_corpus
from data_modules.source.chunks import MAX_RAW, BadRow, BatchChunk, Chunk, grouped
from data_modules.source.locating import (
    SAMPLE_PREFIX,
    SAMPLES,
    files_of,
    is_generated,
    is_hub_id,
    is_remote,
    is_url,
    name_of,
    only_train,
    size_of,
    stamp_of,
)
from data_modules.source.opening import Budget, File, Url, reason_of
from data_modules.source.readers import MAX_ROW_BYTES, count_rows, read_file
from data_modules.source.splits import Part, check_split
from data_modules.types import MAX_PROBLEMS, DataError, Origin, Problems, Row

__all__ = [
    "MAX_RAW",
    "MAX_ROW_BYTES",
    "BadRow",
    "Budget",
    "Chunk",
    "Part",
    "check_split",
    "find_files",
    "fingerprint",
    "is_generated",
    "is_hub_id",
    "is_remote",
    "is_url",
    "name_of",
    "read_chunks",
    "read_rows",
]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT = 10.0
_HUB_ROWS = 1000
_SAMPLE_ROW_BYTES = 1000  # about; only the size of a chunk hangs on it


def read_chunks(
    path: str,
    *,
    split: str = "train",
    revision: str | None = None,
    budget: Budget | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    rows: tuple[int, int | None] = (0, None),
    shard: tuple[int, int] = (0, 1),
    streaming: bool = False,
) -> Iterator[Chunk]:
    """Yield the rows of a file, folder, glob, URL, hub id or `sample:` name in chunks.

    A chunk can be sent to another process and parsed there. With a `budget` only about so many
    bytes are read, of all files together; a slice of a large file that does not begin at its first
    row is then not looked at. `rows` (start, stop), from 0, are those of `split` that are wanted,
    as where some are held out; of these `shard` (index, count) takes every count-th, so that the
    shards have each row once between them. `streaming` fetches a hub data set while it is read.
    Raises DataError where a file cannot be read to its end, changes meanwhile, or has no row; what
    is wrong with single rows is in Chunk.rows.
    """
    if revision is not None and not is_hub_id(path):
        raise DataError(f"{path}: revision '{revision}' is given, which only a hub data set has")
    parts = _parts(path, split)
    if is_generated(path):
        chunks = map(functools.partial(_read_sample, path), parts)
    elif is_hub_id(path):
        # Its files can be dealt out only where all rows of them are wanted.
        is_whole = streaming and rows == (0, None) and split == parts[0].name
        dealt, shard = (shard, (0, 1)) if is_whole else ((0, 1), shard)
        hub = functools.partial(_read_hub, path, revision, max_row_bytes, dealt, streaming)
        chunks = map(hub, parts)
    else:
        chunks = map(functools.partial(_read_files, path, budget, max_row_bytes), parts)
    yield from _take(itertools.chain.from_iterable(chunks), *rows, shard)


def read_rows(
    path: str,
    split: str = "train",
    budget: Budget | None = None,
    *,
    revision: str | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Row]:
    """Yield the rows of `read_chunks`; raises DataError with all problems after the good rows."""
    problems = Problems()
    try:
        for chunk in read_chunks(
            path, split=split, revision=revision, budget=budget, max_row_bytes=max_row_bytes
        ):
            for row in chunk.rows():
                if isinstance(row, BadRow):
                    problems.add(row.problem)
                else:
                    yield row
    except DataError as error:
        for problem in error.problems:
            problems.add(problem)
    problems.raise_if_any()


def find_files(path: str, split: str = "train") -> list[File]:
    """Return the files behind `path`; raises DataError when there is none that can be read."""
    files: dict[str, File] = {}
    for part in _parts(path, split):
        files |= {str(file): file for file in files_of(path, part.name)}
    return list(files.values())


def fingerprint(path: str, split: str = "train", revision: str | None = None) -> str:
    """Return the sha256 of the bytes behind `path`.

    For remote files it is that of their etags, or of size and time; for a hub id it is the commit
    that `revision` means now, and "" where the hub does not answer.
    """
    if is_hub_id(path):
        return _commit_of(path, revision)
    files: Sequence[File]
    files = sorted(SAMPLES.glob("*.py")) if is_generated(path) else find_files(path, split)
    digest = hashlib.sha256()
    for file in files:
        if isinstance(file, Url) and (stamp := stamp_of(file)) is not None:
            digest.update(f"{file} {stamp}\n".encode())
            continue
        try:
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {reason_of(error)}") from error
    return digest.hexdigest()


def _parts(path: str, split: str) -> list[Part]:
    try:
        return check_split(split)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _take(
    chunks: Iterator[Chunk], start: int, stop: int | None, shard: tuple[int, int] = (0, 1)
) -> Generator[Chunk, None, int]:
    """Yield the rows from `start` to `stop`, and of those every count-th; return how many passed.

    Nothing is counted where all rows are taken.
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


def _read_sample(path: str, part: Part) -> Iterator[Chunk]:
    if part.name != "train":
        raise DataError(only_train(path, part.name))
    _, _, num_documents = CORPORA[path.removeprefix(SAMPLE_PREFIX)]
    rows = (
        (_SAMPLE_ROW_BYTES, Row(dict(values), Origin(path, number)))
        for number, values in enumerate(read_corpus(path.removeprefix(SAMPLE_PREFIX)), 1)
    )
    yield from _take(grouped(rows, path), *_resolved(path, part, num_documents))


def _resolved(path: str, part: Part, total: int | None) -> tuple[int, int | None]:
    """Return the slice's rows; raises DataError where it has none."""
    start, stop = part.resolve(total)
    if part.is_sliced and (start == total or (stop is not None and stop <= start)):
        rows = "" if total is None else f" of {total:,} rows"
        raise DataError(f"{path}: 0 rows in '{part}'{rows}; give another slice")
    return start, stop


def _read_files(
    path: str, budget: Budget | None, max_row_bytes: int, part: Part
) -> Iterator[Chunk]:
    files = files_of(path, part.name)
    stamps = [stamp_of(file) for file in files]
    total = None
    if part.needs_total:
        if budget is not None and sum(size_of(file) for file in files) > budget.left:
            # Not to be counted in this short time: what surely is in the slice, or nothing.
            if part.start is not None:
                budget.left = 0
                return
            part = Part(part.name)
        else:
            total = sum(count_rows(file, max_row_bytes) for file in files)
    start, stop = _resolved(path, part, total)
    try:
        chunks = _read_each(files, budget, max_row_bytes)
        num_rows = yield from _take(chunks, start, stop)
    except DataError as error:
        _check_unchanged(files, stamps, error)
        raise
    _check_unchanged(files, stamps)
    if start and num_rows <= start and not (budget is not None and budget.spent):
        raise DataError(f"{path}: 0 rows in '{part}' of {num_rows:,} rows; give another slice")


def _read_each(files: Sequence[File], budget: Budget | None, max_row_bytes: int) -> Iterator[Chunk]:
    for file in files:
        if budget is not None and budget.spent:
            return
        is_empty = True
        for chunk in read_file(file, budget, max_row_bytes):
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
            f"{file}: changed while it was read; start again when it is written" for file in changed
        ]
        raise DataError(problems[:MAX_PROBLEMS]) from cause


def _read_hub(
    path: str,
    revision: str | None,
    max_row_bytes: int,
    shard: tuple[int, int],
    streaming: bool,
    part: Part,
) -> Iterator[Chunk]:
    import datasets

    try:
        rows = datasets.load_dataset(path, split=part.name, revision=revision, streaming=streaming)
        if streaming:
            yield from _stream_hub(path, part, rows, shard)
        else:
            yield from _load_hub(path, part, rows, max_row_bytes)
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        asked = f"split '{part.name}'" + (f", revision '{revision}'" if revision else "")
        raise DataError(
            f"{path}: no such file here, and the hub gave no data set of that name "
            f"({asked}): {reason_of(error)}"
        ) from error


def _load_hub(path: str, part: Part, rows: Any, max_row_bytes: int) -> Iterator[Chunk]:
    if not len(rows):
        raise DataError(f"{path}: 0 rows in split '{part.name}'; give one with at least one row")
    tables = rows.with_format("arrow").iter(batch_size=_HUB_ROWS)
    # Its types say which text is JSON; see BatchChunk.
    described = rows.features.arrow_schema.metadata
    tables = (table.replace_schema_metadata(described) for table in tables)
    chunks = _hub_chunks(path, tables, max_row_bytes)
    yield from _take(chunks, *_resolved(path, part, len(rows)))


def _hub_chunks(path: str, tables: Iterator[Any], max_row_bytes: int) -> Iterator[Chunk]:
    first = 1
    for table in tables:
        for batch in table.combine_chunks().to_batches():
            numbers = range(first, first + batch.num_rows)
            first = numbers.stop
            yield BatchChunk(path, batch.nbytes, numbers, batch, max_row_bytes)


def _stream_hub(path: str, part: Part, rows: Any, shard: tuple[int, int]) -> Iterator[Chunk]:
    index, count = shard
    name = path
    if count > 1 and rows.num_shards % count == 0:
        # Its files are dealt out: nobody fetches what another one reads.
        from datasets.distributed import split_dataset_by_node

        rows = split_dataset_by_node(rows, rank=index, world_size=count)
        name, shard = f"{path} (part {index + 1} of {count})", (0, 1)
    total = None
    if part.needs_total:
        infos = rows.info.splits or {}
        if part.name not in infos or not infos[part.name].num_examples:
            raise DataError(
                f"{path}: how many rows split '{part.name}' has is not known while it is streamed; "
                f"give '{part}' in numbers of rows, or set data.streaming=false"
            )
        total = int(infos[part.name].num_examples)
    start, stop = _resolved(path, part, total)
    numbered = (
        (_SAMPLE_ROW_BYTES, Row(dict(values), Origin(name, number)))
        for number, values in enumerate(rows, 1)
    )
    num_rows = yield from _take(grouped(numbered, name), start, stop, shard)
    if start and num_rows <= start:
        raise DataError(f"{path}: 0 rows in '{part}' of {num_rows:,} rows; give another slice")


def _commit_of(path: str, revision: str | None) -> str:
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().dataset_info(path, revision=revision, timeout=_HUB_TIMEOUT)
    except (OSError, ValueError):
        return ""
    return info.sha or ""
