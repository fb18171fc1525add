"""Encode chunks of rows: format, template and fit together, in this process or in several.

Decides in which process a chunk is encoded. Never reads a file, and never keeps a result.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from data_modules import source
from data_modules.messages import DataError, Origin
from data_modules.template import ChatTemplate, RowProblem
from data_modules.template.masking import Encoded
from data_modules.tokens.rows import Rejected, read_chunk, reject
from data_modules.tokens.store import Documents
from data_modules.types import Conversation, Item

if TYPE_CHECKING:
    import numpy as np

    from data_modules.settings import DataConfig

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
CHUNKS_IN_PROCESS = 4
"""data sets of no more chunks are tokenized by this process: others would start for nothing"""


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
        """Count a row that leaves nothing to train on."""
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


def _by_length(row: tuple[int, str]) -> int:
    return -row[0]


def check_dropped(counts: Counts, path: str, data: DataConfig, sequence_len: int) -> None:
    """Raise DataError when no row is left, or more are dropped than `data.max_dropped_share`."""
    tokens, origin = counts.longest[0] if counts.longest else (0, "")
    longest = f"the longest, {origin}, has {tokens:,} tokens"
    if data.on_long == "error" and counts.dropped:
        raise DataError(
            f"{path}: {counts.dropped:,} rows are longer than {sequence_len:,} tokens; "
            f"{longest}; raise data.sequence_len, or set data.on_long=split, truncate_right or drop"
        )
    lost = counts.dropped + counts.empty + counts.rejected
    num_rows = counts.rows + counts.rejected
    detail = f"{counts.dropped:,} are longer than {sequence_len:,} tokens"
    if counts.dropped:
        detail += (
            f" ({longest}; set data.sequence_len={tokens} or data.on_long=split or truncate_right)"
        )
    detail += f", {counts.empty:,} have nothing to train on"
    if counts.empty:
        detail += f" ({', '.join(counts.empty_origins)}: no answer, weight 0, or cut away)"
    if counts.truncated and counts.empty:
        detail += f"; {counts.truncated:,} were cut ({longest}; set data.sequence_len={tokens})"
    if counts.rejected:
        detail += f", {counts.rejected:,} are bad"
    if not counts.kept:
        raise DataError(f"{path}: no row of {counts.rows:,} is left: {detail}")
    share = data.max_dropped_share
    if share is not None and lost / num_rows > share:
        raise DataError(
            f"{path}: {lost:,} of {num_rows:,} rows are dropped ({lost / num_rows:.1%}"
            f"), data.max_dropped_share is {share}: {detail}"
        )


class TokenizerFacts(Protocol):
    """What the documents need to know of the template."""

    bos_token_id: int | None

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end answers."""


class DocumentBuilder:
    """Collect the documents of one chunk of a file, and count rows without a trained token."""

    def __init__(
        self, file: str, template: TokenizerFacts, sequence_len: int, on_long: str
    ) -> None:
        self._file, self._sequence_len, self._on_long = file, sequence_len, on_long
        self._template = template
        self._pieces: list[Encoded] = []
        self._rows: list[int] = []
        self._lines: list[int] = []
        self.num_rows = 0

    def add(self, encoded: Sequence[Encoded], number: int, origin: Origin, counts: Counts) -> None:
        """Add what row `number` of the chunk became: one result an item."""
        longest = max((_num_tokens(one) for one in encoded), default=0)
        counts.add_length(longest, str(origin))
        how = self._sequence_len, self._on_long, self._template.bos_token_id
        fitting = [piece for one in encoded for piece in fit(one, *how)]
        useful = [piece for piece in fitting if is_trained(piece)]
        if longest > self._sequence_len:
            if not fitting or self._on_long == "error":
                counts.dropped += 1
            elif self._on_long == "drop":
                counts.add_note("branch_dropped", str(origin))
            elif self._on_long == "split":
                counts.split += 1
            else:
                counts.truncated += 1
            if self._on_long != "split":
                kept = sum(map(_num_tokens, fitting))
                counts.lost_tokens += sum(map(_num_tokens, encoded)) - kept
        if not useful:
            if fitting or longest <= self._sequence_len:
                counts.add_empty(str(origin))
            return
        for kind, seen in {note.kind: note.seen for one in encoded for note in one.notes}.items():
            counts.add_note(kind, f"{origin} {seen}".rstrip())
        self._pieces += useful
        self._rows += [number] * len(useful)
        self._lines += [origin.line] * len(useful)
        self.num_rows += 1

    def build(self) -> Documents | None:
        """Return the documents; None where there is none."""
        import numpy as np

        pieces = self._pieces
        if not pieces:
            return None
        targets = [one.target_ids for one in pieces if one.target_ids is not None]
        stops = self._template.stop_token_ids
        return Documents(
            file=self._file,
            input_ids=np.concatenate([one.input_ids for one in pieces]),
            lengths=np.array([len(one.input_ids) for one in pieces], dtype=np.int64),
            weights=np.concatenate([one.weights for one in pieces]),
            target_ids=np.concatenate(targets) if targets else None,
            target_lengths=np.array([len(one) for one in targets]) if targets else None,
            rows=np.array(self._rows, dtype=np.int64),
            lines=np.array(self._lines, dtype=np.int64),
            trained=np.array([np.count_nonzero(_labels(one)) for one in pieces], dtype=np.int64),
            label_weights=np.array([_labels(one).sum(dtype=np.float64) for one in pieces]),
            digests=np.array([_digest(one) for one in pieces], dtype=np.uint64),
            ends_in_stop=np.array([_last_trained(one) in stops for one in pieces]),
            double_bos=np.array([self._has_two_bos(one) for one in pieces]),
        )

    def _has_two_bos(self, one: Encoded) -> bool:
        bos = self._template.bos_token_id
        return bos is not None and one.input_ids[:2].tolist() == [bos, bos]


