"""A tokenizer encodes as its tokenizer.json says, whatever class and model type are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, TokenizersBackend
from transformers.models.auto import tokenization_auto as auto

from app.model.base import ModelConfig
from app.model.tokenizer import build_tokenizer
from app.model.tokenizer_file import follow_file, save_tokenizer
from common.errors import UserError

TEXT = (
    "Add 123456789 and 12.5%\n\n\tthe  caf\u00e9 cafe\u0301 \ufb01ne \uff11\uff12 \u2460 it's, "
    "he!!!??? </s> <x>\u4f60\u597d 12 \u0441\u043b\u043e\u0432\u043e \U0001f600<|end|> "
    "the\r\n   123 "
)
PIECES = ["12", "23", "123", "he", "the", "an", "and", "caf", "fi", "\u4f60\u597d"]
SPECIAL = ["<|end|>", "<unk>"]


def _merges(start: str, seen: set[str]) -> list[tuple[str, str]]:
    merges = []
    for piece in [*PIECES, start + "the", start + "an"]:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in seen and set(piece) <= seen | {start}:
                merges.append((piece[: end - 1], piece[end - 1]))
                seen.add(piece[:end])
    return merges


def _bpe(letters: list[str], start: str, **settings: Any) -> Tokenizer:
    vocabulary = {each: i for i, each in enumerate(letters)}
    merges = _merges(start, set(vocabulary))
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    return Tokenizer(models.BPE(vocabulary, merges, **settings))


def _split(tokenizer: Tokenizer, words: Any, decoder: Any) -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoder
    return tokenizer


def byte_level() -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = _bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120")
    return _split(tokenizer, level, decoders.ByteLevel())


def _letters() -> list[str]:
    letters = {letter for letter in TEXT if not letter.isspace()}
    return [*SPECIAL[1:], *sorted(letters - set("\u4f60{\u2460")), "\u2581"]


def metaspace() -> Tokenizer:
    tokenizer = _bpe(_letters(), "\u2581", unk_token="<unk>", fuse_unk=True)
    tokenizer.normalizer = normalizers.NFKC()
    return _split(tokenizer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def unigram() -> Tokenizer:
    pieces = [*_letters(), *PIECES, "\u2581the", "\u2581and"]
    scores = [(each, -len(PIECES[0]) - i / 10) for i, each in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("!", "?")])
    return _split(tokenizer, pre_tokenizers.Metaspace(), decoders.Metaspace())


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each for each in (byte_level, metaspace, unigram)
}


def fast_classes() -> list[str]:
    """The tokenizer classes of transformers that a tokenizer.json can be loaded by."""
    names = {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    names |= {"PreTrainedTokenizerFast", *filter(None, auto.TOKENIZER_MAPPING_NAMES.values())}
    classes = {name: auto.tokenizer_class_from_name(name) for name in names}
    return sorted(
        name
        for name, each in classes.items()
        if isinstance(each, type) and issubclass(each, TokenizersBackend)
    )


def model_types() -> list[str]:
    """A model type of each kind that AutoTokenizer tells apart."""
    kinds = {
        (name, model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS): model_type
        for model_type, name in auto.TOKENIZER_MAPPING_NAMES.items()
    }
    return sorted(kinds.values())


def make_folder(folder: Path, kind: str, name: str, model_type: str, **settings: Any) -> Tokenizer:
    own = KINDS[kind]()
    own.add_special_tokens(SPECIAL)
    own.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    folder.mkdir(exist_ok=True)
    own.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "eos_token": "<|end|>", "unk_token": "<unk>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    described = {"model_type": model_type} if model_type else {}
    (folder / "config.json").write_text(json.dumps(described))
    return own


def ids(tokenizer: Any, text: str = TEXT) -> list[int]:
    encoded: Any = tokenizer.encode(text, add_special_tokens=False)
    return encoded.ids if isinstance(tokenizer, Tokenizer) else encoded


def build(folder: Path) -> Any:
    return build_tokenizer(ModelConfig(path=str(folder)))


def check(folder: Path, own: Tokenizer, what: str) -> bool:
    """Hold that a folder's tokenizer encodes as the file, or its class cannot read the file."""
    try:
        tokenizer = build(folder)
    except UserError as error:
        assert "cannot be read" in str(error), what
        with pytest.raises((Exception, SystemExit)):
            AutoTokenizer.from_pretrained(folder)
        return False
    assert ids(tokenizer) == ids(own), what
    assert tokenizer(TEXT)["input_ids"] == own.encode(TEXT).ids, what
    return True


SWEPT = (pytest.mark.slow, pytest.mark.versions)
MORE = [pytest.param(kind, marks=SWEPT) for kind in list(KINDS)[1:]]


@pytest.mark.parametrize("kind", ["byte_level", *MORE])
def test_all_classes_encode_as_the_file(kind: str, tmp_path: Path) -> None:
    names = fast_classes()
    read = [check(tmp_path, make_folder(tmp_path, kind, name, ""), name) for name in names]
    assert len(names) >= 80
    assert sum(read) >= 58


@pytest.mark.versions
@pytest.mark.slow
def test_all_model_types_with_some_of_the_classes_encode_as_the_file(tmp_path: Path) -> None:
    """Each model type with every 20th class, from another one on: all 8,100 pairs take minutes."""
    names = fast_classes()
    for number, model_type in enumerate(model_types()):
        for name in names[number % 20 :: 20]:
            check(tmp_path, make_folder(tmp_path, "byte_level", name, model_type), name)


