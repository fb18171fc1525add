"""Check a chat template on small test chats before any row is encoded.

The checks run in a forked process with limited time and memory. Each test chat has a unique word in
every text and goes through the same steps as a row; each trained token is traced back to the turn
whose word it is part of. A test chat that the template rejects is only counted; a trained token of
a wrong turn is a fault, which stops the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.errors import Origin
from data_modules.template.rendering import (
    OUT_OF_MEMORY,
    Chat,
    Renderer,
    RowRefusedError,
    UnsupportedTurns,
    render_errors,
)
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.template.encoding import TokenizedText

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


class TracedChat(NamedTuple):
    """A conversation as it is trained on: `weights` float32 [tokens] cover the whole text."""

    text: str
    tokenized: TokenizedText
    weights: npt.NDArray[np.float32]
    notes: frozenset[str]


@dataclass(slots=True)
class CheckResult:
    """The result of all test chats.

    `num_correct` have a correct loss mask; `refused` maps the name of a rejected one to the reason;
    `faults` are wrong masks.
    """

    num_correct: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def run_test_chats(trace: Callable[[Conversation], TracedChat | RowRefusedError]) -> CheckResult:
    """Check the loss mask of every test chat; `trace` renders, masks and tokenizes a conversation.

    Raises MemoryError if the template exceeds the memory of the process.
    """
    result = CheckResult()
    for name, turns in TEST_CHATS.items():
        chat = build_test_chat(turns)
        traced = trace(chat)
        if isinstance(traced, RowRefusedError):
            result.refused[name] = str(traced)
            if OUT_OF_MEMORY in str(traced):
                raise MemoryError
            continue
        faults = list(find_mask_faults(chat, traced))
        result.faults += [f"in the test chat `{name}` {fault}" for fault in faults]
        result.num_correct += not faults
    return result


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
    return Conversation(tuple(turns), _ORIGIN, _TOOLS if groups[0] == "T" else ())


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
        for text in _words_of(turn):
            if text not in trained and lost.get(text[0], "lost_tool_calls") not in traced.notes:
                yield f"`{text}` of turn {number + 1} (assistant) is not trained on"


def _words_of(turn: Turn) -> list[str]:
    texts = [turn.content, turn.reasoning or ""]
    for call in turn.tool_calls:
        texts += [call.name, *map(str, call.arguments.items())]
    return [word[0] for text in texts for word in _WORD.finditer(text)]


def _word(part: str, turn: int, call: int = 0) -> str:
    return f"{part}{turn}vq{call}"


def _build_tool() -> dict[str, object]:
    name, description, parameter, meaning = (_word("t", number) for number in range(4))
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_TOOLS: tuple[dict[str, object], ...] = (_build_tool(),)


def find_unsupported_turns(renderer: Renderer) -> UnsupportedTurns:
    """Return the turns that the template of `renderer` rejects.

    Nothing is unsupported if it rejects even the smallest chat: each row then gets its own error.
    """

    def rejects(pattern: str) -> bool:
        chat = build_test_chat(pattern)
        try:
            renderer.apply_template([Chat(chat.turns, chat.tools)])
        except render_errors():
            return True
        return False

    if rejects("u a"):
        return UnsupportedTurns()
    return UnsupportedTurns(
        tools=rejects("T u c t a") and rejects("T u ac t a"),
        system=rejects("s u a"),
        later_system=rejects("u a s u a"),
        questions=rejects("u u a"),
        answers=rejects("u a a u a"),
    )
