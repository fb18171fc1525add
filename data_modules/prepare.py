"""Turn a data set into tokens on disk: read, convert, encode, fit, and count what became of rows.

Composes source -> format -> template for one data set, in several processes where it is large, and
keeps the result in the cache. Never plans a step and never splits off a validation share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data_modules import source
from data_modules.cache import Key, code_version, open_or_make
from data_modules.documents import DocumentBuilder
from data_modules.rows import BadRows, Rejected, chunks_of, find_format, read_chunk, reject
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.store import Documents, StoreWriter, TokenStore
from data_modules.template import ChatTemplate, RowProblem
from data_modules.types import Conversation, DataError, Item

if TYPE_CHECKING:
    import transformers

COUNTS_FILE = "counts.json"
REJECTED_FILE = "rejected.jsonl"
CHUNKS_IN_PROCESS = 4
"""data sets of no more chunks are tokenised by this process: others would start for nothing"""
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


@dataclass(slots=True)
class Counts:
    """Count what became of the rows of a data set; origins are file:line."""

    rows: int = 0
    kept: int = 0
    chats: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    lost_tokens: int = 0
    empty: int = 0
    empty_origins: list[str] = field(default_factory=list)
    rejected: int = 0
    longest: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    stop_token_ids: list[int] = field(default_factory=list)
    largest_token: tuple[int, str] = (-1, "")

    def add_empty(self, origin: str) -> None:
        """Count a row that leaves nothing to learn."""
        self.empty += 1
        self.empty_origins = [*self.empty_origins, origin][:5]

    def add_length(self, tokens: int, origin: str) -> None:
        """Remember the row if it is one of the five longest."""
        if len(self.longest) < 5 or tokens > self.longest[-1][0]:
            self.longest = sorted([*self.longest, (tokens, origin)], key=_by_length)[:5]

    def add_note(self, kind: str, seen: str, count: int = 1) -> None:
        """Count a fact about a row; the first one seen is kept."""
        before, first = self.notes.get(kind, (0, seen))
        self.notes[kind] = (before + count, first)

    def merge(self, other: Counts) -> None:
        """Add the counts of the rows that come after these."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.empty_origins = [*self.empty_origins, *other.empty_origins][:5]
        for tokens, origin in other.longest:
            self.add_length(tokens, origin)
        for kind, (count, seen) in other.notes.items():
            self.add_note(kind, seen, count)
        self.stop_token_ids = sorted({*self.stop_token_ids, *other.stop_token_ids})
        self.largest_token = max(self.largest_token, other.largest_token)


_SUMMED = (
    "rows",
    "kept",
    "chats",
    "dropped",
    "truncated",
    "split",
    "lost_tokens",
    "empty",
    "rejected",
)


