"""Find the text of a chat template: by its name, in a file, or in a tokenizer.

Decides which tokens a tokenizer needs for the named ones, each a file in `named/`. Never
renders: that is the renderer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_modules.messages import DataError
from data_modules.template.rendering import Chat, Renderer
from data_modules.types import ToolCall, Turn

if TYPE_CHECKING:
    import transformers

_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_NEEDED = {
    "plain": (),
    "chatml": _CHATML,
    "alpaca": (),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "harmony": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    "llama2": (),
    "llama3": _LLAMA3,
    "llama3_1": _LLAMA3,
    "mistral": (),
    "mistral_v3": ("[INST]", "[/INST]"),
    "mistral_v7": ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen3": _CHATML,
    "t5": (),
    "vicuna": (),
    "zephyr": (),
}
"""the control tokens that each template writes; without any it ends answers with the EOS"""
TEMPLATE_NAMES = tuple(_NEEDED)
TEMPLATES_WITH_TOOLS = ("plain", "gemma4", "granite", "qwen3")
"""those that write tools, the calls of an answer and what the tools gave back"""
MAX_TEMPLATE_BYTES = 1 << 20
_FOLDER = Path(__file__).parent / "named"
_QUESTION, _ANSWER = Turn("user", "a"), Turn("assistant", "b")
_CALL = Turn("assistant", "", tool_calls=(ToolCall("f", {}),))
_TOOL = {"type": "function", "function": {"name": "f", "description": "c", "parameters": {}}}
_PROBES = (
    Chat((_QUESTION,)),
    Chat((_QUESTION, _ANSWER)),
    Chat((_QUESTION, _ANSWER, _QUESTION, _ANSWER)),
    Chat((Turn("system", "d"), _QUESTION, _ANSWER)),
    Chat((_QUESTION, _CALL, Turn("tool", "e"), _ANSWER), (_TOOL,)),
    Chat((Turn("system", "d"), _QUESTION), (_TOOL,)),
)
# Blanks before a block are taken out at the beginning of a line only, which this is no longer.
_BLANKS = re.compile(r"\A[ \t]+(?=\{[%#](?!\+))")
_LAST_NEWLINE = re.compile(r"(?:\r\n|\r|\n)\Z")


def named_template(name: str) -> str:
    """Return the text of the template `name`, one of TEMPLATE_NAMES."""
    return (_FOLDER / f"{name}.jinja").read_text("utf-8").removesuffix("\n")


def check_named(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Raise DataError when `tokenizer` lacks a token that the template `name` writes."""
    if missing := _missing(tokenizer, name):
        raise DataError(
            f"data.chat_template={name} needs the tokens {' and '.join(missing)}, which this "
            "tokenizer does not have; use data.chat_template=plain"
        )
    if not _NEEDED[name] and tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer has no eos token, so `{name}` cannot end an answer; set eos_token in "
            "its tokenizer_config.json"
        )


def templates_alike(
    tokenizer: transformers.PreTrainedTokenizerBase, renderer: Renderer
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each named template that renders small chats as `renderer` does.

    Some begin with the BOS only in the text given here.
    """
    bos = tokenizer.bos_token
    own = renderer.render(_PROBES[:3], False)
    for name in TEMPLATE_NAMES:
        if _missing(tokenizer, name):
            continue
        plain = named_template(name)
        for text in (plain,) if bos is None else (plain, "{{ bos_token }}" + plain):
            if Renderer(tokenizer, text).render(_PROBES[:3], False) == own:
                yield name, text


def _missing(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> list[str]:
    known = tokenizer.get_added_vocab()
    return [token for token in _NEEDED[name] if token not in known]


def read_template(name: str) -> str:
    """Return the text of the .jinja file `name`; raises DataError where it is not one."""
    file = Path(name).expanduser()
    if file.suffix != ".jinja" or not file.is_file():
        what = "no such file" if file.suffix == ".jinja" else "unknown chat template"
        raise DataError(
            f"data.chat_template={name}: {what}; use {', '.join(TEMPLATE_NAMES)}, a .jinja "
            "file, or null for the tokenizer's own"
        )
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise DataError(
            f"data.chat_template={name}: {file.stat().st_size:,} bytes, too large for a chat "
            "template; give a .jinja file"
        )
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.chat_template={name}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def add_bos(text: str, bos: str, renderer: Renderer) -> str:
    """Return the template `text` so that it begins every chat with `bos`, once.

    `renderer` renders `text` itself. A template that begins all chats so is returned as it is; one
    that does so for some chats is rendered first, and the BOS added where it lacks.
    """
    rendered = [one for prompt in (False, True) for one in renderer.render(_PROBES, prompt)]
    begins = [one.lstrip().startswith(bos) for one in rendered if isinstance(one, str)]
    if begins and all(begins):
        return text
    if any(begins) or "bos_token" in text or bos in text:
        # Its own line, so that blanks and newlines at both ends mean what they meant before.
        return (
            "{% set chat_of_template %}\n" + _LAST_NEWLINE.sub("", text) + "{%+ endset %}"
            "{% if not chat_of_template.lstrip().startswith(bos_token) %}{{ bos_token }}{% endif %}"
            "{{ chat_of_template }}"
        )
    return "{{ bos_token }}" + _BLANKS.sub("", text)
