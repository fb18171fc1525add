"""Write turns as text through the chat template, and hide or show what an answer thinks.

Decides what the template is given, and in which of the forms in use: templates differ in the key of
a thought, in arguments as an object or as JSON, in the content of a message that only calls, and in
the ids of calls. Templates run in the sandbox of `tokenizer.apply_chat_template` only; a row that
the template refuses is handed back, not raised.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from data_modules.messages import shown
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import transformers


THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
INPUT_HEADER = "\n\n### Input:\n"
"""what alpaca's form writes between an instruction and its input; its preamble depends on it"""
CALL_IDS = ("given", "nine", "named")
# Private-use characters that no text and no template holds.
_PROBE, _PROBE_ARGUMENT = "\ue0f1probe\ue0f2", "\ue0f1argument\ue0f2"
NO_MEMORY = "it takes more memory than there is"


class RowRefusedError(ValueError):
    """Say why a row cannot be encoded, without its place: the caller knows that."""


class TemplateRefusedError(RowRefusedError):
    """Say what the template raised for a row."""


class Chat(NamedTuple):
    """Hold what the template is given of one row."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Say how messages are written for a template.

    `reasoning_key` is the key of a thought, "" where the template reads none; `has_parts`: contents
    are lists of parts; `arguments_as_json`: a call's arguments are a JSON string; `null_content`: a
    message that only calls has the content None; `call_ids` are those of the row (given), nine
    characters long (nine), or `functions.NAME:NUMBER` (named).
    """

    reasoning_key: str = ""
    has_parts: bool = False
    arguments_as_json: bool = False
    null_content: bool = False
    call_ids: str = "given"


