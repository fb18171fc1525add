"""Find documents that share a run of tokens with documents of training.

Decides what counts as the same words: n-grams of token ids that are not boilerplate (a system
prompt, a template's header), and how many of them. One alone says little: of unrelated real data
up to nine documents in ten share one, two or three in a hundred share a fifth of theirs. Never
decides what it means for a run. Compares `input_ids`; a decoder's labels are not searched.

Boilerplate is found by counting: it occurs in many documents. Of few documents the count says
little, so there the loss mask helps: what is trained on was written for its row, while a prompt's
words are boilerplate as soon as two rows share them (or there is one row alone).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]
    from data_modules.messages import Origin
    from data_modules.types import Example

    Indices = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]


_BASE, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
CHUNK_TOKENS = 1 << 20
"""tokens that are hashed at a time: about 60 MB with what comes of them"""
BOILERPLATE_SHARE, BOILERPLATE_DOCUMENTS = 0.10, 2
"""an n-gram in more documents of a data set than the larger of the two is boilerplate"""
WHOLE_SHARE = 0.6
"""share of a question's n-grams from which on it is the other one, whatever its answer"""
FEW_DOCUMENTS = 20
"""in data sets of up to so many documents of training the loss mask is looked at too"""
_MAX_TABLE_BITS = 27


def hash_grams(ids: npt.NDArray[np.int32], ngram: int) -> Hashes:
    """Return a hash of the `ngram` ids from each position on, uint64 [len(ids) - ngram + 1].

    A polynomial in the mixed ids, mod 2^64; blocks of 1, 2, 4, ... ids are put together from the
    halves, so that 13 ids cost 5 passes.
    """
    import numpy as np

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


