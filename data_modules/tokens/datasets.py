"""All data sets of a run: their tokens on disk, split into training and validation.

Composes preparation, holdout and audit. For a stream, holds only the validation rows. Never plans
a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from common.redaction import redact
from common.text import counted
from data_modules import source
from data_modules.audit.audit import audit_documents
from data_modules.audit.findings import (
    Audit,
    DatasetFacts,
    RunSettings,
    warn_of_first_rows,
)
from data_modules.format import PREFERENCE, sort_unread
from data_modules.packing import Indices, seeded_generator
from data_modules.settings import (
    DEFAULT_SEQUENCE_LEN,
    DataConfig,
    DatasetConfig,
    PackingConfig,
    dataset_names,
)
from data_modules.stream import validation_slice
from data_modules.template import ChatTemplate, MaskConfig
from data_modules.tokens import encode, prepare
from data_modules.tokens.encode import TokenSpec
from data_modules.tokens.prepare import Key, Prepared
from data_modules.tokens.store import Examples, TokenStore, TokenValues
from data_modules.types import BatchSpec, Item, ModelSpec, Tokens

if TYPE_CHECKING:
    import transformers


_REFERENCE_FILE = "reference.npy"
_VAL_KEY = "data.val_datasets"
_NOTABLE_RATIO = 2
"""a note is printed if more than this many times the share of the used rows is held out"""
Mask = npt.NDArray[np.bool_]
PairValues = npt.NDArray[np.float64]
"""log-probabilities of a base for the answers of pairs [n, 2]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Everything that determines the data of a run."""

    config: DataConfig
    packing: PackingConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    model: ModelSpec
    batching: BatchSpec
    seed: int
    first_rows: int | None = None
    """read only this many rows of each data set; None: all"""

    @property
    def sequence_len(self) -> int:
        """Return the maximum tokens of a document; DataError above the model's context."""
        requested, context_len = self.config.sequence_len, self.model.context_len
        if requested is None:
            return min(DEFAULT_SEQUENCE_LEN, context_len or DEFAULT_SEQUENCE_LEN)
        if context_len is not None and requested > context_len:
            raise DataError(
                f"data.sequence_len is {requested:,}, the model's context {context_len:,} tokens; "
                f"set data.sequence_len={context_len}"
            )
        return requested


@dataclass(kw_only=True, slots=True)
class DatasetReport:
    """What was read of a data set; `tokens` are those of the training rows."""

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
    wants_validation: bool
    key: str
    """the setting that names it"""
    is_trained: bool
    notes: list[str]

    def line(self) -> str:
        guessed = ", guessed" if self.format_guessed else ""
        if self.is_streamed:
            return (
                f"{self.name}: streamed ({self.format}{guessed}), its first "
                f"{self.validation_rows:,} rows are for validation"
            )
        first = "the first " if self.is_cut else ""
        parts = [
            f"{first}{counted(self.rows, 'row')} ({self.format}{guessed})",
            f"{self.train_rows:,} train + {self.validation_rows:,} validation"
            if self.is_trained
            else f"{self.validation_rows:,} validation, never trained on",
            self.how,
        ]
        return f"{self.name}: {', '.join([*parts, *self._remarks()])}"

    def remark(self) -> str:
        """Return a line of what the table of counts does not show; empty if there is nothing."""
        if self.is_streamed:
            return self.line()
        remarks = [f"only its first {self.rows:,} rows were read"] if self.is_cut else []
        remarks += self._remarks()
        return f"{self.name}: {', '.join(remarks)}" if remarks else ""

    def _remarks(self) -> list[str]:
        remarks = list(self.notes)
        if self.wants_validation and not self.validation_rows:
            remarks.append("too few distinct rows for validation")
        if self.repeated_rows:
            remarks.append(f"{self.repeated_rows:,} left out because they are in validation")
        if self.rejected:
            remarks.append(f"{self.rejected:,} bad rows left out")
        return remarks


@dataclass(kw_only=True, slots=True)
class Fingerprint:
    """The identity of a test data set; `sha256` is "" for a hub id."""

    name: str
    path: str
    sha256: str


