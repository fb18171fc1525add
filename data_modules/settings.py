"""The settings of the data, and their checks before torch or a tokenizer is loaded.

Reads a few rows to check them. Never tokenizes one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import DataError
from common.facts import check_values, setting
from common.text import printable
from data_modules import format as formats
from data_modules import source
from data_modules.audit.findings import AuditConfig
from data_modules.tokens.encode import BadRows, Rejected, chunks_of, find_format, read_chunk
from data_modules.types import Tokens

CHECKED_BYTES = 16 << 20
"""read limit of the check of the rows, over all files together: it must be quick"""
_PROCESSES_PER_CORE, _FEW_PROCESSES = 8, 64
_DATASET_LISTS = ("datasets", "val_datasets", "test_datasets")
CACHE_VARIABLE = "LOFT_DATA_CACHE"


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """How documents are packed."""

    method: str = setting("multipack", choices=("multipack", "like_length", "none"))
    """multipack: documents fill packs of `data.sequence_len` tokens, each attending to itself only
    (fastest); like_length: the same with documents of similar length in a pack (cheaper attention,
    packs differ more); none: one document a row, right-padded (slower), which is chosen
    automatically, with a message, for models that cannot keep the documents of a pack apart"""
    window: int | None = setting(None, ge=1)
    """number of documents that are packed together; null = all of an epoch (fuller packs)"""


@dataclass(kw_only=True, slots=True)
class MixtureConfig:
    """The meaning of the data sets' weights."""

    weights: str = setting("epochs", choices=("epochs", "rows", "tokens"))
    """epochs: how often each row is seen in an epoch; rows: a data set's share of an epoch's rows;
    tokens: its share of an epoch's tokens. Shares need not sum to 1: 7 and 3 are 70 % and 30 %"""
    temperature: float | None = setting(None, gt=0)
    """null: the weights are the shares, regardless of size; T: shares are proportional to
    weight * size^(1/T), size in rows or tokens: 1 = by size, more = more equal"""
    stop: str = setting("all", choices=("all", "first"))
    """with shares, an epoch ends when every data set was seen completely (all: smaller ones
    repeat), or when the first one is exhausted (first: the others continue in the next epoch)"""


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """One data set."""

    path: str = setting(resume="content", is_path=True, grants="host")
    """a file (json, jsonl, csv, tsv, parquet, arrow, txt; .gz or .zst), a folder or glob of them, a
    URL (s3://, gs://, https://), a hub id (owner/name), or sample:NAME for what ships"""
    name: str | None = setting(None, resume="content", grants="nothing")
    """its name in metrics, and the configuration to read if its card declares several;
    null = the file's name without suffix"""
    format: str | None = setting(None, resume="data", grants="nothing")
    """alpaca, messages, sharegpt, prompt_completion, completion, pretokenized, oasst, preference,
    kto or classification; null = the objective's, or guessed"""
    split: str = setting("train", resume="data", grants="nothing")
    """which split of a folder (by its card, or by train, dev, test, ... in the names) or of a hub
    data set, and which slice: train[:90%], train[100:200]"""
    revision: str | None = setting(None, resume="data", grants="nothing")
    """commit, tag or branch of a hub data set; null = the newest"""
    weight: float = setting(1.0, gt=0, note="or leave the data set out", resume="data")
    """how often a row is seen in an epoch: 0.5 = a seeded half of the rows, 2.0 = each twice; or
    the data set's share, see data.mixture.weights"""
    max_rows: int | None = setting(None, ge=1, resume="data")
    """train on at most this many rows, a seeded choice; null = all"""
    columns: dict[str, str] = setting(default_factory=dict, resume="data", grants="nothing")
    """the column of each field of the format, as in {instruction: question, output:
    answers.0.text}; dots select nested fields"""


def with_format(config: DataConfig, name: str | None) -> DataConfig:
    """Return `config` with the format `name` for every data set with a loss that names none."""
    if name is None:
        return config

    def given(datasets: list[DatasetConfig]) -> list[DatasetConfig]:
        return [replace(each, format=each.format or name) for each in datasets]

    return replace(config, datasets=given(config.datasets), val_datasets=given(config.val_datasets))


