"""Fit encoded rows into the sequence length, and lay them side by side as documents.

Decides what becomes of a row that is too long. Never reads or renders.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from data_modules.counts import Counts
from data_modules.store import Documents
from data_modules.types import Encoded, Origin

if TYPE_CHECKING:
    import numpy as np


class Tokenising(Protocol):
    """What the documents need to know of the template."""

    bos_token_id: int | None

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end answers."""


class DocumentBuilder:
    """Collect the documents of one chunk of a file, and count rows that leave nothing to learn."""

    def __init__(self, file: str, template: Tokenising, sequence_len: int, on_long: str) -> None:
        self._file, self._sequence_len, self._on_long = file, sequence_len, on_long
        self._template = template
        self._pieces: list[Encoded] = []
        self._rows: list[int] = []
        self._lines: list[int] = []
        self.num_rows = 0

    def add(self, encoded: Sequence[Encoded], number: int, origin: Origin, counts: Counts) -> None:
        """Add what row `number` of the chunk became: one result an item."""
        longest = max((_num_tokens(one) for one in encoded), default=0)
        counts.add_length(longest, str(origin))
        how = self._sequence_len, self._on_long, self._template.bos_token_id
        fitting = [piece for one in encoded for piece in fit(one, *how)]
        useful = [piece for piece in fitting if is_learned(piece)]
        if longest > self._sequence_len:
            if not fitting or self._on_long == "error":
                counts.dropped += 1
            elif self._on_long == "drop":
                counts.add_note("branch_dropped", str(origin))
            elif self._on_long == "split":
                counts.split += 1
            else:
                counts.truncated += 1
            if self._on_long != "split":
                kept = sum(map(_num_tokens, fitting))
                counts.lost_tokens += sum(map(_num_tokens, encoded)) - kept
        if not useful:
            if fitting or longest <= self._sequence_len:
                counts.add_empty(str(origin))
            return
        for kind, seen in {note.kind: note.seen for one in encoded for note in one.notes}.items():
            counts.add_note(kind, f"{origin} {seen}".rstrip())
        self._pieces += useful
        self._rows += [number] * len(useful)
        self._lines += [origin.line] * len(useful)
        self.num_rows += 1

    def build(self) -> Documents | None:
        """Return the documents; None where there is none."""
        import numpy as np

        pieces = self._pieces
        if not pieces:
            return None
        targets = [one.target_ids for one in pieces if one.target_ids is not None]
        stops = self._template.stop_token_ids
        return Documents(
            file=self._file,
            input_ids=np.concatenate([one.input_ids for one in pieces]),
            lengths=np.array([len(one.input_ids) for one in pieces], dtype=np.int64),
            weights=np.concatenate([one.weights for one in pieces]),
            target_ids=np.concatenate(targets) if targets else None,
            target_lengths=np.array([len(one) for one in targets]) if targets else None,
            rows=np.array(self._rows, dtype=np.int64),
            lines=np.array(self._lines, dtype=np.int64),
            trained=np.array([np.count_nonzero(_labels(one)) for one in pieces], dtype=np.int64),
            label_weights=np.array([_labels(one).sum(dtype=np.float64) for one in pieces]),
            digests=np.array([_digest(one) for one in pieces], dtype=np.uint64),
            ends_in_stop=np.array([_last_learned(one) in stops for one in pieces]),
            double_bos=np.array([self._has_two_bos(one) for one in pieces]),
        )

    def _has_two_bos(self, one: Encoded) -> bool:
        bos = self._template.bos_token_id
        return bos is not None and one.input_ids[:2].tolist() == [bos, bos]


def fit(one: Encoded, sequence_len: int, on_long: str, bos_token_id: int | None) -> list[Encoded]:
    """Return the documents of at most `sequence_len` tokens that an encoded item becomes.

    What is cut from its left side keeps its BOS; encoder-decoder items are not split.
    """

    if _num_tokens(one) <= sequence_len:
        return [one]
    if on_long in ("drop", "error"):
        return []
    keeps_end = on_long == "truncate_left"
    cut = slice(-sequence_len, None) if keeps_end else slice(sequence_len)
    if one.target_ids is not None:
        return [Encoded(one.input_ids[cut], one.weights[cut], one.target_ids[cut])]
    bos = int(bos_token_id is not None and int(one.input_ids[0]) == bos_token_id)
    if on_long == "split":
        return _split(one, sequence_len, bos)
    ids, weights = one.input_ids[cut].copy(), one.weights[cut].copy()
    if keeps_end and bos:
        ids[0], weights[0] = one.input_ids[0], 0.0
    return [Encoded(ids, weights)]


def _split(one: Encoded, sequence_len: int, bos: int) -> list[Encoded]:
    """Cut a document into pieces of like length, each with the `bos` tokens that it begins with."""
    import numpy as np

    num_tokens = len(one.input_ids) - bos
    num_pieces = -(-num_tokens // (sequence_len - bos))
    cuts = [bos + num_tokens * piece // num_pieces for piece in range(num_pieces + 1)]
    return [
        Encoded(
            np.concatenate([one.input_ids[:bos], one.input_ids[start:end]]),
            np.concatenate([np.zeros(bos, np.float32), one.weights[start:end]]),
        )
        for start, end in itertools.pairwise(cuts)
    ]


def is_learned(one: Encoded) -> bool:
    """Tell whether any label of a document has a weight."""
    return bool(_labels(one).any())


def _num_tokens(one: Encoded) -> int:
    targets = 0 if one.target_ids is None else len(one.target_ids)
    return max(len(one.input_ids), targets)


def _labels(one: Encoded) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the weights of what is predicted: a causal model never predicts the first token."""
    return one.weights[1:] if one.target_ids is None else one.weights


def _last_learned(one: Encoded) -> int:
    ids = one.input_ids if one.target_ids is None else one.target_ids
    return int(ids[one.weights.nonzero()[0][-1]])


def _digest(one: Encoded) -> int:
    content = hashlib.blake2b(one.input_ids.tobytes(), digest_size=8)
    if one.target_ids is not None:
        content.update(one.target_ids.tobytes())
    return int.from_bytes(content.digest(), "little")
