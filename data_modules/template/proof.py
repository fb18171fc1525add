"""Prove on the template at hand that nothing of another turn is trained on.

Conversations of the forms that rows have, each text in them a word of its own, go the way that rows
go; every trained token is traced back to the turn whose word it spells. A form that the template
refuses is counted, a token of the wrong turn is a fault that ends the run before it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from data_modules.messages import Origin
from data_modules.template.rendering import NO_MEMORY, RowRefusedError, TemplateRefusedError
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.template.encoding import TokenizedText

FORMS = {
    "one answer": "u a",
    "two answers": "u a u a",
    "system": "s u a",
    "system, three answers": "s u a u a u a",
    "tools, unused": "T u a",
    "system and tools, unused": "T s u a",
    "a call alone": "T u c t a",
    "a call after words": "T u ac t a",
    "calls one after another": "T u c t c t a",
    "calls one after another, with words": "T s u ac t ac t a",
    "two calls at once": "T u cc tt a",
    "calls in two rounds": "T u c t a u c t a",
    "a call, then talk": "T u c t a u a",
    "ends with a call": "T u c",
    "ends with a call after words": "T u ac",
    "ends with a result": "T u c t",
    "thoughts": "u ra",
    "thoughts in two answers": "u ra u ra",
    "thoughts before calls": "T u rc t ra",
    "thoughts, words and a call": "T u rac t ra",
    "thoughts before calls in two rounds": "T u rc t ra u rc t ra",
    "thoughts in tags": "u x u x",
    "user after user": "u u a",
    "answer after answer": "u a a u a",
    "an empty answer": "u e u a",
    "ends with a question": "u a u",
    "answer first": "a u a",
    "system later": "u a s u a",
}
"""form -> its turns: s system, u user, t result, e an empty answer, and of answers r reasoning, a
words, c a call, x words after a thought in tags; T declares a tool"""
_ORIGIN = Origin("proof", 1)
_WORD = re.compile(r"([a-z])(\d+)vq(\d)")


class Traced(NamedTuple):
    """Hold a conversation as it is trained on: `weights` float32 [tokens] of the whole text."""

    text: str
    tokenized: TokenizedText
    weights: npt.NDArray[np.float32]
    notes: frozenset[str]


@dataclass(slots=True)
class Proof:
    """Hold what the forms showed: how many are proven, why others are refused, and the faults.

    `is_whole`: in all that the template renders, the answers can be told apart.
    """

    num_proven: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    is_whole: bool = True


def prove(trace: Callable[[Conversation], Traced | RowRefusedError]) -> Proof:
    """Trace every form; `trace` renders, masks and tokenizes one conversation.

    Raises MemoryError where the template takes more than the process may have.
    """
    proof = Proof()
    for name, form in FORMS.items():
        chat = conversation(form)
        traced = trace(chat)
        if isinstance(traced, RowRefusedError):
            proof.refused[name] = str(traced)
            proof.is_whole &= isinstance(traced, TemplateRefusedError)
            if NO_MEMORY in str(traced):
                raise MemoryError
            continue
        faults = list(faults_of(chat, traced))
        proof.faults += [f"in the form `{name}` {fault}" for fault in faults]
        proof.num_proven += not faults
        proof.is_whole &= not faults
    return proof


def conversation(form: str) -> Conversation:
    """Return a conversation of `form`, each of its texts a word that says whose it is."""
    words = form.split()
    turns: list[Turn] = []
    for word in words:
        if word == "T":
            continue
        if word[0] in "sut":
            role = {"s": "system", "u": "user", "t": "tool"}[word[0]]
            turns += [Turn(role, _word("c", len(turns) + number)) for number in range(len(word))]
            continue
        number = len(turns)
        content = _word("c", number)
        if "x" in word:
            content = f"<think>\n{_word('r', number)}\n</think>\n\n{content}"
        thought = _word("r", number) if "r" in word else None
        calls = tuple(
            ToolCall(
                _word("f", number, index), {_word("p", number, index): _word("k", number, index)}
            )
            for index in range(word.count("c"))
        )
        speaks = "a" in word or "x" in word
        turns.append(Turn("assistant", content if speaks else "", None, thought, calls))
    return Conversation(tuple(turns), _ORIGIN, _TOOLS if words[0] == "T" else ())


def faults_of(chat: Conversation, traced: Traced) -> Iterator[str]:
    """Yield what is wrong: trained words of others, and own words that are not trained on."""
    trained = set()
    for found in _WORD.finditer(traced.text):
        number = int(found[2]) if found[1] != "t" else -1
        start, end = found.span()
        first = traced.tokenized.first(start, end)
        weights = traced.weights[first : traced.tokenized.after(end)]
        if number >= 0 and chat.turns[number].role == "assistant":
            if len(weights) and weights.all():
                trained.add(found[0])
            continue
        if weights.any():
            role = chat.turns[number].role if number >= 0 else "declared tools"
            where = f"turn {number + 1} ({role})" if number >= 0 else f"the {role}"
            yield f"{where} is trained on"
    lost = {
        "c": {"lost_content"},
        "r": {"lost_reasoning"},
        "f": {"lost_tool_calls"},
        "p": {"lost_tool_calls"},
        "k": {"lost_tool_calls"},
    }
    for number, turn in enumerate(chat.turns):
        if turn.role != "assistant":
            continue
        for word in _words_of(turn):
            if word not in trained and not lost[word[0]] & traced.notes:
                yield f"turn {number + 1} (assistant) is not trained on whole: `{word}` is left out"


def _words_of(turn: Turn) -> list[str]:
    texts = [turn.content, turn.reasoning or ""]
    for call in turn.tool_calls:
        texts += [call.name, *map(str, call.arguments.items())]
    return [found[0] for text in texts for found in _WORD.finditer(text)]


def _word(part: str, turn: int, call: int = 0) -> str:
    return f"{part}{turn}vq{call}"


def _tool() -> dict[str, object]:
    name, says, key, of = (_word("t", number) for number in range(4))
    properties = {key: {"type": "string", "description": of}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    return {
        "type": "function",
        "function": {"name": name, "description": says, "parameters": parameters},
    }


_TOOLS: tuple[dict[str, object], ...] = (_tool(),)
