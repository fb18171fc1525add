"""Encode rows chunk by chunk: source -> format -> template, in one process or several.

Decides what happens to a bad row (an error, a line in the quarantine, or a count) and which process
encodes a chunk. Never stores a result.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter, itemgetter
from typing import IO, TYPE_CHECKING

from common.errors import MAX_PROBLEMS, DataError, Origin, Problems
from common.text import percent
from data_modules import format as formats
from data_modules import source
from data_modules.format import KTO, PREFERENCE
from data_modules.template import (
    CharacterCheck,
    ChatTemplate,
    RowRefusedError,
    UnusableTemplateError,
)
from data_modules.tokens.store import DocumentBuilder, Documents, padding_id, without_ends
from data_modules.types import Conversation, Document, Encoded, Item, Row, Tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

    from data_modules.settings import DataConfig, DatasetConfig

CHUNKS_IN_PROCESS = 4
"""data sets of at most this many chunks are tokenized without starting worker processes"""
_GUESSED_ROWS = 100
"""number of first rows from which the format of a data set is guessed"""
_MAX_FIRST = 5
"""number of rows of a kind that are named in reports"""
_MAX_UNREAD = 200
"""number of names of what nothing reads that are counted one by one"""
_OTHER_NAMES = "other names"
PAIRED = (PREFERENCE, KTO)
"""formats whose rows are two documents, which nothing may part"""
_OF_ONE_ROW = re.compile(r"`.*?`|\(turns: .*?\)|\d+", re.DOTALL)
"""parts of the reason why a template refuses a row that differ between rows"""


@dataclass(slots=True)
class Counts:
    """Counts of what happened to the rows of a data set; origins are file:line."""

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
    unknown_tokens: int = 0
    lossy_rows: int = 0
    first_lossy: str = ""
    lost_characters: dict[str, int] = field(default_factory=dict)
    """rows with each character that the tokenizer does not keep"""
    stop_token_ids: list[int] = field(default_factory=list)
    largest_token: tuple[int, str] = (-1, "")
    unread: dict[str, tuple[int, str]] = field(default_factory=dict)
    """column or inner key that nothing reads -> rows that have it, and the first of them"""

    def add_empty(self, origin: str) -> None:
        """Count a row with nothing to train on."""
        self.empty += 1
        self.empty_origins = [*self.empty_origins, origin][:_MAX_FIRST]

    def add_length(self, tokens: int, origin: str) -> None:
        """Record the row if it is one of the longest."""
        if len(self.longest) < _MAX_FIRST or tokens > self.longest[-1][0]:
            longest = sorted([*self.longest, (tokens, origin)], key=itemgetter(0), reverse=True)
            self.longest = longest[:_MAX_FIRST]

    def add_note(self, kind: str, seen: str, count: int = 1) -> None:
        """Count a note on a row; the first example of its kind is kept."""
        num_before, first = self.notes.get(kind, (0, seen))
        self.notes[kind] = (num_before + count, first)

    def add_unread(self, name: str, origin: str, count: int = 1) -> None:
        """Count a row with a column or key that nothing reads; of very many names, only a total."""
        if name not in self.unread and len(self.unread) >= _MAX_UNREAD:
            name = _OTHER_NAMES
        num_before, first = self.unread.get(name, (0, origin))
        self.unread[name] = (num_before + count, first)

    def add_lost(self, characters: set[str], origin: str) -> None:
        """Count a row with characters that the tokenizer does not keep."""
        self.lossy_rows += 1
        self.first_lossy = self.first_lossy or origin
        for each in characters:
            self.lost_characters[each] = self.lost_characters.get(each, 0) + 1

    def merge(self, other: Counts) -> None:
        """Add the counts of the rows after these."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.empty_origins = [*self.empty_origins, *other.empty_origins][:_MAX_FIRST]
        for tokens, origin in other.longest:
            self.add_length(tokens, origin)
        for kind, (count, seen) in other.notes.items():
            self.add_note(kind, seen, count)
        for name, (count, origin) in other.unread.items():
            self.add_unread(name, origin, count)
        self.first_lossy = self.first_lossy or other.first_lossy
        for character, rows in other.lost_characters.items():
            self.lost_characters[character] = self.lost_characters.get(character, 0) + rows
        self.stop_token_ids = sorted({*self.stop_token_ids, *other.stop_token_ids})
        self.largest_token = max(self.largest_token, other.largest_token)


_SUMMED = [each.name for each in fields(Counts) if each.type == "int"]