def fit(one: Encoded, sequence_len: int, on_long: str, bos_token_id: int | None) -> list[Encoded]:
    """Return the documents of at most `sequence_len` tokens that an encoded item becomes.

    What is cut from its left side keeps its BOS; encoder-decoder items are not split.
    """

    if _num_tokens(one) <= sequence_len:
        return [one]
    if on_long in ("drop", "error"):
        return []
    keeps_end = on_long == "truncate_left"
    cut = slice(-sequence_len, None) if keeps_end else slice(sequence_len)
    if one.target_ids is not None:
        return [Encoded(one.input_ids[cut], one.weights[cut], one.target_ids[cut])]
    bos = int(bos_token_id is not None and int(one.input_ids[0]) == bos_token_id)
    if on_long == "split":
        return _split(one, sequence_len, bos)
    ids, weights = one.input_ids[cut].copy(), one.weights[cut].copy()
    if keeps_end and bos:
        ids[0], weights[0] = one.input_ids[0], 0.0
    return [Encoded(ids, weights)]


def _split(one: Encoded, sequence_len: int, bos: int) -> list[Encoded]:
    """Cut a document into pieces of like length, each with the `bos` tokens that it begins with."""
    import numpy as np

    num_tokens = len(one.input_ids) - bos
    num_pieces = -(-num_tokens // (sequence_len - bos))
    cuts = [bos + num_tokens * piece // num_pieces for piece in range(num_pieces + 1)]
    return [
        Encoded(
            np.concatenate([one.input_ids[:bos], one.input_ids[start:end]]),
            np.concatenate([np.zeros(bos, np.float32), one.weights[start:end]]),
        )
        for start, end in itertools.pairwise(cuts)
    ]


def is_trained(one: Encoded) -> bool:
    """Tell whether any label of a document has a weight."""
    return bool(_labels(one).any())


def _num_tokens(one: Encoded) -> int:
    targets = 0 if one.target_ids is None else len(one.target_ids)
    return max(len(one.input_ids), targets)


def _labels(one: Encoded) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the weights of what is predicted: a causal model never predicts the first token."""
    return one.weights[1:] if one.target_ids is None else one.weights


def _last_trained(one: Encoded) -> int:
    ids = one.input_ids if one.target_ids is None else one.target_ids
    return int(ids[one.weights.nonzero()[0][-1]])


def _digest(one: Encoded) -> int:
    content = hashlib.blake2b(one.input_ids.tobytes(), digest_size=8)
    if one.target_ids is not None:
        content.update(one.target_ids.tobytes())
    return int.from_bytes(content.digest(), "little")


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Hold what became of a chunk of rows; `num_rows` counts the bad ones, too."""

    documents: Documents | None
    counts: Counts
    rejected: list[Rejected]
    num_rows: int
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
        counts, rejected, num_rows = Counts(), [], 0
        rows: dict[int, list[Item]] = {}
        for number, found in enumerate(read_chunk(chunk, self.format, self.columns)):
            num_rows += 1
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
            builder.add(good, number, items[0].origin, counts)
        rejected = sorted(rejected + reject(chunk, refused), key=_line)
        counts.rows = len(rows) - len(refused)
        counts.kept = builder.num_rows
        counts.stop_token_ids = sorted(self.template.stop_token_ids)
        documents = builder.build()
        if documents is not None:
            counts.largest_token = documents.largest_token()
        return EncodedChunk(documents, counts, rejected, num_rows, chunk.num_bytes)


def _line(row: Rejected) -> int:
    return row.origin.line


def encode_chunks(
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
                "a process that tokenizes was killed, often for lack of memory; set data.num_proc=1"
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