def _by_length(row: tuple[int, str]) -> int:
    return -row[0]


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


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Hold what became of a chunk of rows."""

    documents: Documents | None
    counts: Counts
    rejected: list[Rejected]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEncoder:
    """Encode chunks of rows; the same in this process and in others."""

    format: str
    columns: dict[str, str]
    template: ChatTemplate
    sequence_len: int
    on_long: str

    def __call__(self, chunk: source.Chunk) -> EncodedChunk:
        """Return the documents of the rows of `chunk`, and what became of the others."""
        counts, rejected = Counts(), []
        rows: dict[int, list[Item]] = {}
        for number, found in enumerate(read_chunk(chunk, self.format, self.columns)):
            if isinstance(found, Rejected):
                rejected.append(found)
            else:
                rows[number] = found
        counts.chats = sum(isinstance(items[0], Conversation) for items in rows.values())
        encoded = iter(self.template.encode([item for items in rows.values() for item in items]))
        refused: dict[int, str] = {}
        builder = DocumentBuilder(chunk.file, self.template, self.sequence_len, self.on_long)
        for number, items in rows.items():
            results = [next(encoded) for _ in items]
            problem = next((one for one in results if isinstance(one, RowProblem)), None)
            if problem is not None:
                refused[number] = problem.problem
                continue
            good = [one for one in results if not isinstance(one, RowProblem)]
            builder.add(good, items[0].origin, counts)
        rejected = sorted(rejected + reject(chunk, refused), key=_line)
        counts.rows = len(rows) - len(refused)
        counts.kept = builder.num_rows
        counts.stop_token_ids = sorted(self.template.stop_token_ids)
        documents = builder.build()
        if documents is not None:
            counts.largest_token = documents.largest_token()
        return EncodedChunk(documents, counts, rejected, chunk.num_bytes)


def _line(row: Rejected) -> int:
    return row.origin.line


def prepare_dataset(
    dataset: DatasetConfig,
    data: DataConfig,
    template: ChatTemplate,
    sequence_len: int,
    tokenizer_hash: str,
) -> Prepared:
    """Return a data set's tokens, from the cache where they stand there.

    Raises DataError with all rows that cannot be read, and where the files change meanwhile.
    """
    sha256 = source.fingerprint(dataset.path, dataset.split, dataset.revision)
    key = _key(dataset, data, template, sequence_len, tokenizer_hash, sha256)

    def make(folder: Path) -> None:
        _write(folder, dataset, data, template, sequence_len)
        if source.fingerprint(dataset.path, dataset.split, dataset.revision) != sha256:
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
    )


def check_dropped(counts: Counts, path: str, data: DataConfig, sequence_len: int) -> None:
    """Raise DataError when no row is left, or more are dropped than `data.max_dropped_share`."""
    tokens, origin = counts.longest[0] if counts.longest else (0, "")
    longest = f"the longest, {origin}, has {tokens:,} tokens"
    if data.on_long == "error" and counts.dropped:
        raise DataError(
            f"{path}: {counts.dropped:,} rows are longer than {sequence_len:,} tokens; "
            f"{longest}; raise data.sequence_len, or set data.on_long=drop or truncate_right"
        )
    lost = counts.dropped + counts.empty
    detail = f"{counts.dropped:,} are longer than {sequence_len:,} tokens"
    if counts.dropped:
        detail += f" ({longest}; set data.sequence_len={tokens} or data.on_long=truncate_right)"
    detail += f", {counts.empty:,} have nothing to learn"
    if counts.empty:
        detail += f" ({', '.join(counts.empty_origins)}: no answer, weight 0, or cut away)"
    if counts.truncated and counts.empty:
        detail += f"; {counts.truncated:,} were cut ({longest}; set data.sequence_len={tokens})"
    if not counts.kept:
        raise DataError(f"{path}: no row of {counts.rows:,} is left: {detail}")
    share = data.max_dropped_share
    if share is not None and lost / counts.rows > share:
        raise DataError(
            f"{path}: {lost:,} of {counts.rows:,} rows are dropped ({lost / counts.rows:.1%}"
            f"), data.max_dropped_share is {share}: {detail}"
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
    }
    return Key(
        path=dataset.path,
        split=dataset.split,
        parts={
            "data": sha256,
            "tokenizer": tokenizer_hash,
            "template": template.hash,
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
) -> None:
    """Tokenise a data set into `folder`."""
    bad = BadRows(data)
    format_name, chunks = find_format(dataset, chunks_of(dataset, data))
    encoder = ChunkEncoder(
        format=format_name or "",
        columns=dataset.columns,
        template=template,
        sequence_len=sequence_len,
        on_long=data.on_long,
    )
    counts, writer = Counts(), StoreWriter(folder)
    num_proc = data.num_proc or os.cpu_count() or 1
    try:
        with _Progress(dataset) as progress:
            for part in _encode(encoder, chunks, num_proc):
                bad.add_all(part.rejected)
                if part.documents is not None:
                    rows = part.documents.rows + counts.kept
                    writer.add(dataclasses.replace(part.documents, rows=rows))
                counts.merge(part.counts)
                progress.advance(part)
    except DataError as error:
        # The rest of a file cannot be read: said together with its bad rows.
        bad.add_problems(error.problems)
    writer.close()
    bad.raise_if_any()
    counts.rejected = len(bad.kept)
    counts.rows += len(bad.empty)
    for origin in bad.empty:
        counts.add_empty(str(origin))
    _check_rows_left(dataset, counts, bad)
    check_dropped(counts, dataset.path, data, sequence_len)
    note = {"format": format_name, "counts": dataclasses.asdict(counts)}
    (folder / COUNTS_FILE).write_text(json.dumps(note, indent=2) + "\n")
    with (folder / REJECTED_FILE).open("w") as file:
        for row in bad.kept:
            line = {"origin": str(row.origin), "problem": row.problem, "row": row.raw}
            file.write(json.dumps(line) + "\n")


def _check_rows_left(dataset: DatasetConfig, counts: Counts, bad: BadRows) -> None:
    if counts.rows:
        return
    if bad.kept:
        raise DataError(
            [
                f"{dataset.path}: all {len(bad.kept):,} rows are bad, so none is left; the first:",
                *(row.problem for row in bad.kept[:5]),
            ]
        )
    raise DataError(f"{dataset.path}: 0 rows; give a file with at least one row")


def _encode(
    encoder: ChunkEncoder, chunks: Iterable[source.Chunk], num_proc: int
) -> Iterator[EncodedChunk]:
    """Encode chunks in order; in `num_proc` processes where there are more than a few."""
    chunks = iter(chunks)
    head = list(itertools.islice(chunks, CHUNKS_IN_PROCESS + 1))
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if len(head) <= CHUNKS_IN_PROCESS or num_proc == 1 or not can_fork:
        yield from map(encoder, itertools.chain(head, chunks))
        return
    # Forked, so that nothing has to be imported or sent again: this process has no GPU yet.
    with ProcessPoolExecutor(
        num_proc, multiprocessing.get_context("fork"), _start_worker, (encoder,)
    ) as pool:
        waiting: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in itertools.chain(head, chunks):
                waiting.append(pool.submit(_encode_in_worker, chunk))
                # No more than this is read ahead, so that a large file never lies in memory.
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenises was killed, often for lack of memory; set data.num_proc=1"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_encoder: ChunkEncoder | None = None


def _start_worker(encoder: ChunkEncoder) -> None:
    global _encoder
    _encoder = encoder
    # One process a core, one thread a process; and an interrupt is the parent's to handle.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent was killed: nobody would ever take the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: source.Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)


class _Progress:
    """Show how far a data set is prepared, where a person looks on."""

    def __init__(self, dataset: DatasetConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._name = dataset.name or source.name_of(dataset.path)
        self._rows = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, part: EncodedChunk) -> None:
        """Count a chunk that is done."""
        self._rows += part.counts.rows
        text = f"tokenising {self._name}: {self._rows:,} rows"
        self._bar.update(self._task, advance=part.num_bytes, description=text)
