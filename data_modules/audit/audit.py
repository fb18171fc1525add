"""Audit before training: counts per data set of what is trained on, and what is wrong with it.

Compares the two sides and hands the counts to the rules. Never changes a row, and never raises by
itself: `Audit.check` does, so that a preview can show what it complains of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data_modules.audit.figures import (
    Audit,
    AuditWarning,
    BenchmarkAudit,
    DatasetAudit,
    count_of,
)
from data_modules.audit.overlap import Columns, find_overlap
from data_modules.audit.rules import AuditConfig, DatasetFacts, RunSettings, judge

if TYPE_CHECKING:
    import numpy.typing as npt

    from data_modules.audit.overlap import Overlap


NUM_LONGEST = 5
NUM_PAIRS = 3
MAX_TRAIN_TOKENS, MAX_HELD_OUT_TOKENS = 50_000_000, 2_000_000
"""tokens that are searched for overlap, for seconds and some hundred megabytes; of more, evenly
spread documents stand for all"""


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
    """Count what both sides hold, compare them and judge.

    `datasets` of `train` and `validation` index `facts`, those of `benchmarks` (the documents of
    the test data sets) `benchmark_names`.
    """
    audit = Audit(
        datasets=_count(facts, train, validation), longest=_longest(facts, train, validation)
    )
    _find_duplicates(audit, train)
    _find_repeated(audit, train, validation)
    if config.overlap and len(validation):
        names = [dataset.name for dataset in audit.datasets]
        overlapping = _find_overlap(audit, config, train, validation, "validation", names)
        for dataset, count in zip(audit.datasets, overlapping, strict=True):
            dataset.overlapping = count
    if config.overlap and benchmarks is not None and len(benchmarks):
        overlapping = _find_overlap(audit, config, train, benchmarks, "test", benchmark_names)
        audit.benchmarks = _count_benchmarks(train, benchmarks, benchmark_names, overlapping)
    judge(audit, facts, config, run or RunSettings())
    return audit


def _count(
    facts: Sequence[DatasetFacts], train: Columns, validation: Columns
) -> list[DatasetAudit]:
    import numpy as np

    def each(side: Columns, values: npt.NDArray[Any] | None = None) -> list[int]:
        counts = np.bincount(side.datasets, weights=values, minlength=len(facts))
        return [round(count) for count in counts.tolist()]

    rows = zip(
        facts,
        each(train),
        each(validation),
        each(train, train.lengths),
        each(train, train.trained),
        each(train, ~train.ends_in_stop),
        each(train, train.double_bos),
        each(validation, validation.lengths),
        strict=True,
    )
    return [
        DatasetAudit(
            name=fact.name,
            path=fact.path,
            rows=fact.rows,
            train=of_train,
            validation=of_validation,
            tokens=tokens,
            trained=trained,
            bad_rows=fact.bad_rows,
            dropped=fact.dropped_long,
            truncated=fact.truncated,
            lost_tokens=fact.lost_tokens,
            lost_share=_share(
                fact.lost_tokens,
                tokens + held_out if fact.kept_tokens is None else fact.kept_tokens,
            ),
            split=fact.split,
            empty=fact.empty,
            no_stop=no_stop,
            double_bos=double_bos,
            notes={kind: count for kind, (count, _) in fact.notes.items()},
        )
        for fact, of_train, of_validation, tokens, trained, no_stop, double_bos, held_out in rows
    ]


def _share(part: int, rest: int) -> float:
    return part / max(1, part + rest)


def _longest(
    facts: Sequence[DatasetFacts], train: Columns, validation: Columns
) -> list[tuple[int, str]]:
    """Return (tokens, origin) of the longest rows, those before any cut included."""
    import numpy as np

    found = {origin: tokens for fact in facts for tokens, origin in fact.longest}
    for side in (train, validation):
        for index in np.argsort(-side.lengths, kind="stable")[:NUM_LONGEST].tolist():
            origin, tokens = str(side.origin(index)), int(side.lengths[index])
            found[origin] = max(tokens, found.get(origin, 0))
    ordered = sorted(found.items(), key=lambda row: (-row[1], row[0]))
    return [(tokens, origin) for origin, tokens in ordered[:NUM_LONGEST]]


def _find_duplicates(audit: Audit, train: Columns) -> None:
    """Count documents of training that stand there already, to the token.

    Pieces of one row that was split may be alike: they are not duplicates of each other.
    """
    import numpy as np

    _, first, group = np.unique(train.digests, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[group] != np.arange(len(train)))
    others = [train.origin(one) != train.origin(int(first[group[one]])) for one in again.tolist()]
    again = again[np.array(others, dtype=np.bool_)]
    for index, dataset in enumerate(audit.datasets):
        own = again[train.datasets[again] == index]
        dataset.duplicates = len(own)
        if len(own):
            place, earlier = train.origin(int(own[0])), train.origin(int(first[group[own[0]]]))
            audit.findings.append(
                AuditWarning(
                    dataset=dataset.name,
                    count=len(own),
                    total=dataset.train,
                    what="training examples",
                    statement="are duplicates",
                    first=(str(place), str(earlier)),
                    joiner=", the same as ",
                    advice="remove them",
                    advice_in_full="remove them, or type data.audit.max_duplicate_share=0 to stop "
                    "on them",
                )
            )


def _find_repeated(audit: Audit, train: Columns, validation: Columns) -> None:
    """Count validation documents that also stand in training, to the token."""
    import numpy as np

    if not len(train) or not len(validation):
        return
    digests, first = np.unique(train.digests, return_index=True)
    place = np.minimum(np.searchsorted(digests, validation.digests), len(digests) - 1)
    found = np.flatnonzero(digests[place] == validation.digests)
    for index, dataset in enumerate(audit.datasets):
        own = found[validation.datasets[found] == index]
        dataset.repeated = len(own)
        if len(own):
            here, there = validation.origin(int(own[0])), train.origin(int(first[place[own[0]]]))
            audit.findings.append(
                AuditWarning(
                    dataset=dataset.name,
                    count=len(own),
                    total=dataset.validation,
                    what="validation documents",
                    statement="also stand in training",
                    first=(str(here), str(there)),
                    joiner=", the same as ",
                    advice="remove them",
                    advice_in_full="remove them: their loss does not show generalization",
                )
            )


def _find_overlap(
    audit: Audit,
    config: AuditConfig,
    train: Columns,
    held_out: Columns,
    what: str,
    names: Sequence[str],
) -> list[int]:
    """Return for each data set of `held_out` how many documents share words with training."""
    import numpy as np

    found = find_overlap(
        train,
        held_out,
        config.ngram,
        min_share=config.overlap_share,
        max_train_tokens=MAX_TRAIN_TOKENS,
        max_held_out_tokens=MAX_HELD_OUT_TOKENS,
    )
    _note_searched_share(audit, what, found)
    counts = []
    for index, name in enumerate(names):
        own = held_out.datasets == index
        flagged = np.flatnonzero(found.flagged & own)
        counts.append(len(flagged))
        if len(flagged):
            pairs = [
                (str(held_out.origin(one)), str(train.origin(int(found.partner[one]))))
                for one in flagged[:NUM_PAIRS].tolist()
            ]
            named = ", ".join(" with ".join(pair) for pair in pairs)
            total = int(own.sum())
            audit.findings.append(
                AuditWarning(
                    dataset=name,
                    count=len(flagged),
                    total=total,
                    what=f"{what} documents",
                    statement="overlap with training",
                    first=pairs[0],
                    advice="data.audit.max_overlap_share=0 stops on them",
                    written=f"{name}: {count_of(len(flagged), total)} {what} documents overlap "
                    f"with training (share {config.overlap_share:.0%} of their runs of "
                    f"{config.ngram} tokens), first {named}; look at these pairs, or type "
                    "data.audit.max_overlap_share=0 to stop on them",
                )
            )
    return counts


def _note_searched_share(audit: Audit, what: str, found: Overlap) -> None:
    for share, side in ((found.train_share, "training"), (found.held_out_share, what)):
        if share < 1:
            audit.facts.append(
                f"overlap with {what} documents: searched in {share:.0%} of the {side} tokens, "
                "evenly spread documents; all of them would take long"
            )


def _count_benchmarks(
    train: Columns, benchmarks: Columns, names: Sequence[str], overlapping: Sequence[int]
) -> list[BenchmarkAudit]:
    import numpy as np

    known = np.isin(benchmarks.digests, train.digests)
    rows = np.bincount(benchmarks.datasets, minlength=len(names))
    repeated = np.bincount(benchmarks.datasets[known], minlength=len(names))
    return [
        BenchmarkAudit(
            name=name, rows=int(rows[i]), repeated=int(repeated[i]), overlapping=overlapping[i]
        )
        for i, name in enumerate(names)
    ]