def check_dropped(counts: Counts, path: str, data: DataConfig, sequence_len: int) -> None:
    """Raise DataError if no row is left, or more than `data.max_dropped_share` are dropped."""
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
        detail += f" ({', '.join(counts.empty_origins)}: no answer, weight 0, cut away, or a pair "
        detail += "of equal answers: give such rows an answer to train on, or another one)"
    if counts.truncated and counts.empty:
        detail += f"; {counts.truncated:,} were cut ({longest}; set data.sequence_len={tokens})"
    if counts.rejected:
        detail += f", {counts.rejected:,} are bad"
    if not counts.kept:
        raise DataError(f"{path}: no row of {counts.rows:,} is left: {detail}")
    share = data.max_dropped_share
    if share is not None and lost / num_rows > share:
        raise DataError(
            f"{path}: {lost:,} of {num_rows:,} rows are dropped ({percent(lost / num_rows)}"
            f"), data.max_dropped_share is {share}: {detail}"
        )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The result of encoding a chunk of rows; `num_rows` includes the bad ones."""

    documents: Documents | None
    counts: Counts
    rejected: list[Rejected]
    num_rows: int
    num_bytes: int


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


class ChunkEncoder:
    """Encode chunks of rows, in this process or in a worker; `format` is "" without a good row."""

    def __init__(self, dataset: DatasetConfig, format: str, spec: TokenSpec) -> None:
        self.dataset, self.format, self.spec = dataset, format, spec
        self.template = spec.template
        self.characters = CharacterCheck(spec.template.tokenizer)

    def __call__(self, chunk: source.Chunk) -> EncodedChunk:
        """Return the documents of the rows of `chunk`, the counts, and the rejected rows."""
        counts, rejected, num_rows = Counts(), [], 0
        rows: dict[int, list[Item]] = {}
        for number, found in enumerate(read_chunk(chunk, self.format, self.dataset, counts)):
            num_rows += 1
            if isinstance(found, Rejected):
                rejected.append(found)
            else:
                rows[number] = found
        if self.format == KTO:
            rows = formats.with_other_answers(rows)
        counts.chats = sum(isinstance(items[0], Conversation) for items in rows.values())
        encoded = iter(self.template.encode([item for items in rows.values() for item in items]))
        refused: dict[int, ValueError] = {}
        builder = DocumentBuilder(
            *(chunk.file, self.template, self.spec.sequence_len, self.spec.config.on_long, counts),
            has_verdicts=self.format == KTO,
        )
        for number, items in rows.items():
            results = [next(encoded) for _ in items]
            try:
                for result in results:
                    if isinstance(result, RowRefusedError):
                        raise result
                whole = [result for result in results if isinstance(result, Encoded)]
                self._add(builder, whole, number, items[0])
            except (formats.RowError, RowRefusedError) as error:
                # A traceback would hold this frame, and so the rows of the chunk, in a cycle.
                refused[number] = error.with_traceback(None)
                continue
            if self.characters.keeps_all:
                continue
            lost = set().union(*(self.characters.lost(text) for text in _texts_of(items)))
            if lost:
                counts.add_lost(lost, str(items[0].origin))
        if refused:
            rejected = sorted(rejected + _reject(chunk, refused), key=attrgetter("origin.line"))
        counts.rows = len(rows) - len(refused)
        counts.kept = builder.num_rows
        counts.stop_token_ids = sorted(self.template.stop_token_ids)
        documents = builder.build()
        if documents is not None:
            counts.largest_token = documents.largest_token()
            counts.unknown_tokens = documents.count_token(self.characters.unknown_id)
        return EncodedChunk(documents, counts, rejected, num_rows, chunk.num_bytes)

    def _add(
        self, builder: DocumentBuilder, encoded: Sequence[Encoded], number: int, item: Item
    ) -> None:
        """Add a row by its format; RowError if its label is not a class of the model."""
        label = None if isinstance(item, Tokens) else item.label
        labels, several = self.spec.labels, self.spec.is_multi_label
        if labels:
            # As transformers rates a text: at its last token that is no padding. Nobody would write
            # an EOS behind a text to classify.
            ends = {padding_id(self.template.tokenizer)}
            if isinstance(label, (str, tuple)) and isinstance(item, Document):
                ends.add(self.template.tokenizer.eos_token_id)
            encoded = [without_ends(each, ends) for each in encoded]
        if isinstance(label, (str, tuple)):
            value = (formats.labels_of if several else formats.label_of)(label, labels)
            builder.add_labelled(encoded[0], number, item.origin, value)
        elif self.format in PAIRED:
            builder.add_pair(encoded, number, item.origin, label)
        else:
            builder.add(encoded, number, item.origin)


def _texts_of(items: Iterable[Item]) -> Iterator[str]:
    """Yield the texts of items, without the blanks around them, which templates may remove."""
    for item in items:
        if isinstance(item, Document):
            yield item.text.strip()
        elif isinstance(item, Conversation):
            for turn in item.turns:
                yield from (turn.content.strip(), (turn.reasoning or "").strip())


def encode_chunks(
    encoder: ChunkEncoder, chunks: Iterable[source.Chunk], num_proc: int
) -> Iterator[EncodedChunk]:
    """Encode chunks in order, in `num_proc` processes if there are more than a few."""
    chunks = iter(chunks)
    head = list(itertools.islice(chunks, CHUNKS_IN_PROCESS + 1))
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if len(head) <= CHUNKS_IN_PROCESS or num_proc == 1 or not can_fork:
        yield from map(encoder, itertools.chain(head, chunks))
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Forked, so that nothing is imported or pickled again; CUDA is not initialized yet.
    with ProcessPoolExecutor(
        num_proc, multiprocessing.get_context("fork"), _start_worker, (encoder,)
    ) as pool:
        waiting: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in itertools.chain(head, chunks):
                waiting.append(pool.submit(_encode_in_worker, chunk))
                # Bounds the read-ahead, so that a large file is never in memory as a whole.
                if len(waiting) > 2 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenizing process was killed, usually for lack of memory; set data.num_proc=1"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_encoder: ChunkEncoder | None = None


def _start_worker(encoder: ChunkEncoder) -> None:
    global _encoder
    _encoder = encoder
    # One process per core with one thread each; the parent handles an interrupt.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent has died, since nobody would take the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: source.Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be used: its place, the reason, and the beginning of its text.

    `columns` are the row's columns if they are what is wrong with it. `is_empty` means that only
    its answer is empty, `is_of_template` that the row may be fine with another chat template.
    """

    origin: Origin
    problem: str
    raw: str
    columns: tuple[str, ...] | None = None
    is_empty: bool = False
    is_of_template: bool = False


