"""Streaming: read, tokenize and pack while training, for data larger than the disk.

Decides the order of a stream: rows in file order, shuffled and packed within a window. Each rank
and each loader worker reads its own shard of the rows; while it trains on one window, a thread
reads the next. The length of a stream is never known.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from common.errors import DataError
from common.text import counted
from data_modules.collator import Batch, Collator
from data_modules.packing import pack_documents, seeded_generator
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.tokens.encode import (
    BadRows,
    ChunkEncoder,
    Counts,
    EncodedChunk,
    check_dropped,
    chunks_of,
)
from data_modules.types import Example

if TYPE_CHECKING:
    from data_modules.tokens.datasets import DataSpec

WINDOW_PACKS = 512
"""packs that are shuffled and packed together"""
_MAX_WINDOW_TOKENS = 1 << 21
"""limit of a window, in tokens, which makes it fewer packs if these are long"""
_MIN_WINDOW_PACKS = 8
"""packs of a window, however long they are"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The number of steps and packs that a run takes from a stream."""

    num_steps: int
    packs_per_step: int

    def line(self) -> str:
        return f"streaming: {self._size()}; rows are read, shuffled and packed a window at a time"

    def summary(self) -> str:
        return f"{self._size()} of a stream"

    def _size(self) -> str:
        return f"{counted(self.num_steps, 'step')} of {counted(self.packs_per_step, 'pack')}"

    def ends_epoch(self, step: int) -> bool:
        """Return whether a tenth of the run ends here: a stream has no epochs."""
        return step % math.ceil(self.num_steps / 10) == 0

    def epoch_at(self, step: int) -> None:
        """Return None: a stream has no epochs."""