@dataclass(kw_only=True, slots=True)
class DataReport:
    """What was read, for the screen and for the run's manifest."""

    datasets: list[DatasetReport]
    template_note: str
    mixture: list[str] = field(default_factory=list)
    test_datasets: list[Fingerprint] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines to log: one per data set, the mixture, and the chat template's note."""
        note = [self.template_note] if self.template_note else []
        return [*(report.line() for report in self.datasets), *self.mixture, *note]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyDataset:
    """A prepared data set with its name and its split into training and validation."""

    name: str
    config: DatasetConfig
    data: Prepared
    split: Sides
    key: str
    is_trained: bool


def token_spec(spec: DataSpec, template: ChatTemplate) -> TokenSpec:
    """Return what determines the tokens of the data sets of a run."""
    return TokenSpec(
        config=spec.config,
        template=template,
        sequence_len=spec.sequence_len,
        tokenizer_hash=prepare.hash_of(spec.tokenizer),
        tokenizer=str(spec.tokenizer.name_or_path),
        labels=spec.model.labels,
        is_multi_label=spec.model.is_multi_label,
        first_rows=spec.first_rows,
    )


class PreparedData:
    """The data sets of a run, tokenized or found in the cache, and split; raises DataError.

    `train_examples` and `val_examples` are the documents of the two sides; all rows read of a
    stream are for validation.
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
        self.train_examples = self._examples([ready.split.training for ready in self.datasets])
        self.val_examples = self._examples([ready.split.validation for ready in self.datasets])

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end answers in the rows."""
        return {stop for data in self._all_prepared() for stop in data.counts.stop_token_ids}

    def _all_prepared(self) -> list[Prepared]:
        return [*(ready.data for ready in self.datasets), *self._tests.values()]

    @cached_property
    def audit(self) -> Audit:
        """The audit of the training data; for a stream, of the rows read."""
        config = self._config
        is_stream = config.streaming
        stores = [data.store for data in self._tests.values()]
        examples = self.train_examples, self.val_examples
        if is_stream:  # what was read, with the numbers of `datasets`
            read = [np.flatnonzero(ready.split.validation) for ready in self.datasets]
            examples = Examples([each.data.store for each in self.datasets], read), Examples([], [])
        audit = audit_documents(
            config.audit,
            [
                DatasetFacts(
                    name=ready.name,
                    path=redact(ready.config.path),
                    format=ready.data.format,
                    counts=ready.data.counts,
                    kept_tokens=int(ready.data.store.lengths.sum()),
                    on_long=config.on_long,
                    # The audit of a stream counts what was read.
                    is_trained=ready.is_trained or is_stream,
                )
                for ready in self.datasets
            ],
            *examples,
            benchmarks=Examples(stores, [np.arange(len(store)) for store in stores]),
            benchmark_names=list(self._tests),
            run=self._run_settings(),
        )
        if is_stream:
            audit.facts.append("a stream: only the validation rows were audited")
        found = {ready.name: ready.data.counts.unread for ready in self.datasets}
        if is_stream and not config.held_out:
            for fact in self._first_rows():
                found[fact.name] = fact.counts.unread
                warn_of_first_rows(audit, fact, self._run_settings())
        found |= {f"test data {name}": data.counts.unread for name, data in self._tests.items()}
        audit.unread = {name: sort_unread(unread) for name, unread in found.items() if unread}
        return audit

    def _run_settings(self) -> RunSettings:
        config = self._config
        return RunSettings(
            trains_prompts=config.train_on_inputs or set(config.roles_to_train) > {"assistant"},
            mask=MaskConfig.of(config).changed(),
            train_on_eos=config.train_on_eos,
            sequence_len=self._spec.sequence_len,
            is_encoder_decoder=self._template.is_encoder_decoder,
            has_own_template=self._template.is_tokenizers_own,
        )

    def _first_rows(self) -> Iterator[DatasetFacts]:
        """Yield what happened to the first rows of each data set of a stream."""
        spec = token_spec(self._spec, self._template)
        names = dataset_names(self._config.loss_datasets)
        for name, dataset in zip(names, self._config.datasets, strict=False):
            format_name, counts, num_tokens = encode.encode_first_rows(dataset, spec)
            yield DatasetFacts(
                name=name,
                path=redact(dataset.path),
                format=format_name,
                counts=counts,
                kept_tokens=num_tokens,
                on_long=self._config.on_long,
            )

    def report(self) -> DataReport:
        reports = []
        for index, ready in enumerate(self.datasets):
            rows, counts, split = ready.data.store.rows, ready.data.counts, ready.split
            train_rows, validation_rows = (
                len(np.unique(rows[side])) for side in (split.training, split.validation)
            )
            notes = [*ready.data.notes]
            if ready.is_trained:
                share = self._config.held_out
                notes += _share_notes(
                    ready.config.max_rows,
                    share,
                    train_rows,
                    validation_rows,
                    is_only=len(self._config.datasets) == 1,
                )
            of_dataset = self.train_examples.datasets == index
            reports.append(
                DatasetReport(
                    name=ready.name,
                    path=redact(ready.config.path),
                    format=ready.data.format,
                    format_guessed=ready.data.format_guessed,
                    sha256=ready.data.sha256,
                    how=ready.data.how,
                    rows=counts.rows,
                    train_rows=train_rows,
                    validation_rows=validation_rows,
                    repeated_rows=split.repeated_rows,
                    tokens=int(self.train_examples.lengths[of_dataset].sum()),
                    trained_tokens=int(self.train_examples.trained[of_dataset].sum()),
                    rejected=counts.rejected,
                    is_cut=ready.data.is_cut,
                    is_streamed=self._config.streaming and ready.is_trained,
                    wants_validation=ready.is_trained and self._config.held_out > 0,
                    key=ready.key,
                    is_trained=ready.is_trained,
                    notes=notes,
                )
            )
        tests = zip(self._config.test_datasets, self._tests.items(), strict=True)
        has_chats = any(data.counts.chats for data in self._all_prepared())
        return DataReport(
            datasets=reports,
            template_note=self._template.note if has_chats else "",
            test_datasets=[
                Fingerprint(name=name, path=redact(config.path), sha256=data.sha256)
                for config, (name, data) in tests
            ],
        )

    def prompt_items(self, max_rows: int) -> Iterator[tuple[str, list[Item]]]:
        """Yield the items of the first rows of each test data set, else of the validation rows."""
        if self._tests:
            for name, dataset in zip(self._tests, self._config.test_datasets, strict=True):
                limit = min(max_rows, dataset.max_rows or max_rows)
                yield name, _read_items(dataset, self._config, max_rows=limit)
            return
        for ready in self.datasets:
            rows = np.unique(ready.data.store.rows[ready.split.validation])
            wanted = set(rows[:max_rows].tolist())
            yield ready.name, _read_items(ready.config, self._config, wanted=wanted)

    def write_rejected(self, folder: Path) -> None:
        """Copy the quarantined rows to `folder`/quarantine."""
        trained = {ready.name: ready.data for ready in self.datasets}
        tests = {f"test-{name}": data for name, data in self._tests.items()}
        for name, data in (trained | tests).items():
            if data.counts.rejected:
                (folder / "quarantine").mkdir(exist_ok=True)
                shutil.copy(
                    data.folder / prepare.REJECTED_FILE, folder / "quarantine" / f"{name}.jsonl"
                )

    def _prepare_all(self) -> tuple[dict[str, Prepared], dict[str, Prepared]]:
        """Prepare all data sets, by name; raises the problems of all of them together."""
        config, problems, kinds = self._config, list[str](), set[type[DataError]]()
        shared = token_spec(self._spec, self._template)

        def prepare_each(datasets: list[DatasetConfig], spec: TokenSpec) -> dict[str, Prepared]:
            prepared = {}
            for name, dataset in zip(dataset_names(datasets), datasets, strict=True):
                try:
                    prepared[name] = prepare.prepare_dataset(dataset, spec)
                except DataError as error:
                    problems.extend(error.problems)
                    kinds.add(type(error))
            return prepared

        trained = prepare_each([dataset for _, dataset in self._datasets_to_read()], shared)
        # A long test row is reported when its prompt is built; until then its tokens are only used
        # by the audit, to find overlaps.
        lenient = dataclasses.replace(config, on_long="truncate_left", max_dropped_share=None)
        tests = prepare_each(config.test_datasets, dataclasses.replace(shared, config=lenient))
        if problems:
            kind = kinds.pop() if len(kinds) == 1 else DataError
            raise kind(problems)
        return trained, tests

    def _datasets_to_read(self) -> list[tuple[str, DatasetConfig]]:
        """Return (key, data set) to tokenize, named; of a stream only its validation rows."""
        config = self._config
        named = [
            dataclasses.replace(dataset, name=name)
            for dataset, name in zip(
                config.loss_datasets, dataset_names(config.loss_datasets), strict=True
            )
        ]
        trained, validated = named[: len(config.datasets)], named[len(config.datasets) :]
        if config.streaming:
            trained = [validation_slice(each, config) for each in trained if config.held_out]
        return [
            *((f"data.datasets[{n}]", dataset) for n, dataset in enumerate(trained)),
            *((f"{_VAL_KEY}[{n}]", dataset) for n, dataset in enumerate(validated)),
        ]

    def _split(self, prepared: dict[str, Prepared], seed: int) -> list[ReadyDataset]:
        read = self._datasets_to_read()
        is_trained = [not key.startswith(_VAL_KEY) for key, _ in read]
        sources = [
            (data.store, dataset)
            for data, (_, dataset) in zip(prepared.values(), read, strict=True)
        ]
        splits = []
        if not self._config.streaming:
            splits = hold_out(sources[: sum(is_trained)], self._config.held_out, seed)
        for (store, dataset), trained in list(zip(sources, is_trained, strict=True))[len(splits) :]:
            every, cap = np.ones(len(store), np.bool_), None if trained else dataset.max_rows
            splits.append(Sides(~every, _capped(store, every, cap, seed, str(dataset.name))))
        return [
            ReadyDataset(name, dataset, data, split, key, trained)
            for (name, data), (key, dataset), split, trained in zip(
                prepared.items(), read, splits, is_trained, strict=True
            )
        ]

    def _examples(self, masks: list[Mask]) -> Examples:
        """Return the documents of masks, with the data sets' numbers among all with a loss."""
        stores = [ready.data.store for ready in self.datasets]
        chosen = [np.flatnonzero(mask) for mask in masks]
        # A stream that holds out no rows is not read.
        num_unread = len(self._config.loss_datasets) - len(stores) if stores else 0
        return Examples(
            stores[:1] * num_unread + stores, [np.zeros(0, np.int64)] * num_unread + chosen
        )