def read_chunk(
    chunk: source.Chunk, format_name: str, dataset: DatasetConfig, counts: Counts | None = None
) -> Iterator[list[Item] | Rejected]:
    """Yield the items of each row of a chunk, or its rejection; `counts` gets what is not read."""
    for row in chunk.rows():
        if isinstance(row, source.BadRow):
            yield Rejected(row.origin, row.problem, row.raw)
            continue
        unread: set[str] | None = None if counts is None else set()
        found = items_of(row, format_name, dataset, unread)
        if counts is not None and unread and not isinstance(found, Rejected):
            origin = str(row.origin)
            for name in unread:
                counts.add_unread(name, origin)
        yield found


def items_of(
    row: Row, format_name: str, dataset: DatasetConfig, unread: set[str] | None = None
) -> list[Item] | Rejected:
    """Return the items of a row, or its rejection; `unread` as of `convert_row`."""
    try:
        if dataset.format is None:
            formats.check_guessed(row, dataset.columns)
        return formats.convert_row(row, format_name, dataset.columns, unread)
    except formats.RowError as error:
        is_of_columns = isinstance(error, (formats.MissingColumnError, formats.MeaningError))
        return Rejected(
            row.origin,
            f"{row.origin} {error}",
            _text_of(row),
            tuple(row.values) if is_of_columns else None,
            isinstance(error, formats.EmptyAnswerError),
        )


def _reject(chunk: source.Chunk, refused: Mapping[int, ValueError]) -> list[Rejected]:
    """Return the rejections of rows of `chunk`; `refused` is by row number, from 0."""
    return [
        Rejected(
            row.origin,
            f"{row.origin} {error}",
            _text_of(row),
            is_of_template=isinstance(error, UnusableTemplateError),
        )
        for number, row in enumerate(chunk.rows())
        if (error := refused.get(number)) and isinstance(row, Row)
    ]


def _text_of(row: Row) -> str:
    """Return a row as JSON, cut to the length that the quarantine keeps."""
    return json.dumps(row.values, ensure_ascii=False, default=str)[: source.MAX_RAW]


def find_format(
    dataset: DatasetConfig, chunks: Iterator[source.Chunk]
) -> tuple[str | None, Iterator[source.Chunk]]:
    """Return the format of a data set, given or guessed, and all its chunks.

    The format is None if no row can be read.
    """
    if dataset.format is not None:
        return dataset.format, chunks
    read: list[source.Chunk] = []
    for chunk in chunks:
        read.append(chunk)
        rows = (row for row in chunk.rows() if isinstance(row, Row))
        first = list(itertools.islice(rows, _GUESSED_ROWS))
        if first:
            return formats.guess_format(first, dataset.columns), itertools.chain(read, chunks)
    return None, iter(read)


def chunks_of(
    dataset: DatasetConfig,
    data: DataConfig,
    budget: source.Budget | None = None,
    *,
    rows: tuple[int, int | None] = (0, None),
    shard: tuple[int, int] = (0, 1),
) -> Iterator[source.Chunk]:
    """Return the chunks of a data set, read according to its settings; see `read_chunks`."""
    return source.read_chunks(
        dataset.path,
        split=dataset.split,
        name=dataset.name,
        revision=dataset.revision,
        budget=budget,
        max_row_bytes=data.max_row_bytes,
        limits=data.limits,
        rows=rows,
        shard=shard,
        streaming=data.streaming,
    )


