"""Judge what an audit has counted: what stops a run, what is only said, and what to do about it.

Holds the audit's settings. Never counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data_modules.audit.figures import Audit, DatasetAudit

NOTES = {
    "lost_system": "the chat template drops their system turn; set data.chat_template to one that "
    "writes it, or move its text into the first user turn",
    "lost_tools": "the chat template drops their tools; set data.chat_template to one that writes "
    "them",
    "lost_tool_calls": "the chat template drops their tool calls; set data.chat_template to one "
    "that writes them",
    "lost_reasoning": "the chat template drops their reasoning; set data.chat_template to one that "
    "writes it, or data.reasoning=strip",
    "control_token": "control tokens stand in their text and act as such; set "
    "data.control_tokens=escape, or remove them",
    "cleaned": "control characters were removed from their text",
}
"""kind of a note on a row -> what it means, and what to do"""
SHARES = (
    "max_truncated_share",
    "max_duplicate_share",
    "max_overlap_share",
    "min_trained_share",
)


@dataclass(kw_only=True, slots=True)
class AuditConfig:
    """Choose what is compared before training, and which shares stop the run."""

    overlap: bool = True
    """look for words of the validation rows and of data.test_datasets in training; takes about as
    long as reading all tokens once"""
    ngram: int = 13
    """tokens in a row that count as the same words, about 10 words of a large vocabulary; shorter
    documents are compared whole"""
    overlap_share: float = 0.2
    """share of a document's n-grams that must stand in training for it to overlap (those that a
    tenth of the documents have apart); 0 = one is enough"""
    max_truncated_share: float | None = None
    """stop when more than this share of a data set's rows is truncated; null = never"""
    max_duplicate_share: float | None = None
    """stop when more than this share of a data set's documents is there already; null = never"""
    max_overlap_share: float | None = None
    """stop when more than this share of the validation or test rows of a data set overlaps with
    training; null = never"""
    min_trained_share: float | None = None
    """stop when less than this share of a data set's tokens is learned; null = never"""


