"""Hold all data sets of a run: tokens on disk, split into training and validation.

Composes prepare, holdout and audit. Of a stream it has the rows held out for validation. Never
plans a step.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_modules import source
from data_modules.audit import Audit, DatasetFacts, RunSettings, audit_documents
from data_modules.messages import DataError, redact
from data_modules.packing.mixture import Split, hold_out
from data_modules.settings import DataConfig, DatasetConfig, dataset_names
from data_modules.stream import validation_slice
from data_modules.template import ChatTemplate
from data_modules.tokens.encode import Rejected, chunks_of, convert, find_format
from data_modules.tokens.prepare import REJECTED_FILE, Prepared, TokenSpec, hash_of, prepare_dataset
from data_modules.tokens.store import Examples
from data_modules.types import BatchSpec, Item, ModelSpec

if TYPE_CHECKING:
    import transformers

    from data_modules.packing import PackingConfig


DEFAULT_SEQUENCE_LEN = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """What the data of a run follows from."""

    config: DataConfig
    packing: PackingConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    model: ModelSpec
    batching: BatchSpec
    seed: int
    first_rows: int | None = None
    """read only so many rows of each data set"""

    @property
    def sequence_len(self) -> int:
        """Return the tokens that a document may have; DataError above the model's context."""
        asked, context_len = self.config.sequence_len, self.model.context_len
        if asked is None:
            return min(DEFAULT_SEQUENCE_LEN, context_len or DEFAULT_SEQUENCE_LEN)
        if context_len is not None and asked > context_len:
            raise DataError(
                f"data.sequence_len is {asked:,}, the model's context {context_len:,} tokens; "
                f"set data.sequence_len={context_len}"
            )
        return asked


@dataclass(kw_only=True, slots=True)
class DatasetReport:
    """Describe a data set; tokens are those of training."""

    name: str
    path: str
    format: str
    format_guessed: bool
    sha256: str
    how: str
    rows: int
    train_rows: int
    validation_rows: int
    repeated_rows: int
    tokens: int
    trained_tokens: int
    rejected: int
    is_cut: bool
    is_streamed: bool
    asks_validation: bool

    def line(self) -> str:
        """Return it in one line."""
        guessed = ", guessed" if self.format_guessed else ""
        if self.is_streamed:
            return (
                f"{self.name}: streamed ({self.format}{guessed}), {self.validation_rows:,} of its "
                "first rows are for validation"
            )
        first = "the first " if self.is_cut else ""
        parts = [
            f"{first}{self.rows:,} rows ({self.format}{guessed})",
            f"{self.train_rows:,} train + {self.validation_rows:,} validation",
            self.how,
        ]
        return f"{self.name}: {', '.join([*parts, *self._remarks()])}"

    def remark(self) -> str:
        """Return what a table of counts does not say: a line, empty where there is nothing."""
        if self.is_streamed:
            return self.line()
        remarks = [f"only its first {self.rows:,} rows were read"] if self.is_cut else []
        remarks += self._remarks()
        return f"{self.name}: {', '.join(remarks)}" if remarks else ""

    def _remarks(self) -> list[str]:
        remarks = []
        if self.asks_validation and not self.validation_rows:
            remarks.append("too few distinct rows for validation")
        if self.repeated_rows:
            remarks.append(f"{self.repeated_rows:,} left out that stand in validation")
        if self.rejected:
            remarks.append(f"{self.rejected:,} bad rows left out")
        return remarks


@dataclass(kw_only=True, slots=True)
class Fingerprint:
    """Tell which rows the evaluation asks; `sha256` is "" for a hub id."""

    name: str
    path: str
    sha256: str