@dataclass(frozen=True, slots=True)
class Sides:
    """The training and the validation documents of a data set, as masks, bool [documents].

    A document may be in neither. `repeated_rows` counts the rows that are left out of training
    because validation has an identical one.
    """

    training: Mask
    validation: Mask
    repeated_rows: int = 0


def hold_out(
    sources: Sequence[tuple[TokenStore, DatasetConfig]], val_set_size: float, seed: int
) -> list[Sides]:
    """Split each data set into training and validation.

    `val_set_size` is a share of the rows if below 1, else a number of rows; a data set of one row
    has no validation rows. Identical rows stay on the same side, so there may be fewer validation
    rows than requested. A data set's `max_rows` limits its training rows. Raises DataError if no
    row is left to train on.
    """
    validation = [
        _choose_rows(store, val_set_size, dataset.path, seed, str(dataset.name))
        for store, dataset in sources
    ]
    held_out = [store.digests[mask] for (store, _), mask in zip(sources, validation, strict=True)]
    digests = np.unique(np.concatenate([np.zeros(0, np.uint64), *held_out]))
    splits = []
    for (store, dataset), mask in zip(sources, validation, strict=True):
        repeated = np.unique(store.rows[np.isin(store.digests, digests) & ~mask])
        training = ~mask & ~np.isin(store.rows, repeated)
        training = _capped(store, training, dataset.max_rows, seed, str(dataset.name))
        splits.append(Sides(training, mask, len(repeated)))
    return splits