def encode_first_rows(dataset: DatasetConfig, spec: TokenSpec) -> tuple[str, Counts, int]:
    """Return the format of a stream, and the counts and the tokens of its first chunk."""
    format_name, chunks = find_format(dataset, chunks_of(dataset, spec.config))
    encoder, counts, num_tokens = ChunkEncoder(dataset, format_name or "", spec), Counts(), 0
    for part in map(encoder, itertools.islice(chunks, 1)):
        counts = part.counts
        num_tokens = part.documents.num_tokens if part.documents is not None else 0
    return encoder.format, counts, num_tokens


class FirstRows:
    """Yield chunks of at most `max_rows` rows (None: all); `is_cut` is set if there were more."""

    def __init__(self, chunks: Iterator[source.Chunk], max_rows: int | None) -> None:
        self._chunks, self._max_rows = chunks, max_rows
        self.is_cut = False

    def __iter__(self) -> Iterator[source.Chunk]:
        if self._max_rows is None:
            yield from self._chunks
            return
        left = self._max_rows
        for chunk in self._chunks:
            num_rows = chunk.count()
            if num_rows > left:
                self.is_cut = True
                if left:
                    yield chunk.select(range(left))
                return
            left -= num_rows
            yield chunk


@dataclass(slots=True)
class _Group:
    first: Rejected
    last: Rejected
    count: int = 0


class BadRows:
    """Collect the rows that cannot be used, and decide whether they stop the run.

    Rows whose columns are wrong are reported once for all rows with the same columns, with the
    number of good rows; rows that the chat template refuses, once a reason. Only the first problems
    are kept in memory; quarantined rows are written to `file`, if given, a JSON line each.
    """

    def __init__(self, data: DataConfig, file: IO[str] | None = None) -> None:
        self._quarantines = data.on_bad_row == "quarantine"
        self._drops_empty = data.drop_empty
        self._problems = Problems()
        self._groups: dict[str | tuple[str, ...], _Group] = {}
        self._num_good, self._first_good = 0, ""
        self._file = file
        self.first_kept: list[str] = []
        """problems of the first quarantined rows"""
        self.num_kept = 0
        self.first_empty: list[Origin] = []
        """the first rows that were dropped for an empty answer"""
        self.num_empty = 0

    def add(self, row: Rejected) -> None:
        if row.is_empty and self._drops_empty:
            self.num_empty += 1
            self.first_empty = [*self.first_empty, row.origin][:_MAX_FIRST]
        elif self._quarantines:
            self.num_kept += 1
            self.first_kept = [*self.first_kept, row.problem][:_MAX_FIRST]
            if self._file is not None:
                line = {"origin": str(row.origin), "problem": row.problem, "row": row.raw}
                self._file.write(json.dumps(line) + "\n")
        else:
            key: str | tuple[str, ...] | None = row.columns
            if row.is_of_template:
                key = _OF_ONE_ROW.sub("", row.problem.removeprefix(str(row.origin)))
            if key is None or (key not in self._groups and len(self._groups) >= MAX_PROBLEMS):
                self._problems.add(row.problem)
            else:
                group = self._groups.setdefault(key, _Group(row, row))
                group.last = row
                group.count += 1

    def add_good(self, format_name: str, origin: Origin) -> None:
        self._num_good += 1
        self._first_good = self._first_good or f"of format {format_name}, first {origin}"

    def add_problems(self, problems: Iterable[str]) -> None:
        """Add problems that stop the run even if bad rows are quarantined."""
        for problem in problems:
            self._problems.add(problem)

    def raise_if_any(self, num_good: int = 0) -> None:
        """Raise DataError with all problems that stop the run; `num_good`: rows that were encoded.

        What the template refuses in every row is its own fault.
        """
        is_template = len(self._groups) == 1 and not (num_good or self._problems)
        for group in self._groups.values():
            problem, count = group.first.problem, group.count
            if not group.first.is_of_template:
                notes = [f"{count - 1:,} more rows have these columns"] if count > 1 else []
                if self._num_good:
                    notes.append(f"{self._num_good:,} rows are {self._first_good}")
                problem += f" ({'; '.join(notes)})" if notes else ""
            elif count > 1 and is_template:
                problem = problem.replace("change the row", "fix the template")
                problem = f"the chat template fits none of the {count:,} rows, first {problem}"
            elif count > 1:
                problem += f" ({count:,} rows for this reason, the last {group.last.origin})"
            self._problems.add(problem)
        self._groups.clear()
        self._problems.raise_if_any()
