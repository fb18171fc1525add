"""Audit the data before training: count each data set, and compare training with held-out rows.

findings.py decides what the counts mean. Never changes a row, and never raises: `Audit.check` does,
so that a preview can show the rows with problems.

_Overlap: the n-grams of `input_ids` that a held-out document shares with training documents. One
n-gram alone means little: in unrelated real data up to nine of ten documents share one with another
document, but only 2 to 3 % share a fifth of theirs. Boilerplate (system prompts, template headers)
does not count; it is found by counting, as it occurs in many documents. With few documents counts
are not reliable, so the loss mask is used too: text that is trained on was written for its row,
while n-grams of prompts are boilerplate as soon as two rows share them (or there is only one row).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from common.text import percent
from data_modules.audit import findings
from data_modules.audit.findings import Audit, AuditConfig, DatasetAudit, DatasetFacts, RunSettings

if TYPE_CHECKING:
    from data_modules.tokens.store import Examples as Columns
    from data_modules.types import Example

_NUM_LONGEST = 5
_NUM_PAIRS = 3
_ONE_SIDED = 0.75
"""share of pairs with the longer answer on the same side from which length gives it away"""
MAX_TRAIN_TOKENS, MAX_HELD_OUT_TOKENS = 50_000_000, 2_000_000
"""tokens that are searched for overlap, which takes seconds and some hundred megabytes; of more
tokens, evenly spaced documents are searched"""
_Hashes = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_T = TypeVar("_T", np.int64, np.uint64)
_BASE, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
CHUNK_TOKENS = 1 << 20
"""tokens that are hashed at once, which takes about 60 MB with all intermediate arrays"""
_BOILERPLATE_SHARE, _BOILERPLATE_DOCUMENTS = 0.10, 2
"""an n-gram is boilerplate in a data set if more than this share, and this number, of its
documents contain it"""
_SAME_QUESTION_SHARE = 0.6
"""share of common n-grams from which two questions are the same, whatever their answers"""
FEW_DOCUMENTS = 20
"""training documents of a data set up to which the loss mask is used to find boilerplate"""
_MAX_TABLE_BITS = 27


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
    run = run or RunSettings()
    findings.warn_of_long_rows(audit, facts, run)  # first: lost tokens cost most
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
    findings.apply_rules(audit, facts, config, run)
    return audit


def _count(
    facts: Sequence[DatasetFacts], train: Columns, validation: Columns
) -> list[DatasetAudit]:
    def sums(side: Columns, values: npt.NDArray[Any] | None = None) -> list[int]:
        """Return the documents of each data set, or the sums of their `values`."""
        counts = np.bincount(side.datasets, weights=values, minlength=len(facts))
        return [round(count) for count in counts.tolist()]

    columns = {
        "train": sums(train),
        "validation": sums(validation),
        "tokens": sums(train, train.lengths),
        "trained": sums(train, train.trained),
        "no_stop": sums(train, ~train.ends_in_stop),
        "double_bos": sums(train, train.double_bos),
    }
    held_out = sums(validation, validation.lengths)
    datasets = []
    for index, fact in enumerate(facts):
        counts = fact.counts
        own = {name: numbers[index] for name, numbers in columns.items()}
        kept = own["tokens"] + held_out[index] if fact.kept_tokens is None else fact.kept_tokens
        datasets.append(
            DatasetAudit(
                name=fact.name,
                path=fact.path,
                rows=counts.rows,
                bad_rows=counts.rejected,
                dropped=counts.dropped,
                truncated=counts.truncated,
                lost_tokens=counts.lost_tokens,
                lost_share=counts.lost_tokens / max(1, counts.lost_tokens + kept),
                split=counts.split,
                empty=counts.empty,
                notes={kind: count for kind, (count, _) in counts.notes.items()},
                **own,
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
            audit.warn(
                dataset,
                *(len(duplicates), "training examples", "are duplicates"),
                first=(str(train.origin(document)), str(earlier)),
                joiner=", the same as ",
                advice="remove them, or set data.audit.max_duplicate_share=0 to make this an error",
            )


def _find_repeated(audit: Audit, train: Columns, validation: Columns) -> None:
    """Count validation documents with the same tokens as a training document."""
    same = _find_copies(train, validation)
    for index, dataset in enumerate(audit.datasets):
        repeated = np.flatnonzero((same >= 0) & (validation.datasets == index))
        dataset.repeated = len(repeated)
        if len(repeated):
            document = int(repeated[0])
            origins = validation.origin(document), train.origin(int(same[document]))
            audit.warn(
                dataset,
                *(len(repeated), "validation documents", "are also in the training data"),
                first=(str(origins[0]), str(origins[1])),
                joiner=", the same as ",
                advice="remove them: their loss does not measure generalization",
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
                f"{dataset.name}: {findings.count_of(count, len(longer_by))} pairs "
                f"{statement}{detail}"
            )
            continue
        audit.warn(
            dataset,
            *(count, "training examples", statement),
            advice="a model may learn only that: add pairs of the other kind, or compare "
            "answers per token, by objective=ipo or simpo",
            detail=detail,
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
    for searched, what in ((found.train_share, "training"), (found.held_out_share, side)):
        if searched < 1:
            audit.facts.append(
                f"overlap with {side} documents: searched in {percent(searched, 0)} of the {what} "
                "tokens (evenly spaced documents), to save time"
            )
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
                findings.AuditWarning(
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


def _count_benchmarks(
    train: Columns, benchmarks: Columns, names: Sequence[str], overlapping: Sequence[int]
) -> list[findings.BenchmarkAudit]:
    known = _find_copies(train, benchmarks) >= 0
    rows = np.bincount(benchmarks.datasets, minlength=len(names))
    repeated = np.bincount(benchmarks.datasets[known], minlength=len(names))
    return [
        findings.BenchmarkAudit(
            name=name, rows=int(rows[i]), repeated=int(repeated[i]), overlapping=overlapping[i]
        )
        for i, name in enumerate(names)
    ]


def _hash_grams(ids: npt.NDArray[np.int32], ngram: int) -> _Hashes:
    """Return a hash of the n-gram at each position, uint64 [len(ids) - ngram + 1].

    A polynomial of the mixed ids, mod 2^64; blocks of 1, 2, 4, ... ids are combined from halves, so
    that 13-grams take 5 passes.
    """
    blocks = _mixed(ids.astype(np.uint64))
    hashes = np.zeros(len(ids) - ngram + 1, dtype=np.uint64)
    width, covered, power = 1, 0, _BASE
    while width <= ngram:
        if ngram & width:
            hashes *= np.uint64(power)
            hashes += blocks[covered : covered + len(hashes)]
            covered += width
        if 2 * width <= ngram:
            blocks = blocks[:-width] * np.uint64(power) + blocks[width:]
        width, power = 2 * width, power * power & _WORD
    return _mixed(hashes)


def _mixed(words: _Hashes) -> _Hashes:
    """Mix the bits of each word (finalizer of splitmix64)."""
    words = words + np.uint64(_BASE)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The overlap of a held-out side with training.

    `partner` int64 [n] is the training document that shares most with each held-out document, -1
    for documents without overlap. `train_share` and `held_out_share` are the shares of the tokens
    that were searched.
    """

    partner: _Indices
    train_share: float
    held_out_share: float

    @property
    def flagged(self) -> _Flags:
        """Return whether each held-out document overlaps with training, bool [n]."""
        return self.partner >= 0


