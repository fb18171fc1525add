"""Load the text of a chat template by its name (a file in `named/`) or from a file, and check it.

Knows which tokens a tokenizer needs for each named template, and how to make a template write the
BOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import DataError
from common.text import shown
from data_modules.template.rendering import Chat, Renderer
from data_modules.types import ToolCall, Turn

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser
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
"""name -> control tokens that the template writes; one without any ends answers with the EOS"""
TEMPLATE_NAMES = tuple(_NEEDED)
OWN_TEMPLATE = "the tokenizer's own chat template"
FOR_TOOLS = "tool_use"
"""name of the template for rows with tools, of a tokenizer that has several"""
TEMPLATES_WITH_TOOLS = ("plain", "gemma4", "granite", "qwen3")
"""templates that write declared tools, tool calls and tool results"""
_MAX_TEMPLATE_BYTES = 1 << 20
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
# Jinja's lstrip_blocks removes blanks before a block only at the start of a line; once the BOS is
# written before the block, they have to be removed here.
_LEADING_BLANKS = re.compile(r"\A[ \t]+(?=\{[%#](?!\+))")
_LAST_NEWLINE = re.compile(r"(?:\r\n|\r|\n)\Z")


def named_template(name: str) -> str:
    """Return the text of the template `name`, one of TEMPLATE_NAMES."""
    return (_FOLDER / f"{name}.jinja").read_text("utf-8").removesuffix("\n")


def check_named(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Raise DataError if `tokenizer` lacks a token that the template `name` writes."""
    known = tokenizer.get_added_vocab()
    if missing := [token for token in _NEEDED[name] if token not in known]:
        raise DataError(
            f"data.chat_template={name} needs the tokens {' and '.join(missing)}, which this "
            "tokenizer does not have; use data.chat_template=plain"
        )
    if not _NEEDED[name] and tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer has no eos token, so `{name}` cannot end an answer; set eos_token in "
            "its tokenizer_config.json"
        )


def read_template(name: str) -> str:
    """Return the text of the .jinja file `name`; raise DataError if it is not one."""
    file = Path(name).expanduser()
    if file.suffix != ".jinja" or not file.is_file():
        problem = "no such file" if file.suffix == ".jinja" else "unknown chat template"
        raise DataError(
            f"data.chat_template={name}: {problem}; use {', '.join(TEMPLATE_NAMES)}, a .jinja "
            "file, or null for the tokenizer's own"
        )
    if file.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise DataError(
            f"data.chat_template={name}: {file.stat().st_size:,} bytes, too large for a chat "
            "template; give a .jinja file"
        )
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.chat_template={name}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def add_bos(text: str, bos: str, renderer: Renderer) -> str:
    """Return the template `text`, changed so that every chat starts with `bos` once.

    `renderer` renders `text`. A template that starts all chats with the BOS is returned unchanged;
    one that does so for some chats is rendered into a variable first, and the BOS added if missing.
    """
    rendered = renderer.render(_PROBES) + renderer.render(_PROBES, add_prompt=True)
    has_bos = [chat.lstrip().startswith(bos) for chat in rendered if isinstance(chat, str)]
    if has_bos and all(has_bos):
        return text
    if any(has_bos) or "bos_token" in text or bos in text:
        # On its own line, so that white space at both ends of the template keeps its meaning.
        return (
            "{% set chat_of_template %}\n" + _LAST_NEWLINE.sub("", text) + "{%+ endset %}"
            "{% if not chat_of_template.lstrip().startswith(bos_token) %}{{ bos_token }}{% endif %}"
            "{{ chat_of_template }}"
        )
    return "{{ bos_token }}" + _LEADING_BLANKS.sub("", text)


def merge_templates(templates: str | Mapping[str, str]) -> str:
    """Return the template of a tokenizer; of several, one that chooses by whether a row has tools.

    Raises DataError if there are several without a default one.
    """
    if isinstance(templates, str):
        return templates
    if "default" not in templates:
        raise DataError(
            f"the tokenizer has the chat templates {', '.join(templates)} but no default; save one "
            "of them as a file and set data.chat_template=FILE.jinja"
        )
    default, for_tools = templates["default"], templates.get(FOR_TOOLS)
    if for_tools is None or for_tools == default:
        return default
    # Each on its own lines, so that white space at their ends keeps its meaning.
    with_tools, without = (_LAST_NEWLINE.sub("", text) for text in (for_tools, default))
    return f"{{% if tools %}}\n{with_tools}{{%+ else %}}\n{without}{{%+ endif %}}"


def set_defaults(text: str, kwargs: Mapping[str, Any]) -> str:
    """Return the template with default values for these arguments, unless it has them already."""
    defaults = "".join(
        f"{{% set {name} = {name} if {name} is defined else {_literal(value)} +%}}"
        for name, value in sorted(kwargs.items())
    )
    return text if defaults in text else defaults + _LEADING_BLANKS.sub("", text)


def _literal(value: Any) -> str:
    """Write a JSON value as Jinja."""
    if isinstance(value, Mapping):
        pairs = (f"{key!a}: {_literal(inner)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return ascii(value) if isinstance(value, str) else str(value).lower()


def find_syntax_error(label: str, text: str) -> str | None:
    """Return why `text` is not a template in the dialect of transformers, None if it is one.

    Needs no transformers, which takes seconds to import.
    """
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """The tag around what a model generates, see transformers' AssistantTracker."""

        tags = {"generation"}  # noqa: RUF012  as the class of jinja2 has it

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    try:
        environment.parse(text)  # compiling would compute constants, such as 9 ** 9 ** 9
    except jinja2.TemplateSyntaxError as error:
        return syntax_error(label, error)
    except RecursionError:
        return None  # reported by the check that renders the template
    return None


def syntax_error(label: str, error: jinja2.TemplateSyntaxError | SyntaxError) -> str:
    """Name the line of a chat template that is not valid, and the fix.

    A SyntaxError is of the code that jinja makes of a template: loops nested too deeply, a break
    without a loop. Its lines are not those of the template.
    """
    place = error.msg if isinstance(error, SyntaxError) else f"line {error.lineno}: {error.message}"
    return (
        f"{label} is not a valid template: {shown(place)}; fix it, or set data.chat_template=plain"
    )
