"""Characters that a tokenizer replaces or drops are counted and named before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_modules import DatasetConfig
from data_modules.audit.findings import names_of
from data_modules.template.encoding import CharacterCheck
from data_modules.types import BLANKS
from tests.data_modules.test_datamodule import build

TEXT = '{"a": 1}\n\t<x>  \u00e9 e\u0301 \ufb01 \u4f60 A'
LETTERS = '_ea"1:x>A'.replace("_", "\u2581")


def sentencepiece() -> Tokenizer:
    scores = [("<unk>", 0.0), *((letter, -1.0) for letter in [*LETTERS, "fi", "\u00e9"])]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    blanks = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), blanks])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def with_bytes() -> Tokenizer:
    pieces = ["<unk>", *LETTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return tokenizer


def byte_level(missing: str = "") -> Tokenizer:
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def uncased() -> Tokenizer:
    pieces = ["<unk>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    unknown = "<unk>" if backend.token_to_id("<unk>") is not None else None
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown, eos_token="</s>")


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], set[str]]] = {
    "SentencePiece": (sentencepiece, {"{", "}", "\n", "\t", "<", BLANKS, "\ufb01", "\u4f60"}),
    "byte fallback": (with_bytes, set()),
    "byte level": (byte_level, set()),
    "without impossible bytes": (lambda: byte_level("\u00c0\u00c1\u00ff"), set()),
    "without some bytes": (lambda: byte_level("{\u010a"), {"{", "\n"}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lost_characters(name: str) -> None:
    make, lost = TOKENIZERS[name]
    check = CharacterCheck(fast(make()))
    assert check.lost(TEXT) == lost
    assert check.lost(TEXT) == lost  # of known characters too


def test_case_is_lost_by_uncased_tokenizers() -> None:
    lost = CharacterCheck(fast(uncased())).lost(TEXT)
    assert {"A", "{", "\n"} <= lost
    assert not {"a", "x", "1", '"'} & lost


def test_the_most_common_are_named_first() -> None:
    lost = {"\n": 3, "{": 5, BLANKS: 1, "\u0301": 4} | {chr(0x4E00 + each): 1 for each in range(20)}
    assert names_of(lost).startswith("{, U+0301, newline, repeated blanks, \u4e00, ")
    assert names_of(lost).endswith(" and 12 more")


def warnings_of(tokenizer: Any, folder: Path, rows: list[dict[str, str]]) -> list[str]:
    """Prepare rows for training; return the warnings of the audit."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"val_set_size": 0, "cache_dir": str(folder / "cache")}
    return build([DatasetConfig(path=str(file))], tokenizer, data=data).audit.warnings


def test_rows_and_characters_are_counted_in_the_audit(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a{\nx}", "ax", "a <x {{", "xa")]
    tokenizer = fast(sentencepiece())
    for _ in range(2):  # also when the tokens are found in the cache
        (warning,) = [each for each in warnings_of(tokenizer, tmp_path, rows) if "drops" in each]
        assert warning.startswith("rows: 2 of 4 rows have characters that this tokenizer replaces")
        assert "cannot learn them: {, newline, <, } (4 unknown tokens), first " in warning
        assert f"first {tmp_path / 'rows.jsonl'}:1; use a base whose vocabulary has them" in warning


PROMPTS = [{"prompt": f"question {each} ", "completion": f"answer {each}"} for each in range(4)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("own", "is_chat", "is_said"),
    [(CHATML, False, True), (CHATML, True, False), ("", False, False)],
)
def test_texts_on_an_instruct_tokenizer_are_named(
    own: str, is_chat: bool, is_said: bool, tmp_path: Path
) -> None:
    tokenizer = fast(byte_level())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = own or None
    chats = [{"instruction": row["prompt"], "output": row["completion"]} for row in PROMPTS]
    rows = chats if is_chat else PROMPTS
    found = warnings_of(tokenizer, tmp_path, rows)
    said = [each for each in found if "without the tokenizer's chat template" in each]
    assert len(said) == is_said
    if is_said:
        assert said[0].startswith("rows: 4 of 4 rows are texts of prompt and completion")
