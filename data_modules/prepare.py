"""Read, convert and encode data sets, and count what became of every row.

Composes source -> format -> template. Holds the data's settings and the checks that need neither
torch nor a tokenizer. Never plans a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from data_modules import format as formats
from data_modules import source
from data_modules.types import (
    Conversation,
    DataError,
    Document,
    Example,
    Origin,
    Problems,
    Row,
    shown,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.template import ChatTemplate, Encoded

    Item = Conversation | Document

ON_LONG = ("drop", "truncate_left", "truncate_right", "split", "error")
CHECKED_BYTES = 16 << 20
"""what a check of the settings reads at most, of all files together: it must be quick"""


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Name one data set."""

    path: str
    """a json, jsonl, csv or parquet file, a folder or glob of them, a hub id (owner/name), or
    sample:NAME for what ships with the project"""
    name: str | None = None
    """its name in metrics; null = the file's name without suffix"""
    format: str | None = None
    """alpaca, messages, sharegpt, prompt_completion or completion; null = guessed from columns"""
    split: str = "train"
    """which split of a folder or of a hub data set"""
    weight: float = 1.0
    """how often a row is seen in an epoch: 0.5 = a seeded half of the rows, 2.0 = each twice"""
    columns: dict[str, str] = field(default_factory=dict)
    """format's field: column that holds it, as in {instruction: question, output: answer}"""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Choose what is learned."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    """the data sets to learn from, mixed by their weights"""
    test_datasets: list[DatasetConfig] = field(default_factory=list)
    """rows to ask the model in the evaluation; none = the validation rows"""
    sequence_len: int | None = None
    """tokens a document and a pack may have; null = the smaller of 2048 and the model's context;
    more = longer documents, more memory"""
    val_set_size: float = 0.05
    """validation rows of each data set: a share below 1, else a number of rows (1 = one row)"""
    train_on_inputs: bool = False
    """learn prompts too, not only answers"""
    on_long: str = "drop"
    """a row above `sequence_len`: drop, truncate_left (keep its end), truncate_right (keep its
    beginning), split (into several documents) or error"""
    max_dropped_share: float | None = None
    """stop when more than this share of a data set's rows is dropped; null = never"""
    chat_template: str | None = None
    """plain, chatml or a .jinja file; null = the tokenizer's own, or plain where it has none"""
    num_workers: int = 0
    """processes that lay out batches ahead; 0 = the training process does it (enough here)"""


@dataclass(kw_only=True, slots=True)
class DatasetReport:
    """Count what became of a data set's rows; tokens and documents are those of training."""

    name: str
    path: str
    format: str
    format_guessed: bool
    sha256: str
    rows: int = 0
    train_rows: int = 0
    validation_rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    empty: int = 0
    repeated: int = 0
    longest_tokens: int = 0
    longest_origin: str = ""
    empty_origins: list[str] = field(default_factory=list)
    control_rows: int = 0
    control_first: str = ""

    def line(self, sequence_len: int) -> str:
        """Return the counts in one line."""
        guessed = ", guessed" if self.format_guessed else ""
        share = 100 * self.trained_tokens / max(1, self.tokens)
        parts = [
            f"{self.rows:,} rows ({self.format}{guessed})",
            f"{self.train_rows:,} train + {self.validation_rows:,} validation",
            f"{self.tokens:,} tokens",
            f"{share:.0f} % trained",
        ]
        longest = f"longest {self.longest_origin} with {self.longest_tokens:,} tokens"
        for count, what in (
            (self.dropped, "dropped"),
            (self.truncated, "truncated"),
            (self.split, "split"),
        ):
            if count:
                parts.append(f"{count:,} {what} (longer than {sequence_len:,}; {longest})")
        if self.empty:
            first = ", ".join(self.empty_origins)
            parts.append(f"{self.empty:,} dropped with nothing to learn ({first})")
        if self.control_rows:
            parts.append(
                f"{self.control_rows:,} with control tokens in their text, kept and learned as "
                f"such (first {self.control_first})"
            )
        if self.repeated:
            parts.append(f"{self.repeated:,} validation rows also stand in training")
        return f"{self.name}: {', '.join(parts)}"


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
    sequence_len: int
    template_note: str
    lost_system_turns: int = 0
    test_datasets: list[Fingerprint] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what is said aloud: a line a data set, and how turns are written."""
        lines = [report.line(self.sequence_len) for report in self.datasets]
        lines.append(self.template_note)
        if self.lost_system_turns:
            lines.append(
                f"the chat template drops the system turn of {self.lost_system_turns:,} rows"
            )
        return lines


@dataclass(slots=True)
class Prepared:
    """Hold a data set's encoded rows: `examples[i]` are the documents of `items[i]`."""

    items: list[Item]
    examples: list[list[Example]]
    report: DatasetReport