class TokenStream(IterableDataset[Batch]):
    """Yield micro-batches endlessly from this rank's and this worker's shard of the rows.

    The data sets alternate so that their rows, or tokens, are in proportion to their weights; one
    that is exhausted starts again. `encoders` has one per data set. Documents whose digest is in
    `held_out` are left out. A batch's `step_weight` is its own; `StreamedSteps` replaces it by that
    of the global step.
    """

    def __init__(
        self,
        spec: DataSpec,
        encoders: Sequence[ChunkEncoder],
        collator: Collator,
        *,
        rank: int,
        held_out: frozenset[int],
    ) -> None:
        super().__init__()
        self._spec, self._config = spec, spec.config
        self._encoders, self._collator = encoders, collator
        self._rank, self._held_out = rank, held_out
        self._micro_batch_size = spec.batching.micro_batch_size

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, in an order that depends only on the settings, the rank and the worker."""
        worker = get_worker_info()
        if worker is None:
            yield from self._batches(0, 1)
            return
        # A tokenizer whose thread pool was started before the fork hangs in the worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            yield from self._batches(worker.id, worker.num_workers)
        except DataError as error:
            # Raised in a worker, it would reach the trainer as the text of a traceback.
            yield error  # type: ignore[misc]

    def examples(self, worker_id: int = 0, num_workers: int = 1) -> Iterator[Example]:
        """Yield this shard's documents, each from the data set furthest behind its weight."""
        num_shards = self._spec.batching.num_ranks * num_workers
        shard = (self._rank * num_workers + worker_id, num_shards)
        datasets = self._config.datasets
        streams = [self._repeated(index, shard) for index in range(len(datasets))]
        in_tokens = self._config.mixture.weights == "tokens"
        taken = np.zeros(len(datasets))
        weights = np.array([dataset.weight for dataset in datasets])
        while True:
            chosen = int((taken / weights).argmin())
            example = next(streams[chosen])
            taken[chosen] += example.num_tokens if in_tokens else 1
            yield example

    def _batches(self, worker_id: int, num_workers: int) -> Iterator[Batch]:
        examples = self.examples(worker_id, num_workers)
        keys = (self._rank, worker_id, num_workers)
        seed = int(seeded_generator(self._spec.seed, "stream", *keys).integers(1 << 31))
        capacity, method = self._spec.sequence_len, self._spec.packing.method

        def read() -> list[Example]:
            limit = max(_MIN_WINDOW_PACKS * capacity, _MAX_WINDOW_TOKENS)
            left = self._micro_batch_size * min(WINDOW_PACKS * capacity, limit)
            window = []
            while left > 0:
                window.append(next(examples))
                left -= window[-1].num_tokens
            return window

        with ThreadPoolExecutor(1, "stream") as reader:
            next_window = reader.submit(read)
            for number in itertools.count():
                window = next_window.result()
                next_window = reader.submit(read)
                lengths = np.array([example.num_tokens for example in window], dtype=np.int64)
                packs = pack_documents(lengths, capacity, seed, number, method)
                for first in range(0, len(packs), self._micro_batch_size):
                    micro_batch = range(first, first + self._micro_batch_size)
                    chosen = [[window[i] for i in packs[pack]] for pack in micro_batch]
                    batch = self._collator(chosen, 1.0)
                    yield dataclasses.replace(batch, step_weight=batch.own_weight)

    def _repeated(self, index: int, shard: tuple[int, int]) -> Iterator[Example]:
        """Yield a data set's documents, again and again."""
        dataset, encoder = self._config.datasets[index], self._encoders[index]
        while True:
            num_examples, counts = 0, Counts()
            rows = int(self._config.held_out), None
            for chunk in chunks_of(dataset, self._config, rows=rows, shard=shard):
                part = encoder(chunk)
                self._check(part)
                if not num_examples:
                    counts.merge(part.counts)
                if part.documents is None:
                    continue
                digests = part.documents.digests.tolist()
                for digest, example in zip(digests, part.documents.examples(index), strict=True):
                    if digest not in self._held_out:
                        num_examples += 1
                        yield example
            if not num_examples:
                if counts.rows:
                    check_dropped(counts, dataset.path, self._config, self._spec.sequence_len)
                raise DataError(
                    f"{dataset.path}: no row to train on for rank {shard[0]} of {shard[1]}; it is "
                    "too small for a stream: set data.streaming=false"
                )

    def _check(self, part: EncodedChunk) -> None:
        """Raise DataError for rows that stop a run; log those that it continues without."""
        bad = BadRows(self._config)
        for row in part.rejected:
            bad.add(row)
        bad.raise_if_any(part.counts.rows)
        if bad.num_kept:
            more = f" and {bad.num_kept - 1:,} more" if bad.num_kept > 1 else ""
            log.warning(f"data: left out: {bad.first_kept[0]}{more}")
        if self._config.on_long == "error" and part.counts.dropped:
            tokens, origin = part.counts.longest[0]
            raise DataError(
                f"{origin} has {tokens:,} tokens, more than data.sequence_len; raise it, or set "
                "data.on_long=split, truncate_right or drop"
            )
        largest, origin = part.counts.largest_token
        vocab_size = self._spec.model.vocab_size
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{origin} holds token id {largest:,}, the model's embedding has {vocab_size:,} "
                "rows; set model.tokenizer_path to the model's own"
            )


def validation_slice(dataset: DatasetConfig, config: DataConfig) -> DatasetConfig:
    """Return the first rows of a data set, which are its validation rows."""
    return dataclasses.replace(dataset, split=f"{dataset.split}[:{int(config.held_out)}]")


class StreamedSteps:
    """The steps of a run from a stream; each batch gets the weight of its whole global step.

    `total` sums a number over all ranks; each rank calls it once a step, at the same point. The sum
    is not read here, so a GPU is not waited for.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        plan: StreamPlan,
        accumulation_steps: int,
        first_step: int,
        total: Callable[[float], float | torch.Tensor],
    ) -> None:
        self._batches, self._accumulation_steps = batches, accumulation_steps
        self._first_step, self._num_steps = first_step, plan.num_steps
        self._total = total

    def __len__(self) -> int:
        return self._num_steps - self._first_step

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step; earlier steps are read and skipped."""
        batches = iter(self._batches)
        for step in range(self._num_steps):
            window = []
            for batch in itertools.islice(batches, self._accumulation_steps):
                if isinstance(batch, DataError):
                    # A copy, so that no frame of the traceback refers to itself: such a cycle keeps
                    # the workers alive until it is collected, which then waits 5 s for each.
                    raise copy.copy(batch)
                window.append(batch)
            if step < self._first_step:
                continue
            weight = self._total(sum(batch.step_weight for batch in window))
            yield [dataclasses.replace(batch, step_weight=weight) for batch in window]
