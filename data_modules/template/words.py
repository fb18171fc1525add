"""Tokenize plain Western text a word at a time, and cache the words.

Decides which texts may be tokenized so: those whose tokenizer is byte-level BPE with a well-known
way to split words, and whose characters are split alike by every Unicode version. A word's tokens
never depend on its neighbours there, so the ids are those of the tokenizer itself, several times
faster: splitting and merging the same words again is what tokenizing costs. All else is left to
the tokenizer (`ids` returns None).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from typing import Any

MAX_WORDS = 100_000
MAX_WORD = 40
# Letters and numbers (Unicode's L and N) among the characters that are handled here. U+017F is
# none of them: it is an `s` to patterns that ignore case.
_LETTERS = r"A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017e\u0180-\u024f"
_NUMBERS = r"0-9\u00b2\u00b3\u00b9\u00bc-\u00be"
_OTHER = re.compile(r"[^\t\n\r\x20-\x7e\u00a1-\u017e\u0180-\u024f\u2010-\u2027\u20ac]")
_END = r"|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _END
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _END
)
_KNOWN = {_GPT2, _CL100K % "{1,3}", _CL100K % ""}
"""how GPT-2, Llama 3 and Qwen split words"""


class WordTokenizer:
    """Tokenize texts with `backend`, a byte-level BPE that splits words by `pattern`."""

    def __init__(self, backend: Any, pattern: str) -> None:
        self._split = re.compile(_translate(pattern)).findall
        self._words = _Words(backend)
        added = backend.get_added_tokens_decoder().items()
        self._ids = {token.content: id_ for id_, token in added}
        # As the tokenizer does it: first the tokens of the text as it is, then all others.
        self._passes = [
            _Cutter(token.content for _, token in added if token.normalized is normalized)
            for normalized in (False, True)
        ]

    @classmethod
    def of(cls, backend: Any) -> WordTokenizer | None:
        """Return one for the tokenizer, None where its words cannot be split here."""
        pattern = _pattern_of(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        if pattern not in _KNOWN or backend.model.dropout or backend.encode_special_tokens:
            return None
        if any(
            token.single_word
            or token.lstrip
            or token.rstrip
            or not token.content
            # It is sought as the normalizer writes it, in another form than its own.
            or (token.normalized and not unicodedata.is_normalized("NFC", token.content))
            for token in added
        ):
            return None
        return cls(backend, pattern)

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of `text`, None where it has characters that are not handled here."""
        if _OTHER.search(text):
            return None
        parts = [text]
        for cutter in self._passes:
            parts = [piece for part in parts for piece in self._cut(cutter, part)]
        words, known = self._words, self._ids
        ids: list[int] = []
        for part in parts:
            if part in known:
                ids.append(known[part])
            else:
                ids.extend(chain.from_iterable(map(words.__getitem__, self._split(part))))
        return ids

    def _cut(self, cutter: _Cutter, part: str) -> list[str]:
        return [part] if part in self._ids else cutter.cut(part)


class _Words(dict[str, tuple[int, ...]]):
    """Remember the ids of words, up to MAX_WORDS."""

    def __init__(self, backend: Any) -> None:
        import tokenizers

        super().__init__()
        self._model = backend.model
        self._bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> tuple[int, ...]:
        ((tokenized, _),) = self._bytes.pre_tokenize_str(word)
        ids = tuple(token.id for token in self._model.tokenize(tokenized))
        if len(word) <= MAX_WORD and len(self) < MAX_WORDS:
            self[word] = ids
        return ids


class _Cutter:
    """Cut a text at added tokens; only those whose first two characters it holds are sought."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._heads = sorted({token[:2] for token in self._tokens})
        self._patterns: dict[tuple[str, ...], re.Pattern[str]] = {}

    def cut(self, text: str) -> list[str]:
        """Return the pieces of `text`: added tokens and what stands between them."""
        held = tuple([head for head in self._heads if head in text])
        if not held:
            return [text] if text else []
        pattern = self._patterns.get(held)
        if pattern is None:
            tokens = [token for token in self._tokens if token[:2] in held]
            pattern = re.compile("(" + "|".join(map(re.escape, tokens)) + ")")
            self._patterns[held] = pattern
        return [piece for piece in pattern.split(text) if piece]


def _pattern_of(pre_tokenizer: Any) -> str:
    """Return the pattern that splits words, "" where it has none of these."""
    described = json.loads(pre_tokenizer.__getstate__())
    steps = described.get("pretokenizers") or [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return _GPT2
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        split = steps[0]
        if split["behavior"] == "Isolated" and not split["invert"]:
            return str(split["pattern"].get("Regex", ""))
    return ""


def _translate(pattern: str) -> str:
    """Write a known pattern with the letters and numbers as ranges."""
    for ends in (r"[^\s", r"[^\r\n"):
        pattern = pattern.replace(rf"{ends}\p{{L}}\p{{N}}]", f"{ends}{_LETTERS}{_NUMBERS}]")
    return pattern.replace(r"\p{L}", f"[{_LETTERS}]").replace(r"\p{N}", f"[{_NUMBERS}]")
