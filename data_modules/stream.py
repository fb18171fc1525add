"""Read, encode and pack while training, for data larger than the disk.

Decides the order of a stream: rows as they come, shuffled and packed window by window. Each rank
and each loader's worker reads its own share of the rows. Never knows how long the stream is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from data_modules import source
from data_modules.collator import Collator
from data_modules.documents import fit, is_learned
from data_modules.packing import pack_documents
from data_modules.rows import BadRows, Rejected, find_format, read_chunk
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate, RowProblem
from data_modules.types import Batch, DataError, Example, seeded_generator

WINDOW_PACKS = 512
"""packs' worth of tokens that are shuffled and packed together"""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Say how many steps are taken from a stream."""

    num_steps: int
    packs_per_step: int

    def line(self) -> str:
        """Say it in words."""
        return (
            f"streaming: rows are read, shuffled and packed in windows of {WINDOW_PACKS} packs; "
            f"{self.num_steps:,} steps of {self.packs_per_step:,} packs"
        )


class TokenStream(IterableDataset[Batch]):
    """Yield micro-batches without end: this rank's and this worker's share of the rows.

    Data sets take turns so that their rows stand in proportion to their weights; one that ends
    begins again. `step_weight` of a batch is its own; `StreamedSteps` makes it the global step's.
    """

    def __init__(
        self,
        config: DataConfig,
        template: ChatTemplate,
        collator: Collator,
        *,
        sequence_len: int,
        method: str,
        micro_batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
    ) -> None:
        super().__init__()
        self._config, self._template, self._collator = config, template, collator
        self._sequence_len, self._method = sequence_len, method
        self._micro_batch_size = micro_batch_size
        self._rank, self._num_ranks, self._seed = rank, num_ranks, seed

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; their order depends on the settings, rank and worker only."""
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        shard = (self._rank * num_workers + worker_id, self._num_ranks * num_workers)
        examples = self._mixed(shard)
        seed = int(seeded_generator(self._seed, "stream", *shard).integers(1 << 31))
        for number in itertools.count():
            window = list(self._take_window(examples))
            lengths = np.array([example.num_tokens for example in window], dtype=np.int64)
            packs = pack_documents(lengths, self._sequence_len, seed, number, self._method)
            for first in range(0, len(packs), self._micro_batch_size):
                chosen = [
                    [window[i] for i in packs[first + k]] for k in range(self._micro_batch_size)
                ]
                batch = self._collator(chosen, 1.0)
                yield dataclasses.replace(batch, step_weight=float(batch.loss_weights.sum()))

    def _take_window(self, examples: Iterator[Example]) -> Iterator[Example]:
        wanted = WINDOW_PACKS * self._sequence_len * self._micro_batch_size
        if self._method == "none":
            wanted = min(wanted, 1 << 20)
        taken = 0
        while taken < wanted:
            example = next(examples)
            taken += example.num_tokens
            yield example

    def _mixed(self, shard: tuple[int, int]) -> Iterator[Example]:
        """Take the next row from the data set that is furthest behind its share."""
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

    def _repeated(self, index: int, shard: tuple[int, int]) -> Iterator[Example]:
        dataset = self._config.datasets[index]
        while True:
            num_examples = 0
            for example in self._examples(dataset, index, shard):
                num_examples += 1
                yield example
            if not num_examples:
                raise DataError(
                    f"{dataset.path}: no row to learn for rank {shard[0]} of {shard[1]}; it is too "
                    "small for a stream: set data.streaming=false"
                )

    def _examples(
        self, dataset: DatasetConfig, index: int, shard: tuple[int, int]
    ) -> Iterator[Example]:
        chunks = source.read_chunks(
            dataset.path,
            split=dataset.split,
            rows=(int(self._config.val_set_size), None),
            revision=dataset.revision,
            max_row_bytes=self._config.max_row_bytes,
            shard=shard,
            streaming=True,
        )
        format_name, chunks = find_format(dataset, chunks)
        bos = self._template.bos_token_id
        for chunk in chunks:
            bad = BadRows(self._config)
            items, origins = [], []
            for found in read_chunk(chunk, format_name or "", dataset.columns):
                if isinstance(found, Rejected):
                    bad.add(found)
                else:
                    items += found
                    origins += [one.origin for one in found]
            bad.raise_if_any()
            for encoded, origin in zip(self._template.encode(items), origins, strict=True):
                if isinstance(encoded, RowProblem):
                    bad.add(Rejected(encoded.origin, f"{encoded.origin} {encoded.reason}", ""))
                    bad.raise_if_any()
                    continue
                for one in fit(encoded, self._sequence_len, self._config.on_long, bos):
                    if is_learned(one):
                        yield Example(one.input_ids, one.weights, index, origin, one.target_ids)


def held_out_part(dataset: DatasetConfig, config: DataConfig) -> DatasetConfig:
    """Return the slice of a data set that is for validation: its first rows."""
    return dataclasses.replace(dataset, split=f"{dataset.split}[:{int(config.val_set_size)}]")


class StreamedSteps:
    """Take a run's steps from a stream, and give each batch the weight of its whole global step.

    `total` sums a number over all ranks; each rank calls it once a step, at the same place.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        plan: StreamPlan,
        accumulation_steps: int,
        first_step: int,
        total: Callable[[float], float],
    ) -> None:
        self._batches, self._accumulation_steps = batches, accumulation_steps
        self._first_step, self._num_steps = first_step, plan.num_steps
        self._total = total

    def __len__(self) -> int:
        return (self._num_steps - self._first_step) * self._accumulation_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches; those before the first step are read and left out."""
        batches = iter(self._batches)
        for step in range(self._num_steps):
            window = list(itertools.islice(batches, self._accumulation_steps))
            if step < self._first_step:
                continue
            weight = self._total(sum(batch.step_weight for batch in window))
            for batch in window:
                yield dataclasses.replace(batch, step_weight=weight)