def _choose_rows(store: TokenStore, size: float, path: str, seed: int, name: str) -> Mask:
    """Return a seeded choice of rows, with all identical rows or none, as bool [documents]."""
    _, firsts, of_document = np.unique(store.rows, return_index=True, return_inverse=True)
    num_rows = len(firsts)
    if size >= max(2, num_rows):
        raise DataError(
            f"{path}: data.val_set_size={size:g} leaves none of its {num_rows:,} rows to train on; "
            "set fewer, or a share below 1"
        )
    chosen = np.zeros(num_rows, dtype=np.bool_)
    if size > 0 and num_rows > 1:
        wanted = size if size >= 1 else round(size * num_rows)
        count = min(max(1, int(wanted)), num_rows - 1)
        content = np.add.reduceat(store.digests, firsts)
        _, first_rows, kinds, sizes = np.unique(
            content, return_index=True, return_inverse=True, return_counts=True
        )
        # In order of first occurrence, so that without duplicates rows themselves are chosen.
        in_order = np.argsort(first_rows)
        order = in_order[seeded_generator(seed, "split", name).permutation(len(sizes))]
        taken = np.zeros(len(sizes), dtype=np.bool_)
        taken[_fill(order, sizes, count)] = True
        chosen = taken[kinds]
    return chosen[of_document]


