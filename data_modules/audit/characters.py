"""Find the characters of a text that a tokenizer cannot keep.

A vocabulary may lack a character, which becomes the unknown token or nothing, and a normalizer may
replace it: the model can then neither read nor write it.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLANKS = "  "
"""stands for several blanks in a row, which some tokenizers make one"""
_MAX_NAMED = 12
"""number of characters that a warning names"""
_NO_BYTES = set("\u00c0\u00c1\u00f5\u00f6\u00f7\u00f8\u00f9\u00fa\u00fb\u00fc\u00fd\u00fe\u00ff")
"""letters for bytes that are in no UTF-8 text"""
_NAMES = {"\n": "newline", "\t": "tab", "\r": "carriage return", " ": "blank"} | {
    BLANKS: "repeated blanks"
}


class CharacterCheck:
    """Find the characters of texts that are not in the decoded tokens of the text.

    Each character is tried once, between two letters. Characters that only have another Unicode
    form after decoding are kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        unknown, others = tokenizer.unk_token_id, (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self.unknown_id = None if unknown in others else unknown
        """token of unknown characters; None if it has another use too"""
        self._kept: set[str] = set()
        self.keeps_all = self._has_all_bytes() and all(map(self._keeps, string.printable))
        """whether no text can lose a character, so that none need be looked at"""

    def lost(self, text: str) -> set[str]:
        """Return the characters of `text` that its tokens do not hold; BLANKS for repeated ones."""
        seen = set(text)
        if BLANKS in text:
            seen.add(BLANKS)
        seen -= self._kept
        lost = {each for each in seen if not self._keeps(each)}
        self._kept |= seen - lost
        return {each for each in lost if not self._is_composed(each, text)}

    def _is_composed(self, character: str, text: str) -> bool:
        """Return whether an accent is kept as a part of the letter before it."""
        place = text.index(character)
        is_accent = len(character) == 1 and unicodedata.combining(character) != 0
        return is_accent and place > 0 and self._keeps(text[place - 1 : place + 1])

    def _has_all_bytes(self) -> bool:
        from tokenizers import pre_tokenizers

        normalizer = self._backend.normalizer
        alphabet = set(pre_tokenizers.ByteLevel.alphabet()) - _NO_BYTES
        return (normalizer is None or type(normalizer).__name__ == "NFC") and all(
            self._backend.token_to_id(each) is not None for each in alphabet
        )

    def _keeps(self, character: str) -> bool:
        encoding = self._backend.encode(f"x{character}x", add_special_tokens=False)
        # The unknown token is decoded as its name, which has characters of its own.
        known = [token_id for token_id in encoding.ids if token_id != self.unknown_id]
        decoded = self._backend.decode(known, skip_special_tokens=False)
        return any(
            unicodedata.normalize(form, character) in unicodedata.normalize(form, decoded)
            for form in ("NFC", "NFD")
        )


def names_of(lost: Mapping[str, int]) -> str:
    """Name the characters that most rows have, for messages; `lost` is character -> rows."""
    ordered = sorted(lost, key=lambda each: (-lost[each], each))
    names = [_name_of(each) for each in ordered[:_MAX_NAMED]]
    return ", ".join(names) + (f" and {more:,} more" if (more := len(lost) - len(names)) else "")


def _name_of(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    if character.isprintable() and not unicodedata.combining(character):
        return character
    return f"U+{ord(character):04X}"