def dataset_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """Return a name for each data set, all different: as given, or made from the path."""
    names: list[str] = []
    for config in datasets:
        base = config.name or source.name_of(config.path)
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def check_datasets(config: DataConfig) -> list[str]:
    """Return all that is wrong with the settings and the rows, without torch or a tokenizer.

    Looks at 16 MB of all files together, in equal parts for the data sets, so that it is quick;
    hub data sets are not fetched.
    """
    problems = _check_settings(config)
    left, unread = CHECKED_BYTES, len(config.datasets) + len(config.test_datasets)
    for key, datasets in (("datasets", config.datasets), ("test_datasets", config.test_datasets)):
        for index, dataset in enumerate(datasets):
            found = _check_dataset_settings(dataset, f"data.{key}[{index}]")
            budget = source.Budget(left // unread)
            left, unread = left - budget.left, unread - 1
            problems += found or _check_rows(dataset, budget)
            left += max(0, budget.left)
        problems += _check_names(datasets, f"data.{key}")
    return problems


def read_items(
    config: DatasetConfig, budget: source.Budget | None = None
) -> tuple[list[Item], str, bool]:
    """Return the rows as conversations or documents, their format, and whether it was guessed.

    With a `budget` there may be none. Raises DataError with the problems of all rows.
    """
    problems = Problems()
    rows = _collect(source.read_rows(config.path, config.split, budget), problems)
    first = next(rows, None)
    if first is None:
        problems.raise_if_any()
        if budget is not None:
            return [], "", True
        raise DataError(f"{config.path}: 0 rows; give a file with at least one row")
    name = config.format or _guess(config, first)
    items = _convert([first], name, config, problems)
    items += _convert(rows, name, config, problems)
    problems.raise_if_any()
    return items, name, config.format is None


def fingerprints(datasets: Sequence[DatasetConfig]) -> list[Fingerprint]:
    """Return what tells the data sets of two runs apart."""
    return [
        Fingerprint(
            name=name, path=config.path, sha256=source.fingerprint(config.path, config.split)
        )
        for config, name in zip(datasets, dataset_names(datasets), strict=True)
    ]


def prepare_dataset(
    config: DatasetConfig,
    name: str,
    index: int,
    data: DataConfig,
    template: ChatTemplate,
    sequence_len: int,
) -> Prepared:
    """Read and encode one data set; rows that leave nothing to learn are dropped and counted.

    Raises DataError when no row is left, or more are dropped than `data.max_dropped_share`.
    """
    items, format_name, guessed = read_items(config)
    report = DatasetReport(
        name=name,
        path=config.path,
        format=format_name,
        format_guessed=guessed,
        sha256=source.fingerprint(config.path, config.split),
        rows=len(items),
    )
    prepared = Prepared([], [], report)
    encoded = template.encode(items, data.train_on_inputs)
    for item, pieces in zip(items, encoded, strict=True):
        fitting = _fit(
            pieces, item.origin, data.on_long, sequence_len, template.bos_token_id, report
        )
        examples = [
            Example(ids, weights, index, item.origin)
            for ids, weights in fitting
            if weights[1:].any()
        ]
        if examples:
            prepared.items.append(item)
            prepared.examples.append(examples)
            _note_control_token(template.control_token(item), item.origin, report)
        elif fitting:
            report.empty += 1
            if len(report.empty_origins) < 5:
                report.empty_origins.append(str(item.origin))
    _check_dropped(report, data, sequence_len)
    return prepared


def count_split(prepared: Prepared, is_validation: Sequence[bool]) -> None:
    """Write the rows of both sides, and the tokens of the training side, into the report."""
    report = prepared.report
    for examples, held_out in zip(prepared.examples, is_validation, strict=True):
        if held_out:
            report.validation_rows += 1
            continue
        report.train_rows += 1
        for example in examples:
            report.tokens += len(example.input_ids)
            report.trained_tokens += int((example.weights[1:] > 0).sum())


def count_repeated(
    reports: Sequence[DatasetReport], train: Iterable[Example], validation: Iterable[Example]
) -> None:
    """Write into the reports how many validation documents also stand in training, to the token."""
    learned = {example.input_ids.tobytes() for example in train}
    for example in validation:
        reports[example.dataset].repeated += example.input_ids.tobytes() in learned


def _note_control_token(token: str | None, origin: Origin, report: DatasetReport) -> None:
    if token is not None:
        report.control_rows += 1
        report.control_first = report.control_first or f"{origin}: {shown(token)}"


def _fit(
    pieces: Encoded,
    origin: Origin,
    on_long: str,
    sequence_len: int,
    bos_token_id: int | None,
    report: DatasetReport,
) -> list[Encoded]:
    ids, weights = pieces
    if len(ids) <= sequence_len:
        return [pieces]
    if len(ids) > report.longest_tokens:
        report.longest_tokens, report.longest_origin = len(ids), str(origin)
    if on_long in ("drop", "error"):
        report.dropped += 1
        return []
    if on_long == "split":
        report.split += 1
        return _split_tokens(ids, weights, sequence_len, has_bos=bos_token_id is not None)
    report.truncated += 1
    if on_long == "truncate_right":
        return [(ids[:sequence_len], weights[:sequence_len])]
    ids, weights = ids[-sequence_len:].copy(), weights[-sequence_len:].copy()
    if bos_token_id is not None:
        ids[0], weights[0] = bos_token_id, 0.0
    return [(ids, weights)]


def _split_tokens(
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    sequence_len: int,
    has_bos: bool,
) -> list[Encoded]:
    """Cut a document into pieces of at most `sequence_len` tokens, each with the BOS it has."""
    import numpy as np

    bos = 1 if has_bos else 0
    width = sequence_len - bos
    return [
        (
            np.concatenate([ids[:bos], ids[cut : cut + width]]),
            np.concatenate([np.zeros(bos, np.float32), weights[cut : cut + width]]),
        )
        for cut in range(bos, len(ids), width)
    ]


def _check_dropped(report: DatasetReport, data: DataConfig, sequence_len: int) -> None:
    longest = f"the longest, {report.longest_origin}, has {report.longest_tokens:,} tokens"
    if data.on_long == "error" and report.dropped:
        raise DataError(
            f"{report.path}: {report.dropped:,} rows are longer than {sequence_len:,} tokens; "
            f"{longest}; raise data.sequence_len, or set data.on_long=drop or truncate_right"
        )
    lost = report.dropped + report.empty
    detail = f"{report.dropped:,} are longer than {sequence_len:,} tokens"
    if report.dropped:
        detail += f" ({longest}; raise data.sequence_len or set data.on_long=truncate_right)"
    detail += f", {report.empty:,} have nothing to learn"
    if report.empty:
        detail += f" ({', '.join(report.empty_origins)}: no answer, or cut away)"
    if lost == report.rows:
        raise DataError(f"{report.path}: no row of {report.rows:,} is left: {detail}")
    share = data.max_dropped_share
    if share is not None and lost / report.rows > share:
        raise DataError(
            f"{report.path}: {lost:,} of {report.rows:,} rows are dropped ({lost / report.rows:.1%}"
            f"), data.max_dropped_share is {share}: {detail}"
        )


def _collect(rows: Iterator[Row], problems: Problems) -> Iterator[Row]:
    try:
        yield from rows
    except DataError as error:
        for problem in error.problems:
            problems.add(problem)


def _guess(config: DatasetConfig, first: Row) -> str:
    try:
        columns = formats.apply_columns(first.values, config.columns)
    except formats.MissingColumnError as error:
        raise DataError(f"{first.origin} {error}") from error
    name = formats.guess_format(columns)
    if name is None:
        raise DataError(
            f"{first.origin} columns {list(first.values)} are of no known format; set "
            f"data.datasets[].format to one of {', '.join(formats.FORMATS)}, and name the columns "
            "by data.datasets[].columns, as in {instruction: question, output: answer}"
        )
    return name


def _convert(
    rows: Iterable[Row], name: str, config: DatasetConfig, problems: Problems
) -> list[Item]:
    items: list[Item] = []
    lacking: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        try:
            items.append(formats.convert_row(row, name, config.columns))
        except formats.MissingColumnError as error:
            lacking.setdefault(tuple(row.values), []).append(f"{row.origin} {error}")
        except formats.RowError as error:
            problems.add(f"{row.origin} {error}")
    for same in lacking.values():
        more = f" ({len(same) - 1:,} more rows have these columns)" if len(same) > 1 else ""
        problems.add(f"{same[0]}{more}")
    return items


def _check_settings(config: DataConfig) -> list[str]:
    problems = []
    if not config.datasets and not config.test_datasets:
        problems.append("data.datasets is empty; give 'data.datasets=[{path: FILE}]' or data=NAME")
    if config.on_long not in ON_LONG:
        problems.append(f"data.on_long is '{config.on_long}'; use {', '.join(ON_LONG)}")
    if config.sequence_len is not None and config.sequence_len < 2:
        problems.append(f"data.sequence_len is {config.sequence_len}; give 2 tokens or more")
    if not (math.isfinite(config.val_set_size) and config.val_set_size >= 0):
        problems.append(
            f"data.val_set_size is {config.val_set_size}; give a share from 0 to 1, or rows"
        )
    share = config.max_dropped_share
    if share is not None and not 0 <= share <= 1:
        problems.append(f"data.max_dropped_share is {share}; give a share from 0 to 1, or null")
    if config.num_workers < 0:
        problems.append(f"data.num_workers is {config.num_workers}; give 0 or more")
    return problems


def _check_dataset_settings(dataset: DatasetConfig, key: str) -> list[str]:
    problems = []
    if not (math.isfinite(dataset.weight) and dataset.weight > 0):
        problems.append(f"{key}.weight is {dataset.weight}; give a number above 0")
    if dataset.format is not None:
        try:
            formats.check_format(dataset.format)
            formats.check_columns(dataset.format, dataset.columns)
        except ValueError as error:
            problems.append(f"{key}.{error}")
    return problems


def _check_names(datasets: Sequence[DatasetConfig], key: str) -> list[str]:
    names = [dataset.name for dataset in datasets]
    return [
        f"{key}[{index}].name '{name}' is already that of {key}[{names.index(name)}]; give another"
        for index, name in enumerate(names)
        if name is not None and names.index(name) < index
    ]


def _check_rows(dataset: DatasetConfig, budget: source.Budget) -> list[str]:
    if source.is_hub_id(dataset.path) or source.is_generated(dataset.path):
        return []
    try:
        read_items(dataset, budget)
    except DataError as error:
        return error.problems
    return []
