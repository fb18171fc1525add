"""Compose the data path into a LightningDataModule: prepare once, then loaders.

Decides which rows are for validation and how batches reach the trainer. The order of batches is
this project's own: the trainer must be made with `use_distributed_sampler=False`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_modules.collator import Collator
from data_modules.mixture import Mixture, split_rows
from data_modules.packing import (
    MicroBatch,
    PackingConfig,
    StepPlan,
    StepSampler,
    check_packing,
    pack_documents,
    shard_packs,
)
from data_modules.prepare import (
    DataConfig,
    DataReport,
    Prepared,
    count_repeated,
    count_split,
    dataset_names,
    fingerprints,
    prepare_dataset,
    read_items,
)
from data_modules.template import ChatTemplate
from data_modules.types import Batch, Conversation, DataError, Document, Example, Prompt

if TYPE_CHECKING:
    import transformers

DEFAULT_SEQUENCE_LEN = 2048

log = logging.getLogger(__name__)


class FinetuneDataModule(lightning.LightningDataModule):
    """Serve the training steps and the validation pass of a run.

    After `setup`: `dataset_names`, `sequence_len`, `train_examples`, `val_examples`, `report`,
    `template`, `template_hash`, `total_steps` and `plan`. `first_step` is the global step that the
    training loader begins with. Which share of the steps a loader serves, the trainer's rank says.
    The trainer must have `num_ranks` ranks and `use_distributed_sampler=False`. `vocab_size` is
    the number of rows of the model's embedding: token ids beyond it are an error.
    """

    def __init__(
        self,
        config: DataConfig,
        packing: PackingConfig,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        context_len: int | None,
        micro_batch_size: int,
        accumulation_steps: int,
        num_epochs: int,
        max_steps: int | None,
        seed: int,
        num_ranks: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        check_packing(packing)
        self._config, self._packing, self._tokenizer = config, packing, tokenizer
        self._micro_batch_size, self._accumulation_steps = micro_batch_size, accumulation_steps
        self._num_epochs, self._max_steps, self._seed = num_epochs, max_steps, seed
        self._num_ranks, self._vocab_size = num_ranks, vocab_size
        self.sequence_len = choose_sequence_len(config.sequence_len, context_len)
        self.dataset_names = dataset_names(config.datasets)
        self.first_step = 0
        self._is_set_up = False
        self.train_examples: list[Example] = []
        self.val_examples: list[Example] = []
        self._val_items: list[list[Conversation | Document]] = []
        self._test_items: list[list[Conversation | Document]] = []

    def prepare_data(self) -> None:
        """Do nothing: every rank reads the files itself."""

    def setup(self, stage: str | None = None) -> None:
        """Read, encode and split the data sets, once; raises DataError."""
        if self._is_set_up:
            return
        self.template = ChatTemplate.resolve(self._tokenizer, self._config.chat_template)
        with _collector_paused():
            prepared = self._prepare()
            for data in prepared:
                self._split(data)
        self._check_token_ids()
        reports = [data.report for data in prepared]
        count_repeated(reports, self.train_examples, self.val_examples)
        self.report = DataReport(
            datasets=reports,
            sequence_len=self.sequence_len,
            template_note=self.template.note,
            lost_system_turns=self.template.num_lost_system_turns,
            test_datasets=fingerprints(self._config.test_datasets),
        )
        self._is_set_up = True

    @property
    def template_hash(self) -> str:
        """Return the sha256 of the chat template in use."""
        return self.template.hash

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps of the run."""
        return self.plan.num_steps

    @cached_property
    def plan(self) -> StepPlan:
        """Return the plan of all steps; `setup` must have run."""
        datasets = np.array([example.dataset for example in self.train_examples])
        groups = [np.flatnonzero(datasets == index) for index in range(len(self.dataset_names))]
        weights = [dataset.weight for dataset in self._config.datasets]
        return StepPlan(
            _lengths(self.train_examples),
            np.array(
                [example.weights[1:].sum(dtype=np.float64) for example in self.train_examples]
            ),
            Mixture(groups, weights, self._seed).epoch,
            capacity=self.sequence_len,
            method=self._packing.method,
            seed=self._seed,
            micro_batch_size=self._micro_batch_size,
            accumulation_steps=self._accumulation_steps,
            world_size=self._num_ranks,
            num_epochs=self._num_epochs,
            max_steps=self._max_steps,
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's micro-batches of all steps from `first_step` on, as one epoch."""
        sampler = StepSampler(self.plan, self._rank, self.first_step)
        return self._loader(self.train_examples, sampler)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return this rank's share of the validation rows, in an order that never changes.

        There is no loader when there are no validation rows.
        """
        return self._val_loader(self._num_ranks, self._rank) if self.val_examples else []

    def whole_val_dataloader(self) -> DataLoader[Batch]:
        """Return all validation rows, whatever the number of ranks; there must be some."""
        return self._val_loader(1, 0)

    def _val_loader(self, num_ranks: int, rank: int) -> DataLoader[Batch]:
        lengths = _lengths(self.val_examples)
        method = self._packing.method
        packs = pack_documents(lengths, self.sequence_len, self._seed, 0, method)
        batches = shard_packs(packs, self._micro_batch_size, num_ranks, rank)
        return self._loader(self.val_examples, batches)

    def prompts(self, max_rows: int) -> dict[str, list[Prompt]]:
        """Return the prompts of the first `max_rows` rows of each data set with answers to ask for.

        They come from `test_datasets` when there are any, else from the validation rows. Prompts
        above `sequence_len` tokens are left out, and logged.
        """
        if self._config.test_datasets:
            names, items = dataset_names(self._config.test_datasets), self._test_items
        else:
            names, items = self.dataset_names, self._val_items
        found: dict[str, list[Prompt]] = {}
        for name, rows in zip(names, items, strict=True):
            prompts = [p for item in rows[:max_rows] if (p := self.template.prompt(item))]
            fitting = [p for p in prompts if len(p.input_ids) <= self.sequence_len]
            if len(fitting) < len(prompts):
                longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
                log.warning(
                    f"data: {name}: {len(prompts) - len(fitting):,} of {len(prompts):,} prompts "
                    f"are longer than {self.sequence_len:,} tokens and are not asked; the longest, "
                    f"{longest.origin}, has {len(longest.input_ids):,}; raise data.sequence_len"
                )
            if fitting:
                found[name] = fitting
        return found

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move a batch; from page-locked memory to a GPU, while the GPU still works."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def _prepare(self) -> list[Prepared]:
        prepared: list[Prepared] = []
        problems: list[str] = []
        for index, (dataset, name) in enumerate(
            zip(self._config.datasets, self.dataset_names, strict=True)
        ):
            try:
                prepared.append(
                    prepare_dataset(
                        dataset, name, index, self._config, self.template, self.sequence_len
                    )
                )
            except DataError as error:
                problems += error.problems
        for dataset in self._config.test_datasets:
            try:
                self._test_items.append(read_items(dataset)[0])
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
        return prepared

    def _split(self, data: Prepared) -> None:
        report = data.report
        size = self._config.val_set_size
        held_out = split_rows(len(data.items), size, self._seed, report.name)
        count_split(data, held_out.tolist())
        for examples, is_validation in zip(data.examples, held_out, strict=True):
            (self.val_examples if is_validation else self.train_examples).extend(examples)
        self._val_items.append([data.items[row] for row in np.flatnonzero(held_out)])

    def _check_token_ids(self) -> None:
        """Raise DataError where a token has no row in the embedding: a GPU would only crash."""
        rows, pad = self._vocab_size, self._tokenizer.pad_token_id
        if rows is None:
            return
        largest, origin = -1, ""
        for example in (*self.train_examples, *self.val_examples):
            if (token := int(example.input_ids.max())) > largest:
                largest, origin = token, str(example.origin)
        problems = []
        if largest >= rows:
            problems.append(
                f"{origin} holds token id {largest:,}, the model's embedding has {rows:,} rows; "
                "set model.tokenizer_path to the tokenizer that the model was made with"
            )
        if pad is not None and pad >= rows:
            problems.append(
                f"the tokenizer's pad token has id {pad:,}, the model's embedding has {rows:,} "
                "rows; set pad_token in tokenizer_config.json to the tokenizer's eos_token"
            )
        if problems:
            raise DataError(problems)

    def _loader(
        self, examples: list[Example], sampler: Sequence[MicroBatch] | StepSampler
    ) -> DataLoader[Batch]:
        return DataLoader(
            _Batches(examples, self._collator),
            sampler=sampler,
            batch_size=None,
            num_workers=self._config.num_workers,
            pin_memory=torch.cuda.is_available(),
            # A loader without its own generator draws a number from the global one, so that a
            # validation pass would change the dropout of the steps after it.
            generator=torch.Generator(),
        )

    @cached_property
    def _collator(self) -> Collator:
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        return Collator(0 if pad is None else pad, packed=self._packing.method != "none")

    @property
    def _rank(self) -> int:
        if not self.trainer:
            return 0
        if self.trainer.world_size != self._num_ranks:
            raise ValueError(
                f"the steps are planned for {self._num_ranks} ranks (num_ranks), "
                f"the trainer has {self.trainer.world_size}"
            )
        rank: int = self.trainer.global_rank
        return rank


class _Batches(Dataset[Batch]):
    """Lay out the micro-batch that a sampler asks for."""

    def __init__(self, examples: list[Example], collator: Collator) -> None:
        self._examples, self._collator = examples, collator

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        packs = [[self._examples[i] for i in pack] for pack in micro_batch.packs]
        return self._collator(packs, micro_batch.step_weight)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector off what is read: it would walk all rows again and again.

    What is there in the end stays for the whole run, so it is taken out of its sight for good.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def choose_sequence_len(sequence_len: int | None, context_len: int | None) -> int:
    """Return the tokens that a document may have; raises DataError above the model's context."""
    if sequence_len is None:
        return min(DEFAULT_SEQUENCE_LEN, context_len or DEFAULT_SEQUENCE_LEN)
    if context_len is not None and sequence_len > context_len:
        raise DataError(
            f"data.sequence_len is {sequence_len:,}, the model's context {context_len:,} tokens; "
            f"set data.sequence_len={context_len}"
        )
    return sequence_len


def _lengths(examples: Sequence[Example]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([len(example.input_ids) for example in examples], dtype=np.int64)
