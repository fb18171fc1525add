"""The rules of an audit: which counts stop a run, which are warnings, and the fix for each.

Holds the settings of the audit. Never counts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.facts import setting
from common.text import percent
from data_modules.audit.figures import Audit, AuditWarning, DatasetAudit, count_of
from data_modules.types import BLANKS

if TYPE_CHECKING:
    from data_modules.tokens.encode import Counts

_REPORTED_ABOVE = 0.01
"""share of a data set's tokens that may be lost with long rows without a warning"""
_KEEPS_TOOLS = "set data.chat_template to one that writes them, such as qwen3"
_NOTES = {
    "lost_system": (
        "have a system turn that the chat template drops",
        "set data.chat_template to one that writes it, or move its text into the first user turn",
    ),
    "lost_user": (
        "have user turns that the chat template drops",
        "set data.chat_template to one that writes them",
    ),
    "lost_tool_turn": ("have tool results that the chat template drops", _KEEPS_TOOLS),
    "lost_content": ("have text next to tool calls that the chat template drops", _KEEPS_TOOLS),
    "lost_tools": ("have tools that the chat template drops", _KEEPS_TOOLS),
    "lost_tool_calls": ("have tool calls that the chat template drops", _KEEPS_TOOLS),
    "lost_reasoning": (
        "have reasoning that the chat template drops",
        "set data.chat_template to one that writes it, or data.reasoning=strip",
    ),
    "other_prompt": (
        "have an answer after another text than the prompt of chat, evaluate and serve",
        "answers without reasoning: set data.chat_template_kwargs={enable_thinking: false} if the "
        "template reads it, or give them reasoning; earlier answers: data.last_turn_only=true",
    ),
    "unread_kwargs": (
        "have an argument in chat_template_kwargs that the chat template does not read",
        "correct its name, or remove it",
    ),
    "control_token": (
        "have control tokens in their text, which act as such",
        "set data.control_tokens=escape, or remove them",
    ),
    "branch_dropped": (
        "have branches that are longer than data.sequence_len and dropped",
        "set a larger data.sequence_len",
    ),
    "same_answers": (
        "have the same answer as chosen and rejected, and are left out",
        "remove them",
    ),
    "cut_to_the_same": (
        "have answers that differ only in what was cut off, and are left out",
        "set a larger data.sequence_len",
    ),
    "rewritten_turns": (
        "have turns that the chat template rejects, which are rewritten",
        "look at them with python -m app.preview, or set data.unsupported_turns=refuse",
    ),
    "reasoning_in_tags": (
        "have reasoning that is written in <think> tags, as part of the answer",
        "",
    ),
}
"""kind of a note on rows -> what is said of them, and the fix"""
_MAX_NAMED = 12
"""number of characters that a warning names"""
_NAMES = {"\n": "newline", "\t": "tab", "\r": "carriage return", " ": "blank"} | {
    BLANKS: "repeated blanks"
}


@dataclass(kw_only=True, slots=True)
class AuditConfig:
    """The settings of the audit before training."""

    overlap: bool = True
    """search the training rows for n-grams of the validation rows and of data.test_datasets; takes
    about as long as reading all tokens once"""
    ngram: int = setting(13, ge=2, note="13 is usual")
    """tokens per n-gram in the search for overlap, about 10 words with a large vocabulary; shorter
    documents are compared as a whole"""
    overlap_share: float = setting(0.2, ge=0, le=1)
    """share of its n-grams, from 0 to 1, that must occur in the training rows for a document to
    overlap; n-grams of over a tenth of the documents do not count; 0 = one n-gram is enough"""
    max_truncated_share: float | None = setting(None, ge=0, le=1)
    """stop the run if more than this share of a data set's rows is truncated; null = never"""
    max_duplicate_share: float | None = setting(None, ge=0, le=1)
    """stop the run if more than this share of a data set's documents are duplicates; null =
    never"""
    max_overlap_share: float | None = setting(None, ge=0, le=1)
    """stop the run if more than this share of a data set's validation or test rows overlaps with
    training; null = never"""
    min_trained_share: float | None = setting(None, ge=0, le=1)
    """stop the run if less than this share of a data set's tokens is trained on; null = never"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFacts:
    """What happened to a data set's rows before the audit.

    `kept_tokens` are those not lost with long rows, None = the tokens of training and validation.
    `is_trained`: not a data set for validation only.
    """

    name: str
    path: str
    format: str
    counts: Counts
    kept_tokens: int | None = None
    on_long: str = "drop"
    is_trained: bool = True

    @property
    def is_chat(self) -> bool:
        """Return whether the rows went through the chat template."""
        return self.counts.chats > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings of the run that explain unusual counts.

    `trains_prompts`: data.train_on_inputs is set, or data.roles_to_train has other roles than the
    assistant. `sequence_len`: most tokens of a document; None = unknown. `has_own_template`: the
    chat template is the tokenizer's.
    """

    trains_prompts: bool = False
    train_on_eos: str = "turn"
    is_encoder_decoder: bool = False
    sequence_len: int | None = None
    has_own_template: bool = False


