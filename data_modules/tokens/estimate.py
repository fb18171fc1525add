"""Estimate the tokens of an epoch within a second, from the cache or from the first rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.redaction import redact
from common.text import counted
from data_modules import source
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.tokens.encode import Rejected, chunks_of, find_format, read_chunk
from data_modules.tokens.prepare import (
    COUNTS_FILE,
    KEY_FILE,
    TOKEN_SETTINGS,
    Key,
    is_whole,
    read_newest,
    read_note,
)
from data_modules.types import Conversation, Document, Item, Tokens

SAMPLE_BYTES = 512 << 10
"""bytes read of all data sets together"""
_TURN_TOKENS = 5
"""tokens that a chat template adds to a turn, as ChatML and Llama 3's do"""

CountTokens = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochTokens:
    """The estimated tokens of an epoch, and in words what the estimate is based on."""

    tokens: int
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    tokens: float
    rows: float
    rows_read: int
    is_cached: bool


def estimate_epoch(
    config: DataConfig, *, sequence_len: int, tokenizer: str, count_tokens: CountTokens
) -> EpochTokens:
    """Estimate the tokens of an epoch; DataError with a short phrase if it cannot be estimated.

    `tokenizer` is the path or hub id with which cached tokens must have been made. `count_tokens`
    returns the number of tokens of each text.
    """
    datasets = config.datasets
    if not datasets:
        raise DataError("no data set is named")
    if config.streaming:
        raise DataError("the length of a stream is unknown")
    if config.mixture.weights != "epochs" and len(datasets) > 1:
        raise DataError(f"data.mixture.weights={config.mixture.weights} mixes data sets by shares")
    tokens, sizes = 0.0, list[_Size]()
    for dataset in datasets:
        size = _find_cached(dataset, config, sequence_len, tokenizer)
        if size is None:
            budget = source.Budget(SAMPLE_BYTES // len(datasets))
            size = _sample(dataset, config, sequence_len, count_tokens, budget)
        held_out = config.held_out
        left = 1 - (held_out if held_out < 1 else min(1.0, held_out / max(1.0, size.rows)))
        if dataset.max_rows is not None:
            left = min(left, dataset.max_rows / max(1.0, size.rows))
        weight = dataset.weight if config.mixture.weights == "epochs" else 1.0
        tokens += size.tokens * left * weight
        sizes.append(size)
    return EpochTokens(tokens=round(tokens), how=_how(sizes))


def _how(sizes: Sequence[_Size]) -> str:
    rows, read = round(sum(size.rows for size in sizes)), sum(size.rows_read for size in sizes)
    if all(size.is_cached for size in sizes):
        return f"{counted(rows, 'row')} tokenized in the cache"
    return f"all {rows:,} rows" if read == rows else f"the first {read:,} of about {rows:,} rows"


def _find_cached(
    dataset: DatasetConfig, data: DataConfig, sequence_len: int, tokenizer: str
) -> _Size | None:
    """Return the size in the newest entry of the cache, if its settings and files are the same."""
    root = Path(data.cache_dir).expanduser()
    try:
        folder = root / read_newest(root, Key(redact(dataset.path), dataset.split, {}))
        settings = read_note(folder / KEY_FILE)["parts"]["settings"]
        note = read_note(folder / COUNTS_FILE)
        rows, tokens = int(note["counts"]["rows"]), int(note["tokens"])
        size = _Size(tokens=tokens, rows=rows, rows_read=rows, is_cached=True)
        requested: dict[str, Any] = {name: getattr(data, name) for name in TOKEN_SETTINGS}
        requested |= {"format": dataset.format, "columns": dataset.columns}
        requested |= {"sequence_len": sequence_len}
        is_same = note["tokenizer"] == tokenizer and all(
            settings[name] == value for name, value in requested.items()
        )
        is_current = _is_unchanged_since(dataset, (folder / KEY_FILE).stat().st_mtime)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return size if is_same and is_current and is_whole(folder, [COUNTS_FILE]) else None


def _is_unchanged_since(dataset: DatasetConfig, seconds: float) -> bool:
    """Return whether no file of a data set changed since a time; remote files are not checked."""
    if source.is_remote(dataset.path):
        return True
    files = source.find_files(dataset.path, dataset.split, name=dataset.name)
    return all(file.stat().st_mtime <= seconds for file in files if isinstance(file, Path))


def _sample(
    dataset: DatasetConfig,
    data: DataConfig,
    sequence_len: int,
    count_tokens: CountTokens,
    budget: source.Budget,
) -> _Size:
    """Count the tokens of the first rows, and extrapolate by bytes."""
    if source.is_remote(dataset.path):
        raise DataError(f"{redact(dataset.path)} is not in the cache of tokenized data")
    limit, num_bytes, num_rows = budget.left, 0, 0
    items: list[Item] = []
    name, chunks = find_format(dataset, chunks_of(dataset, data, budget))
    is_cut = False
    for chunk in chunks:
        for row in read_chunk(chunk, name or "", dataset):
            items += [] if isinstance(row, Rejected) else row
        num_bytes, num_rows = num_bytes + chunk.num_bytes, num_rows + chunk.count()
        if is_cut := num_bytes >= limit:
            break
    if not items:
        raise DataError(f"{dataset.path}: its first {limit >> 10} KiB hold no row that can be read")
    lengths = _lengths(items, count_tokens)
    tokens = sum(_kept(length, sequence_len, data.on_long) for length in lengths)
    if not (is_cut or budget.spent):
        return _Size(tokens=tokens, rows=num_rows, rows_read=num_rows, is_cached=False)
    total = source.num_bytes(dataset.path, dataset.split, dataset.name)
    if total is None:
        raise DataError(f"{dataset.path}: the size of its rows is unknown until they are read")
    factor = max(1.0, total / num_bytes)  # not the budget, which may end within a row
    return _Size(
        tokens=tokens * factor, rows=num_rows * factor, rows_read=num_rows, is_cached=False
    )


def _lengths(items: Sequence[Item], count_tokens: CountTokens) -> list[int]:
    counted = iter(count_tokens([text for item in items for text in _texts(item)]))
    lengths = []
    for item in items:
        length = sum(itertools.islice(counted, len(_texts(item))))
        if isinstance(item, Tokens):
            length += len(item.input_ids)
        else:
            length += 1 + (_TURN_TOKENS * len(item.turns) if isinstance(item, Conversation) else 0)
        lengths.append(length)
    return lengths


def _texts(item: Item) -> list[str]:
    """Return the texts of an item that are tokenized."""
    if isinstance(item, Tokens):
        return []
    if isinstance(item, Document):
        return [item.text]
    texts = [turn.content + (turn.reasoning or "") for turn in item.turns]
    calls = [
        json.dumps({"name": call.name, "arguments": call.arguments}, default=dict)
        for turn in item.turns
        for call in turn.tool_calls
    ]
    return texts + calls + [json.dumps(tool, default=dict) for tool in item.tools]


def _kept(length: int, sequence_len: int, on_long: str) -> int:
    """Return the tokens of a row that are left after `on_long` is applied."""
    if length <= sequence_len or on_long == "split":
        return length
    return sequence_len if on_long.startswith("truncate") else 0
