"""Write turns as text through the chat template, and hide or show what an answer thinks.

Decides what the template is given. Templates run in the sandbox of
`tokenizer.apply_chat_template` only; a row that the template refuses is handed back, not raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from data_modules.types import Conversation, Turn, shown

if TYPE_CHECKING:
    import transformers

THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
# Private-use characters that no text and no template holds.
_PROBE = "\ue0f1probe\ue0f2"


class RowRefusedError(ValueError):
    """Say why a row cannot be encoded, without its place: the caller knows that."""


class Chat(NamedTuple):
    """Hold what the template is given of one row."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class Renderer:
    """Render chats through the template that the tokenizer holds."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._reads_reasoning: bool | None = None

    def given(self, chat: Conversation, reasoning: str) -> Chat:
        """Return what the template is given of `chat`.

        With `reasoning` "strip" no thought is left in it. Else `Turn.reasoning` stays for a
        template that writes it, and stands in `<think>` tags before the content for all others.
        """
        turns = chat.turns
        for turn in turns:
            if turn.reasoning is not None or (reasoning == "strip" and "</think>" in turn.content):
                turns = tuple(self._with_thought(turn, reasoning) for turn in turns)
                break
        return Chat(turns, chat.tools)

    @property
    def reads_reasoning(self) -> bool:
        """Tell whether the template writes a turn's `reasoning_content`."""
        if self._reads_reasoning is None:
            turns = (Turn("user", "a"), Turn("assistant", "b", reasoning=_PROBE))
            text = self.render([Chat(turns)], False)[0]
            self._reads_reasoning = isinstance(text, str) and _PROBE in text
        return self._reads_reasoning

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

    def apply(self, chats: Sequence[Chat], prompt: bool) -> list[str]:
        """Render chats that have the tools of the first one; raises what the template raises."""
        tools = [dict(tool) for tool in chats[0].tools] or None
        texts: list[str] = self._tokenizer.apply_chat_template(
            [[_message(turn) for turn in chat.turns] for chat in chats],
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return texts

    def _with_thought(self, turn: Turn, reasoning: str) -> Turn:
        if turn.role != "assistant" or (turn.reasoning is None and reasoning != "strip"):
            return turn
        if reasoning == "strip":
            return replace(turn, content=THOUGHT.sub("", turn.content), reasoning=None)
        if self.reads_reasoning:
            return turn
        said = f"<think>\n{turn.reasoning}\n</think>\n\n{turn.content}"
        return replace(turn, content=said, reasoning=None)

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
                texts.append(
                    RowRefusedError(
                        f"the chat template refuses this row (turns: {roles}): "
                        f"{shown(str(error))}; change the row, or set data.chat_template=plain"
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


def _message(turn: Turn) -> dict[str, Any]:
    """Return a turn as templates expect it: the form of OpenAI, with arguments as an object."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
                **({} if call.id is None else {"id": call.id}),
            }
            for call in turn.tool_calls
        ]
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message