@dataclass(kw_only=True, slots=True)
class DataReport:
    """Say what was read, for the screen and for the run's manifest."""

    datasets: list[DatasetReport]
    template_note: str
    mixture: list[str] = field(default_factory=list)
    test_datasets: list[Fingerprint] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines to log: one a data set, their shares, and how turns are written."""
        note = [self.template_note] if self.template_note else []
        return [*(report.line() for report in self.datasets), *self.mixture, *note]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyDataset:
    """Hold a data set with its name: what was read of it, and which documents are trained on."""

    name: str
    config: DatasetConfig
    data: Prepared
    split: Split


class PreparedData:
    """Prepare the data sets, or find them in the cache, and split them; raises DataError.

    `train_examples` and `val_examples` are the documents of both sides; of a stream all that was
    read is for validation.
    """

    def __init__(self, spec: DataSpec, template: ChatTemplate) -> None:
        self._spec, self._config, self._template = spec, spec.config, template
        prepared, self._tests = self._prepare_all()
        _check_token_ids(
            [*prepared.values(), *self._tests.values()],
            spec.model.vocab_size,
            spec.tokenizer.pad_token_id,
        )
        self.datasets = self._split(prepared, spec.seed)
        self.train_examples = self._examples([one.split.training for one in self.datasets])
        self.val_examples = self._examples([one.split.validation for one in self.datasets])

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that were seen to end answers."""
        prepared = [*(one.data for one in self.datasets), *self._tests.values()]
        return {stop for data in prepared for stop in data.counts.stop_token_ids}

    @property
    def has_chats(self) -> bool:
        """Tell whether any row goes through the chat template."""
        prepared = [*(one.data for one in self.datasets), *self._tests.values()]
        return any(data.counts.chats for data in prepared)

    @cached_property
    def audit(self) -> Audit:
        """Return what will be trained on and what is wrong with it; of a stream, the rows read."""
        config = self._config
        is_stream = config.streaming
        stores = [data.store for data in self._tests.values()]
        nothing = Examples([], [])
        audit = audit_documents(
            config.audit,
            [_facts(one, config.on_long) for one in self.datasets],
            self.val_examples if is_stream else self.train_examples,
            nothing if is_stream else self.val_examples,
            benchmarks=Examples(stores, [np.arange(len(store)) for store in stores]),
            benchmark_names=list(self._tests),
            run=RunSettings(
                trains_prompts=config.train_on_inputs or set(config.roles_to_train) > {"assistant"},
                train_on_eos=config.train_on_eos,
                sequence_len=self._spec.sequence_len,
                is_encoder_decoder=self._template.is_encoder_decoder,
            ),
        )
        if is_stream:
            audit.facts.append("a stream: only the rows held out were looked at")
        return audit

    def report(self) -> DataReport:
        """Return what was read, a report a data set."""
        reports = []
        for index, one in enumerate(self.datasets):
            rows, counts = one.data.store.rows, one.data.counts
            trained_grams = self.train_examples.datasets == index
            reports.append(
                DatasetReport(
                    name=one.name,
                    path=redact(one.config.path),
                    format=one.data.format,
                    format_guessed=one.data.format_guessed,
                    sha256=one.data.sha256,
                    how=one.data.how,
                    rows=counts.rows,
                    train_rows=len(np.unique(rows[one.split.training])),
                    validation_rows=len(np.unique(rows[one.split.validation])),
                    repeated_rows=one.split.repeated_rows,
                    tokens=int(self.train_examples.lengths[trained_grams].sum()),
                    trained_tokens=int(self.train_examples.trained[trained_grams].sum()),
                    rejected=counts.rejected,
                    is_cut=one.data.is_cut,
                    is_streamed=self._config.streaming,
                    asks_validation=self._config.val_set_size > 0,
                )
            )
        tests = zip(self._config.test_datasets, self._tests.items(), strict=True)
        return DataReport(
            datasets=reports,
            template_note=self._template.note if self.has_chats else "",
            test_datasets=[
                Fingerprint(name=name, path=redact(config.path), sha256=data.sha256)
                for config, (name, data) in tests
            ],
        )

    def prompt_items(self, max_rows: int) -> Iterator[tuple[str, list[Item]]]:
        """Yield the items of the first rows of each test data set, or else of those held out."""
        if self._tests:
            for name, dataset in zip(self._tests, self._config.test_datasets, strict=True):
                most = min(max_rows, dataset.max_rows or max_rows)
                yield name, read_items(dataset, self._config, max_rows=most)
            return
        for one in self.datasets:
            rows = np.unique(one.data.store.rows[one.split.validation])
            wanted = set(rows[:max_rows].tolist())
            yield one.name, read_items(one.config, self._config, wanted=wanted)

    def write_rejected(self, folder: Path) -> None:
        """Copy the rows that a quarantine took to `folder`/quarantine."""
        read = {one.name: one.data for one in self.datasets}
        tests = {f"test-{name}": data for name, data in self._tests.items()}
        for name, data in (read | tests).items():
            if data.counts.rejected:
                (folder / "quarantine").mkdir(exist_ok=True)
                shutil.copy(data.folder / REJECTED_FILE, folder / "quarantine" / f"{name}.jsonl")

    def _prepare_all(self) -> tuple[dict[str, Prepared], dict[str, Prepared]]:
        """Prepare every data set, by its name; the problems of all of them are listed together."""
        config, problems, kinds = self._config, list[str](), set[type[DataError]]()
        shared = TokenSpec(
            config=config,
            template=self._template,
            sequence_len=self._spec.sequence_len,
            tokenizer_hash=hash_of(self._spec.tokenizer),
            tokenizer=str(self._spec.tokenizer.name_or_path),
            first_rows=self._spec.first_rows,
        )

        def prepare(datasets: list[DatasetConfig], spec: TokenSpec) -> dict[str, Prepared]:
            prepared = {}
            for name, dataset in zip(dataset_names(datasets), datasets, strict=True):
                try:
                    prepared[name] = prepare_dataset(dataset, spec)
                except DataError as error:
                    problems.extend(error.problems)
                    kinds.add(type(error))
            return prepared

        read = prepare(self._read(), shared)
        # Whoever asks a long row is told so when it asks; its tokens are compared all the same.
        lenient = dataclasses.replace(config, on_long="truncate_left", max_dropped_share=None)
        tests = prepare(config.test_datasets, dataclasses.replace(shared, config=lenient))
        if problems:
            kind = kinds.pop() if len(kinds) == 1 else DataError
            raise kind(problems)
        return read, tests

    def _read(self) -> list[DatasetConfig]:
        """Return what is prepared: the data sets, or of streams the beginning, with their names."""
        config = self._config
        names = dataset_names(config.datasets)
        named = [
            dataclasses.replace(dataset, name=name)
            for dataset, name in zip(config.datasets, names, strict=True)
        ]
        if not config.streaming:
            return named
        return [validation_slice(one, config) for one in named] if config.val_set_size else []

    def _split(self, prepared: dict[str, Prepared], seed: int) -> list[ReadyDataset]:
        config, read = self._config, self._read()
        stores = [data.store for data in prepared.values()]
        if config.streaming:
            every = [np.ones(len(store), np.bool_) for store in stores]
            splits = [Split(~mask, mask) for mask in every]
        else:
            splits = hold_out(
                stores,
                list(prepared),
                [dataset.path for dataset in read],
                [dataset.max_rows for dataset in read],
                config.val_set_size,
                seed,
            )
        parts = zip(prepared.items(), read, splits, strict=True)
        return [ReadyDataset(name, one, data, side) for (name, data), one, side in parts]

    def _examples(self, masks: list[np.ndarray[tuple[int], np.dtype[np.bool_]]]) -> Examples:
        stores = [one.data.store for one in self.datasets]
        return Examples(stores, [np.flatnonzero(mask) for mask in masks])


