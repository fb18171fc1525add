"""Tokenize a data set into the cache: read, convert, encode, fit to length, and count the rows.

Composes source -> format -> template for one data set, in several processes if it is large. Never
plans a step and never splits off validation rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import DataError, RemoteError
from common.redaction import redact
from common.text import counted, printable, reason_of
from data_modules import source
from data_modules.audit.characters import CharacterCheck
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate
from data_modules.tokens.cache import Key, code_version, open_or_make, read_note
from data_modules.tokens.encode import (
    BadRows,
    ChunkEncoder,
    Counts,
    EncodedChunk,
    FirstRows,
    check_dropped,
    chunks_of,
    encode_chunks,
    find_format,
)
from data_modules.tokens.store import StoreWriter, TokenStore

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