def _mixed(words: Hashes) -> Hashes:
    """Spread each word's bits over all 64 of them (splitmix64's finaliser)."""
    import numpy as np

    words = words + np.uint64(_BASE)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class Columns(Protocol):
    """Offer the documents of one side, one by one and as columns of `n` documents."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each document, int64 [n]."""

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        """Return the trained tokens of each document, int64 [n]; the first one never is."""

    @property
    def datasets(self) -> npt.NDArray[np.int64]:
        """Return the index of each document's data set, int64 [n]."""

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """Return a hash of each document's ids, uint64 [n]."""

    @property
    def ends_in_stop(self) -> npt.NDArray[np.bool_]:
        """Return whether the last trained token is a stop token, bool [n]."""

    @property
    def double_bos(self) -> npt.NDArray[np.bool_]:
        """Return whether a document begins with two BOS tokens, bool [n]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...

    def origin(self, index: int) -> Origin:
        """Return where a document comes from."""

    def token_ids(self, indices: Indices) -> tuple[npt.NDArray[np.int32], Indices]:
        """Return the ids of these documents one after the other, and how many each has."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Hold what was found: `partner` int64 [n] is the document of training that held-out document i
    shares most with, or -1. `train_share` and `held_out_share` say how much was searched.
    """

    partner: Indices
    train_share: float
    held_out_share: float

    @property
    def flagged(self) -> Flags:
        """Return which held-out documents overlap with training, bool [n]."""
        return self.partner >= 0


@dataclass(frozen=True, slots=True)
class _Index:
    """Hold the n-grams of the held-out side: sorted and different, and who has them.

    Gram i stands in documents `documents[starts[i]:starts[i + 1]]`. `table` is a filter that lets
    all known n-grams through and few others.
    """

    grams: Hashes
    starts: Indices
    documents: Indices
    table: Flags

    def find(self, hashes: Hashes) -> tuple[Indices, Indices]:
        """Return the positions of known hashes, and the gram that each of them is."""
        import numpy as np

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
) -> Overlap:
    """Find the held-out documents of whose n-grams at least `min_share` stand in training.

    Not where both have a question and the two differ, unless their answers share an n-gram.

    Documents shorter than `ngram` tokens are compared whole, and so are copies to the token.
    N-grams in more than 10 % of the documents of a data set of either side (and in more than 2) are
    boilerplate and do not count, wherever they stand. In data sets of up to 20 documents of
    training those without a trained token are boilerplate already in the second document, or in
    the only one. Above the maxima, evenly spread documents stand for all.
    """
    import numpy as np

    partner = np.full(len(held_out), -1, dtype=np.int64)
    searched, train_share = _spread(train.lengths, max_train_tokens)
    run, held_out_share = _spread(held_out.lengths, max_held_out_tokens)
    _match_copies(train, held_out, partner)
    index = _index_grams(held_out, run, ngram)
    known = np.full(len(index.grams), -1, dtype=np.int64)
    boilerplate = np.zeros(len(index.grams), dtype=np.bool_)
    if len(index.grams):
        for dataset in np.unique(train.datasets[searched]):
            chosen = searched[train.datasets[searched] == dataset]
            first, is_common = _search(train, chosen, index, ngram)
            known = np.where(known < 0, first, known)
            boilerplate |= is_common
    known[boilerplate] = -1
    matched = _match_shares(index, known, min_share, len(train), partner)
    for one in np.flatnonzero(matched >= 0).tolist() if min_share else ():
        own, other = held_out[one], train[int(matched[one])]
        if _asks_another(own, other, ngram, index, boilerplate):
            matched[one] = -1
    partner = np.where(partner < 0, matched, partner)
    return Overlap(partner, train_share, held_out_share)


def _spread(lengths: Indices, max_tokens: int) -> tuple[Indices, float]:
    """Return evenly spread documents of about `max_tokens` tokens, and their share of all.

    Neighbours, a thousand at a time: what lies between them is then never read from the disk.
    """
    import numpy as np

    total = int(lengths.sum())
    step = max(1, -(-total // max_tokens))
    block = max(1, min(1000, len(lengths) // (100 * step)))
    chosen = np.flatnonzero(np.arange(len(lengths)) // block % step == 0)
    return chosen, int(lengths[chosen].sum()) / max(1, total)


def _match_copies(train: Columns, held_out: Columns, partner: Indices) -> None:
    """Match documents that are the same to the token, by their digests."""
    import numpy as np

    if not len(train) or not len(held_out):
        return
    digests, first = np.unique(train.digests, return_index=True)
    place = np.minimum(np.searchsorted(digests, held_out.digests), len(digests) - 1)
    same = digests[place] == held_out.digests
    partner[same] = first[place[same]]


def _match_shares(
    index: _Index, known: Indices, min_share: float, num_train: int, partner: Indices
) -> Indices:
    """Return a training document of each enough of whose n-grams are `known`, or -1, int64 [n].

    Those that have a `partner` are left out. `num_train`: documents of training.
    """
    import numpy as np

    owners = np.repeat(known, np.diff(index.starts))
    shared = owners >= 0
    counts = np.bincount(index.documents, minlength=len(partner))
    found = np.bincount(index.documents[shared], minlength=len(partner))
    # Pairs of documents as one number, the one that stands there most often last.
    pairs, times = np.unique(
        index.documents[shared] * num_train + owners[shared], return_counts=True
    )
    pairs = pairs[np.argsort(times, kind="stable")]
    matched = np.full(len(partner), -1, dtype=np.int64)
    matched[pairs // max(1, num_train)] = pairs % max(1, num_train)
    enough = (found > 0) & (found >= min_share * counts) & (partner < 0)
    return np.where(enough, matched, -1)


def _asks_another(
    own: Example, other: Example, ngram: int, index: _Index, boilerplate: Flags
) -> bool:
    """Tell whether two documents have different questions, and answers without common words.

    Exercises of one kind share most of their words. A text without a question is its own answer.
    """
    import numpy as np

    (question, answer), (other_question, other_answer) = _parts(own), _parts(other)
    if not all(map(len, (question, answer, other_question, other_answer))):
        return False
    if np.array_equal(question, other_question) or _share(answer, other_answer, ngram):
        return False
    if len(question) < ngram:
        return True
    _, grams = index.find(hash_grams(question, ngram))
    telling = index.grams[grams[~boilerplate[grams]]]
    return _share_of(telling, other_question, ngram) < WHOLE_SHARE


def _share(ids: npt.NDArray[np.int32], others: npt.NDArray[np.int32], ngram: int) -> float:
    return _share_of(hash_grams(ids, ngram), others, ngram) if len(ids) >= ngram else 0.0


def _share_of(hashes: Hashes, others: npt.NDArray[np.int32], ngram: int) -> float:
    """Return the share of n-grams that stand in `others`; 0 where there are none."""
    import numpy as np

    if not len(hashes) or len(others) < ngram:
        return 0.0
    return float(np.isin(hashes, hash_grams(others, ngram)).mean())


def _parts(example: Example) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the ids that are not trained on, and those that are."""
    if example.target_ids is not None:
        return example.input_ids, example.target_ids
    is_trained = example.weights > 0
    return example.input_ids[~is_trained], example.input_ids[is_trained]


