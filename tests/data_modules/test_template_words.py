"""Ids that are computed word by word equal the tokenizer's, and so do the offsets."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_modules.template import encoding
from data_modules.template.encoding import TextTokenizer
from tests.data_modules.conftest import SHARED, WORDS, build_tokenizer

TEXT = (
    "I'll say: it's 1,000.50\u20ac (na\u00efve \u00bd caf\u00e9) DON'T\r\n\r\n\n  x\t\ty  \n "
    "f(x)='re' \u201cquoted\u201d \u2013 \u2026 \u00b5m \u00aa\u00ba x\u00b2 ### <|im_end|>end<|im_"
)
PLAIN = sorted({chr(c) for c in range(0x250)} | {chr(c) for c in range(0x2000, 0x2040)})
PIECES = [
    *("'s", "'S", "'ll", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "1234", "12", "abc", "the"),
    *("<|im_end|>", "<|im_", "|>", "<end>", "<end"),
    *("\u2603", "\u4e00", "e\u0301", "\u017f", "\u212a"),
    *("\x00", "\x1c", "\x85", "\u00a0", "\u2028", "\U0001f600", "\u00ad", "\u00bd", "\u0660"),
]
texts = st.lists(st.sampled_from(PIECES) | st.sampled_from(PLAIN), max_size=12).map("".join)


# As in the tokenizer.json of Llama 3 and of Qwen.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")


@pytest.mark.parametrize("normalizer", ["", "NFC"])
@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("<mark>", {"lstrip": True}),
        ("<mark>", {"rstrip": True}),
        ("<mark>", {"single_word": True}),
        ("mark", {"single_word": True}),
        ("mark", {"normalized": True}),
        ("<mark>", {"normalized": True, "lstrip": True, "rstrip": True}),
        ("<e\u0301>", {"normalized": True}),
        ("<e\u0301>", {"normalized": False}),
        ("<e\u0301>", {"special": True}),
        ("  ", {"normalized": True}),
        ("", {}),
    ],
)
def test_added_tokens_of_all_kinds_are_tokenized_as_by_the_tokenizer(
    normalizer: str, content: str, options: dict[str, bool]
) -> None:
    import tokenizers

    tokenizer = build_tokenizer(["</s>"], eos="</s>")
    if normalizer:
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.add_tokens([tokenizers.AddedToken(content, **options)])
    text_tokenizer = TextTokenizer(tokenizer)
    held = [content, "<e\u0301>", "<\u00e9>"]
    texts = [
        f"{a}{one}{b}" for one in held for a in ("", "a", "a ", " \n") for b in ("", "b", "  b")
    ]
    for text in [*texts, " ".join(texts)]:
        expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        # Checked first: `tokenize` drops the word tokenizer as soon as an id differs.
        assert text_tokenizer._words is None or text_tokenizer._words.ids(text) in (None, expected)
        (tokenized,) = text_tokenizer.tokenize([text], {})
        assert tokenized.ids.tolist() == expected


@cache
def tokenizer_of(pattern: str, normalizer: str, ignores_merges: bool = False) -> Any:
    """Build a tokenizer that splits words by `pattern`, with tokens of all kinds added.

    As in Llama 3's, words of the vocabulary may be one token, whatever the merges.
    """
    import tokenizers

    tokenizer = build_tokenizer(["<|im_end|>", "</s>"], eos="</s>")
    if ignores_merges:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocab = state["model"]["vocab"]
        for word in ("abc", "the", "\u0120123", "12", "\u00c3\u00a9t\u00c3\u00a9", "'ll"):
            vocab.setdefault(word, max(vocab.values()) + 1)
        state["model"] |= {"merges": state["model"]["merges"][:40], "ignore_merges": True}
        tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend = tokenizer.backend_tokenizer
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        level = tokenizers.pre_tokenizers.Sequence([split, level])
    backend.pre_tokenizer = level
    if normalizer:
        backend.normalizer = tokenizers.normalizers.NFC()
    added = [
        tokenizers.AddedToken(text, normalized=normalized)
        for text, normalized in (("<end>", False), ("  ", True), ("   ", True), ("<end", True))
    ]
    tokenizer.add_tokens(added)
    return tokenizer


@pytest.mark.parametrize(
    ("pattern", "normalizer", "ignores_merges"),
    [
        *(("", "", False), ("", "NFC", False), (LLAMA3, "", False), (QWEN, "NFC", False)),
        (LLAMA3, "", True),
    ],
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts)
def test_ids_equal_the_tokenizers(
    pattern: str, normalizer: str, ignores_merges: bool, text: str
) -> None:
    tokenizer = tokenizer_of(pattern, normalizer, ignores_merges)
    backend, text_tokenizer = tokenizer.backend_tokenizer, TextTokenizer(tokenizer)
    assert text_tokenizer._words is not None
    for sample in (text, f"{TEXT}abc'll the 123 {text}"):
        expected = backend.encode(sample, add_special_tokens=False).ids
        # Checked first: `tokenize` drops the word tokenizer as soon as an id differs.
        assert text_tokenizer._words.ids(sample) in (None, expected)
        (tokenized,) = text_tokenizer.tokenize([sample], {})
        assert tokenized.ids.tolist() == expected


@cache
def named_tokenizer(name: str) -> tuple[Any, TextTokenizer]:
    import transformers

    tokenizer = tokenizer_of("", "NFC")
    if name:
        folder = SHARED / ("models" if name == "stories260K" else "tokenizers") / name
        if not folder.is_dir():
            pytest.skip("needs the shared tokenizers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, TextTokenizer(tokenizer)


@pytest.mark.parametrize("name", ["", "stories260K", "gpt2"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts, data=st.data())
def test_characters_map_to_tokens_as_by_the_tokenizers_offsets(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer, text_tokenizer = named_tokenizer(name)
    (tokenized,) = text_tokenizer.tokenize([text], {})
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    if start < end:
        found = map(encoding.char_to_token, range(start, end))
        assert tokenized.first(start, end) == next((one for one in found if one is not None), None)
        before_end = [n for n, (first, _) in enumerate(encoding.offsets) if first < end]
        assert tokenized.after(end) == max(before_end, default=-1) + 1


def test_supported_characters_are_normalized_and_of_the_same_category() -> None:
    supported = [chr(c) for c in range(0x3000) if not encoding._OTHER.match(chr(c))]
    assert len(supported) > 500
    for character in supported:
        assert unicodedata.is_normalized("NFC", f"a{character}a")
        letter = bool(encoding.re.match(f"[{encoding._LETTERS}]", character))
        number = bool(encoding.re.match(f"[{encoding._NUMBERS}]", character))
        kind = unicodedata.category(character)[0]
        assert (letter, number) == (kind == "L", kind == "N")


def test_no_word_tokenizer_for_unknown_patterns() -> None:
    from tokenizers import Regex, pre_tokenizers

    backend = build_tokenizer(["</s>"], eos="</s>").backend_tokenizer
    assert encoding.WordTokenizer.of(backend) is not None
    split = pre_tokenizers.Split(Regex(r"\p{L}+|."), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for other in (pre_tokenizers.Sequence([split, level]), pre_tokenizers.Whitespace()):
        backend.pre_tokenizer = other
        assert encoding.WordTokenizer.of(backend) is None
    tokenizer = build_tokenizer(["</s>"], eos="</s>")
    tokenizer.backend_tokenizer.model.byte_fallback = True
    assert TextTokenizer(tokenizer)._words is None


def test_the_cache_of_words_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_CACHED", 3)
    tokenizer = tokenizer_of("", "")
    word_tokenizer = encoding.WordTokenizer.of(tokenizer.backend_tokenizer)
    assert word_tokenizer is not None
    ids = tokenizer.backend_tokenizer.encode(WORDS, add_special_tokens=False).ids
    assert word_tokenizer.ids(WORDS) == ids == word_tokenizer.ids(WORDS)
    assert len(word_tokenizer._words) == 3


@pytest.mark.parametrize("name", ["olmo-gpt-neox", "gpt2"])
def test_ids_of_real_tokenizers_and_texts(name: str) -> None:
    folder = SHARED / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip("needs the shared tokenizers")
    import transformers

    is_file = (folder / "tokenizer.json").is_file()
    kind: Any = transformers.PreTrainedTokenizerFast if is_file else transformers.GPT2TokenizerFast
    text_tokenizer = TextTokenizer(tokenizer := kind.from_pretrained(folder))
    assert text_tokenizer._words is not None
    by_words = 0
    for data in ("instruct/gsm8k_alpaca.json", "chat/oasst_trees.jsonl", "text/c4_demo.jsonl"):
        text = (SHARED / data).read_text("utf-8")
        parts = [text[i : i + 999] for i in range(0, min(len(text), 30_000), 999)]
        expected = tokenizer.backend_tokenizer.encode_batch(parts, add_special_tokens=False)
        tokenized = text_tokenizer.tokenize(parts, {})
        assert [s.ids.tolist() for s in tokenized] == [e.ids for e in expected]
        by_words += sum(text_tokenizer._words.ids(part) is not None for part in parts)
    assert by_words > 40


def test_the_word_tokenizer_is_dropped_if_its_ids_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    text_tokenizer = TextTokenizer(tokenizer_of(LLAMA3, ""))
    assert text_tokenizer._words is not None
    monkeypatch.setattr(encoding.WordTokenizer, "ids", lambda self, text: [0] * len(text))
    backend = text_tokenizer._backend
    tokenized = text_tokenizer.tokenize(["the quick", "brown fox"], {})
    assert [one.ids.tolist() for one in tokenized] == [
        backend.encode(text, add_special_tokens=False).ids for text in ("the quick", "brown fox")
    ]
    assert text_tokenizer._words is None
