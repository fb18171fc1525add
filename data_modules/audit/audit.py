"""Audit the data before training: count each data set, and compare training with held-out rows.

rules.py decides what the counts mean. Never changes a row, and never raises: `Audit.check` does, so
that a preview can show the rows with problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.text import percent
from data_modules.audit.figures import (
    Audit,
    AuditWarning,
    BenchmarkAudit,
    DatasetAudit,
    count_of,
)
from data_modules.audit.overlap import find_copies, find_overlap
from data_modules.audit.rules import AuditConfig, DatasetFacts, RunSettings, apply_rules

if TYPE_CHECKING:
    from data_modules.audit.overlap import Overlap
    from data_modules.tokens.store import Examples as Columns


_NUM_LONGEST = 5
_NUM_PAIRS = 3
_ONE_SIDED = 0.75
"""share of pairs with the longer answer on the same side from which length gives it away"""
MAX_TRAIN_TOKENS, MAX_HELD_OUT_TOKENS = 50_000_000, 2_000_000
"""tokens that are searched for overlap, which takes seconds and some hundred megabytes; of more
tokens, evenly spaced documents are searched"""


def audit_documents(
    config: AuditConfig,
    facts: Sequence[DatasetFacts],
    train: Columns,
    validation: Columns,
    *,
    benchmarks: Columns | None = None,
    benchmark_names: Sequence[str] = (),
    run: RunSettings | None = None,
) -> Audit:
    """Count the documents of both sides, compare them, and apply the rules.

    The `datasets` of `train` and `validation` are indices of `facts`, those of `benchmarks` (the
    documents of the test data sets) of `benchmark_names`.
    """
    audit = Audit(
        datasets=_count(facts, train, validation), longest=_longest(facts, train, validation)
    )
    _find_duplicates(audit, train)
    _find_repeated(audit, train, validation)
    _compare_answers(audit, facts, train)
    names = [dataset.name for dataset in audit.datasets]
    if config.overlap and len(validation):
        overlapping = _find_overlap(audit, config, train, validation, "validation", names)
        for dataset, count in zip(audit.datasets, overlapping, strict=True):
            dataset.overlapping = count
    if config.overlap and benchmarks is not None and len(benchmarks):
        overlapping = _find_overlap(audit, config, train, benchmarks, "test", benchmark_names)
        audit.benchmarks = _count_benchmarks(train, benchmarks, benchmark_names, overlapping)
    apply_rules(audit, facts, config, run or RunSettings())
    return audit


def _count(
    facts: Sequence[DatasetFacts], train: Columns, validation: Columns
) -> list[DatasetAudit]:
    def sums(side: Columns, values: npt.NDArray[Any] | None = None) -> list[int]:
        """Return the documents of each data set, or the sums of their `values`."""
        counts = np.bincount(side.datasets, weights=values, minlength=len(facts))
        return [round(count) for count in counts.tolist()]

    sides = zip(
        facts,
        sums(train),
        sums(validation),
        sums(train, train.lengths),
        sums(train, train.trained),
        sums(train, ~train.ends_in_stop),
        sums(train, train.double_bos),
        sums(validation, validation.lengths),
        strict=True,
    )
    datasets = []
    for fact, num_train, num_validation, tokens, trained, no_stop, double_bos, held_out in sides:
        counts = fact.counts
        kept = tokens + held_out if fact.kept_tokens is None else fact.kept_tokens
        datasets.append(
            DatasetAudit(
                name=fact.name,
                path=fact.path,
                rows=counts.rows,
                train=num_train,
                validation=num_validation,
                tokens=tokens,
                trained=trained,
                bad_rows=counts.rejected,
                dropped=counts.dropped,
                truncated=counts.truncated,
                lost_tokens=counts.lost_tokens,
                lost_share=counts.lost_tokens / max(1, counts.lost_tokens + kept),
                split=counts.split,
                empty=counts.empty,
                no_stop=no_stop,
                double_bos=double_bos,
                notes={kind: count for kind, (count, _) in counts.notes.items()},
            )
        )
    return datasets


def _longest(
    facts: Sequence[DatasetFacts], train: Columns, validation: Columns
) -> list[tuple[int, str]]:
    """Return (tokens, origin) of the longest rows, including rows as they were before a cut."""
    found = {origin: tokens for fact in facts for tokens, origin in fact.counts.longest}
    for side in (train, validation):
        for index in np.argsort(-side.lengths, kind="stable")[:_NUM_LONGEST].tolist():
            origin, tokens = str(side.origin(index)), int(side.lengths[index])
            found[origin] = max(tokens, found.get(origin, 0))
    ordered = sorted(found.items(), key=lambda row: (-row[1], row[0]))
    return [(tokens, origin) for origin, tokens in ordered[:_NUM_LONGEST]]


def _find_duplicates(audit: Audit, train: Columns) -> None:
    """Count training documents with the same tokens as an earlier one.

    Equal pieces of one split row are not duplicates of each other.
    """
    _, first, group = np.unique(train.digests, return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[group] != np.arange(len(train)))
    is_other_row = [
        train.origin(document) != train.origin(int(first[group[document]]))
        for document in repeats.tolist()
    ]
    repeats = repeats[np.array(is_other_row, dtype=np.bool_)]
    for index, dataset in enumerate(audit.datasets):
        duplicates = repeats[train.datasets[repeats] == index]
        dataset.duplicates = len(duplicates)
        if len(duplicates):
            document = int(duplicates[0])
            earlier = train.origin(int(first[group[document]]))
            audit.findings.append(
                dataset.warning(
                    *(len(duplicates), "training examples", "are duplicates"),
                    first=(str(train.origin(document)), str(earlier)),
                    joiner=", the same as ",
                    advice="remove them, or set data.audit.max_duplicate_share=0 to make this an "
                    "error",
                )
            )


def _find_repeated(audit: Audit, train: Columns, validation: Columns) -> None:
    """Count validation documents with the same tokens as a training document."""
    same = find_copies(train, validation)
    for index, dataset in enumerate(audit.datasets):
        repeated = np.flatnonzero((same >= 0) & (validation.datasets == index))
        dataset.repeated = len(repeated)
        if len(repeated):
            document = int(repeated[0])
            origins = validation.origin(document), train.origin(int(same[document]))
            audit.findings.append(
                dataset.warning(
                    *(len(repeated), "validation documents", "are also in the training data"),
                    first=(str(origins[0]), str(origins[1])),
                    joiner=", the same as ",
                    advice="remove them: their loss does not measure generalization",
                )
            )


def _compare_answers(audit: Audit, facts: Sequence[DatasetFacts], train: Columns) -> None:
    """Report how often the chosen answer of a pair is the longer one; warn if it nearly always is.

    The correlation is that of length with being chosen, within the pairs.
    """
    for index, fact in enumerate(facts):
        if fact.format != "preference" or not (own := train.datasets == index).any():
            continue
        dataset = audit.datasets[index]
        # The prompt is the same in both documents.
        longer_by = 2 * train.rejected_starts[own] - train.lengths[own]
        correlation = longer_by.mean() / max(1e-9, np.sqrt(np.square(longer_by).mean()))
        detail = f" (correlation of length with being chosen: {correlation:+.2f})"
        counts = {"longer": int((longer_by > 0).sum()), "shorter": int((longer_by < 0).sum())}
        kind, count = max(counts.items(), key=itemgetter(1))
        statement = f"have a chosen answer that is {kind} than the rejected one"
        if count < _ONE_SIDED * len(longer_by):
            audit.facts.append(
                f"{dataset.name}: {count_of(count, len(longer_by))} pairs {statement}{detail}"
            )
            continue
        audit.findings.append(
            dataset.warning(
                *(count, "training examples", statement),
                advice="a model may learn only that: add pairs of the other kind, or compare "
                "answers per token, by objective=ipo or simpo",
                detail=detail,
            )
        )


def _find_overlap(
    audit: Audit,
    config: AuditConfig,
    train: Columns,
    held_out: Columns,
    side: str,
    names: Sequence[str],
) -> list[int]:
    """Return the number of overlapping documents of each data set of `held_out`.

    `side` is what messages call the held-out documents: validation or test.
    """
    found = find_overlap(
        train,
        held_out,
        config.ngram,
        min_share=config.overlap_share,
        max_train_tokens=MAX_TRAIN_TOKENS,
        max_held_out_tokens=MAX_HELD_OUT_TOKENS,
    )
    _add_searched_share(audit, side, found)
    counts = []
    for index, name in enumerate(names):
        is_in_dataset = held_out.datasets == index
        flagged = np.flatnonzero(found.flagged & is_in_dataset)
        counts.append(len(flagged))
        if len(flagged):
            pairs = [
                (str(held_out.origin(document)), str(train.origin(int(found.partner[document]))))
                for document in flagged[:_NUM_PAIRS].tolist()
            ]
            named = ", ".join(" with ".join(pair) for pair in pairs)
            share = percent(config.overlap_share, 0)
            audit.findings.append(
                AuditWarning(
                    name,
                    *(len(flagged), int(is_in_dataset.sum()), f"{side} documents"),
                    "overlap with training",
                    first=pairs[0],
                    advice="data.audit.max_overlap_share=0 makes this an error",
                    detail=f" (they share {share} of their n-grams of {config.ngram} tokens: "
                    f"{named})",
                )
            )
    return counts


def _add_searched_share(audit: Audit, held_out: str, found: Overlap) -> None:
    for share, side in ((found.train_share, "training"), (found.held_out_share, held_out)):
        if share < 1:
            audit.facts.append(
                f"overlap with {held_out} documents: searched in {percent(share, 0)} of the {side} "
                "tokens (evenly spaced documents), to save time"
            )


def _count_benchmarks(
    train: Columns, benchmarks: Columns, names: Sequence[str], overlapping: Sequence[int]
) -> list[BenchmarkAudit]:
    known = find_copies(train, benchmarks) >= 0
    rows = np.bincount(benchmarks.datasets, minlength=len(names))
    repeated = np.bincount(benchmarks.datasets[known], minlength=len(names))
    return [
        BenchmarkAudit(
            name=name, rows=int(rows[i]), repeated=int(repeated[i]), overlapping=overlapping[i]
        )
        for i, name in enumerate(names)
    ]
