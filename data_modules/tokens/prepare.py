"""Turn a data set into tokens on disk: read, convert, encode, fit, and count what became of rows.

Composes source -> format -> template for one data set, in several processes where it is large, and
keeps the result in the cache. Never plans a step and never splits off a validation share.
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

from data_modules import source
from data_modules.messages import DataError, RemoteError, printable, redact
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate
from data_modules.tokens.cache import Key, code_version, open_or_make
from data_modules.tokens.encode import (
    ChunkEncoder,
    Counts,
    EncodedChunk,
    check_dropped,
    encode_chunks,
)
from data_modules.tokens.rows import BadRows, FirstRows, chunks_of, find_format
from data_modules.tokens.store import StoreWriter, TokenStore

if TYPE_CHECKING:
    import transformers

COUNTS_FILE = "counts.json"
REJECTED_FILE = "rejected.jsonl"
TOKEN_SETTINGS = (
    "train_on_inputs",
    "roles_to_train",
    "train_on_eos",
    "last_turn_only",
    "reasoning",
    "control_tokens",
    "on_long",
    "on_bad_row",
    "drop_empty",
    "max_row_bytes",
)
"""what of DataConfig shapes the tokens"""
ROW_LIMITS = ("columns", "key_chars", "nesting")
"""limits beyond which a row is left out where on_bad_row=quarantine"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Hold a data set that is ready on disk: its tokens, its counts, and how it came there."""

    store: TokenStore
    counts: Counts
    format: str
    format_guessed: bool
    sha256: str
    folder: Path
    how: str
    is_cut: bool


def prepare_dataset(
    dataset: DatasetConfig,
    data: DataConfig,
    template: ChatTemplate,
    sequence_len: int,
    tokenizer_hash: str,
    first_rows: int | None = None,
) -> Prepared:
    """Return a data set's tokens, from the cache where they stand there.

    With `first_rows` only so many rows are read, and `is_cut` says whether there are more. The
    content of a stream's files, and of those read in part, is taken from their size and time: they
    are not read to the end. Raises DataError with all rows that cannot be read, and where the files
    change meanwhile.
    """
    # A branch of the hub moves: what is read is the commit that the key names.
    revision = source.resolved_revision(dataset.path, dataset.revision) or dataset.revision
    dataset = dataclasses.replace(dataset, revision=revision)

    def fingerprint() -> str:
        return source.fingerprint(
            dataset.path,
            dataset.split,
            dataset.revision,
            by_stamp=data.streaming or first_rows is not None,
            limits=data.limits,
        )

    sha256 = fingerprint()
    key = _key(dataset, data, template, sequence_len, tokenizer_hash, sha256, first_rows)

    def make(folder: Path) -> None:
        _write(folder, dataset, data, template, sequence_len, first_rows)
        if fingerprint() != sha256:
            raise DataError(f"{dataset.path}: changed while it was being read; start again")

    folder, how = open_or_make(Path(data.cache_dir).expanduser(), key, make)
    note = json.loads((folder / COUNTS_FILE).read_text())
    counts = Counts(**note["counts"])
    check_dropped(counts, dataset.path, data, sequence_len)
    return Prepared(
        store=TokenStore(folder),
        counts=counts,
        format=note["format"],
        format_guessed=dataset.format is None,
        sha256=sha256,
        folder=folder,
        how=how,
        is_cut=note["is_cut"],
    )


