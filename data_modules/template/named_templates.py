"""Load the text of a chat template by its name (a file in `named/`) or from a file, and check it.

Test chats run before any row is encoded, in a forked process with limited time and memory. Each has
a unique word in every text and goes through the same steps as a row; each trained token is traced
back to the turn whose word it is part of. A test chat that the template rejects is only counted; a
trained token of a wrong turn is a fault, which stops the run.

Knows which tokens a tokenizer needs for each named template, and how to make a template write the
BOS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import DataError, Origin
from common.text import shown
from data_modules.template import rendering
from data_modules.template.rendering import Chat, Renderer, RowRefusedError
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser
    import numpy as np
    import numpy.typing as npt
    import transformers

    from data_modules.template.encoding import TokenizedText

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
_MAX_TEMPLATE_BYTES = 1 << 20
_FOLDER = Path(__file__).parent / "named"
_BOS_PROBES = ("u", "u a", "u a u a", "s u a", "T u c t a", "T s u")
"""test chats that tell whether a template writes the BOS always, sometimes or never"""
# Jinja's lstrip_blocks removes blanks before a block only at the start of a line; once the BOS is
# written before the block, they have to be removed here.
_LEADING_BLANKS = re.compile(r"\A[ \t]+(?=\{[%#](?!\+))")
_LAST_NEWLINE = re.compile(r"(?:\r\n|\r|\n)\Z")
TEST_CHATS = {
    "one answer": "u a",
    "two answers": "u a u a",
    "system": "s u a",
    "system, three answers": "s u a u a u a",
    "tools, unused": "T u a",
    "system and tools, unused": "T s u a",
    "a call alone": "T u c t a",
    "a call after text": "T u ac t a",
    "calls one after another": "T u c t c t a",
    "calls one after another, with text": "T s u ac t ac t a",
    "two calls at once": "T u cc tt a",
    "calls in two rounds": "T u c t a u c t a",
    "a call, then another question": "T u c t a u a",
    "ends with a call": "T u c",
    "ends with a call after text": "T u ac",
    "ends with a result": "T u c t",
    "reasoning": "u ra",
    "reasoning in two answers": "u ra u ra",
    "reasoning before calls": "T u rc t ra",
    "reasoning, text and a call": "T u rac t ra",
    "reasoning before calls in two rounds": "T u rc t ra u rc t ra",
    "reasoning in tags": "u x u x",
    "user after user": "u u a",
    "answer after answer": "u a a u a",
    "an empty answer": "u e u a",
    "ends with a question": "u a u",
    "answer first": "a u a",
    "system later": "u a s u a",
}
"""name -> turns of the chat: s system, u user, t tool result, e empty answer; of answers r
reasoning, a text, c a call, x text after reasoning in tags; T declares a tool"""
_ORIGIN = Origin("template check", 1)
_WORD = re.compile(r"([a-z])(\d+)vq(\d)")
_PARAMETERS = {
    "type": "object",
    "properties": {"t2vq0": {"type": "string", "description": "t3vq0"}},
    "required": ["t2vq0"],
}
_TOOL = {"name": "t0vq0", "description": "t1vq0", "parameters": _PARAMETERS}


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
    probes = [Chat(chat.turns, chat.tools) for chat in map(build_test_chat, _BOS_PROBES)]
    rendered = renderer.render(probes) + renderer.render(probes, add_prompt=True)
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


class TracedChat(NamedTuple):
    """A conversation as it is trained on: `weights` float32 [tokens] cover the whole text."""

    text: str
    tokenized: TokenizedText
    weights: npt.NDArray[np.float32]
    notes: frozenset[str]


def run_test_chats(
    trace: Callable[[Conversation], TracedChat | RowRefusedError],
) -> dict[str, list[str] | RowRefusedError]:
    """Return the faults in the loss mask of each test chat, or why the template rejects it.

    `trace` renders, masks and tokenizes a conversation. Raises MemoryError if the template exceeds
    the memory of the process.
    """
    found: dict[str, list[str] | RowRefusedError] = {}
    for name, turns in TEST_CHATS.items():
        chat = build_test_chat(turns)
        traced = trace(chat)
        if isinstance(traced, TracedChat):
            found[name] = list(find_mask_faults(chat, traced))
        elif rendering.OUT_OF_MEMORY in str(traced):
            raise MemoryError
        else:
            found[name] = traced
    return found


def build_test_chat(pattern: str) -> Conversation:
    """Build a conversation by a `pattern` of TEST_CHATS; each text is a word that is unique."""
    groups = pattern.split()
    turns: list[Turn] = []
    for letters in groups:
        if letters == "T":
            continue
        if letters[0] in "sut":
            role = {"s": "system", "u": "user", "t": "tool"}[letters[0]]
            turns += [Turn(role, _word("c", len(turns) + i)) for i in range(len(letters))]
            continue
        number = len(turns)
        content = _word("c", number)
        if "x" in letters:
            content = f"<think>\n{_word('r', number)}\n</think>\n\n{content}"
        reasoning = _word("r", number) if "r" in letters else None
        calls = tuple(
            ToolCall(
                _word("f", number, index), {_word("p", number, index): _word("k", number, index)}
            )
            for index in range(letters.count("c"))
        )
        has_text = "a" in letters or "x" in letters
        turns.append(Turn("assistant", content if has_text else "", None, reasoning, calls))
    tools = ({"type": "function", "function": _TOOL},) if groups[0] == "T" else ()
    return Conversation(tuple(turns), _ORIGIN, tools)


def find_mask_faults(chat: Conversation, traced: TracedChat) -> Iterator[str]:
    """Yield the faults of a loss mask: words of other turns that are trained on, and words of
    answers that are not.
    """
    trained = set()
    for word in _WORD.finditer(traced.text):
        number = int(word[2]) if word[1] != "t" else -1
        start, end = word.span()
        first = traced.tokenized.first(start, end)
        weights = traced.weights[first : traced.tokenized.after(end)]
        if number >= 0 and chat.turns[number].role == "assistant":
            if len(weights) and weights.all():
                trained.add(word[0])
            continue
        if weights.any():
            where = f"turn {number + 1} ({chat.turns[number].role})"
            yield f"{where if number >= 0 else 'the text of declared tools'} is trained on"
    lost = {"c": "lost_content", "r": "lost_reasoning"}
    for number, turn in enumerate(chat.turns):
        if turn.role != "assistant":
            continue
        calls = (f"{call.name} {call.arguments}" for call in turn.tool_calls)
        for word in _WORD.finditer(" ".join((turn.content, turn.reasoning or "", *calls))):
            text = word[0]
            if text not in trained and lost.get(text[0], "lost_tool_calls") not in traced.notes:
                yield f"`{text}` of turn {number + 1} (assistant) is not trained on"


def _word(part: str, turn: int, call: int = 0) -> str:
    return f"{part}{turn}vq{call}"


def find_unsupported_turns(renderer: Renderer) -> tuple[str, ...]:
    """Return the names, of UNSUPPORTED_BY, of the turns that the template of `renderer` rejects.

    Nothing is unsupported if it rejects even the smallest chat: each row then gets its own error.
    """

    def rejects(pattern: str) -> bool:
        chat = build_test_chat(pattern)
        try:
            renderer.apply_template([Chat(chat.turns, chat.tools)])
        except rendering.render_errors():
            return True
        return False

    if rejects("u a"):
        return ()
    patterns_of = rendering.UNSUPPORTED_BY.items()
    found = [name for name, patterns in patterns_of if all(map(rejects, patterns))]
    if {rendering.SYSTEM_TURNS, rendering.LATER_SYSTEM_TURNS} <= {*found}:
        found.remove(rendering.LATER_SYSTEM_TURNS)
    return tuple(found)
