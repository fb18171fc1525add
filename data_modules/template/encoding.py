"""Tokenize texts, map their characters to tokens, and find those that no token keeps.

A token that spans the border of two ranges belongs to the later one. Never renders, and never adds
a token that is not in the text.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from data_modules.template.rendering import RowRefusedError
from data_modules.types import BLANKS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers

_NO_BYTES = set("\u00c0\u00c1\u00f5\u00f6\u00f7\u00f8\u00f9\u00fa\u00fb\u00fc\u00fd\u00fe\u00ff")
"""letters for bytes that are in no UTF-8 text"""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The token ids of a text, int32 [tokens], and the map from its characters to tokens.

    `starts` and `ends` are the characters of each token, int64 [tokens], not decreasing.
    """

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def first(self, start: int, end: int) -> int | None:
        """Return the first token of the characters [start, end); None if no token holds them."""
        token = int(self.ends.searchsorted(start, side="right"))
        return token if token < len(self.ids) and self.starts[token] < end else None

    def after(self, end: int) -> int:
        """Return the index after the last token that holds a character before `end`."""
        return int(self.starts.searchsorted(end, side="left"))


class TextTokenizer:
    """Tokenize many texts at once with a fast tokenizer; no special token is added.

    Of byte-level tokenizers only the ids are computed: the number of bytes of each token tells
    which characters it holds, and computing offsets costs more than the rest of the mask.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        import numpy as np

        self._backend: Any = tokenizer.backend_tokenizer
        self._widths: npt.NDArray[np.int64] | None = None
        """bytes of each token [vocabulary], of a byte-level tokenizer"""
        self._is_nfc = False
        self._words: WordTokenizer | None = None
        self._control_ids = {
            id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        if _is_byte_level(self._backend):
            # A character of a vocabulary entry is one byte.
            vocab = self._backend.get_vocab(with_added_tokens=False)
            added = self._backend.get_added_tokens_decoder()
            self._widths = np.zeros(max([*vocab.values(), *added], default=0) + 1, np.int64)
            for text, id_ in vocab.items():
                self._widths[id_] = len(text)
            for id_, token in added.items():
                self._widths[id_] = len(token.content.encode())
            self._is_nfc = self._backend.normalizer is not None
            self._words = WordTokenizer.of(self._backend)

    def tokenize(
        self, texts: Sequence[str], plain_ranges: Mapping[int, Sequence[tuple[int, int]]]
    ) -> list[TokenizedText | RowRefusedError]:
        """Return the tokens of each text.

        `plain_ranges[i]` are the ranges of the control tokens in text i, in order, that are
        tokenized as plain text.
        """
        self._backend.no_truncation()
        self._backend.no_padding()
        tokenized: list[TokenizedText | RowRefusedError]
        if self._widths is None:
            encodings = self._encode(texts, self._backend.encode_batch)
            tokenized = [_by_offsets(encoding.ids, encoding.offsets) for encoding in encodings]
        else:
            tokenized = [
                self._by_bytes(text, ids, self._widths)
                for text, ids in zip(texts, self._ids(texts), strict=True)
            ]
        for index, ranges in plain_ranges.items():
            if ranges:
                tokenized[index] = self._tokenize_escaped(texts[index], ranges)
        return tokenized

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text: of its words if it can be split, else the tokenizer's."""
        word_ids = [self._words.ids(text) if self._words else None for text in texts]
        known = next((pair for pair in zip(texts, word_ids, strict=True) if pair[1]), None)
        if known is not None:
            # Compared for one text of a batch: they must never differ from the tokenizer's.
            text, ids = known
            if self._backend.encode(text, add_special_tokens=False).ids != ids:
                self._words = None
                return self._ids(texts)
        others = [text for text, ids in zip(texts, word_ids, strict=True) if ids is None]
        encodings = iter(self._encode(others, self._backend.encode_batch_fast))
        return [next(encodings).ids if ids is None else ids for ids in word_ids]

    def _by_bytes(
        self, text: str, ids: Sequence[int], widths: npt.NDArray[np.int64]
    ) -> TokenizedText:
        """Map characters to tokens by the bytes of each token; by offsets if NFC changes bytes."""
        import numpy as np

        text_ids = np.array(ids, np.int32)
        sizes = widths[text_ids]
        ends = sizes.cumsum()
        before: npt.NDArray[np.int64] | None = None
        if not text.isascii():  # UTF-8 bytes before each character and before the end
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            widened = 1 + (codes > 0x7F) + (codes > 0x7FF).astype(np.int64) + (codes > 0xFFFF)
            before = np.concatenate([np.zeros(1, np.int64), widened.cumsum()])
        num_bytes = len(text) if before is None else before[-1]
        is_changed = (
            before is not None and self._is_nfc and not unicodedata.is_normalized("NFC", text)
        )
        if is_changed or (ends[-1] if len(ends) else 0) != num_bytes:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return _by_offsets(encoding.ids, encoding.offsets)
        starts = ends - sizes
        if before is not None:
            starts, ends = before.searchsorted(starts, side="right") - 1, before.searchsorted(ends)
        return TokenizedText(text_ids, starts, ends)

    def _encode(self, texts: Sequence[str], batch: Callable[..., Any]) -> Sequence[Any]:
        """Encode texts as a batch, which uses threads; a single text is encoded without them."""
        if len(texts) > 1:
            return list(batch(list(texts), add_special_tokens=False))
        return [self._backend.encode(text, add_special_tokens=False) for text in texts]

    def _tokenize_escaped(
        self, text: str, ranges: Sequence[tuple[int, int]]
    ) -> TokenizedText | RowRefusedError:
        """Tokenize the text in parts, split after the first character of each control token."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        borders = [0, *(start + 1 for start, _ in ranges), len(text)]
        for start, end in pairwise(borders):
            part_ids, part_offsets = self._tokenize_part(text[start:end], is_first=start == 0)
            ids += part_ids
            offsets += [(start + first, start + last) for first, last in part_offsets]
        tokenized = _by_offsets(ids, offsets)
        for start, end in ranges:
            if self._control_ids.intersection(
                ids[tokenized.first(start, end) : tokenized.after(end)]
            ):
                return RowRefusedError(
                    f"the control token `{text[start:end]}` cannot be tokenized as plain text; "
                    "remove it, or set data.control_tokens=keep"
                )
        return tokenized

    def _tokenize_part(self, part: str, is_first: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not is_first:
            # After a newline: some tokenizers put a space before the start of a text.
            encoding = self._backend.encode("\n" + part, add_special_tokens=False)
            offsets = encoding.offsets
            first = next((i for i, (start, _) in enumerate(offsets) if start >= 1), len(offsets))
            if all(end <= 1 for _, end in offsets[:first]):
                return encoding.ids[first:], [(a - 1, b - 1) for a, b in offsets[first:]]
        encoding = self._backend.encode(part, add_special_tokens=False)
        return encoding.ids, encoding.offsets


def _by_offsets(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> TokenizedText:
    """Map characters to tokens by the tokenizer's offsets, which may be out of order.

    An end becomes the largest up to its token, a start the smallest from its token on: the first
    and the last token that hold a character stay the same, and can be found by bisection.
    """
    import numpy as np

    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    starts = np.minimum.accumulate(starts[::-1])[::-1]
    return TokenizedText(np.array(ids, np.int32), starts, np.maximum.accumulate(ends))


def stop_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    """Return text -> id of the tokens that can end an answer, longest first.

    These are all added tokens, as not every tokenizer marks its end of turn as special; but not
    runs of blanks, which some tokenizers add.
    """
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    ids.update(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    texts = sorted((text for text in ids if text.strip()), key=len, reverse=True)
    return {text: ids[text] for text in texts}


def control_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that the tokenizer parses as control tokens, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return sorted(filter(str.strip, texts), key=len, reverse=True)


def _is_byte_level(backend: Any) -> bool:
    """Return whether the tokens of a text are always its bytes, in order."""
    settings = _settings_of(backend.pre_tokenizer)
    steps: list[dict[str, Any]] = settings.get("pretokenizers") or [settings]
    model = backend.model
    byte_levels = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        type(model).__name__ == "BPE"
        and _settings_of(backend.normalizer).get("type", "NFC") == "NFC"
        and len(byte_levels) == 1
        and not byte_levels[0]["add_prefix_space"]
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and not model.byte_fallback
        and not any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )
    )


def _settings_of(part: Any) -> dict[str, Any]:
    """Return the settings of a normalizer or pre-tokenizer, {} for None."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