def _index_grams(held_out: Columns, run: Indices, ngram: int) -> _Index:
    import numpy as np

    hashes: list[Hashes] = []
    documents: list[Indices] = []
    boilerplate: list[Hashes] = []
    for dataset in np.unique(held_out.datasets[run]):
        chosen = run[held_out.datasets[run] == dataset]
        parts = [_different(*part) for part in _grams(held_out, chosen, ngram)]
        if not parts:
            continue
        grams = np.concatenate([part[0] for part in parts])
        hashes.append(grams)
        documents.append(np.concatenate([part[1] for part in parts]))
        each, counts = np.unique(grams, return_counts=True)
        boilerplate.append(each[counts > _most(len(chosen))])
    grams = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    owners = np.concatenate(documents) if documents else np.zeros(0, np.int64)
    if boilerplate:
        kept = ~np.isin(grams, np.concatenate(boilerplate))
        grams, owners = grams[kept], owners[kept]
    order = np.argsort(grams, kind="stable")
    each, starts = np.unique(grams[order], return_index=True)
    bits = min(max(16, len(each).bit_length() + 4), _MAX_TABLE_BITS)
    table = np.zeros(1 << bits, dtype=np.bool_)
    table[each >> np.uint64(64 - bits)] = True
    return _Index(each, np.append(starts, len(order)), owners[order], table)


def _search(train: Columns, chosen: Indices, index: _Index, ngram: int) -> tuple[Indices, Flags]:
    """Return for each gram of `index` a training document that has it, or -1.

    And which of them stand in too many of the `chosen` documents, bool [grams].
    """
    import numpy as np

    counts = np.zeros(len(index.grams), dtype=np.int64)
    first = np.full(len(index.grams), -1, dtype=np.int64)
    for hashes, documents in _grams(train, chosen, ngram):
        at, grams = index.find(hashes)
        owners = documents[at]
        order = np.lexsort((owners, grams))
        grams, owners = grams[order], owners[order]
        new = np.ones(len(grams), dtype=np.bool_)
        new[1:] = (grams[1:] != grams[:-1]) | (owners[1:] != owners[:-1])
        grams, owners = grams[new], owners[new]
        counts += np.bincount(grams, minlength=len(counts))
        unseen = first[grams] < 0
        # Written backwards, so that the first document of a gram is the one that stays.
        first[grams[unseen][::-1]] = owners[unseen][::-1]
    is_common = counts > _most(len(chosen))
    if len(chosen) <= FEW_DOCUMENTS:
        is_prompt = ~_trained_grams(train, chosen, index, ngram)
        first[is_prompt & (counts > min(1, len(chosen) - 1))] = -1
    return first, is_common


def _trained_grams(train: Columns, chosen: Indices, index: _Index, ngram: int) -> Flags:
    """Return which grams of `index` hold a trained token in one of the `chosen` documents."""
    import numpy as np

    trained_grams = np.zeros(len(index.grams), dtype=np.bool_)
    for one in chosen[train.lengths[chosen] >= ngram].tolist():
        example = train[one]
        if len(example.input_ids) < ngram:
            continue
        # The weights of a decoder's labels belong to other tokens: all that is read may count.
        weights = (
            example.weights
            if example.target_ids is None
            else np.ones(len(example.input_ids), np.float32)
        )
        sums = np.concatenate([[0], np.cumsum(weights > 0)])
        at, grams = index.find(hash_grams(example.input_ids, ngram))
        trained_grams[grams[(sums[ngram:] > sums[:-ngram])[at]]] = True
    return trained_grams


def _most(num_documents: int) -> float:
    return max(BOILERPLATE_DOCUMENTS, BOILERPLATE_SHARE * num_documents)


def _different(hashes: Hashes, documents: Indices) -> tuple[Hashes, Indices]:
    """Keep each n-gram of a document once; `documents` is sorted."""
    import numpy as np

    order = np.lexsort((hashes, documents))
    hashes, documents = hashes[order], documents[order]
    new = np.ones(len(hashes), dtype=np.bool_)
    new[1:] = (hashes[1:] != hashes[:-1]) | (documents[1:] != documents[:-1])
    return hashes[new], documents[new]


def _grams(side: Columns, chosen: Indices, ngram: int) -> Iterator[tuple[Hashes, Indices]]:
    """Yield the n-grams' hashes of `chosen` documents and whose they are, chunk by chunk."""
    import numpy as np

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
        hashes = hash_grams(flat, ngram)
        count = len(hashes)
        whole = numbers[:count] == numbers[ngram - 1 :]
        yield hashes[whole], owners[:count][whole]