def hash_of(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Return a hash of all of a tokenizer that shapes tokens."""
    state = [tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.special_tokens_map.items())]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _key(
    dataset: DatasetConfig,
    data: DataConfig,
    template: ChatTemplate,
    sequence_len: int,
    tokenizer_hash: str,
    sha256: str,
    first_rows: int | None,
) -> Key:
    import tokenizers
    import transformers

    settings = {name: getattr(data, name) for name in TOKEN_SETTINGS}
    settings |= {
        "format": dataset.format,
        "columns": dict(dataset.columns),
        "revision": dataset.revision,
        "sequence_len": sequence_len,
        "encoder_decoder": template.is_encoder_decoder,
        "limits": {name: getattr(data.limits, name) for name in ROW_LIMITS},
    }
    return Key(
        path=redact(dataset.path),  # a signed URL is another one each day, and so is a password
        split=dataset.split if first_rows is None else f"{dataset.split}, first {first_rows}",
        parts={
            # What nobody can name is never found again.
            "data": sha256 or uuid.uuid4().hex,
            "tokenizer": tokenizer_hash,
            # A template that writes the day gives other tokens tomorrow.
            "template": f"{template.hash} {template.date_key}".strip(),
            "settings": settings,
            "code": code_version(),
            "versions": {
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        },
    )


def _write(
    folder: Path,
    dataset: DatasetConfig,
    data: DataConfig,
    template: ChatTemplate,
    sequence_len: int,
    first_rows: int | None,
) -> None:
    """Tokenize a data set into `folder`."""
    read = FirstRows(chunks_of(dataset, data), first_rows)
    format_name, chunks = find_format(dataset, iter(read))
    encoder = ChunkEncoder(
        format=format_name or "",
        columns=dataset.columns,
        template=template,
        sequence_len=sequence_len,
        on_long=data.on_long,
    )
    counts, writer = Counts(), StoreWriter(folder)
    num_proc = data.num_proc or len(os.sched_getaffinity(0))
    num_rows = 0
    with (folder / REJECTED_FILE).open("w") as rejected:
        bad = BadRows(data, rejected)
        try:
            with _Progress(dataset) as progress:
                for part in encode_chunks(encoder, chunks, num_proc):
                    bad.add_all(part.rejected)
                    if part.documents is not None:
                        rows = part.documents.rows + num_rows
                        writer.add(dataclasses.replace(part.documents, rows=rows))
                    num_rows += part.num_rows
                    if num_rows > data.limits.rows:
                        raise DataError(_too_many_rows(dataset, data))
                    counts.merge(part.counts)
                    progress.advance(part)
        except RemoteError:
            raise
        except DataError as error:
            # The rest of a file cannot be read: said together with its bad rows.
            bad.add_problems(error.problems)
    writer.close()
    bad.raise_if_any()
    counts.rejected = bad.num_kept
    counts.rows += bad.num_empty
    for origin in bad.first_empty:
        counts.add_empty(str(origin))
    counts.empty += bad.num_empty - len(bad.first_empty)
    _check_rows_left(dataset, counts, bad)
    check_dropped(counts, dataset.path, data, sequence_len)
    note = {
        "format": format_name,
        "counts": dataclasses.asdict(counts),
        "is_cut": read.is_cut,
    }
    (folder / COUNTS_FILE).write_text(json.dumps(note, indent=2) + "\n")


def _too_many_rows(dataset: DatasetConfig, data: DataConfig) -> str:
    return (
        f"{dataset.path}: has more than {data.limits.rows:,} rows, which is data.limits.rows; "
        "raise it if the data is right, or give a part of it: data.datasets[].split=train[:10%]"
    )


def _check_rows_left(dataset: DatasetConfig, counts: Counts, bad: BadRows) -> None:
    if counts.rows:
        return
    if bad.num_kept:
        raise DataError(
            [
                f"{dataset.path}: all {bad.num_kept:,} rows are bad, so none is left; the first:",
                *bad.first_kept,
            ]
        )
    raise DataError(f"{dataset.path}: 0 rows; give a file with at least one row")


class _Progress:
    """Show how far a data set is prepared, where a person looks on."""

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
        self._task = self._bar.add_task("", total=source.num_bytes(dataset.path, dataset.split))

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, part: EncodedChunk) -> None:
        """Count a chunk that is done."""
        self._rows += part.counts.rows
        text = f"tokenizing {self._name}: {self._rows:,} rows"
        self._bar.update(self._task, advance=part.num_bytes, description=text)