def _fill(order: Indices, sizes: Indices, count: int) -> Indices:
    """Return the kinds that together have `count` rows, in their order; what is too large waits."""
    chosen: list[Indices] = []
    while count and len(order):
        ends = np.cumsum(sizes[order])
        fitting = int(ends.searchsorted(count, side="right"))
        chosen.append(order[:fitting])
        count -= int(ends[fitting - 1]) if fitting else 0
        order = order[fitting:]
        order = order[sizes[order] <= count]
    return np.concatenate([order[:0], *chosen])


def _capped(store: TokenStore, mask: Mask, cap: int | None, seed: int, name: str) -> Mask:
    """Return a mask with at most `cap` of its rows, a seeded choice."""
    rows = np.unique(store.rows[mask])
    if cap is None or cap >= len(rows):
        return mask
    return mask & np.isin(store.rows, seeded_generator(seed, "cap", name).permutation(rows)[:cap])


class ReferenceStore:
    """What a base or a teacher says of each data set's rows, in the cache beside their tokens.

    Of a pair two log-probabilities of a base; with `by_token` values of each trained token.
    `identity`: everything besides the tokens that determines them. NaN for rows beyond `max_rows`,
    which no run with these settings reads.
    """

    def __init__(
        self, root: Path, datasets: Sequence[ReadyDataset], identity: str, *, by_token: bool
    ) -> None:
        self._root, self._datasets, self._by_token = root, datasets, by_token
        # Whatever a seed holds out of them.
        self.places = [
            np.arange(len(ready.data.store))
            if ready.config.max_rows is None
            else np.flatnonzero(ready.split.training | ready.split.validation)
            for ready in datasets
        ]
        """documents of each data set whose values are stored, int64 [pairs]"""
        self._keys = [
            _key(ready, places, identity)
            for ready, places in zip(datasets, self.places, strict=True)
        ]

    def read(self) -> list[PairValues | TokenValues] | None:
        """Return the values of each data set; None unless all are stored."""
        folders = [self._root / key.name for key in self._keys]
        if not all(map(prepare.is_whole, folders)):
            return None
        files = [folder / _REFERENCE_FILE for folder in folders]
        if not self._by_token:
            return [np.load(file, allow_pickle=False) for file in files]
        stores = [ready.data.store for ready in self._datasets]
        return [TokenValues(file, each.trained) for file, each in zip(files, stores, strict=True)]

    def write(self, values: npt.NDArray[Any]) -> None:
        """Store the values of all `places` [pairs, 2], or [trained tokens, ...].

        Raises DataError if the cache cannot be written.
        """
        counts = [
            ready.data.store.trained if self._by_token else np.ones(len(ready.data.store), np.int64)
            for ready in self._datasets
        ]
        named = zip(counts, self.places, strict=True)
        borders = np.cumsum([own[places].sum() for own, places in named])[:-1]
        for rows, key, places, own in zip(
            counts, self._keys, self.places, np.split(values, borders), strict=True
        ):
            whole = np.full((rows.sum(), *values.shape[1:]), np.nan, values.dtype)
            is_read = np.zeros(len(rows), np.bool_)
            is_read[places] = True
            whole[np.repeat(is_read, rows)] = own

            def make(folder: Path, whole: npt.NDArray[Any] = whole) -> None:
                np.save(folder / _REFERENCE_FILE, whole)

            prepare.open_or_make(self._root, key, make)


