"""Encode chunks of rows: format, template and fit together, in this process or in several.

Decides in which process a chunk is encoded. Never reads a file, and never keeps a result.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from data_modules import source
from data_modules.counts import Counts
from data_modules.documents import DocumentBuilder
from data_modules.rows import Rejected, read_chunk, reject
from data_modules.store import Documents
from data_modules.template import ChatTemplate, RowProblem
from data_modules.types import Conversation, DataError, Item

CHUNKS_IN_PROCESS = 4
"""data sets of no more chunks are tokenised by this process: others would start for nothing"""


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
