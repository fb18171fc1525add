"""A tokenizer.json that expands texts without end or draws tokens at random is refused at once."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from app.model.base import ModelConfig
from app.model.tokenizer import build_tokenizer
from app.model.tokenizer_file import _try_expression
from app.preflight.base_model import inspect_tokenizer
from common.errors import UserError
from tests.tiny import TINY_BASE


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def decoders(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def prepend(text: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": text}


SNOWMAN = "\u2603"
BOMBS: dict[str, dict[str, Any]] = {
    "a rare letter": {"normalizer": normalizers(*[replace(SNOWMAN, SNOWMAN * 2)] * 60)},
    "an expression": {"normalizer": normalizers(*[replace("(.)", "xx", "Regex")] * 60)},
    "an empty pattern": {"normalizer": normalizers(*[replace("", "xx")] * 60)},
    "prepended": {"normalizer": normalizers(*[prepend("\u2581")] * 300)},
    "a decoder": {"decoder": decoders(*[replace("a", "aa")] * 60)},
}
VALID: dict[str, dict[str, Any] | None] = {
    "none": None,
    "Llama": normalizers(prepend("\u2581"), replace(" ", "\u2581")),
    "a table": normalizers(*[replace(chr(0x4E00 + each), "x") for each in range(200)]),
}


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WELL_KNOWN = {
    "Llama 3": _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "GPT-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + f"{_WORDS}?"
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + f"{_WORDS}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def changed(folder: Path, **parts: Any) -> Path:
    content = json.loads((TINY_BASE / "tokenizer.json").read_text())
    config = (TINY_BASE / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "tokenizer.json").write_text(json.dumps(content | parts))
    return folder


@pytest.mark.parametrize("name", BOMBS)
def test_endless_expansion_is_refused(name: str, tmp_path: Path) -> None:
    path = str(changed(tmp_path, **BOMBS[name]))
    start = time.process_time()
    _, problems = inspect_tokenizer(ModelConfig(path=path))
    assert time.process_time() - start < 2
    assert len(problems) == 1
    section = next(iter(BOMBS[name]))
    assert f"tokenizer.json: its {section} " in problems[0]
    assert "characters" in problems[0]
    with pytest.raises(UserError, match=f"its {section}"):  # as from the hub
        build_tokenizer(ModelConfig(path=path))


SLOW = [
    r"(?:q|q)*Z",
    r"([^Z]+)+ZY",
    r"k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?k?kkkkkkkkkkkkkkkkkkkkkkkkkw",
    r"^(?:ab|a|b)+c",
    r"(\p{Han}+)+\d",
    "(\u0416+)+\\d",
    r"(?x) ( z+ ) + \d",
]


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def in_section(section: str, expression: str) -> dict[str, Any]:
    """Return a section with an expression between others."""
    if section == "pre_tokenizer":
        steps = [split(r"\d"), split(expression), {"type": "ByteLevel", "use_regex": False}]
        steps[-1] |= {"add_prefix_space": False, "trim_offsets": True}
        return {"type": "Sequence", "pretokenizers": steps}
    steps = [replace(r"\r\n", "\n", "Regex"), replace(expression, "b", "Regex")]
    return {"type": "Sequence", f"{section}s": steps}


@pytest.mark.parametrize("expression", SLOW)
def test_an_expression_that_takes_exponential_time_is_refused(
    expression: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    section = ("pre_tokenizer", "normalizer", "decoder")[SLOW.index(expression) % 3]
    path = str(changed(tmp_path, **{section: in_section(section, expression)}))
    start = time.monotonic()
    _, (problem,) = inspect_tokenizer(ModelConfig(path=path))
    assert time.monotonic() - start < 30
    assert f"tokenizer.json: its {section}: the regular expression {expression} " in problem
    if SLOW.index(expression) < 3:  # as from the hub
        with pytest.raises(UserError, match="without repeats of repeats"):
            build_tokenizer(ModelConfig(path=path))
    assert "panicked" not in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_expressions_of_well_known_tokenizers_are_matched_in_a_moment() -> None:
    for expression in WELL_KNOWN.values():
        start = time.process_time()
        assert _try_expression(expression) == "", expression
        assert time.process_time() - start < 0.3, expression


@pytest.mark.parametrize("name", VALID)
def test_common_normalizers_are_accepted(name: str, tmp_path: Path) -> None:
    path = str(changed(tmp_path, normalizer=VALID[name]))
    assert not inspect_tokenizer(ModelConfig(path=path))[1]


@pytest.mark.parametrize("dropout", [1e-9, 1])
def test_bpe_dropout_is_refused(dropout: float, tmp_path: Path) -> None:
    model = json.loads((TINY_BASE / "tokenizer.json").read_text())["model"]
    path = changed(tmp_path, model=model | {"dropout": dropout})
    _, problems = inspect_tokenizer(ModelConfig(path=str(path)))
    assert problems[0].startswith(
        f"{path / 'tokenizer.json'}: model.dropout={dropout}: BPE dropout"
    )
