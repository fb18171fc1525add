"""What an audit says: which counts stop a run, which are warnings with a fix, how all are shown.

Holds the settings of the audit. Never counts: audit.py does.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import DataError
from common.facts import setting
from common.redaction import redact, redacted
from common.text import aligned, percent, printable, shown
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
_LIMITS = {
    "max_truncated_share": ("rows are truncated", "raise data.sequence_len"),
    "max_duplicate_share": ("training examples are duplicates", "remove them"),
    "max_overlap_share": ("held-out documents overlap with training", "remove them from training"),
}
"""setting -> what of more than its share is said, and the fix"""
_OF_TURNS = frozenset({"roles_to_train", "last_turn_only", "reasoning", "unsupported_turns"})
"""settings of the loss mask that rows without turns do not read"""
_FIRST_ROWS = "first rows"
"""unit of warnings of a stream, of which no more is read before training"""
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
        return self.counts.chats > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings of the run that explain unusual counts.

    `trains_prompts`: data.train_on_inputs is set, or data.roles_to_train has other roles than the
    assistant. `mask`: name -> value, as typed, of the settings of the loss mask that differ from
    their defaults. `sequence_len`: most tokens of a document; None = unknown. `has_own_template`:
    the chat template is the tokenizer's.
    """

    trains_prompts: bool = False
    mask: Mapping[str, str] = field(default_factory=dict)
    train_on_eos: str = "turn"
    is_encoder_decoder: bool = False
    sequence_len: int | None = None
    has_own_template: bool = False


_MAX_FILE = 32
"""characters of the longest path that is printed in full"""
_ORIGIN = re.compile(r"(.+?):(\d+)(?= |$)")
HEADINGS = {
    "rows": "rows",
    "train": "train",
    "validation": "validation",
    "tokens": "tokens",
    "trained": "trained",
    "lost_tokens": "lost",
    "bad_rows": "bad",
    "dropped": "too long",
    "truncated": "truncated",
    "split": "split",
    "empty": "nothing to train on",
    "no_stop": "no stop",
    "double_bos": "two BOS",
    "duplicates": "duplicates",
    "repeated": "in both",
    "overlapping": "overlap",
}
"""count -> heading of its column; the heading of a note is its kind"""
_ALWAYS_SHOWN = ("rows", "train", "validation", "tokens", "trained")
"""columns that are shown even if they are zero"""
_ON_SCREEN = (*_ALWAYS_SHOWN, "lost_tokens")
"""columns of the table on the screen; warnings report the other counts"""
_SHORT_HEADINGS = {"validation": "val"}
"""headings in the table at the start of a run, which has further columns"""
_MAX_UNREAD_SHOWN = 8
"""names of what nothing reads in the line on the screen, for each data set"""
_MAX_LINE = 160
"""characters of a line of warnings on the screen, if at least two data sets fit into it"""


