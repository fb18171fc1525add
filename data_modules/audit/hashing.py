"""Hash runs of tokens: equal runs have equal hashes, others as good as never. Never compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]

_BASE, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


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
