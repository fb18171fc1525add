"""Say what a person may ask of the data, and check it before torch or a tokenizer is there.

Decides which settings there are and which are wrong. Never encodes a row.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_modules import format as formats
from data_modules import source
from data_modules.audit import AuditConfig, check_audit
from data_modules.messages import printable
from data_modules.packing.mixture import MixtureConfig, check_mixture
from data_modules.template import Limits, MaskConfig, check_mask
from data_modules.tokens.rows import check_first_rows

ON_LONG = ("drop", "truncate_left", "truncate_right", "split", "error")
ON_BAD_ROW = ("error", "quarantine")
CHECKED_BYTES = 16 << 20
"""what a check of the settings reads at most, of all files together: it must be quick"""
CACHE_VARIABLE = "LOFT_DATA_CACHE"


def _cache_dir() -> str:
    return os.environ.get(CACHE_VARIABLE, "outputs/cache")


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Name one data set."""

    path: str
    """a file (json, jsonl, csv, tsv, parquet, arrow, txt; .gz or .zst), a folder or glob of them,
    a URL of one (s3://, gs://, https://), a hub id (owner/name), or sample:NAME for what ships
    with the project"""
    name: str | None = None
    """its name in metrics; null = the file's name without suffix"""
    format: str | None = None
    """alpaca, messages, sharegpt, prompt_completion, completion, pretokenized or oasst; null =
    guessed from columns"""
    split: str = "train"
    """which split of a folder or of a hub data set, and which slice: train[:90%], train[100:200]"""
    revision: str | None = None
    """commit, tag or branch of a hub data set; null = the newest"""
    weight: float = 1.0
    """how often a row is seen in an epoch: 0.5 = a seeded half of the rows, 2.0 = each twice; or
    its share, see data.mixture.weights"""
    max_rows: int | None = None
    """a seeded choice of so many training rows at most; null = all"""
    columns: dict[str, str] = field(default_factory=dict)
    """format's field: column that holds it, as in {instruction: question, output: answers.0.text};
    dots go into nested fields"""


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
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    """whose turns are learned: assistant, user, system, tool"""
    train_on_eos: str = "turn"
    """which stop tokens are learned: all, turn (those of learned turns), last or none"""
    last_turn_only: bool = False
    """learn only the last answer of a conversation"""
    reasoning: str = "keep"
    """what an answer thinks before it speaks: keep (learned), mask (seen, not learned) or strip"""
    control_tokens: str = "keep"
    """a control token's text inside a row: keep (it acts as one), escape (plain text) or error"""
    on_long: str = "drop"
    """a row above `sequence_len`: drop, truncate_left (keep its end), truncate_right (keep its
    beginning), split (into several documents) or error"""
    on_bad_row: str = "error"
    """a row that cannot be read: error, or quarantine (left out and written, with its reason,
    beside the run)"""
    drop_empty: bool = False
    """leave rows with an empty answer out and count them; they are an error else"""
    max_dropped_share: float | None = None
    """stop when more than this share of a data set's rows is dropped; null = never"""
    max_row_bytes: int = source.MAX_ROW_BYTES
    """a larger row is refused, and so is a longer text in one"""
    limits: source.Limits = field(default_factory=source.Limits)
    chat_template: str | None = None
    """plain, chatml, llama3, ... or a .jinja file; null = the tokenizer's own, else the one that
    is named for the model, else plain"""
    template_seconds: float = 10.0
    """a chat template that takes longer for some small chats at the start is refused"""
    template_memory_mb: int = 1024
    """a chat template that takes more memory for them is refused; MB"""
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    streaming: bool = False
    """read while training, for data larger than the disk; needs trainer.max_steps"""
    cache_dir: str = field(default_factory=_cache_dir)
    """folder that keeps tokenised data sets for the next run"""
    num_proc: int | None = None
    """processes that tokenise large data sets; null = one a core"""
    num_workers: int = 0
    """processes that lay out batches ahead; 0 = the training process does it (enough here)"""

    def template_limits(self) -> Limits:
        """Return what a chat template may take at the start."""
        return Limits(seconds=self.template_seconds, memory_mb=self.template_memory_mb)

    def mask(self) -> MaskConfig:
        """Return what of these settings decides which tokens are learned."""
        return MaskConfig(
            train_on_inputs=self.train_on_inputs,
            roles_to_train=list(self.roles_to_train),
            train_on_eos=self.train_on_eos,
            last_turn_only=self.last_turn_only,
            reasoning=self.reasoning,
            control_tokens=self.control_tokens,
        )