@dataclass(frozen=True, slots=True)
class _Index:
    """The distinct n-grams of the held-out side, sorted, and the documents that contain them.

    N-gram i occurs in `documents[starts[i]:starts[i + 1]]`. `table` is a filter by the leading bits
    of the hash, which all known n-grams pass and few others.
    """

    grams: _Hashes
    starts: _Indices
    documents: _Indices
    table: _Flags

    def find(self, hashes: _Hashes) -> tuple[_Indices, _Indices]:
        """Return the positions of the known hashes, and the n-gram of each."""
        shift = np.uint64(64 - (len(self.table).bit_length() - 1))
        maybe = np.flatnonzero(self.table[hashes >> shift])
        grams = np.searchsorted(self.grams, hashes[maybe])
        grams = np.minimum(grams, len(self.grams) - 1)
        known = self.grams[grams] == hashes[maybe]
        return maybe[known], grams[known]


def find_overlap(
    train: Columns,
    held_out: Columns,
    ngram: int,
    *,
    min_share: float,
    max_train_tokens: int,
    max_held_out_tokens: int,
) -> _Overlap:
    """Find held-out documents that share at least `min_share` of their n-grams with training.

    A pair of documents with different questions does not overlap, unless the answers share an
    n-gram. Documents shorter than `ngram` tokens are compared as a whole, as are exact copies.

    N-grams in more than 10 % of the documents (and more than 2) of a data set of either side are
    boilerplate and do not count anywhere. In data sets of up to 20 training documents, n-grams
    without a trained token are boilerplate if a second document has them, or there is only one
    document. Above the maxima, evenly spaced documents are searched.
    """
    partner = _find_copies(train, held_out)
    searched, train_share = _sample_documents(train.lengths, max_train_tokens)
    sampled, held_out_share = _sample_documents(held_out.lengths, max_held_out_tokens)
    index = _index_grams(held_out, sampled, ngram)
    known = np.full(len(index.grams), -1, dtype=np.int64)
    boilerplate = np.zeros(len(index.grams), dtype=np.bool_)
    if len(index.grams):
        for dataset in np.unique(train.datasets[searched]):
            chosen = searched[train.datasets[searched] == dataset]
            first, is_common = _find_in_training(train, chosen, index, ngram)
            known = np.where(known < 0, first, known)
            boilerplate |= is_common
    known[boilerplate] = -1
    matched = _match_shares(index, known, min_share, len(train), partner)
    for document in np.flatnonzero(matched >= 0).tolist() if min_share else ():
        held_out_example, train_example = held_out[document], train[int(matched[document])]
        if _is_other_exercise(held_out_example, train_example, ngram, index, boilerplate):
            matched[document] = -1
    partner = np.where(partner < 0, matched, partner)
    return _Overlap(partner, train_share, held_out_share)


