"""Render token ids as text, token by token, with the loss weight of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 4096
"""tokens of a row that are kept: half from its beginning, half from its end"""
INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of several that make up one character."""

    text: str
    ids: tuple[int, ...]
    weight: float
    is_special: bool

    @property
    def is_trained(self) -> bool:
        """Tell whether it counts in the loss."""
        return self.weight > 0

    @property
    def kinds(self) -> str:
        """Return its CSS classes: t trained on, p with a weight of its own, s special."""
        is_weighted = self.is_trained and self.weight != 1
        return " ".join("t" * self.is_trained + "p" * is_weighted + "s" * self.is_special)


@dataclass(frozen=True, slots=True)
class Passage:
    """The pieces of a row; `left_out` tokens are omitted between `head` and `tail`."""

    head: list[Piece]
    left_out: int = 0
    tail: list[Piece] = field(default_factory=list)

    def cut(self, limit: int) -> Passage:
        """Return its first and last pieces, at most `limit` of them."""
        pieces = [*self.head, *self.tail]
        if len(pieces) <= limit:
            return self
        first, last = limit - limit // 2, limit // 2
        # What was left out before lies between head and tail.
        gone = pieces[first : len(pieces) - last]
        left_out = self.left_out + sum(len(piece.ids) for piece in gone)
        return Passage(pieces[:first], left_out, pieces[len(pieces) - last :])


def visible(text: str) -> str:
    """Escape what is not printable in `text`, except newlines: `\\x1b`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter == "\n" or letter.isprintable()
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


class TokenRenderer:
    """Render token ids as text, token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self._special |= set(tokenizer.all_special_ids)

    def passage(self, ids: npt.NDArray[Any], weights: npt.NDArray[Any]) -> Passage:
        """Render a document; of a long one its beginning and its end."""
        left_out = len(ids) - MAX_TOKENS
        if left_out <= 0:
            return Passage(list(self._pieces(ids.tolist(), weights.tolist())))
        half = MAX_TOKENS // 2
        head = self._pieces(ids[:half].tolist(), weights[:half].tolist())
        tail = self._pieces(ids[-half:].tolist(), weights[-half:].tolist())
        return Passage(list(head), left_out, list(tail))

    def _pieces(self, ids: list[int], weights: list[float]) -> Iterator[Piece]:
        """Yield a piece a token; tokens that hold parts of one character make one piece.

        Each is decoded with the one before it: alone, some tokenizers drop its leading space.
        """
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[before:end])
            is_last = end == len(ids) or ids[end] in self._special
            if text.endswith(INCOMPLETE) and not is_last and end - start < 4:
                continue
            text = text[len(self._decode(ids[before:start])) :]
            yield Piece(
                text=visible(text),
                ids=tuple(ids[start:end]),
                weight=max(weights[start:end]),
                is_special=ids[end - 1] in self._special,
            )
            before, start = start, end

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
