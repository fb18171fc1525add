"""The rules of an audit: which counts stop a run, which are warnings, and the fix for each.

Holds the settings of the audit. Never counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.facts import setting
from common.text import percent
from data_modules.audit.characters import names_of
from data_modules.audit.figures import Audit, AuditWarning, DatasetAudit, count_of

REPORTED_ABOVE = 0.01
"""share of a data set's tokens that may be lost with long rows without a warning"""
NOTES = {
    "lost_system": (
        "the chat template drops their system turn",
        "have a system turn that the chat template drops",
        "set data.chat_template to one that writes it, or move its text into the first user turn",
    ),
    "lost_user": (
        "the chat template drops their user turns",
        "have user turns that the chat template drops",
        "set data.chat_template to one that writes them",
    ),
    "lost_tool_turn": (
        "the chat template drops their tool results",
        "have tool results that the chat template drops",
        "set data.chat_template to one that writes them, such as qwen3",
    ),
    "lost_content": (
        "the chat template drops the text next to their tool calls",
        "have text next to tool calls that the chat template drops",
        "set data.chat_template to one that writes them, such as qwen3",
    ),
    "lost_tools": (
        "the chat template drops their tools",
        "have tools that the chat template drops",
        "set data.chat_template to one that writes them, such as qwen3",
    ),
    "lost_tool_calls": (
        "the chat template drops their tool calls",
        "have tool calls that the chat template drops",
        "set data.chat_template to one that writes them, such as qwen3",
    ),
    "lost_reasoning": (
        "the chat template drops their reasoning",
        "have reasoning that the chat template drops",
        "set data.chat_template to one that writes it, or data.reasoning=strip",
    ),
    "other_prompt": (
        "an answer follows another text than the prompt of chat, evaluate and serve",
        "have an answer after another text than the prompt of chat, evaluate and serve",
        "answers without reasoning: set data.chat_template_kwargs={enable_thinking: false} if the "
        "template reads it, or give them reasoning; earlier answers: data.last_turn_only=true",
    ),
    "unread_kwargs": (
        "the chat template does not read an argument in their chat_template_kwargs",
        "have an argument in chat_template_kwargs that the chat template does not read",
        "correct its name, or remove it",
    ),
    "control_token": (
        "their text contains control tokens, which act as such",
        "have control tokens in their text, which act as such",
        "set data.control_tokens=escape, or remove them",
    ),
    "branch_dropped": (
        "some of their branches are longer than data.sequence_len and dropped",
        "have branches that are longer than data.sequence_len and dropped",
        "set a larger data.sequence_len",
    ),
    "same_answers": (
        "chosen and rejected are the same, so nothing can be learned from them; left out",
        "have the same answer as chosen and rejected, and are left out",
        "remove them",
    ),
    "cut_to_the_same": (
        "chosen and rejected differ only in what was cut off; left out",
        "have answers that differ only in what was cut off, and are left out",
        "set a larger data.sequence_len",
    ),
    "rewritten_turns": (
        "the chat template rejects some of their turns, which are rewritten",
        "have turns that the chat template rejects, which are rewritten",
        "look at them with python -m app.preview, or set data.unsupported_turns=refuse",
    ),
    "reasoning_in_tags": (
        "their reasoning is written in <think> tags, as part of the answer",
        "have reasoning that is written in <think> tags, as part of the answer",
        "",
    ),
}
"""kind of a note on rows -> its meaning, the same as a statement after "rows", and the fix"""


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
    """What happened to a data set's rows before the audit; origins are file:line.

    `lost_tokens` were dropped or truncated with long rows (`on_long`); `kept_tokens` are all other
    tokens, None = the tokens of training and validation. `longest` are (tokens, origin) before any
    cut. `notes` maps a kind to (rows, first origin and what was found there). `is_chat`: the rows
    went through the chat template. `lossy_rows` have characters that the
    tokenizer does not keep, `lost_characters` maps each of them to its rows. `is_trained`: not a
    data set for validation only.
    """

    name: str
    path: str
    format: str
    is_chat: bool
    rows: int
    bad_rows: int = 0
    dropped_long: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    kept_tokens: int | None = None
    on_long: str = "drop"
    split: int = 0
    empty: int = 0
    empty_origins: Sequence[str] = ()
    longest: Sequence[tuple[int, str]] = ()
    notes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    unknown_tokens: int = 0
    lossy_rows: int = 0
    first_lossy: str = ""
    lost_characters: Mapping[str, int] = field(default_factory=dict)
    is_trained: bool = True


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
        audit.findings += _warn_of_characters(dataset, fact)
        if run.has_own_template and fact.format == "prompt_completion" and not fact.is_chat:
            audit.findings.append(_warn_of_no_template(dataset))
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
    if dataset.lost_share <= REPORTED_ABOVE:
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
    longest = f"; the longest has {fact.longest[0][0]:,} tokens" if fact.longest else ""
    return AuditWarning(
        dataset=fact.name,
        count=count,
        total=dataset.rows,
        unit="rows",
        share=dataset.lost_share,
        statement=statement,
        advice=advice,
        full_advice=f"{advice}{longest}",
    )


