"""Turn texts into token ids, and characters into tokens.

Decides which token holds a character: one that lies over a border belongs to what comes after it.
Never renders, and never adds a token that is not in the text.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from data_modules.template.rendering import RowRefusedError
from data_modules.template.words import WordTokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers


LONG_TEXT = 4096
"""characters from which on it is found out once for all where each of them stands"""


class TokenizedText(Protocol):
    """Hold the token ids of a text, int32 [tokens], and say which of them hold its characters."""

    ids: npt.NDArray[np.int32]

    def first(self, start: int, end: int) -> int | None:
        """Return the first token that holds a character of [start, end); blanks may hold none."""

    def after(self, end: int) -> int:
        """Return the index after the last token that holds a character before `end`."""


class TextTokenizer:
    """Tokenize many texts at once with a fast tokenizer; no special token is added.

    Byte-level tokenizers are asked for ids only: the bytes of each token say which characters it
    holds, and asking for the offsets costs more than the rest of the mask.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        # TokenizersBackend's Rust tokenizer: its encodings answer char_to_token without building
        # a Python list of offsets, which costs more than the tokenizing.
        self._backend: Any = tokenizer.backend_tokenizer
        self._widths: npt.NDArray[np.int64] | None = None
        self._is_nfc = False
        self._words: WordTokenizer | None = None
        self._control_ids = {
            id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        if _is_byte_level(self._backend):
            self._widths = _byte_widths(self._backend)
            self._is_nfc = self._backend.normalizer is not None
            self._words = WordTokenizer.of(self._backend)

    def tokenize(
        self, texts: Sequence[str], plain: Mapping[int, Sequence[tuple[int, int]]]
    ) -> list[TokenizedText | RowRefusedError]:
        """Return the tokens of each text.

        `plain[i]` are the stretches of text i that hold a control token, in their order: they are
        tokenized as plain text.
        """
        self._backend.no_truncation()
        self._backend.no_padding()
        tokenized: list[TokenizedText | RowRefusedError]
        if self._widths is None:
            encodings = self._encode(texts, self._backend.encode_batch)
            tokenized = [
                (_sorted_offsets(encoding) if len(text) >= LONG_TEXT else None)
                or _Offsets(encoding)
                for text, encoding in zip(texts, encodings, strict=True)
            ]
        else:
            tokenized = self._tokenize_bytes(texts, self._widths)
        for index, stretches in plain.items():
            tokenized[index] = self._tokenize_escaped(texts[index], stretches)
        return tokenized

    def _tokenize_bytes(
        self, texts: Sequence[str], widths: npt.NDArray[np.int64]
    ) -> list[TokenizedText | RowRefusedError]:
        import numpy as np

        ids = [self._words.ids(text) if self._words else None for text in texts]
        if not self._agrees(texts, ids):
            self._words = None
            return self._tokenize_bytes(texts, widths)
        left = [text for text, known in zip(texts, ids, strict=True) if known is None]
        encodings = iter(self._encode(left, self._backend.encode_batch_fast))
        tokenized: list[TokenizedText | RowRefusedError] = []
        for text, known in zip(texts, ids, strict=True):
            own = np.array(next(encodings).ids if known is None else known, np.int32)
            ends = widths[own].cumsum()
            is_ascii = text.isascii()
            num_bytes = len(text) if is_ascii else len(text.encode())
            changed = self._is_nfc and not is_ascii and not unicodedata.is_normalized("NFC", text)
            if changed or (ends[-1] if len(ends) else 0) != num_bytes:
                tokenized.append(_Offsets(self._backend.encode(text, add_special_tokens=False)))
            else:
                tokenized.append(_Bytes(own, ends, "" if is_ascii else text))
        return tokenized

    def _encode(self, texts: Sequence[str], batch: Callable[..., Any]) -> Sequence[Any]:
        """Encode texts as a batch, which takes threads; none are taken for one text."""
        if len(texts) > 1:
            return list(batch(list(texts), add_special_tokens=False))
        return [self._backend.encode(text, add_special_tokens=False) for text in texts]

    def _agrees(self, texts: Sequence[str], ids: Sequence[list[int] | None]) -> bool:
        """Compare one text of each batch with the tokenizer: the ids here must never differ."""
        known = next((pair for pair in zip(texts, ids, strict=True) if pair[1] is not None), None)
        if known is None:
            return True
        own: list[int] = self._backend.encode(known[0], add_special_tokens=False).ids
        return own == known[1]

    def _tokenize_escaped(
        self, text: str, plain: Sequence[tuple[int, int]]
    ) -> TokenizedText | RowRefusedError:
        """Take the text apart behind the first character of each control token."""
        import numpy as np

        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        borders = [0, *(start + 1 for start, _ in plain), len(text)]
        for start, end in itertools.pairwise(borders):
            part_ids, part_offsets = self._tokenize_part(text[start:end], is_first=start == 0)
            ids += part_ids
            offsets += [(start + first, start + last) for first, last in part_offsets]
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        tokenized = _Arrays(np.array(ids, np.int32), starts, ends)
        for start, end in plain:
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
            # After a newline: some tokenizers write a blank before whatever comes first.
            encoding = self._backend.encode("\n" + part, add_special_tokens=False)
            offsets = encoding.offsets
            own = next((i for i, (start, _) in enumerate(offsets) if start >= 1), len(offsets))
            if all(end <= 1 for _, end in offsets[:own]):
                return encoding.ids[own:], [(a - 1, b - 1) for a, b in offsets[own:]]
        encoding = self._backend.encode(part, add_special_tokens=False)
        return encoding.ids, encoding.offsets


class _Offsets:
    """Ask the tokenizer's own encoding where a character is."""

    def __init__(self, encoding: Any) -> None:
        import numpy as np

        self._encoding = encoding
        self.ids: npt.NDArray[np.int32] = np.array(encoding.ids, np.int32)

    def first(self, start: int, end: int) -> int | None:
        for position in range(start, end):
            token: int | None = self._encoding.char_to_token(position)
            if token is not None:
                return token
        return None

    def after(self, end: int) -> int:
        for position in range(end - 1, -1, -1):
            token: int | None = self._encoding.char_to_token(position)
            if token is not None:
                last = token
                # One character can be several byte tokens.
                while last + 1 < len(self.ids) and self._starts_before(last + 1, end):
                    last += 1
                return last + 1
        return len(self.ids)

    def _starts_before(self, token: int, end: int) -> bool:
        chars: tuple[int, int] | None = self._encoding.token_to_chars(token)
        return chars is not None and chars[0] < end


class _Bytes:
    """Count bytes: `ends` int64 [tokens] is where each token ends; `text` "" when it is ASCII."""

    def __init__(self, ids: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], text: str) -> None:
        self.ids, self._ends, self._text = ids, ends, text
        self._bytes_before: npt.NDArray[np.int64] | None = None

    def first(self, start: int, end: int) -> int | None:
        token = int(self._ends.searchsorted(self._byte(start), side="right"))
        return token if start < end and token < len(self.ids) else None

    def after(self, end: int) -> int:
        return int(self._ends.searchsorted(self._byte(end), side="left")) + 1 if end else 0

    def _byte(self, position: int) -> int:
        if not self._text:
            return position
        if len(self._text) < LONG_TEXT:
            return len(self._text[:position].encode())
        if self._bytes_before is None:
            self._bytes_before = _bytes_before(self._text)
        return int(self._bytes_before[position])