def _facts(one: ReadyDataset, on_long: str) -> DatasetFacts:
    counts = one.data.counts
    return DatasetFacts(
        name=one.name,
        path=redact(one.config.path),
        format=one.data.format,
        is_chat=counts.chats > 0,
        rows=counts.rows,
        bad_rows=counts.rejected,
        dropped_long=counts.dropped,
        truncated=counts.truncated,
        split=counts.split,
        empty=counts.empty,
        empty_origins=counts.empty_origins,
        lost_tokens=counts.lost_tokens,
        kept_tokens=int(one.data.store.lengths.sum()),
        on_long=on_long,
        longest=counts.longest,
        notes=counts.notes,
    )


def _check_token_ids(
    prepared: list[Prepared], vocab_size: int | None, pad_token_id: int | None
) -> None:
    """Raise DataError where a token has no row in the embedding: a GPU would only crash."""
    if vocab_size is None:
        return
    problems = []
    largest, origin = max((data.counts.largest_token for data in prepared), default=(-1, ""))
    if largest >= vocab_size:
        problems.append(
            f"{origin} holds token id {largest:,}, the model's embedding has {vocab_size:,} rows; "
            "set model.tokenizer_path to the tokenizer that the model was made with"
        )
    if pad_token_id is not None and pad_token_id >= vocab_size:
        problems.append(
            f"the tokenizer's pad token has id {pad_token_id:,}, the model's embedding has "
            f"{vocab_size:,} rows; set pad_token in tokenizer_config.json to the tokenizer's "
            "eos_token"
        )
    if problems:
        raise DataError(problems)


def read_items(
    dataset: DatasetConfig,
    data: DataConfig,
    *,
    wanted: Collection[int] | None = None,
    max_rows: int | None = None,
) -> list[Item]:
    """Return the items of the first `max_rows` good rows, or of the rows with numbers `wanted`.

    Rows are numbered from 0 in the order of reading, bad ones too. Raises DataError where a row
    that is wanted is not there.
    """
    items: list[Item] = []
    if max_rows == 0 or (wanted is not None and not wanted):
        return items
    most = len(wanted) if wanted is not None else max_rows
    format_name, chunks = find_format(dataset, chunks_of(dataset, data))
    num_found = 0
    for number, row in enumerate(row for chunk in chunks for row in chunk.rows()):
        if isinstance(row, source.BadRow) or (wanted is not None and number not in wanted):
            continue
        found = convert(row, format_name or "", dataset.columns)
        if isinstance(found, Rejected):
            continue
        items += found
        num_found += 1
        if num_found == most:
            return items
    if wanted is not None:
        raise DataError(f"{dataset.path}: changed since it was tokenized; start again")
    return items
