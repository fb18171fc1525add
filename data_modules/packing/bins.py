"""Decide which documents share a pack and where in the epoch it comes, from lengths alone.

Never reads a token, and knows neither steps nor ranks: those are packing.py's.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]

LIKE_LENGTH_WINDOW = 2000
"""documents of the shuffled order among which like lengths are brought together"""
BLOCK_PACKS = 256
"""so many packs are a stretch of the epoch in which every data set has its share"""
SHORT_SHARE = 1.1
"""tokens of short documents kept back to fill the packs, over the room that is expected there"""
WELL_FILLED = 0.995
"""how full packs must be on average for no tighter, less mixed way to be tried"""
WORTH_IT = 0.995
"""a tighter way is taken when it needs at most this share of the packs"""


def seeded_generator(seed: int, *keys: object) -> np.random.Generator:
    """Return a generator that depends on `seed` and `keys` only, on every machine."""
    import numpy as np

    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


@dataclass(frozen=True, slots=True)
class Packs:
    """Hold documents in packs: pack i is `documents[starts[i]:starts[i + 1]]`."""

    documents: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> Indices:
        """Return the documents of a pack; packs beyond the last one are empty."""
        if pack >= len(self):
            return self.documents[:0]
        return self.documents[self.starts[pack] : self.starts[pack + 1]]


def pack_documents(
    lengths: Indices,
    capacity: int,
    seed: int,
    epoch: int,
    method: str,
    *,
    window: int | None = None,
    datasets: Indices | None = None,
) -> Packs:
    """Put each document into one pack of at most `capacity` tokens, in a seeded order.

    `lengths` int64 [documents], none above `capacity`. `multipack` cuts the shuffled documents into
    packs and fills these with the shortest documents, so that packs hold long and short ones alike
    and each step is a fair sample; `like_length` packs the neighbours of windows sorted by length;
    `none` gives each document a pack. Whatever the method, a document may be in any step with the
    same probability, so the gradient is unbiased. With `window`, so many documents of the shuffled
    order at a time are packed among themselves. With `datasets` [documents], each stretch of about
    BLOCK_PACKS packs holds every data set's share of the tokens. Returns positions in `lengths`.
    """
    import numpy as np

    if not len(lengths):
        return Packs(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if (longest := int(lengths.max())) > capacity:
        raise ValueError(f"a document of {longest} tokens does not fit a pack of {capacity}")
    if lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has no tokens; it cannot be packed")
    rng = seeded_generator(seed, "packing", epoch)
    order = rng.permutation(len(lengths))
    pack_of, num_packs = np.empty(len(order), dtype=np.int64), 0
    for start in range(0, len(order), window or len(order)):
        here = slice(start, start + (window or len(order)))
        chosen, count = _choose(lengths[order[here]], capacity, method, rng)
        pack_of[here] = chosen + num_packs
        num_packs += count
    tokens = None
    if datasets is not None:
        columns = int(datasets.max()) + 1
        cells = pack_of * columns + datasets[order]
        tokens = np.bincount(cells, lengths[order], num_packs * columns).reshape(-1, columns)
    pack_of = _pack_order(num_packs, tokens, rng)[pack_of]
    counts = np.bincount(pack_of, minlength=num_packs)
    return Packs(order[sort_order(pack_of)], np.concatenate([[0], np.cumsum(counts)]))


def sort_order(keys: Indices) -> Indices:
    """Return the stable order of `keys`, none negative.

    numpy sorts 16-bit keys by radix, ten times as fast as wider ones.
    """
    import numpy as np

    if not len(keys) or int(keys.max()) < 1 << 16:
        return np.argsort(keys.astype(np.uint16), kind="stable")
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    return order[sort_order(keys[order] >> 16)]


def _pack_order(
    num_packs: int, tokens: npt.NDArray[Any] | None, rng: np.random.Generator
) -> Indices:
    """Return the place of each pack in the epoch, every place equally likely.

    `tokens` [packs, data sets]. The epoch is cut into blocks of about BLOCK_PACKS packs. Each block
    in turn gets one more of the shuffled packs: the block that holds most of a data set gets the
    pack that holds least of it, for the data set that blocks differ in most. Then the blocks are
    shuffled, and the packs within each.
    """
    import numpy as np

    num_blocks = num_packs // BLOCK_PACKS
    shuffled = rng.permutation(num_packs)
    if tokens is None or tokens.shape[1] < 2 or num_blocks < 2:
        return shuffled
    held = np.zeros((num_blocks, tokens.shape[1]))
    block_of = np.empty(num_packs, dtype=np.int64)
    for start in range(0, num_packs, num_blocks):
        packs = shuffled[start : start + num_blocks]
        dataset = int(held.var(axis=0).argmax())
        blocks = np.argsort(-held[:, dataset], kind="stable")[: len(packs)]
        packs = packs[np.argsort(tokens[packs, dataset], kind="stable")]
        block_of[packs] = blocks
        held[blocks] += tokens[packs]
    order = rng.permutation(num_packs)
    order = order[sort_order(rng.permutation(num_blocks)[block_of[order]])]
    place = np.empty(num_packs, dtype=np.int64)
    place[order] = np.arange(num_packs)
    return place


def _choose(
    sizes: Indices, capacity: int, method: str, rng: np.random.Generator
) -> tuple[Indices, int]:
    """Return the pack of each document, and the number of packs."""
    import numpy as np

    if method == "none":
        return np.arange(len(sizes)), len(sizes)
    if method == "multipack":
        return _multipack(sizes, capacity, rng)
    windows = np.arange(len(sizes)) // LIKE_LENGTH_WINDOW
    order = sort_order(sizes)
    order = order[sort_order(windows[order])]
    starts = next_fit(sizes[order], capacity)
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(sizes)))
    return pack_of, len(starts)


def _multipack(sizes: Indices, capacity: int, rng: np.random.Generator) -> tuple[Indices, int]:
    """Cut the longer documents into packs as they come, then best fit for the shorter ones.

    Where few short documents leave packs half empty, best fit decreasing of all documents may need
    fewer packs, at the price of packs of like lengths; it is taken where it saves enough.
    """
    import numpy as np

    is_short = sizes <= _longest_short(sizes, capacity)
    long = np.flatnonzero(~is_short)
    starts = next_fit(sizes[long], capacity)
    rooms = capacity - np.add.reduceat(sizes[long], starts) if len(long) else long
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[long] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(long)))
    short = np.flatnonzero(is_short)
    short = short[sort_order(capacity - sizes[short])]
    pack_of[short], num_packs = best_fit(sizes[short], rooms, capacity, rng)
    if int(sizes.sum()) < WELL_FILLED * num_packs * capacity:
        order = sort_order(capacity - sizes)
        tight, num_tight = best_fit(sizes[order], rooms[:0], capacity, rng)
        if num_tight <= WORTH_IT * num_packs:
            pack_of[order] = tight
            num_packs = num_tight
    return pack_of, num_packs


def _longest_short(sizes: Indices, capacity: int) -> int:
    """Return the length up to which documents are kept back to fill the ends of packs.

    A pack that is cut from a row of documents ends with a room of half the document that did not
    fit; the longer a document, the more often it is that one: sum(length^2) / (2 * sum(length)).
    """
    import numpy as np

    counts = np.bincount(sizes)
    tokens = counts * np.arange(len(counts))
    short = np.cumsum(tokens)
    long = short[-1] - short
    squares = tokens * np.arange(len(counts))
    room = (squares.sum() - np.cumsum(squares)) / np.maximum(2 * long, 1)
    expected = long * room / np.maximum(capacity - room, 1)
    return int(np.argmax(short >= SHORT_SHARE * expected))


def next_fit(sizes: Indices, capacity: int) -> Indices:
    """Return the first document of each pack; a pack takes documents until one does not fit."""
    import numpy as np

    ends = np.cumsum(sizes).tolist()
    starts: list[int] = []
    first = 0
    while first < len(ends):
        starts.append(first)
        filled = ends[first - 1] if first else 0
        first = bisect_right(ends, filled + capacity, first)
    return np.array(starts, dtype=np.int64)


def best_fit(
    sizes: Indices, rooms: Indices, capacity: int, rng: np.random.Generator
) -> tuple[Indices, int]:
    """Return the pack of each document, and the number of packs.

    `sizes` decreasing; `rooms` are the tokens that packs already there can take. Each document goes
    into the fullest pack that has room, else into a new one. Packs with the same room move
    together, and so do documents of the same length: as many as fit, into as many packs.
    `open_rooms` has bit r set when `packs[r]` is not empty, so that the tightest fit is the lowest
    bit from a length up.
    """
    import numpy as np

    packs: dict[int, list[int]] = {}
    open_rooms = 0
    shuffled = rng.permutation(len(rooms))
    for pack, room in zip(shuffled.tolist(), rooms[shuffled].tolist(), strict=True):
        packs.setdefault(room, []).append(pack)
    for room in packs:
        open_rooms |= 1 << room
    num_packs = len(rooms)
    chosen: list[int] = []
    counts = np.bincount(sizes)
    present = np.flatnonzero(counts)[::-1]
    for size, count in zip(present.tolist(), counts[present].tolist(), strict=True):
        while count:
            fitting = open_rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                each, into = _shares(count, room // size, len(packs[room]))
                same = packs[room]
                taken = same[len(same) - into :]
                del same[len(same) - into :]
                if not same:
                    open_rooms ^= 1 << room
            else:
                room = capacity
                each, into = _shares(count, room // size, count)
                taken = list(range(num_packs, num_packs + into))
                num_packs += into
            chosen += taken if each == 1 else [pack for pack in taken for _ in range(each)]
            count -= each * into
            left = room - each * size
            if left:
                packs.setdefault(left, []).extend(taken)
                open_rooms |= 1 << left
    return np.array(chosen, dtype=np.int64), num_packs


def _shares(count: int, most: int, num_packs: int) -> tuple[int, int]:
    """Return how many of `count` documents go into each of how many packs that take `most` each."""
    into = min(count // most, num_packs)
    return (most, into) if into else (count, 1)