REBUILT = [
    *[("GPT2Tokenizer", each) for each in ("llama", "qwen2")],
    ("GPTNeoXTokenizer", "olmo"),
    ("LlamaTokenizerFast", "qwen2"),
    ("GemmaTokenizer", "gemma"),
]


@pytest.mark.parametrize(("name", "model_type"), REBUILT)
def test_what_is_saved_encodes_as_the_file(
    name: str, model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = make_folder(tmp_path / "base", "byte_level", name, model_type)
    saved = {each: tmp_path / each for each in ("adapter", "model")}
    for folder in saved.values():
        folder.mkdir()
    shutil.copy(tmp_path / "base" / "config.json", saved["model"])
    for folder in saved.values():
        save_tokenizer(build(tmp_path / "base"), folder)
        assert ids(Tokenizer.from_file(str(folder / "tokenizer.json"))) == ids(own)
        assert ids(build(folder)) == ids(own)
    assert ids(AutoTokenizer.from_pretrained(saved["adapter"])) == ids(own)
    settings = json.loads((saved["adapter"] / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] != "TokenizersBackend"  # unknown to transformers 4
    # transformers ignores the class that is saved beside this model type.
    is_forced = model_type == "qwen2"
    assert (ids(AutoTokenizer.from_pretrained(saved["model"])) == ids(own)) == (not is_forced)
    assert ("PreTrainedTokenizerFast.from_pretrained" in caplog.text) == is_forced


def test_versions_4_and_5_read_what_is_saved(tmp_path: Path) -> None:
    own = make_folder(
        tmp_path / "base", "byte_level", "TokenizersBackend", "", extra_special_tokens=["<x>"]
    )
    (saved := tmp_path / "saved").mkdir()
    save_tokenizer(build(tmp_path / "base"), saved)
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<x>"]  # as a list, 4 reads them by this name
    assert "extra_special_tokens" not in settings
    for opened in (build(saved), AutoTokenizer.from_pretrained(saved)):
        assert ids(opened) == ids(own) and opened.extra_special_tokens == ["<x>"]


def test_settings_beyond_the_limits_stay_as_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "base", "byte_level", "TokenizersBackend", "", padding_side="left")
    tokenizer = build(tmp_path / "base")
    monkeypatch.setenv("LOFT_LIMITS", "json_key=1")
    (saved := tmp_path / "saved").mkdir()
    save_tokenizer(tokenizer, saved)
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["padding_side"]) == ("<|end|>", "left")


def test_settings_stay_and_the_file_decides_about_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    index = make_folder(tmp_path, "byte_level", "GPT2Tokenizer", "").token_to_id("<x>")
    decoder = {index: {"content": "<x>", "lstrip": False, "rstrip": True, "normalized": True}}
    own = make_folder(
        tmp_path, "byte_level", "GPT2Tokenizer", "llama", add_prefix_space=True,
        split_special_tokens=True, added_tokens_decoder=decoder, pad_token="<pad>",
        image_token="<image>", extra_special_tokens=["<more>"], chat_template="a template",
        model_max_length=77, padding_side="left",
    )  # fmt: skip
    tokenizer = build(tmp_path)
    assert ids(tokenizer) == ids(own)
    assert "GPT2Tokenizer of transformers changes the pre_tokenizer" in caplog.text
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.unk_token == "<unk>"
    assert tokenizer.bos_token is None  # the class's own is not in the vocabulary
    size = own.get_vocab_size()
    assert set(tokenizer.get_vocab()) - set(own.get_vocab()) == {"<pad>", "<image>", "<more>"}
    assert ids(tokenizer, "<pad>")[0] >= size
    assert tokenizer.chat_template == "a template"
    assert tokenizer.model_max_length == 77
    assert tokenizer.padding_side == "left"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ids(again) == ids(own)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_verified_tokenizer_is_not_verified_again_until_a_byte_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[Path] = []

    def follow(tokenizer: Any, file: Path) -> Any:
        verified.append(file)
        return follow_file(tokenizer, file)

    monkeypatch.setattr("app.model.tokenizer.follow_file", follow)
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))
    base, file = tmp_path / "base", tmp_path / "base" / "tokenizer.json"
    own = make_folder(base, "byte_level", "PreTrainedTokenizerFast", "")
    build(base)
    assert not (tmp_path / "cache").exists()  # no run has cached data here
    (tmp_path / "cache").mkdir()
    build(base)
    assert len(verified) == 2
    assert ids(build(base)) == ids(own)
    assert len(verified) == 2
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))
    build(base)
    merges = content["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]  # the same size
    file.write_text(json.dumps(content))
    assert ids(build(base)) == ids(Tokenizer.from_file(str(file)))
    assert len(verified) == 4
    content["model"]["dropout"] = 0.1
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="BPE dropout"):
        build(base)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_tokenizer_that_transformers_changes_is_verified_at_each_start(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path))
    own = make_folder(tmp_path / "base", "byte_level", "GPT2Tokenizer", model_type)
    assert ids(build(tmp_path / "base")) == ids(build(tmp_path / "base")) == ids(own)
    assert not (tmp_path / "tokenizers").exists()
