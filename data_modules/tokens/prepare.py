"""Tokenize a data set into the cache: read, convert, encode, fit to length, and count the rows.

Composes source -> format -> template for one data set, in several processes if it is large. Never
plans a step and never splits off validation rows. Estimates the tokens of an epoch within a second,
from the cache or from the first rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import DataError, RemoteError
from common.redaction import redact
from common.text import counted, printable, reason_of
from data_modules import source
from data_modules.audit.rules import CharacterCheck
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate
from data_modules.tokens.cache import (
    KEY_FILE,
    Key,
    code_version,
    is_whole,
    open_or_make,
    read_newest,
    read_note,
)
from data_modules.tokens.encode import (
    BadRows,
    ChunkEncoder,
    Counts,
    EncodedChunk,
    FirstRows,
    Rejected,
    check_dropped,
    chunks_of,
    encode_chunks,
    find_format,
    read_chunk,
)
from data_modules.tokens.store import StoreWriter, TokenStore
from data_modules.types import Conversation, Document, Item, Tokens

if TYPE_CHECKING:
    import transformers

COUNTS_FILE = "counts.json"
REJECTED_FILE = "rejected.jsonl"
TOKEN_SETTINGS = (
    *("train_on_inputs", "roles_to_train", "train_on_eos", "last_turn_only", "reasoning"),
    *("control_tokens", "unsupported_turns", "on_long", "on_bad_row", "drop_empty"),
    "max_row_bytes",
)
"""fields of DataConfig that affect the tokens"""
_ROW_LIMITS = ("columns", "key_chars", "nesting")
"""fields of `data.limits` that affect which rows on_bad_row=quarantine leaves out"""
SAMPLE_BYTES = 512 << 10
"""bytes read of all data sets together"""
_TURN_TOKENS = 5
"""tokens that a chat template adds to a turn, as ChatML and Llama 3's do"""

CountTokens = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set that is tokenized on disk."""

    store: TokenStore
    counts: Counts
    format: str
    format_guessed: bool
    sha256: str
    folder: Path
    how: str
    """whether it was tokenized now or found in the cache, in words"""
    is_cut: bool
    """whether there are more rows than `first_rows`"""
    notes: list[str]
    """in words, which files of a folder were left out"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec:
    """Everything besides the rows that determines the tokens of a data set."""

    config: DataConfig
    template: ChatTemplate
    sequence_len: int
    tokenizer_hash: str
    tokenizer: str = ""
    """path or hub id of the tokenizer, by which a plan finds the tokens"""
    labels: tuple[str, ...] = ()
    """names of the classes of rows with a label"""
    is_multi_label: bool = False
    """whether a row may have several of them"""
    first_rows: int | None = None
    """read only this many rows; None: all"""


def prepare_dataset(dataset: DatasetConfig, spec: TokenSpec) -> Prepared:
    """Return a data set's tokens, from the cache if they are there.

    Files of a stream, and files that are read in part, are identified by size and time instead of
    their content. Raises DataError with all rows that cannot be read, and if the files change while
    they are read.
    """
    data = spec.config
    # A branch on the hub moves, so the commit that the cache key names is read.
    revision = source.resolved_revision(dataset.path, dataset.revision) or dataset.revision
    dataset = dataclasses.replace(dataset, revision=revision)

    def fingerprint() -> str:
        return source.fingerprint(
            dataset.path,
            dataset.split,
            dataset.revision,
            name=dataset.name,
            by_stamp=data.streaming or spec.first_rows is not None,
            limits=data.limits,
        )

    sha256 = fingerprint()
    key = _key(dataset, spec, sha256)

    def make(folder: Path) -> None:
        _write(folder, dataset, spec)
        if fingerprint() != sha256:
            raise DataError(f"{dataset.path}: changed while it was being read; start again")

    folder, how = open_or_make(Path(data.cache_dir).expanduser(), key, make)
    try:
        note, store = read_note(folder / COUNTS_FILE), TokenStore(folder)
        counts = Counts(**note["counts"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder}: this entry of the cache cannot be read: {reason_of(error)}; remove it, and "
            "the data set is tokenized again"
        ) from error
    check_dropped(counts, dataset.path, data, spec.sequence_len)
    return Prepared(
        store=store,
        counts=counts,
        format=note["format"],
        format_guessed=dataset.format is None,
        sha256=sha256,
        folder=folder,
        how=how,
        is_cut=note["is_cut"],
        notes=source.notes_on_files(dataset.path, dataset.split, data.limits, dataset.name),
    )


def encoder_of(dataset: DatasetConfig, format_name: str | None, spec: TokenSpec) -> ChunkEncoder:
    """Return what encodes the rows of a data set of this format, None if it has no good row."""
    return ChunkEncoder(
        dataset=dataset,
        format=format_name or "",
        template=spec.template,
        characters=CharacterCheck(spec.template.tokenizer),
        sequence_len=spec.sequence_len,
        on_long=spec.config.on_long,
        labels=spec.labels,
        is_multi_label=spec.is_multi_label,
    )