def check_audit(config: AuditConfig) -> list[str]:
    """Return what is wrong with the settings."""
    problems = []
    if config.ngram < 2:
        problems.append(f"data.audit.ngram is {config.ngram}; give 2 tokens or more (13 is usual)")
    if not 0 <= config.overlap_share <= 1:
        problems.append(
            f"data.audit.overlap_share is {config.overlap_share}; give a share from 0 to 1"
        )
    for name in SHARES:
        share = getattr(config, name)
        if share is not None and not (math.isfinite(share) and 0 <= share <= 1):
            problems.append(f"data.audit.{name} is {share}; give a share from 0 to 1, or null")
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFacts:
    """Hold what became of a data set's rows before the audit sees them; origins are file:line.

    `longest` are (tokens, origin) before anything was cut. `notes`: kind -> (rows, first origin
    with what was seen). `is_chat`: its rows went through the chat template.
    """

    name: str
    path: str
    format: str
    is_chat: bool
    rows: int
    bad_rows: int = 0
    dropped_long: int = 0
    truncated: int = 0
    split: int = 0
    empty: int = 0
    empty_origins: Sequence[str] = ()
    longest: Sequence[tuple[int, str]] = ()
    notes: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Hold what a run asked for that would else be taken for a mistake.

    `learns_prompts`: data.train_on_inputs, or data.roles_to_train beyond the assistant.
    """

    learns_prompts: bool = False
    train_on_eos: str = "turn"
    is_encoder_decoder: bool = False


def judge(audit: Audit, facts: Sequence[DatasetFacts], config: AuditConfig, asked: Asked) -> None:
    """Add to `audit` what is to be said of its counts, and what stops the run."""
    for dataset, fact in zip(audit.datasets, facts, strict=True):
        _judge_rows(audit, dataset, fact)
        if fact.is_chat and dataset.train:
            _judge_mask(audit, dataset, asked)
            _judge_stops(audit, dataset, asked.train_on_eos)
        _judge_shares(audit, dataset, config)
        _judge_overlap(audit, config, dataset.path, dataset.overlapping, dataset.validation)
    for test in audit.benchmarks:
        _judge_overlap(audit, config, f"test data {test.name}", test.overlapping, test.rows)


def of(count: int, total: int) -> str:
    """Word a count and what it is a part of."""
    return f"{count:,} of {total:,}"


def _judge_rows(audit: Audit, dataset: DatasetAudit, fact: DatasetFacts) -> None:
    if not dataset.train:
        audit.problems.append(
            f"{fact.path}: no document of data set {dataset.name} is left to train on "
            f"({fact.rows:,} rows, {fact.dropped_long:,} too long, {fact.empty:,} with nothing to "
            f"learn, {dataset.validation:,} for validation); give more rows, or a larger "
            "data.sequence_len"
        )
    if dataset.empty:
        first = ", ".join(fact.empty_origins)
        audit.warnings.append(
            f"{dataset.name}: {of(dataset.empty, dataset.rows)} rows have nothing to learn and are "
            f"left out ({first}: no answer, or it was cut away)"
        )
    for kind, (count, first) in fact.notes.items():
        meaning = NOTES.get(kind, kind.replace("_", " "))
        audit.warnings.append(
            f"{dataset.name}: {of(count, dataset.rows)} rows, first {first}: {meaning}"
        )
    if dataset.double_bos:
        audit.warnings.append(
            f"{dataset.name}: {of(dataset.double_bos, dataset.train)} documents begin with two BOS "
            "tokens; remove the one that stands in the rows, or the chat template's"
        )


def _judge_mask(audit: Audit, dataset: DatasetAudit, asked: Asked) -> None:
    if not dataset.trained:
        audit.problems.append(
            f"{dataset.path}: 0 % of the {dataset.tokens:,} tokens of chat data set {dataset.name} "
            "are learned; set data.roles_to_train=[assistant], and look at its rows with "
            "python -m app.preview"
        )
    # A causal model never predicts the first token; a decoder's targets are learned whole.
    labels = dataset.tokens - dataset.train
    may_learn_all = asked.learns_prompts or asked.is_encoder_decoder
    if dataset.trained and dataset.trained >= labels and not may_learn_all:
        audit.problems.append(
            f"{dataset.path}: 100 % of the {dataset.tokens:,} tokens of chat data set "
            f"{dataset.name} are learned, its prompts too; set data.chat_template to one that "
            "shows where answers begin, or data.train_on_inputs=true if this is meant"
        )


def _judge_stops(audit: Audit, dataset: DatasetAudit, train_on_eos: str) -> None:
    if not dataset.no_stop or not dataset.trained:
        return
    if train_on_eos == "none":
        audit.warnings.append(
            f"{dataset.name}: no stop token is learned (data.train_on_eos=none), so the model will "
            "not learn to end an answer; data.train_on_eos=turn learns it"
        )
    elif dataset.no_stop < dataset.train:
        audit.warnings.append(
            f"{dataset.name}: in {of(dataset.no_stop, dataset.train)} documents the last learned "
            f"token is no stop token ({dataset.truncated + dataset.split:,} rows were cut); raise "
            "data.sequence_len, or look at them with python -m app.preview"
        )
    else:
        audit.problems.append(
            f"{dataset.path}: no stop token is learned in any of the {dataset.train:,} documents "
            f"of data set {dataset.name}, so the model will not learn to end an answer "
            f"({dataset.truncated + dataset.split:,} of {dataset.rows:,} rows were cut); raise "
            "data.sequence_len, set data.train_on_eos=turn, or a data.chat_template that ends its "
            "answers"
        )


def _judge_shares(audit: Audit, dataset: DatasetAudit, config: AuditConfig) -> None:
    limit = config.max_truncated_share
    if limit is not None and dataset.truncated > limit * dataset.rows:
        audit.problems.append(
            f"{dataset.path}: {of(dataset.truncated, dataset.rows)} rows are truncated, "
            f"data.audit.max_truncated_share is {limit}; raise data.sequence_len, or the limit"
        )
    limit = config.max_duplicate_share
    if limit is not None and dataset.duplicates > limit * dataset.train:
        audit.problems.append(
            f"{dataset.path}: {of(dataset.duplicates, dataset.train)} training documents are there "
            f"already, data.audit.max_duplicate_share is {limit}; remove them, or raise the limit"
        )
    limit = config.min_trained_share
    if limit is not None and dataset.trained_share < limit:
        audit.problems.append(
            f"{dataset.path}: {dataset.trained_share:.2%} of the tokens are learned, "
            f"data.audit.min_trained_share is {limit}; look at the mask with "
            "python -m app.preview, or lower the limit"
        )


def _judge_overlap(audit: Audit, config: AuditConfig, where: str, count: int, total: int) -> None:
    limit = config.max_overlap_share
    if limit is not None and count > limit * total:
        audit.problems.append(
            f"{where}: {of(count, total)} held-out documents overlap with training, "
            f"data.audit.max_overlap_share is {limit}; remove them from training, or raise the "
            "limit"
        )