def dataset_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """Return a name for each data set, all different: as given, or made from the path."""
    given = {config.name for config in datasets if config.name}
    names: dict[str, None] = {}
    numbers: Counter[str] = Counter()
    for config in datasets:
        base = printable(config.name or source.name_of(config.path))
        name = base
        while name in names or (name in given and not config.name):
            numbers[base] += 1
            name = f"{base}-{numbers[base] + 1}"
        names[name] = None
    return list(names)


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
            if not found:
                problems += check_first_rows(dataset, config, budget)
            problems += found
            left += max(0, budget.left)
        problems += _check_names(datasets, f"data.{key}")
    return problems


def _check_settings(config: DataConfig) -> list[str]:
    problems = []
    if not config.datasets and not config.test_datasets:
        problems.append("data.datasets is empty; give 'data.datasets=[{path: FILE}]' or data=NAME")
    for name, known in (("on_long", ON_LONG), ("on_bad_row", ON_BAD_ROW)):
        value = getattr(config, name)
        if value not in known:
            problems.append(f"data.{name} is '{value}'; use {', '.join(known)}")
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
    if config.num_proc is not None and config.num_proc < 1:
        problems.append(f"data.num_proc is {config.num_proc}; give 1 or more, or null")
    if not 0 < config.template_seconds < math.inf:
        problems.append(f"data.template_seconds is {config.template_seconds}; give seconds above 0")
    if config.template_memory_mb < 1:
        problems.append(f"data.template_memory_mb is {config.template_memory_mb}; give 1 or more")
    if config.max_row_bytes < 1:
        problems.append(f"data.max_row_bytes is {config.max_row_bytes}; give 1 or more")
    if config.streaming:
        problems += _check_stream(config)
    problems += check_mask(config.mask())
    problems += check_mixture(config.mixture)
    problems += check_audit(config.audit)
    problems += source.check_limits(config.limits)
    return problems


def _check_stream(config: DataConfig) -> list[str]:
    """Return what of the settings needs to know where the data ends."""
    problems = []
    if 0 < config.val_set_size < 1:
        problems.append(
            f"data.val_set_size={config.val_set_size} of a stream: nobody knows how long it is; "
            "give a number of rows (data.val_set_size=200), or 0"
        )
    useless = {
        "data.max_dropped_share": config.max_dropped_share is not None,
        "data.mixture.temperature": config.mixture.temperature is not None,
        "data.mixture.stop": config.mixture.stop != "all",
    }
    for index, dataset in enumerate(config.datasets):
        key = f"data.datasets[{index}]"
        useless[f"{key}.max_rows"] = dataset.max_rows is not None
        if "[" in dataset.split or "+" in dataset.split:
            problems.append(
                f"{key}.split is '{dataset.split}': a stream takes a whole split; set "
                "data.streaming=false"
            )
    problems += [
        f"{key} means nothing for a stream, whose length nobody knows; leave it out, or set "
        "data.streaming=false"
        for key, is_given in useless.items()
        if is_given
    ]
    if len(config.datasets) > 1 and config.mixture.weights == "epochs":
        problems.append(
            "data.mixture.weights=epochs: streams have no epochs; set data.mixture.weights=rows or "
            "tokens, and the data sets' weights as their shares"
        )
    return problems


def _check_dataset_settings(dataset: DatasetConfig, key: str) -> list[str]:
    problems = []
    if not (math.isfinite(dataset.weight) and dataset.weight > 0):
        problems.append(
            f"{key}.weight is {dataset.weight} ({dataset.path}); give a number above 0, or leave "
            "the data set out"
        )
    if dataset.max_rows is not None and dataset.max_rows < 1:
        problems.append(f"{key}.max_rows is {dataset.max_rows}; give 1 or more, or null")
    try:
        source.check_split(dataset.split)
    except ValueError as error:
        problems.append(f"{key}.split: {error}")
    if dataset.format is not None:
        try:
            formats.check_format(dataset.format)
            formats.check_columns(dataset.format, dataset.columns)
        except ValueError as error:
            problems.append(f"{key}.{error}")
    return problems


def _check_names(datasets: Sequence[DatasetConfig], key: str) -> list[str]:
    names = [dataset.name for dataset in datasets]
    first: dict[str | None, int] = {}
    for index, name in enumerate(names):
        first.setdefault(name, index)
    problems = [
        f"{key}[{index}].name '{name}' is already that of {key}[{first[name]}]; give another"
        for index, name in enumerate(names)
        if name is not None and first[name] < index
    ]
    # It is part of metrics' names and of files' names.
    problems += [
        f"{key}[{index}].name '{name}' holds a slash, or begins with a dot; give a plain word"
        for index, name in enumerate(names)
        if name is not None and (not name or "/" in name or name.startswith("."))
    ]
    return problems