def _sample_documents(lengths: _Indices, max_tokens: int) -> tuple[_Indices, float]:
    """Return evenly spaced documents of about `max_tokens` tokens, and their share of all tokens.

    Documents are taken in blocks of up to 1,000, so that the blocks between them are not read from
    disk.
    """
    total = int(lengths.sum())
    step = max(1, -(-total // max_tokens))
    block = max(1, min(1000, len(lengths) // (100 * step)))
    chosen = np.flatnonzero(np.arange(len(lengths)) // block % step == 0)
    return chosen, int(lengths[chosen].sum()) / max(1, total)


def _find_copies(train: Columns, held_out: Columns) -> _Indices:
    """Return the first training document with the same tokens as each held-out one [n], or -1."""
    if not len(train) or not len(held_out):
        return np.full(len(held_out), -1, dtype=np.int64)
    digests, first = np.unique(train.digests, return_index=True)
    position = np.minimum(np.searchsorted(digests, held_out.digests), len(digests) - 1)
    return np.where(digests[position] == held_out.digests, first[position], -1)


def _match_shares(
    index: _Index, known: _Indices, min_share: float, num_train: int, partner: _Indices
) -> _Indices:
    """Return the training document that shares most n-grams with each held-out document, int64 [n].

    -1 for documents with less than `min_share` of their n-grams in training, or with a `partner`
    already. `known` is a training document of each n-gram, or -1; `num_train` the number of
    training documents.
    """
    owners = np.repeat(known, np.diff(index.starts))
    shared = owners >= 0
    counts = np.bincount(index.documents, minlength=len(partner))
    found = np.bincount(index.documents[shared], minlength=len(partner))
    # Pairs of documents as one number, the most frequent pair last.
    pairs, times = np.unique(
        index.documents[shared] * num_train + owners[shared], return_counts=True
    )
    pairs = pairs[np.argsort(times, kind="stable")]
    matched = np.full(len(partner), -1, dtype=np.int64)
    matched[pairs // max(1, num_train)] = pairs % max(1, num_train)
    enough = (found > 0) & (found >= min_share * counts) & (partner < 0)
    return np.where(enough, matched, -1)


def _is_other_exercise(
    held_out: Example, train: Example, ngram: int, index: _Index, boilerplate: _Flags
) -> bool:
    """Return whether two documents have different questions, and answers without common n-grams.

    Exercises of one kind share most of their words. False for texts without a question.
    """
    question, answer = _split_trained(held_out)
    train_question, train_answer = _split_trained(train)
    if not all(map(len, (question, answer, train_question, train_answer))):
        return False
    if np.array_equal(question, train_question):
        return False
    if len(answer) >= ngram and _shared(_hash_grams(answer, ngram), train_answer, ngram):
        return False
    if len(question) < ngram:
        return True
    _, grams = index.find(_hash_grams(question, ngram))
    distinctive = index.grams[grams[~boilerplate[grams]]]
    return _shared(distinctive, train_question, ngram) < _SAME_QUESTION_SHARE


def _shared(hashes: _Hashes, others: npt.NDArray[np.int32], ngram: int) -> float:
    """Return the share of the n-grams `hashes` that occur in the ids `others`; 0 without any."""
    if not len(hashes) or len(others) < ngram:
        return 0.0
    return float(np.isin(hashes, _hash_grams(others, ngram)).mean())


def _split_trained(example: Example) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the ids that are masked, and the ids that are trained on."""
    if example.target_ids is not None:
        return example.input_ids, example.target_ids
    is_trained = example.weights > 0
    return example.input_ids[~is_trained], example.input_ids[is_trained]


def _index_grams(held_out: Columns, sampled: _Indices, ngram: int) -> _Index:
    hashes: list[_Hashes] = []
    documents: list[_Indices] = []
    boilerplate: list[_Hashes] = []
    for dataset in np.unique(held_out.datasets[sampled]):
        chosen = sampled[held_out.datasets[sampled] == dataset]
        parts = [_unique_pairs(*part) for part in _grams(held_out, chosen, ngram)]
        if not parts:
            continue
        grams = np.concatenate([part[0] for part in parts])
        hashes.append(grams)
        documents.append(np.concatenate([part[1] for part in parts]))
        distinct, counts = np.unique(grams, return_counts=True)
        boilerplate.append(distinct[counts > _boilerplate_limit(len(chosen))])
    grams = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    owners = np.concatenate(documents) if documents else np.zeros(0, np.int64)
    if boilerplate:
        kept = ~np.isin(grams, np.concatenate(boilerplate))
        grams, owners = grams[kept], owners[kept]
    order = np.argsort(grams, kind="stable")
    distinct, starts = np.unique(grams[order], return_index=True)
    bits = min(max(16, len(distinct).bit_length() + 4), _MAX_TABLE_BITS)
    table = np.zeros(1 << bits, dtype=np.bool_)
    table[distinct >> np.uint64(64 - bits)] = True
    return _Index(distinct, np.append(starts, len(order)), owners[order], table)


def _find_in_training(
    train: Columns, chosen: _Indices, index: _Index, ngram: int
) -> tuple[_Indices, _Flags]:
    """Return the first of the `chosen` training documents with each n-gram of `index`, or -1.

    Also returns which n-grams are boilerplate in these documents, bool [grams].
    """
    counts = np.zeros(len(index.grams), dtype=np.int64)
    first = np.full(len(index.grams), -1, dtype=np.int64)
    for hashes, documents in _grams(train, chosen, ngram):
        at, grams = index.find(hashes)
        owners, grams = _unique_pairs(documents[at], grams)
        counts += np.bincount(grams, minlength=len(counts))
        unseen = first[grams] < 0
        # In reverse order, so that the first document of an n-gram is written last.
        first[grams[unseen][::-1]] = owners[unseen][::-1]
    is_common = counts > _boilerplate_limit(len(chosen))
    if len(chosen) <= FEW_DOCUMENTS:
        is_prompt = ~_trained_grams(train, chosen, index, ngram)
        first[is_prompt & (counts > min(1, len(chosen) - 1))] = -1
    return first, is_common


def _trained_grams(train: Columns, chosen: _Indices, index: _Index, ngram: int) -> _Flags:
    """Return which n-grams of `index` have a trained token in one of the `chosen` documents."""
    trained_grams = np.zeros(len(index.grams), dtype=np.bool_)
    for document in chosen[train.lengths[chosen] >= ngram].tolist():
        example = train[document]
        if len(example.input_ids) < ngram:
            continue
        # The weights of an encoder-decoder example belong to its targets: all inputs may count.
        weights = (
            example.weights
            if example.target_ids is None
            else np.ones(len(example.input_ids), np.float32)
        )
        sums = np.concatenate([[0], np.cumsum(weights > 0)])
        at, grams = index.find(_hash_grams(example.input_ids, ngram))
        trained_grams[grams[(sums[ngram:] > sums[:-ngram])[at]]] = True
    return trained_grams


def _boilerplate_limit(num_documents: int) -> float:
    return max(_BOILERPLATE_DOCUMENTS, _BOILERPLATE_SHARE * num_documents)


def _unique_pairs(first: npt.NDArray[_T], second: _Indices) -> tuple[npt.NDArray[_T], _Indices]:
    """Return each pair of numbers once, sorted by the second, then by the first."""
    order = np.lexsort((first, second))
    first, second = first[order], second[order]
    new = np.ones(len(first), dtype=np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]


def _grams(side: Columns, chosen: _Indices, ngram: int) -> Iterator[tuple[_Hashes, _Indices]]:
    """Yield the hashes of the n-grams of `chosen` documents, and their documents, in chunks."""
    chosen = chosen[side.lengths[chosen] >= ngram]
    if not len(chosen):
        return
    ends = np.cumsum(side.lengths[chosen])
    cuts = np.searchsorted(ends, np.arange(CHUNK_TOKENS, ends[-1], CHUNK_TOKENS)) + 1
    for part in np.split(chosen, np.unique(cuts)):
        flat, sizes = side.token_ids(part)
        if len(flat) < ngram:
            continue
        owners = np.repeat(part, sizes)
        numbers = np.repeat(np.arange(len(part)), sizes)
        hashes = _hash_grams(flat, ngram)
        count = len(hashes)
        is_inside = numbers[:count] == numbers[ngram - 1 :]  # within one document
        yield hashes[is_inside], owners[:count][is_inside]