def apply_rules(
    audit: Audit, facts: Sequence[DatasetFacts], config: AuditConfig, run: RunSettings
) -> None:
    """Add warnings and problems to `audit`."""
    # Lost tokens first: they cost most.
    long_rows = [_warn_of_long(*pair, run) for pair in zip(audit.datasets, facts, strict=True)]
    audit.findings[:0] = [finding for finding in long_rows if finding is not None]
    for dataset, fact in zip(audit.datasets, facts, strict=True):
        _apply_row_rules(audit, dataset, fact)
        if run.has_own_template and fact.format == "prompt_completion" and not fact.is_chat:
            statement = (
                "are texts of prompt and completion, trained on without the tokenizer's chat "
                "template"
            )
            advice = "to train on chats, name the columns instruction and output"
            audit.findings.append(dataset.warning(dataset.rows, "rows", statement, advice=advice))
        if fact.is_chat and dataset.train:
            _apply_mask_rules(audit, dataset, run)
            _apply_stop_rules(audit, dataset, run.train_on_eos)
        _apply_share_limits(audit, dataset, config)
        _apply_overlap_limit(audit, config, dataset.path, dataset.overlapping, dataset.validation)
    for test in audit.benchmarks:
        _apply_overlap_limit(audit, config, f"test data {test.name}", test.overlapping, test.rows)


def _warn_of_long(
    dataset: DatasetAudit, fact: DatasetFacts, run: RunSettings
) -> AuditWarning | None:
    """Return a warning if a data set loses many tokens with long rows."""
    if dataset.lost_share <= _REPORTED_ABOVE:
        return None
    if fact.on_long == "drop":
        # Of a tree of conversations only some branches may be too long.
        count, action = dataset.dropped + dataset.notes.get("branch_dropped", 0), "dropped"
    else:
        count, action = dataset.truncated, "cut"
    limit = "" if run.sequence_len is None else f"={run.sequence_len}"
    statement = f"are longer than data.sequence_len{limit} and {action}"
    can_split = not (fact.is_chat or run.is_encoder_decoder)
    advice = f"{'data.on_long=split or ' if can_split else ''}a larger data.sequence_len keeps them"
    if fact.on_long == "drop":
        advice += ", data.on_long=truncate_right keeps a part"
    rows = fact.counts.longest
    longest = f"; the longest has {rows[0][0]:,} tokens" if rows else ""
    return dataset.warning(
        count, "rows", statement, share=dataset.lost_share, advice=advice, detail=longest
    )


def _apply_row_rules(audit: Audit, dataset: DatasetAudit, fact: DatasetFacts) -> None:
    counts = fact.counts
    if not (dataset.train if fact.is_trained else dataset.validation):
        use = "to train on" if fact.is_trained else "for validation"
        audit.problems.append(
            f"{fact.path}: no document of data set {dataset.name} is left {use} "
            f"({counts.rows:,} rows, {counts.dropped:,} too long, {counts.empty:,} with nothing to "
            f"train on, {dataset.validation:,} for validation); give more rows, or a larger "
            "data.sequence_len"
        )
    if dataset.empty:
        statement = "have nothing to train on (no answer, or it was cut off) and are left out"
        first = tuple(counts.empty_origins)
        audit.findings.append(
            dataset.warning(dataset.empty, "rows", statement, first=first, joiner=", ")
        )
    for kind, (count, seen) in counts.notes.items():
        words = f"have the note: {kind.replace('_', ' ')}"
        statement, advice = _NOTES.get(kind, (words, ""))
        audit.findings.append(
            dataset.warning(count, "rows", statement, first=(seen,), advice=advice)
        )
    if dataset.double_bos:
        statement = "begin with two BOS tokens"
        advice = "remove the BOS from the rows, or from the chat template"
        audit.findings.append(
            dataset.warning(dataset.double_bos, "documents", statement, advice=advice)
        )
    if counts.lossy_rows:
        unknown = f" ({counts.unknown_tokens:,} unknown tokens)" if counts.unknown_tokens else ""
        statement = (
            "have characters that this tokenizer replaces or drops, so that the model cannot learn "
            f"them: {names_of(counts.lost_characters)}{unknown}"
        )
        advice = "use a base whose vocabulary has them, or write the rows without them"
        first = (counts.first_lossy,)
        audit.findings.append(
            dataset.warning(counts.lossy_rows, "rows", statement, first=first, advice=advice)
        )