def hash_of(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Return a hash of everything in a tokenizer that affects tokens."""
    state = [tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.special_tokens_map.items())]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _key(dataset: DatasetConfig, spec: TokenSpec, sha256: str) -> Key:
    import tokenizers
    import transformers

    data, template, first_rows = spec.config, spec.template, spec.first_rows
    settings = {name: getattr(data, name) for name in TOKEN_SETTINGS}
    settings |= {
        "format": dataset.format,
        "columns": dict(dataset.columns),
        "revision": dataset.revision,
        "sequence_len": spec.sequence_len,
        "labels": [*spec.labels, spec.is_multi_label],
        "encoder_decoder": template.is_encoder_decoder,
        "limits": {name: getattr(data.limits, name) for name in _ROW_LIMITS},
    }
    return Key(
        path=redact(dataset.path),  # the signature or password in a URL changes
        split=dataset.split if first_rows is None else f"{dataset.split}, first {first_rows}",
        parts={
            # Data without a fingerprint is never found in the cache.
            "data": sha256 or uuid.uuid4().hex,
            "tokenizer": spec.tokenizer_hash,
            # A template that writes the date gives different tokens tomorrow.
            "template": f"{template.hash} {template.date_key}".strip(),
            "settings": settings,
            "code": code_version(),
            "versions": {
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        },
    )


def _write(folder: Path, dataset: DatasetConfig, spec: TokenSpec) -> None:
    """Tokenize a data set into `folder`."""
    data = spec.config
    first_rows = FirstRows(chunks_of(dataset, data), spec.first_rows)
    format_name, chunks = find_format(dataset, iter(first_rows))
    encoder = encoder_of(dataset, format_name, spec)
    counts, writer = Counts(), StoreWriter(folder)
    num_proc = data.num_proc or len(os.sched_getaffinity(0))
    num_rows = num_tokens = 0
    with (folder / REJECTED_FILE).open("w") as rejected:
        bad = BadRows(data, rejected)
        try:
            with _Progress(dataset) as progress:
                for part in encode_chunks(encoder, chunks, num_proc):
                    bad.add_all(part.rejected)
                    if part.documents is not None:
                        rows = part.documents.rows + num_rows
                        writer.add(dataclasses.replace(part.documents, rows=rows))
                        num_tokens += part.documents.num_tokens
                    num_rows += part.num_rows
                    if num_rows > data.limits.rows:
                        raise DataError(
                            f"{dataset.path}: has more than {data.limits.rows:,} rows "
                            "(data.limits.rows); raise it if the data is right, or use a part of "
                            "it: data.datasets[].split=train[:10%]"
                        )
                    counts.merge(part.counts)
                    progress.advance(part)
        except RemoteError:
            raise
        except DataError as error:
            # The rest of the file cannot be read; reported together with its bad rows.
            bad.add_problems(error.problems)
    writer.close()
    bad.raise_if_any(counts.rows)
    counts.rejected = bad.num_kept
    counts.rows += bad.num_empty
    for origin in bad.first_empty:
        counts.add_empty(str(origin))
    counts.empty += bad.num_empty - len(bad.first_empty)
    if not counts.rows and bad.num_kept:
        first = f"{dataset.path}: all {bad.num_kept:,} rows are bad; the first:"
        raise DataError([first, *bad.first_kept])
    if not counts.rows:
        raise DataError(f"{dataset.path}: 0 rows; give a file with at least one row")
    check_dropped(counts, dataset.path, data, spec.sequence_len)
    note = {
        "format": format_name,
        "counts": dataclasses.asdict(counts),
        "is_cut": first_rows.is_cut,
        "tokens": num_tokens,
        "tokenizer": spec.tokenizer,
    }
    (folder / COUNTS_FILE).write_text(json.dumps(note, indent=2) + "\n")


class _Progress:
    """A progress bar of the tokenization, on a terminal."""

    def __init__(self, dataset: DatasetConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._name = printable(dataset.name or source.name_of(dataset.path))
        self._rows = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        total = source.num_bytes(dataset.path, dataset.split, dataset.name)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, part: EncodedChunk) -> None:
        """Add a tokenized chunk."""
        self._rows += part.counts.rows
        text = f"tokenizing {self._name}: {counted(self._rows, 'row')}"
        self._bar.update(self._task, advance=part.num_bytes, description=text)


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
    return [
        sum(itertools.islice(counted, len(_texts(item)))) + _other_tokens(item) for item in items
    ]


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


def _other_tokens(item: Item) -> int:
    """Return the number of an item's tokens that come from none of its texts."""
    if isinstance(item, Tokens):
        return len(item.input_ids)
    return 1 + (_TURN_TOKENS * len(item.turns) if isinstance(item, Conversation) else 0)


def _kept(length: int, sequence_len: int, on_long: str) -> int:
    """Return the tokens of a row that are left after `on_long` is applied."""
    if length <= sequence_len or on_long == "split":
        return length
    return sequence_len if on_long.startswith("truncate") else 0