_MAX_CACHED = 100_000
_MAX_WORD = 40
# Letters and numbers (Unicode's L and N) among the supported characters. U+017F is not supported:
# it matches `s` in patterns that ignore case.
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
"""patterns by which GPT-2, Llama 3 and Qwen split words"""


class WordTokenizer:
    """Tokenize Western text one word at a time, and cache the ids of words.

    `backend` is a byte-level BPE tokenizer that splits words by a well-known `pattern`; the
    supported characters are split the same way by every Unicode version. The tokens of a word never
    depend on other words, so the ids are those of the tokenizer itself, without splitting and
    merging the same words again (20,000 chats took 12.9 s of CPU time with the cache, 19.9 s
    without). Texts with other characters are left to the tokenizer (`ids` returns None).
    """

    def __init__(self, backend: Any, pattern: str) -> None:
        # `re` does not know \p{L} and \p{N}.
        for negated in (r"[^\s", r"[^\r\n"):
            known = f"{negated}{_LETTERS}{_NUMBERS}]"
            pattern = pattern.replace(rf"{negated}\p{{L}}\p{{N}}]", known)
        pattern = pattern.replace(r"\p{L}", f"[{_LETTERS}]").replace(r"\p{N}", f"[{_NUMBERS}]")
        self._split = re.compile(pattern).findall
        self._words = _Words(backend)
        added = backend.get_added_tokens_decoder().items()
        self._ids = {token.content: id_ for id_, token in added}
        # In the tokenizer's order: first the tokens sought in the original text, then those sought
        # in the normalized text.
        self._splitters = [
            _AddedTokenSplitter(
                token.content for _, token in added if token.normalized is normalized
            )
            for normalized in (False, True)
        ]

    @classmethod
    def of(cls, backend: Any) -> WordTokenizer | None:
        """Return a WordTokenizer for `backend`; None if it may split words in another way."""
        pattern = _word_pattern(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        if pattern not in _KNOWN or backend.model.dropout or backend.encode_special_tokens:
            return None
        if any(
            token.single_word
            or token.lstrip
            or token.rstrip
            or not token.content
            # The tokenizer seeks its normalized form, which differs from its text.
            or (token.normalized and not unicodedata.is_normalized("NFC", token.content))
            for token in added
        ):
            return None
        return cls(backend, pattern)

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of `text`; None if it has unsupported characters."""
        if _OTHER.search(text):
            return None
        parts = [text]
        for splitter in self._splitters:
            parts = [
                piece
                for part in parts
                for piece in ([part] if part in self._ids else splitter.split(part))
            ]
        words, known = self._words, self._ids
        ids: list[int] = []
        for part in parts:
            if part in known:
                ids.append(known[part])
            else:
                ids.extend(chain.from_iterable(map(words.__getitem__, self._split(part))))
        return ids


class _Words(dict[str, tuple[int, ...]]):
    """Cache the ids of up to _MAX_CACHED words."""

    def __init__(self, backend: Any) -> None:
        import tokenizers

        super().__init__()
        self._model = backend.model
        self._bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> tuple[int, ...]:
        ((tokenized, _),) = self._bytes.pre_tokenize_str(word)
        ids = tuple(token.id for token in self._model.tokenize(tokenized))
        if len(word) <= _MAX_WORD and len(self) < _MAX_CACHED:
            self[word] = ids
        return ids


class _AddedTokenSplitter:
    """Split texts at added tokens; only tokens whose first two characters occur are sought."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._heads = sorted({token[:2] for token in self._tokens})
        self._patterns: dict[tuple[str, ...], re.Pattern[str]] = {}

    def split(self, text: str) -> list[str]:
        """Return the pieces of `text`: added tokens, and the texts between them."""
        heads = tuple([head for head in self._heads if head in text])
        if not heads:
            return [text] if text else []
        pattern = self._patterns.get(heads)
        if pattern is None:
            tokens = [token for token in self._tokens if token[:2] in heads]
            pattern = re.compile("(" + "|".join(map(re.escape, tokens)) + ")")
            self._patterns[heads] = pattern
        return [piece for piece in pattern.split(text) if piece]


def _word_pattern(pre_tokenizer: Any) -> str:
    """Return the pattern that splits words; "" if words are not split by one pattern alone."""
    settings = _settings_of(pre_tokenizer)
    steps = settings.get("pretokenizers") or [settings]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return _GPT2
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        split = steps[0]
        if split["behavior"] == "Isolated" and not split["invert"]:
            return str(split["pattern"].get("Regex", ""))
    return ""


class CharacterCheck:
    """Find the characters of texts that are not in the decoded tokens of the text.

    A vocabulary may lack one, which becomes the unknown token or nothing, and a normalizer may
    replace it: the model can then neither read nor write it. Each character is tried once, between
    two letters. Characters that only have another Unicode form after decoding are kept.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        from tokenizers import pre_tokenizers

        self._backend: Any = tokenizer.backend_tokenizer
        unknown, others = tokenizer.unk_token_id, (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self.unknown_id = None if unknown in others else unknown
        """token of unknown characters; None if it has another use too"""
        self._kept: set[str] = set()
        normalizer = self._backend.normalizer
        letters = set(pre_tokenizers.ByteLevel.alphabet()) - _NO_BYTES
        self.keeps_all = (
            (normalizer is None or type(normalizer).__name__ == "NFC")
            and all(self._backend.token_to_id(each) is not None for each in letters)
            and all(map(self._keeps, string.printable))
        )
        """whether no text can lose a character, so that none need be looked at"""

    def lost(self, text: str) -> set[str]:
        """Return the characters of `text` that its tokens do not hold; BLANKS for repeated ones."""
        seen = set(text)
        if BLANKS in text:
            seen.add(BLANKS)
        seen -= self._kept
        lost = {each for each in seen if not self._keeps(each)}
        self._kept |= seen - lost
        # An accent may be kept as a part of the letter before it.
        accents = {each for each in lost if len(each) == 1 and unicodedata.combining(each)}
        places = {accent: text.index(accent) for accent in accents}
        return lost - {a for a, at in places.items() if at and self._keeps(text[at - 1 : at + 1])}

    def _keeps(self, character: str) -> bool:
        encoding = self._backend.encode(f"x{character}x", add_special_tokens=False)
        # The unknown token is decoded as its name, which has characters of its own.
        known = [token_id for token_id in encoding.ids if token_id != self.unknown_id]
        decoded = self._backend.decode(known, skip_special_tokens=False)
        return any(
            unicodedata.normalize(form, character) in unicodedata.normalize(form, decoded)
            for form in ("NFC", "NFD")
        )