class Renderer:
    """Render chats through the template `text`, None = the one that the tokenizer holds."""

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, text: str | None = None
    ) -> None:
        self._tokenizer, self._text = tokenizer, text

    def given(self, chat: Conversation, reasoning: str) -> Chat:
        """Return what the template is given of `chat`.

        With `reasoning` "strip" no thought is left in it. Else `Turn.reasoning` stays for a
        template that writes it, and stands in `<think>` tags before the content for all others. An
        input follows its header where the template looks for that.
        """
        turns = chat.turns
        header = INPUT_HEADER.replace("\n", "\\n")  # as the source of a template writes it
        if any(turn.input_start for turn in turns) and header in str(self._tokenizer.chat_template):
            turns = tuple(_with_header(turn) for turn in turns)
        if any(
            turn.reasoning is not None or (reasoning == "strip" and "</think>" in turn.content)
            for turn in turns
        ):
            turns = tuple(self._with_thought(turn, reasoning) for turn in turns)
        return Chat(turns, chat.tools)

    def render(self, chats: Sequence[Chat], prompt: bool) -> list[str | RowRefusedError]:
        """Return the text of each chat, in order; `prompt` adds the generation prompt."""
        by_tools: dict[str, list[int]] = {}
        for index, chat in enumerate(chats):
            key = json.dumps(chat.tools, default=str) if chat.tools else ""
            by_tools.setdefault(key, []).append(index)
        texts: list[str | RowRefusedError] = [""] * len(chats)
        for indices in by_tools.values():
            rendered = self._render_alike([chats[index] for index in indices], prompt)
            for index, text in zip(indices, rendered, strict=True):
                texts[index] = text
        return texts

    def apply(
        self, chats: Sequence[Chat], prompt: bool, written: MessageFormat | None = None
    ) -> list[str]:
        """Render chats that have the tools of the first one; raises what the template raises."""
        tools = [dict(tool) for tool in chats[0].tools] or None
        written = written or self.format
        texts: list[str] = self._tokenizer.apply_chat_template(
            [_messages(chat, written) for chat in chats],
            tools=tools,
            chat_template=self._text,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return texts

    def messages(self, chat: Chat) -> list[dict[str, Any]]:
        """Return the turns of a chat as the template reads them."""
        return _messages(chat, self.format)

    def _with_thought(self, turn: Turn, reasoning: str) -> Turn:
        if turn.role != "assistant" or (turn.reasoning is None and reasoning != "strip"):
            return turn
        if reasoning == "strip":
            return replace(turn, content=THOUGHT.sub("", turn.content), reasoning=None)
        if self.format.reasoning_key:
            return turn
        content = f"<think>\n{turn.reasoning}\n</think>\n\n{turn.content}"
        return replace(turn, content=content, reasoning=None)

    @cached_property
    def format(self) -> MessageFormat:
        """Return the first format in which the template writes the small chats it is given."""
        asks = Turn("user", "a")
        found = MessageFormat()
        plain = Chat((asks, Turn("assistant", _PROBE)))
        parts = replace(found, has_parts=True)
        if not self._writes(plain, found) and self._writes(plain, parts):
            found = parts
        thinks = Chat((asks, Turn("assistant", "b", reasoning=_PROBE)))
        found = self._with_reasoning_key(found, thinks)
        for ids, null, as_json in product(CALL_IDS, (False, True), (False, True)):
            one = replace(found, call_ids=ids, null_content=null, arguments_as_json=as_json)
            if all(self._writes(chat, one) for chat in _calling()):
                found = one
                break
        if found.reasoning_key:
            return found
        # Some write the thoughts before calls only.
        turn = Turn(
            "assistant", "", reasoning=_PROBE, tool_calls=(ToolCall("f", {"x": _PROBE_ARGUMENT}),)
        )
        return self._with_reasoning_key(found, Chat((asks, turn)))

    def _with_reasoning_key(self, found: MessageFormat, thinks: Chat) -> MessageFormat:
        keyed = (replace(found, reasoning_key=key) for key in REASONING_KEYS)
        return next((one for one in keyed if self._writes(thinks, one)), found)

    def _writes(self, chat: Chat, written: MessageFormat) -> bool:
        try:
            (text,) = self.apply([chat], False, written)
        except render_errors():
            return False
        if written.null_content and "None" in text:
            return False
        has_call = any(turn.tool_calls for turn in chat.turns)
        return _PROBE in text and (not has_call or _PROBE_ARGUMENT in text)

    def _render_alike(self, chats: list[Chat], prompt: bool) -> list[str | RowRefusedError]:
        errors = render_errors()
        try:
            return list(self.apply(chats, prompt))
        except errors:
            pass  # Once more one by one, to find the rows.
        texts: list[str | RowRefusedError] = []
        for chat in chats:
            try:
                texts.append(self.apply([chat], prompt)[0])
            except errors as error:
                roles = ", ".join(turn.role for turn in chat.turns)
                why = NO_MEMORY if isinstance(error, MemoryError) else shown(str(error))
                texts.append(
                    TemplateRefusedError(
                        f"the chat template refuses this row (turns: {roles}): "
                        f"{why}; change the row, or set data.chat_template=plain"
                    )
                )
        return texts


def render_errors() -> tuple[type[Exception], ...]:
    """Return what a template can raise: Jinja's own errors, and those of Python's operators."""
    import jinja2

    return (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    )


def _with_header(turn: Turn) -> Turn:
    if not turn.input_start:
        return turn
    instruction, given = turn.content[: turn.input_start - 2], turn.content[turn.input_start :]
    return replace(turn, content=instruction + INPUT_HEADER + given, input_start=0)


def _calling() -> Iterator[Chat]:
    """Yield small chats that call a tool: with an id and without."""
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    for id_ in (None, "call_a"):
        call = ToolCall(_PROBE, {"x": _PROBE_ARGUMENT}, id_)
        turns = (
            Turn("user", "a"),
            Turn("assistant", "", tool_calls=(call,)),
            Turn("tool", "e", tool_call_id=id_),
            Turn("assistant", "b"),
        )
        yield Chat(turns, (tool,))


def _messages(chat: Chat, written: MessageFormat) -> list[dict[str, Any]]:
    """Return the turns of a chat as templates expect them: in the form of OpenAI."""
    turns: Sequence[Turn] = chat.turns
    if written.call_ids != "given":
        turns = _with_ids(turns, written.call_ids)
    return [_message(turn, written) for turn in turns]


def _message(turn: Turn, written: MessageFormat) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if written.has_parts:
        message["content"] = [{"type": "text", "text": turn.content}]
    if turn.reasoning is not None:
        message[written.reasoning_key or REASONING_KEYS[0]] = turn.reasoning
    if turn.tool_calls:
        if written.null_content and not turn.content:
            message["content"] = None
        message["tool_calls"] = [_call(call, written.arguments_as_json) for call in turn.tool_calls]
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _call(call: ToolCall, as_json: bool) -> dict[str, Any]:
    arguments: object = dict(call.arguments)
    if as_json:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {
        "type": "function",
        "function": function,
        **({} if call.id is None else {"id": call.id}),
    }


def _with_ids(turns: Sequence[Turn], kind: str) -> list[Turn]:
    """Return the turns with other ids for their calls, and each result with that of its call."""
    ids: dict[str, str] = {}
    waiting: deque[str] = deque()
    written, count = [], 0
    for turn in turns:
        if turn.tool_calls:
            calls = []
            for call in turn.tool_calls:
                new = f"call{count:05d}" if kind == "nine" else f"functions.{call.name}:{count}"
                count += 1
                waiting.append(new)
                if call.id is not None:
                    ids[call.id] = new
                calls.append(replace(call, id=new))
            turn = replace(turn, tool_calls=tuple(calls))
        elif turn.role == "tool":
            answered = ids.get(turn.tool_call_id or "")
            if answered is None:
                answered = waiting.popleft() if waiting else None
            elif answered in waiting:
                waiting.remove(answered)
            turn = replace(turn, tool_call_id=answered)
        written.append(turn)
    return written