def relative(text: str) -> str:
    """Return `text` with paths below the working directory written relative to it."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")


def _short_origins(origins: Iterable[str]) -> list[str]:
    """Return texts that start with `file:line` with short paths; other texts are not changed.

    A path is relative to the working directory, of a long one elsewhere only the end is shown; a
    file that was just named is left out, as in `:12`.
    """
    last_file, shown = "", []
    for origin in origins:
        found = _ORIGIN.match(origin)
        if found is None:
            shown.append(origin)
            continue
        file, line = found.groups()
        name, parts = relative(file), file.replace("\\", "/").rsplit("/", 2)
        if name == file and len(file) > _MAX_FILE and len(parts) == 3:
            name = f".../{parts[1]}/{parts[2]}"
        shown.append(f"{'' if file == last_file else name}:{line}{origin[found.end() :]}")
        last_file = file
    return shown


def count_of(count: int, total: int) -> str:
    return f"{count:,} of {total:,}"


@dataclass(frozen=True, slots=True)
class AuditWarning:
    """A warning about one data set, which reads "`count` of `total` `unit` `statement`".

    `share` is the share of the tokens, from 0 to 1; `first` are the origins (file:line) of one
    example, joined by `joiner`; `advice` is the fix; only files have the `detail`.
    """

    dataset: str
    count: int
    total: int
    unit: str
    statement: str
    share: float | None = None
    first: tuple[str, ...] = ()
    joiner: str = " with "
    advice: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """Return the warning for a file, with whole paths."""
        return self.sentence(self.joiner.join(self.first)) + self.detail

    def sentence(self, example: str) -> str:
        """Return the warning as a sentence with this example."""
        count = count_of(self.count, self.total)
        share = "" if self.share is None else f" ({percent(self.share, 0)} of the tokens)"
        first, fix = example and f", first {example}", self.advice and f"; {self.advice}"
        return f"{self.dataset}: {count} {self.unit}{share} {self.statement}{first}{fix}"

    @property
    def example(self) -> str:
        return self.joiner.join(_short_origins(self.first))


@dataclass(kw_only=True, slots=True)
class DatasetAudit:
    """The counts of a data set. Tokens, `no_stop` and `duplicates` count training documents only.

    rows          rows that were read
    train         training documents; a row that was split is several documents
    validation    validation documents
    trained       tokens that are trained on
    bad_rows      quarantined rows
    dropped       rows longer than the sequence length that were left out
    truncated     rows longer than the sequence length that were cut
    lost_tokens   tokens of dropped rows, and tokens cut from truncated ones
    lost_share    share of `lost_tokens` in all tokens of the data set, from 0 to 1
    split         rows that were split into several documents
    empty         rows without anything to train on, left out
    no_stop       documents whose last trained token is not a stop token
    double_bos    documents that begin with two BOS tokens
    duplicates    documents with the same tokens as an earlier training document
    repeated      validation documents with the same tokens as a training document
    overlapping   validation documents that share n-grams with a training document
    notes         kind of note -> rows
    """

    name: str
    path: str
    rows: int
    train: int
    validation: int
    tokens: int
    trained: int
    bad_rows: int = 0
    dropped: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    lost_share: float = 0.0
    split: int = 0
    empty: int = 0
    no_stop: int = 0
    double_bos: int = 0
    duplicates: int = 0
    repeated: int = 0
    overlapping: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        return self.trained / max(1, self.tokens)


@dataclass(kw_only=True, slots=True)
class BenchmarkAudit:
    """The counts of a test data set.

    repeated      documents with the same tokens as a training document
    overlapping   documents that share n-grams with a training document
    """

    name: str
    rows: int
    repeated: int
    overlapping: int


@dataclass(kw_only=True, slots=True)
class Audit:
    """The results: `problems` stop a run, `findings` are warnings, `facts` are information.

    `longest` are (tokens, file:line) of the longest rows, before any cut.
    """

    datasets: list[DatasetAudit]
    benchmarks: list[BenchmarkAudit] = field(default_factory=list)
    longest: list[tuple[int, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    findings: list[AuditWarning] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    """data set -> (name, rows, first origin) of the columns and inner keys that nothing reads"""

    def warn(
        self, dataset: DatasetAudit, count: int, unit: str, statement: str, **more: Any
    ) -> None:
        """Add the warning that `count` of the rows or documents of a data set ..."""
        totals = {
            **dict.fromkeys(("rows", _FIRST_ROWS), dataset.rows),
            "validation documents": dataset.validation,
        }
        total = totals.get(unit, dataset.train)
        self.findings.append(AuditWarning(dataset.name, count, total, unit, statement, **more))

    @property
    def warnings(self) -> list[str]:
        return [finding.text for finding in self.findings]

    def cells(self) -> list[list[str]]:
        """Return the whole table: headings, a row per data set, and a total of several.

        Columns that are zero everywhere are left out.
        """
        return _cells([asdict(dataset) for dataset in self.datasets], on_screen=False)

    def notes(self) -> list[str]:
        """Return the full lines below the table: longest rows, facts, warnings and problems."""
        longest = ", ".join(f"{origin} {tokens:,}" for tokens, origin in self.longest)
        lines = [f"longest rows, in tokens: {longest}"] if longest else []
        lines += [
            f"test data {test.name}: {test.overlapping:,} of {test.rows:,} documents overlap with "
            f"training, {test.repeated:,} have the same tokens"
            for test in self.benchmarks
        ]
        lines += [*self.facts, *_describe_unread(self.unread, is_brief=False)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"problem: {problem}" for problem in self.problems]
        return [printable(relative(line)) for line in lines]

    def lines(
        self, columns: Mapping[str, Sequence[str]] | None = None, *, only_warnings: bool = False
    ) -> list[str]:
        """Return the lines for the screen: a narrow table, and a line per kind of warning.

        `columns` are further columns: heading -> one cell per data set. `only_warnings` leaves out
        facts, and the problems that `check` raises, but not the line of what nothing reads.
        """
        cells = _cells([asdict(dataset) for dataset in self.datasets], on_screen=True)
        if only_warnings:
            cells[0] = [_SHORT_HEADINGS.get(heading, heading) for heading in cells[0]]
        for heading, texts in (columns or {}).items():
            column = [heading, *map(printable, texts), *[""] * (len(cells) - 1 - len(texts))]
            cells = [[*row, cell] for row, cell in zip(cells, column, strict=True)]
        lines = []
        if self.longest and not only_warnings:
            longest = _short_origins(f"{origin} {tokens:,}" for tokens, origin in self.longest)
            lines = [f"longest rows, in tokens: {', '.join(longest)}"]
        tests = [test for test in self.benchmarks if test.repeated]
        if same := ", ".join(f"{test.name} {count_of(test.repeated, test.rows)}" for test in tests):
            lines.append(f"test documents with the same tokens as a training document: {same}")
        lines += [] if only_warnings else self.facts
        lines += _describe_unread(self.unread, is_brief=True)
        lines += [f"warning: {line}" for line in _group_warnings(self.findings)]
        lines += [] if only_warnings else [f"problem: {problem}" for problem in self.problems]
        return [*(aligned(cells) if self.datasets else []), *map(printable, lines)]

    def full_lines(self) -> list[str]:
        """Return the lines for a file: the whole table, and all notes in full."""
        return [*(aligned(self.cells()) if self.datasets else []), *self.notes()]

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for dataset, counts in zip(self.datasets, values["datasets"], strict=True):
            counts["trained_share"] = round(dataset.trained_share, 6)
            counts["lost_share"] = round(dataset.lost_share, 6)
        values["longest"] = [{"tokens": t, "origin": origin} for t, origin in self.longest]
        values["unread"] = _describe_unread(self.unread, is_brief=False)
        del values["findings"]
        return values | {"warnings": self.warnings}

    def write(self, folder: Path) -> None:
        text = json.dumps(redacted(self.as_dict()), indent=2, ensure_ascii=False)
        (folder / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        (folder / "audit.txt").write_text(
            redact("\n".join(self.full_lines())) + "\n", encoding="utf-8"
        )

    def check(self) -> None:
        """Raise DataError with all problems, if there is any."""
        if self.problems:
            raise DataError(self.problems)


def _describe_unread(
    unread: Mapping[str, Sequence[tuple[str, int, str]]], *, is_brief: bool
) -> list[str]:
    """Return a line of the columns and keys that nothing reads, with their rows; none without any.

    A brief line has the first names only, a long one also the first row of each.
    """
    parts = []
    for dataset, found in unread.items():
        names = [
            f"{shown(name)} ({rows:,} rows{'' if is_brief else f', first {origin}'})"
            for name, rows, origin in (found[:_MAX_UNREAD_SHOWN] if is_brief else found)
        ]
        more = len(found) - len(names)
        names += [f"and {more:,} more"] if more else []
        if names:
            parts.append(f"{dataset}: {', '.join(names)}")
    return [f"columns and keys that nothing reads: {'; '.join(parts)}"] if parts else []


def _group_warnings(findings: Sequence[AuditWarning]) -> list[str]:
    """Return one line per kind of warning: a sentence, or the counts of several data sets."""
    kinds: dict[tuple[str, str, str], list[AuditWarning]] = {}
    for finding in findings:
        kinds.setdefault((finding.unit, finding.statement, finding.advice), []).append(finding)
    return [
        group[0].sentence(group[0].example) if len(group) == 1 else _counts_by_dataset(group)
        for group in kinds.values()
    ]


def _counts_by_dataset(group: Sequence[AuditWarning]) -> str:
    """Return a line with the counts of several data sets; only the largest if it gets too long."""
    ordered = sorted(group, key=lambda finding: (-(finding.share or 0), -finding.count))
    first = ordered[0]
    example = f" (first {first.example})" if first.first else ""
    end = example + (f"; {first.advice}" if first.advice else "")
    share_note = "" if first.share is None else " (tokens lost)"
    start = f"{first.unit} {first.statement}{share_note}: "
    for num_shown in range(len(ordered), 1, -1):
        counts = [
            f"{finding.dataset} {count_of(finding.count, finding.total)}"
            + ("" if finding.share is None else f" ({percent(finding.share, 0)})")
            for finding in ordered[:num_shown]
        ]
        if num_shown < len(ordered):
            counts.append(f"and {len(ordered) - num_shown} more")
        line = start + ", ".join(counts) + end
        if len(line) <= _MAX_LINE - len("warning: "):
            break
    return line


def _cells(datasets: Sequence[Mapping[str, Any]], *, on_screen: bool) -> list[list[str]]:
    kinds = list(dict.fromkeys(kind for dataset in datasets for kind in dataset["notes"]))
    counts = [{**dataset, **dataset["notes"]} for dataset in datasets]
    headings = HEADINGS | {kind: kind.replace("_", " ") for kind in kinds}
    keys = [
        key
        for key in (_ON_SCREEN if on_screen else tuple(headings))
        if key in _ALWAYS_SHOWN or any(row.get(key, 0) for row in counts)
    ]
    if len(counts) > 1:
        total = {key: sum(row.get(key, 0) for row in counts) for key in keys}
        counts.append({"name": "all", **total})
    cells = [["data set", *(printable(headings[key]) for key in keys)]]
    cells += [[printable(row["name"]), *(_cell(key, row) for key in keys)] for row in counts]
    return cells


def _cell(key: str, counts: Mapping[str, Any]) -> str:
    number = counts.get(key, 0)
    if key == "trained":
        return f"{number:,} ({percent(number / max(1, counts['tokens']), 0)})"
    if key == "lost_tokens" and "lost_share" in counts and number:
        return f"{number:,} ({percent(counts['lost_share'], 0)})"
    return f"{number:,}" if number or key in _ALWAYS_SHOWN else "-"


def apply_rules(
    audit: Audit, facts: Sequence[DatasetFacts], config: AuditConfig, run: RunSettings
) -> None:
    for dataset, fact in zip(audit.datasets, facts, strict=True):
        _apply_row_rules(audit, dataset, fact, run)
        if fact.is_chat and dataset.train:
            _apply_mask_rules(audit, dataset, run)
            _apply_stop_rules(audit, dataset, run.train_on_eos)
        for name, count, total in (
            ("max_truncated_share", dataset.truncated, dataset.rows),
            ("max_duplicate_share", dataset.duplicates, dataset.train),
            ("max_overlap_share", dataset.overlapping, dataset.validation),
        ):
            _apply_limit(audit, config, name, dataset.path, count, total)
        least = config.min_trained_share
        if least is not None and dataset.trained_share < least:
            audit.problems.append(
                f"{dataset.path}: {percent(dataset.trained_share, 2)} of the tokens are trained "
                f"on, data.audit.min_trained_share is {least}; look at the mask with python -m "
                "app.preview, or lower the limit"
            )
    for test in audit.benchmarks:
        counts = test.overlapping, test.rows
        _apply_limit(audit, config, "max_overlap_share", f"test data {test.name}", *counts)


def find_unused_settings(
    fact: DatasetFacts, mask: Mapping[str, str], unit: str = "rows"
) -> list[AuditWarning]:
    """Return a warning if no row of a data set reads some of the settings `mask`, as typed."""
    counts = fact.counts
    if fact.format == "pretokenized":
        unused, kind = list(mask), "hold token ids with a mask of their own"
    else:
        unused = [] if fact.is_chat else [each for each in mask if each in _OF_TURNS]
        kind = "are texts without turns"
    if not (unused and counts.rows):
        return []
    typed = ", ".join(f"data.{each}={mask[each]}" for each in unused)
    statement = f"{kind}, on which {typed} {'has' if len(unused) == 1 else 'have'} no effect"
    return [AuditWarning(fact.name, counts.rows, counts.rows, unit, statement)]


def warn_of_long_rows(audit: Audit, facts: Sequence[DatasetFacts], run: RunSettings) -> None:
    """Warn of the data sets that lose many tokens with long rows."""
    for dataset, fact in zip(audit.datasets, facts, strict=True):
        _warn_of_long_rows(audit, dataset, fact, run)


def warn_of_first_rows(audit: Audit, fact: DatasetFacts, run: RunSettings) -> None:
    """Add the warnings about the first rows of a stream; `kept_tokens` of them must be known."""
    counts, kept = fact.counts, fact.kept_tokens or 0
    first = DatasetAudit(
        name=fact.name,
        path=fact.path,
        rows=counts.rows,
        train=counts.kept,
        validation=0,
        tokens=kept,
        trained=0,
        dropped=counts.dropped,
        truncated=counts.truncated,
        lost_share=counts.lost_tokens / max(1, counts.lost_tokens + kept),
        empty=counts.empty,
        notes={kind: count for kind, (count, _) in counts.notes.items()},
    )
    if fact.on_long != "error":  # of which the stream says more
        _warn_of_long_rows(audit, first, fact, run, _FIRST_ROWS)
    _warn_of_rows(audit, first, fact, run, _FIRST_ROWS)


def _warn_of_long_rows(
    audit: Audit, dataset: DatasetAudit, fact: DatasetFacts, run: RunSettings, unit: str = "rows"
) -> None:
    if dataset.lost_share <= _REPORTED_ABOVE:
        return
    count, action, advice = dataset.truncated, "cut", "a larger data.sequence_len keeps them"
    if not (fact.is_chat or run.is_encoder_decoder):
        advice = f"data.on_long=split or {advice}"
    if fact.on_long == "drop":
        # Of a tree of conversations only some branches may be too long.
        count, action = dataset.dropped + dataset.notes.get("branch_dropped", 0), "dropped"
        advice += ", data.on_long=truncate_right keeps a part"
    limit = "" if run.sequence_len is None else f"={run.sequence_len}"
    statement = f"are longer than data.sequence_len{limit} and {action}"
    rows = fact.counts.longest
    longest = f"; the longest has {rows[0][0]:,} tokens" if rows else ""
    share = dataset.lost_share
    audit.warn(dataset, count, unit, statement, share=share, advice=advice, detail=longest)


def _apply_row_rules(
    audit: Audit, dataset: DatasetAudit, fact: DatasetFacts, run: RunSettings
) -> None:
    counts = fact.counts
    if not (dataset.train if fact.is_trained else dataset.validation):
        use = "to train on" if fact.is_trained else "for validation"
        audit.problems.append(
            f"{fact.path}: no document of data set {dataset.name} is left {use} "
            f"({counts.rows:,} rows, {counts.dropped:,} too long, {counts.empty:,} with nothing to "
            f"train on, {dataset.validation:,} for validation); give more rows, or a larger "
            "data.sequence_len"
        )
    _warn_of_rows(audit, dataset, fact, run)


def _warn_of_rows(
    audit: Audit, dataset: DatasetAudit, fact: DatasetFacts, run: RunSettings, unit: str = "rows"
) -> None:
    counts = fact.counts
    if dataset.empty:
        statement = "have nothing to train on (no answer, or it was cut off) and are left out"
        first = tuple(counts.empty_origins)
        audit.warn(dataset, dataset.empty, unit, statement, first=first, joiner=", ")
    for kind, (count, seen) in counts.notes.items():
        statement, advice = _NOTES.get(kind, (f"have the note: {kind.replace('_', ' ')}", ""))
        audit.warn(dataset, count, unit, statement, first=(seen,), advice=advice)
    if dataset.double_bos:
        statement = "begin with two BOS tokens"
        advice = "remove the BOS from the rows, or from the chat template"
        audit.warn(dataset, dataset.double_bos, "documents", statement, advice=advice)
    if counts.lossy_rows:
        unknown = f" ({counts.unknown_tokens:,} unknown tokens)" if counts.unknown_tokens else ""
        statement = (
            "have characters that this tokenizer replaces or drops, so that the model cannot learn "
            f"them: {names_of(counts.lost_characters)}{unknown}"
        )
        advice = "use a base whose vocabulary has them, or write the rows without them"
        first = (counts.first_lossy,)
        audit.warn(dataset, counts.lossy_rows, unit, statement, first=first, advice=advice)
    audit.findings += find_unused_settings(fact, run.mask, unit)
    if run.has_own_template and fact.format == "prompt_completion" and not fact.is_chat:
        statement = (
            "are texts of prompt and completion, trained on without the tokenizer's chat template"
        )
        advice = "to train on chats, name the columns instruction and output"
        audit.warn(dataset, dataset.rows, unit, statement, advice=advice)


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
    audit.warn(dataset, dataset.no_stop, "documents", statement, advice=advice, detail=detail)


def _apply_limit(
    audit: Audit, config: AuditConfig, name: str, where: str, count: int, total: int
) -> None:
    """Add a problem if more than the share `name` of the settings is counted."""
    limit = getattr(config, name)
    if limit is not None and count > limit * total:
        what, fix = _LIMITS[name]
        audit.problems.append(
            f"{where}: {count_of(count, total)} {what}, data.audit.{name} is {limit}; {fix}, or "
            "raise the limit"
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