def _share_notes(
    max_rows: int | None, share: float, train_rows: int, validation_rows: int, *, is_only: bool
) -> list[str]:
    """Return a note if `max_rows` leaves many more validation rows than the share of all rows.

    `is_only`: no other data set gets the setting that it names.
    """
    if max_rows is None or not 0 < share < 1:
        return []
    if validation_rows <= _NOTABLE_RATIO * share * (train_rows + validation_rows):
        return []
    fix = "data.val_set_size=N holds out N rows of each data set"
    if is_only:
        fewer = max(1, round(share * max_rows))
        fix = f"type data.val_set_size={fewer} to hold out fewer rows"
    return [
        f"data.val_set_size={share:g} is a share of all rows, not of max_rows={max_rows:,}: {fix}"
    ]


def _key(ready: ReadyDataset, places: Indices, identity: str) -> Key:
    import torch
    import transformers

    return Key(
        path=redact(ready.config.path),
        split=f"{ready.config.split}, log-probabilities of the base",
        parts={
            "data": ready.data.folder.name,  # determines the tokens and what is trained of them
            "settings": {"base": identity, "rows": hashlib.sha256(places.tobytes()).hexdigest()},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
    )


def _check_token_ids(
    prepared: list[Prepared], vocab_size: int | None, pad_token_id: int | None
) -> None:
    """Raise DataError if a token id has no row in the embedding, which would crash a GPU."""
    if vocab_size is None:
        return
    problems = []
    largest, origin = max((data.counts.largest_token for data in prepared), default=(-1, ""))
    if largest >= vocab_size:
        problems.append(
            f"{origin} holds token id {largest:,}, the model's embedding has {vocab_size:,} rows; "
            "set model.tokenizer_path to the tokenizer that the model was trained with"
        )
    if pad_token_id is not None and pad_token_id >= vocab_size:
        problems.append(
            f"the tokenizer's pad token has id {pad_token_id:,}, the model's embedding has "
            f"{vocab_size:,} rows; set pad_token in tokenizer_config.json to the tokenizer's "
            "eos_token"
        )
    if problems:
        raise DataError(problems)


def _read_items(
    dataset: DatasetConfig,
    data: DataConfig,
    *,
    wanted: Collection[int] | None = None,
    max_rows: int | None = None,
) -> list[Item]:
    """Return the items of the first `max_rows` good rows, or of the rows numbered `wanted`.

    Of a preference pair, that of the chosen answer; none of an answer that is not wanted.

    Rows are numbered from 0 in reading order, including bad ones. Raises DataError if a wanted row
    is missing.
    """
    items: list[Item] = []
    if max_rows == 0 or (wanted is not None and not wanted):
        return items
    limit = len(wanted) if wanted is not None else max_rows
    format_name, chunks = encode.find_format(dataset, encode.chunks_of(dataset, data))
    num_found = 0
    for number, row in enumerate(row for chunk in chunks for row in chunk.rows()):
        if isinstance(row, source.BadRow) or (wanted is not None and number not in wanted):
            continue
        found = encode.items_of(row, format_name or "", dataset)
        if isinstance(found, encode.Rejected):
            continue
        if format_name == PREFERENCE:
            items += found[:1]
        else:
            items += [item for item in found if isinstance(item, Tokens) or item.label != 0]
        num_found += 1
        if num_found == limit:
            return items
    if wanted is not None:
        raise DataError(f"{dataset.path}: changed since it was tokenized; start again")
    return items