DEFAULT_SEQUENCE_LEN = 2048
"""`data.sequence_len` if it is null, and not above the model's context"""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The training data and how it is prepared."""

    datasets: list[DatasetConfig] = setting(default_factory=list, resume="fixed", shown=True)
    """the data sets to train on, mixed by weight"""
    val_datasets: list[DatasetConfig] = setting(
        default_factory=list, resume="fixed", shown=("train", "evaluate")
    )
    """data sets whose loss is measured, never trained on; no rows of data.datasets are held out
    then"""
    test_datasets: list[DatasetConfig] = setting(
        default_factory=list, resume="free", shown=("evaluate",)
    )
    """data sets whose prompts the evaluation answers; none = the validation rows"""
    sequence_len: int | None = setting(
        None,
        ge=2,
        resume="fixed",
        shown=("train", "preview"),
        aliases=("cutoff_len", "max_length", "max_seq_length"),
    )
    """maximum tokens of a document and of a pack; null = the smaller of 2048 and the model's
    context"""
    val_set_size: int | float = setting(0.05, ge=0, shown=("train",))
    """validation rows of each data set: a share below 1, or a number"""
    train_on_inputs: bool = setting(False, shown=("preview",))
    """train on prompts too, not only on answers"""
    roles_to_train: list[str] = setting(
        default_factory=lambda: ["assistant"], choices=("system", "user", "assistant", "tool")
    )
    """roles whose turns are trained on: assistant, user, system, tool; a turn's own weight takes
    precedence"""
    train_on_eos: str = setting("turn", choices=("all", "turn", "last", "none"))
    """stop tokens to train on: all in the row, those of trained turns (turn), that of the last
    trained turn (last), or none"""
    last_turn_only: bool = False
    """train only on the last answer of a conversation"""
    reasoning: str = setting("keep", choices=("keep", "strip", "mask"))
    """the reasoning in front of an answer: keep (trained on), mask (in the context, not trained on)
    or strip (removed)"""
    control_tokens: str = setting("keep", choices=("keep", "escape", "error"))
    """control tokens that occur in a row's text: keep (as control tokens), escape (tokenized as
    plain text) or error"""
    unsupported_turns: str = setting("rewrite", choices=("rewrite", "refuse"))
    """turns that the chat template refuses (Gemma 3: tool results, two user turns in a row):
    rewrite (calls and results as text, a system turn or second user turn merged into the user
    turn) or refuse the row"""
    on_long: str = setting(
        "drop",
        choices=("drop", "truncate_left", "truncate_right", "split", "error"),
        shown=("train", "preview"),
    )
    """rows longer than `sequence_len`: drop, split, error, truncate_left (keep the end) or
    truncate_right"""
    on_bad_row: str = setting("error", choices=("error", "quarantine"))
    """rows that cannot be read: error, or quarantine (left out, and written with the reason into
    the run's folder)"""
    drop_empty: bool = False
    """drop and count rows with an empty answer, instead of an error"""
    max_dropped_share: float | None = setting(None, ge=0, le=1, resume="free")
    """stop if more than this share of a data set's rows is dropped; null = never"""
    max_row_bytes: int = setting(source.MAX_ROW_BYTES, ge=1, resume="free")
    """maximum bytes of a row, and of each text in it; larger ones are refused"""
    limits: source.ReadLimits = setting(default_factory=source.ReadLimits, resume="free")
    """limits of what a file or a URL may hold"""
    chat_template: str | None = setting(
        None, resume="content", shown=("train", "preview"), is_path=True
    )
    """plain, chatml, llama3, ... or a .jinja file; null = the tokenizer's, else the model's, else
    plain"""
    chat_template_kwargs: dict[str, Any] = setting(
        default_factory=dict, resume="content", grants="nothing"
    )
    """arguments of the chat template, as in {enable_thinking: false}, also for the prompts of chat,
    evaluate and serve; a row's own column chat_template_kwargs takes precedence"""
    template_seconds: float = setting(10.0, gt=0, resume="free")
    """time limit for the chat template's trial on small chats at the start, and for each row, in
    seconds"""
    template_memory_mb: int = setting(1024, ge=1, resume="free")
    """memory limit of that trial, in MB"""
    mixture: MixtureConfig = setting(default_factory=MixtureConfig)
    """the meaning of the data sets' weights"""
    audit: AuditConfig = setting(default_factory=AuditConfig, resume="free")
    """the audit before training, and the shares at which it stops the run"""
    streaming: bool = setting(False, resume="fixed")
    """read and tokenize while training, for data larger than the disk; needs trainer.max_steps"""
    cache_dir: str = setting(
        default_factory=lambda: os.environ.get(CACHE_VARIABLE, "outputs/cache"),
        resume="per_start",
        grants="write",
    )
    """folder that caches tokenized data sets for later runs"""
    num_proc: int | None = setting(None, ge=1, resume="free")
    """processes that tokenize large data sets; null = one per core"""
    num_workers: int = setting(0, ge=0, resume="content")
    """processes that collate batches ahead; 0 = the training process does it, which is enough"""

    @property
    def held_out(self) -> float:
        """Return the share or number of rows that are held out of each of `datasets`."""
        return 0 if self.val_datasets else self.val_set_size

    @property
    def has_validation(self) -> bool:
        return bool(self.val_datasets) or self.val_set_size > 0

    @property
    def loss_datasets(self) -> list[DatasetConfig]:
        """Return all data sets with a loss: those to train on, then those for validation only."""
        return [*self.datasets, *self.val_datasets]


def check_datasets(config: DataConfig) -> list[str]:
    """Return the problems of the settings and of the first rows, without torch or a tokenizer.

    Reads at most 16 MB of all files together, in equal parts per data set, so that it is quick; hub
    data sets are not fetched.
    """
    problems = _check_settings(config)
    readable: list[DatasetConfig] = []
    with_loss: dict[str, str | None] = {}
    of_tests: dict[str, str | None] = {}
    for name in _DATASET_LISTS:
        for index, dataset in enumerate(getattr(config, name)):
            key = f"data.{name}[{index}]"
            (of_tests if name == "test_datasets" else with_loss)[key] = dataset.name
            found = _check_dataset_settings(dataset, key)
            if name != "datasets" and dataset.weight != 1:
                rows = "validation" if name == "val_datasets" else "test"
                found.append(
                    f"{key}.weight={dataset.weight:g} has no effect: each {rows} row is measured "
                    "once; leave it out"
                )
            problems += found
            readable += [] if found else [dataset]
    problems += _check_names(with_loss) + _check_names(of_tests)
    if config.max_row_bytes < 1 or check_values(config.limits):
        return problems  # each row would be refused too
    # Rows come last: their problems are many, and only the first are printed.
    left, unread = CHECKED_BYTES, len(readable)
    for dataset in readable:
        budget = source.Budget(left // unread)
        left, unread = left - budget.left, unread - 1
        problems += _check_first_rows(dataset, config, budget)
        left += max(0, budget.left)
    return problems


def _check_settings(config: DataConfig) -> list[str]:
    """Return a problem for each row of a table that applies."""
    size, mixture, cores = config.val_set_size, config.mixture, len(os.sched_getaffinity(0))
    most = max(_FEW_PROCESSES, _PROCESSES_PER_CORE * cores)
    shares = (("temperature", mixture.temperature, None), ("stop", mixture.stop, "all"))
    processes = {"num_workers": config.num_workers, "num_proc": config.num_proc or 0}
    rows = (
        (
            not any(getattr(config, name) for name in _DATASET_LISTS),
            "data.datasets is empty; give 'data.datasets=[{path: FILE}]' or data=NAME",
        ),
        (
            isinstance(size, float) and size == 1,
            "data.val_set_size=1.0 leaves no row to train on; give a share below 1 (0.1), or a "
            "number of rows (1 = one row)",
        ),
        (
            size > 1 and size % 1,
            f"data.val_set_size={size}: neither a share nor a number of rows; give a share below "
            "1, or a whole number",
        ),
        *(
            (
                number > most,
                f"data.{name}={number} starts that many processes on {cores} cores; give at most "
                f"{most}",
            )
            for name, number in processes.items()
        ),
        (
            not config.roles_to_train and not config.train_on_inputs,
            "data.roles_to_train=[]: no part of a conversation would be trained on; set "
            "data.roles_to_train=[assistant]",
        ),
        *(
            (
                mixture.weights == "epochs" and value != default,
                f"data.mixture.{name} is {value}, but with data.mixture.weights=epochs there are "
                "no shares; set data.mixture.weights=tokens or rows",
            )
            for name, value, default in shares
        ),
    )
    problems = check_values(config, "data", skip=_DATASET_LISTS)
    problems += [text for applies, text in rows if applies]
    if config.chat_template_kwargs:
        problems += [
            f"data.chat_template_kwargs: {problem}"
            for problem in formats.find_kwargs_problems(config.chat_template_kwargs)
        ]
    return problems + (_check_stream(config) if config.streaming else [])


def _check_stream(config: DataConfig) -> list[str]:
    """Return a problem for each setting that needs a known number of rows."""
    problems = []
    if 0 < config.held_out < 1:
        problems.append(
            f"data.val_set_size={config.val_set_size}: a stream's length is unknown, so a share of "
            "it is too; give a number of rows (data.val_set_size=200), 0, or "
            "data.val_datasets=[{path: FILE}]"
        )
    needs_length = {
        "data.max_dropped_share": config.max_dropped_share is not None,
        "data.mixture.temperature": config.mixture.temperature is not None,
        "data.mixture.stop": config.mixture.stop != "all",
    }
    for index, dataset in enumerate(config.datasets):
        key = f"data.datasets[{index}]"
        needs_length[f"{key}.max_rows"] = dataset.max_rows is not None
        if "[" in dataset.split or "+" in dataset.split:
            problems.append(
                f"{key}.split is '{dataset.split}': a stream takes a whole split; set "
                "data.streaming=false"
            )
    problems += [
        f"{key} has no effect on a stream, whose length is unknown; leave it out, or set "
        "data.streaming=false"
        for key, is_given in needs_length.items()
        if is_given
    ]
    if len(config.datasets) > 1 and config.mixture.weights == "epochs":
        problems.append(
            "data.mixture.weights=epochs: streams have no epochs; set data.mixture.weights=rows or "
            "tokens, and the data sets' weights as their shares"
        )
    return problems


def _check_dataset_settings(dataset: DatasetConfig, key: str) -> list[str]:
    problems = check_values(dataset, key)
    try:
        source.parse_split(dataset.split)
    except ValueError as error:
        problems.append(f"{key}.split: {error}")
    if dataset.format is not None:
        try:
            formats.check_format(dataset.format)
            if dataset.columns:
                formats.check_columns(dataset.format, dataset.columns)
        except ValueError as error:
            problems.append(f"{key}.{error}")
    return problems


def _check_names(names: Mapping[str, str | None]) -> list[str]:
    """Return the problems of names by their keys; data sets with a loss share their metrics."""
    first: dict[str | None, str] = {}
    for key, name in names.items():
        first.setdefault(name, key)
    problems = [
        f"{key}.name '{name}' is already that of {first[name]}; give another"
        for key, name in names.items()
        if name is not None and first[name] != key
    ]
    # A data set's name is part of the names of metrics and files.
    problems += [
        f"{key}.name '{name}' holds a slash, or begins with a dot; give a plain word"
        for key, name in names.items()
        if name is not None and (not name or "/" in name or name.startswith("."))
    ]
    return problems


def dataset_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """Return a unique name for each data set: the given one, or one derived from the path."""
    given = {config.name for config in datasets if config.name}
    names: dict[str, None] = {}
    numbers: Counter[str] = Counter()
    for config in datasets:
        base = printable(config.name or source.default_name(config.path))
        name = base
        while name in names or (name in given and not config.name):
            numbers[base] += 1
            name = f"{base}-{numbers[base] + 1}"
        names[name] = None
    return list(names)


def found_labels(config: DataConfig) -> list[str]:
    """Return the labels in the first rows of the files of data sets with a loss, sorted."""
    found: set[str] = set()
    for dataset in config.loss_datasets:
        if source.is_remote(dataset.path):
            continue
        for chunk in chunks_of(dataset, config, source.Budget(CHECKED_BYTES)):
            for items in read_chunk(chunk, formats.CLASSIFICATION, dataset):
                if not isinstance(items, Rejected) and not isinstance(items[0], Tokens):
                    label = items[0].label
                    found |= set(label) if isinstance(label, tuple) else {str(label)}
    return sorted(found, key=lambda label: (int(label) if label.isdecimal() else -1, label))


def _check_first_rows(dataset: DatasetConfig, data: DataConfig, budget: source.Budget) -> list[str]:
    """Return the problems of the rows that `budget` allows to read."""
    if source.is_remote(dataset.path):
        return []
    bad = BadRows(data)
    try:
        format_name, chunks = find_format(dataset, chunks_of(dataset, data, budget))
        for chunk in chunks:
            for found in read_chunk(chunk, format_name or "", dataset):
                if isinstance(found, Rejected):
                    bad.add(found)
                else:
                    bad.add_good(format_name or "", found[0].origin)
    except DataError as error:
        bad.add_problems(error.problems)
    try:
        bad.raise_if_any()
    except DataError as error:
        return error.problems
    return []