def _apply_row_rules(audit: Audit, dataset: DatasetAudit, fact: DatasetFacts) -> None:
    if not (dataset.train if fact.is_trained else dataset.validation):
        use = "to train on" if fact.is_trained else "for validation"
        audit.problems.append(
            f"{fact.path}: no document of data set {dataset.name} is left {use} "
            f"({fact.rows:,} rows, {fact.dropped_long:,} too long, {fact.empty:,} with nothing to "
            f"train on, {dataset.validation:,} for validation); give more rows, or a larger "
            "data.sequence_len"
        )
    if dataset.empty:
        first = ", ".join(fact.empty_origins)
        audit.findings.append(
            AuditWarning(
                dataset=dataset.name,
                count=dataset.empty,
                total=dataset.rows,
                unit="rows",
                statement="have nothing to train on (no answer, or it was cut off) and are left "
                "out",
                first=tuple(fact.empty_origins),
                joiner=", ",
                full_text=f"{dataset.name}: {count_of(dataset.empty, dataset.rows)} rows have "
                f"nothing to train on and are left out ({first}: no answer, or it was cut off)",
            )
        )
    for kind, (count, first) in fact.notes.items():
        audit.findings.append(_warn_of_note(dataset, kind, count, first))
    if dataset.double_bos:
        audit.findings.append(
            AuditWarning(
                dataset=dataset.name,
                count=dataset.double_bos,
                total=dataset.train,
                unit="documents",
                statement="begin with two BOS tokens",
                advice="remove the BOS from the rows, or from the chat template",
            )
        )


def _warn_of_characters(dataset: DatasetAudit, fact: DatasetFacts) -> list[AuditWarning]:
    """Warn of characters that become the unknown token, or are lost or changed."""
    if not fact.lossy_rows:
        return []
    unknown = f" ({fact.unknown_tokens:,} unknown tokens)" if fact.unknown_tokens else ""
    return [
        AuditWarning(
            dataset=dataset.name,
            count=fact.lossy_rows,
            total=dataset.rows,
            unit="rows",
            statement="have characters that this tokenizer replaces or drops, so that the model "
            f"cannot learn them: {names_of(fact.lost_characters)}{unknown}",
            first=(fact.first_lossy,),
            advice="use a base whose vocabulary has them, or write the rows without them",
        )
    ]


def _warn_of_no_template(dataset: DatasetAudit) -> AuditWarning:
    return AuditWarning(
        dataset=dataset.name,
        count=dataset.rows,
        total=dataset.rows,
        unit="rows",
        statement="are texts of prompt and completion, trained on without the tokenizer's chat "
        "template",
        advice="to train on chats, name the columns instruction and output",
    )


def _warn_of_note(dataset: DatasetAudit, kind: str, count: int, first: str) -> AuditWarning:
    words = kind.replace("_", " ")
    meaning, statement, advice = NOTES.get(kind, (words, f"have the note: {words}", ""))
    fix = f"; {advice}" if advice else ""
    counted = count_of(count, dataset.rows)
    return AuditWarning(
        dataset=dataset.name,
        count=count,
        total=dataset.rows,
        unit="rows",
        statement=statement,
        first=(first,),
        advice=advice,
        full_text=f"{dataset.name}: {counted} rows, first {first}: {meaning}{fix}",
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
    counted = count_of(dataset.no_stop, dataset.train)
    num_cut = dataset.truncated + dataset.split
    if train_on_eos == "none":
        statement = (
            "train on no stop token (data.train_on_eos=none), so the model will not learn to end "
            "an answer"
        )
        advice = "data.train_on_eos=turn trains on it"
        text = (
            f"{dataset.name}: no stop token is trained on (data.train_on_eos=none), so the model "
            f"will not learn to end an answer; {advice}"
        )
    elif dataset.no_stop < dataset.train:
        statement = "end their trained tokens without a stop token"
        advice = "raise data.sequence_len, or look at them with python -m app.preview"
        text = (
            f"{dataset.name}: in {counted} documents the last trained token is not a stop token "
            f"({num_cut:,} rows were cut); {advice}"
        )
    else:
        audit.problems.append(
            f"{dataset.path}: no stop token is trained on in any of the {dataset.train:,} "
            f"documents of data set {dataset.name}, so the model will not learn to end an answer "
            f"({num_cut:,} of {dataset.rows:,} rows were cut); raise data.sequence_len, set "
            "data.train_on_eos=turn, or a data.chat_template that ends its answers"
        )
        return
    audit.findings.append(
        AuditWarning(
            dataset=dataset.name,
            count=dataset.no_stop,
            total=dataset.train,
            unit="documents",
            statement=statement,
            advice=advice,
            full_text=text,
        )
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