class _Arrays:
    """Look characters up in offsets: `starts` and `ends` int64 [tokens], neither falling."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> None:
        self.ids, self._starts, self._ends = ids, starts, ends

    def first(self, start: int, end: int) -> int | None:
        token = int(self._ends.searchsorted(start, side="right"))
        return token if token < len(self.ids) and self._starts[token] < end else None

    def after(self, end: int) -> int:
        return int(self._starts.searchsorted(end, side="left"))


def _sorted_offsets(encoding: Any) -> _Arrays | None:
    """Return the offsets of a long text as arrays; None where they fall.

    Asking an encoding for one character goes through all its tokens.
    """
    import numpy as np

    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    if (np.diff(starts) < 0).any() or (np.diff(ends) < 0).any():
        return None
    return _Arrays(np.array(encoding.ids, np.int32), starts, ends)


def _bytes_before(text: str) -> npt.NDArray[np.int64]:
    """Return how many bytes of UTF-8 stand before each character, and before the end."""
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes > 0x7F) + (codes > 0x7FF).astype(np.int64) + (codes > 0xFFFF)
    return np.concatenate([np.zeros(1, np.int64), widths.cumsum()])


def stop_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    """Return what can end an answer, by text, longest first: special and other added tokens.

    Not every tokenizer marks its turn's end as special; some add runs of blanks, which end nothing.
    """
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    ids.update(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    texts = sorted((text for text in ids if text.strip()), key=len, reverse=True)
    return {text: ids[text] for text in texts}


def control_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that the tokenizer reads as control tokens, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return sorted(filter(str.strip, texts), key=len, reverse=True)


def _is_byte_level(backend: Any) -> bool:
    """Tell whether all tokens of a tokenizer are the bytes of the text, one after the other."""
    described = _described(backend.pre_tokenizer)
    steps: list[dict[str, Any]] = described.get("pretokenizers") or [described]
    model = backend.model
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        type(model).__name__ == "BPE"
        and _described(backend.normalizer).get("type", "NFC") == "NFC"
        and len(levels) == 1
        and not levels[0]["add_prefix_space"]
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and not model.byte_fallback
        and not any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )
    )


def _described(part: Any) -> dict[str, Any]:
    """Return the settings of a normalizer or pre-tokenizer, {} for None."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _byte_widths(backend: Any) -> npt.NDArray[np.int64]:
    """Return the bytes of each token, int64 [vocabulary]: a character of a token is a byte."""
    import numpy as np

    vocab = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    widths = np.zeros(max([*vocab.values(), *added], default=0) + 1, np.int64)
    for text, id_ in vocab.items():
        widths[id_] = len(text)
    for id_, token in added.items():
        widths[id_] = len(token.content.encode())
    return widths