def _apply_mask_rules(audit: Audit, dataset: DatasetAudit, run: RunSettings) -> None:
    if not dataset.trained:
        audit.problems.append(
            f"{dataset.path}: 0 % of the {dataset.tokens:,} tokens of chat data set {dataset.name} "
            "are trained on; set data.roles_to_train=[assistant], and look at its rows with "
            "python -m app.preview"
        )
    # A causal model never predicts the first token; a decoder is trained on all of its targets.
    labels = dataset.tokens - dataset.train
    may_train_all = run.trains_prompts or run.is_encoder_decoder
    if dataset.trained and dataset.trained >= labels and not may_train_all:
        audit.problems.append(
            f"{dataset.path}: 100 % of the {dataset.tokens:,} tokens of chat data set "
            f"{dataset.name} are trained on, including its prompts; set data.chat_template to one "
            "that shows where answers begin, or data.train_on_inputs=true if this is intended"
        )


def _apply_stop_rules(audit: Audit, dataset: DatasetAudit, train_on_eos: str) -> None:
    if not dataset.no_stop or not dataset.trained:
        return
    num_cut, detail = dataset.truncated + dataset.split, ""
    if train_on_eos == "none":
        statement = (
            "train on no stop token (data.train_on_eos=none), so the model will not learn to end "
            "an answer"
        )
        advice = "data.train_on_eos=turn trains on it"
    elif dataset.no_stop < dataset.train:
        statement = "end their trained tokens without a stop token"
        advice = "raise data.sequence_len, or look at them with python -m app.preview"
        detail = f" ({num_cut:,} rows were cut)"
    else:
        audit.problems.append(
            f"{dataset.path}: no stop token is trained on in any of the {dataset.train:,} "
            f"documents of data set {dataset.name}, so the model will not learn to end an answer "
            f"({num_cut:,} of {dataset.rows:,} rows were cut); raise data.sequence_len, set "
            "data.train_on_eos=turn, or a data.chat_template that ends its answers"
        )
        return
    audit.findings.append(
        dataset.warning(dataset.no_stop, "documents", statement, advice=advice, detail=detail)
    )


def _apply_share_limits(audit: Audit, dataset: DatasetAudit, config: AuditConfig) -> None:
    limit = config.max_truncated_share
    if limit is not None and dataset.truncated > limit * dataset.rows:
        audit.problems.append(
            f"{dataset.path}: {count_of(dataset.truncated, dataset.rows)} rows are truncated, "
            f"data.audit.max_truncated_share is {limit}; raise data.sequence_len, or the limit"
        )
    limit = config.max_duplicate_share
    if limit is not None and dataset.duplicates > limit * dataset.train:
        audit.problems.append(
            f"{dataset.path}: {count_of(dataset.duplicates, dataset.train)} training examples are "
            f"duplicates, data.audit.max_duplicate_share is {limit}; remove them, or raise the "
            "limit"
        )
    limit = config.min_trained_share
    if limit is not None and dataset.trained_share < limit:
        audit.problems.append(
            f"{dataset.path}: {percent(dataset.trained_share, 2)} of the tokens are trained on, "
            f"data.audit.min_trained_share is {limit}; look at the mask with "
            "python -m app.preview, or lower the limit"
        )


def _apply_overlap_limit(
    audit: Audit, config: AuditConfig, where: str, count: int, total: int
) -> None:
    limit = config.max_overlap_share
    if limit is not None and count > limit * total:
        audit.problems.append(
            f"{where}: {count_of(count, total)} held-out documents overlap with training, "
            f"data.audit.max_overlap_share is {limit}; remove them from training, or raise the "
            "limit"
        )


def names_of(lost: Mapping[str, int]) -> str:
    """Name the characters that most rows have, for messages; `lost` is character -> rows."""
    ordered = sorted(lost, key=lambda each: (-lost[each], each))
    names = [
        _NAMES.get(each)
        or (f"U+{ord(each):04X}" if unicodedata.combining(each) or not each.isprintable() else each)
        for each in ordered[:_MAX_NAMED]
    ]
    return ", ".join(names) + (f" and {more:,} more" if (more := len(lost) - len(names)) else "")
