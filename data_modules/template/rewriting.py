"""Write turns that a chat template refuses into turns that it takes.

Gemma 2 and 3, Cohere's and LLaVA's templates stop at a tool's result, at two user turns in a row or
at a system turn. A row that has one is written as people who use these models do: calls and results
as text between `<tool_call>` and `<tool_response>` tags, a system turn at the head of the next
question, turns of one role joined. What a template takes is found by rendering small chats.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from data_modules.template.proof import conversation
from data_modules.template.rendering import Chat, Renderer, render_errors
from data_modules.types import Conversation, Turn

_TOOLS_TEXT = (
    "<tools>\n{tools}\n</tools>\n"
    'Call a tool by <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call>.'
)


@dataclass(frozen=True, slots=True)
class Refused:
    """Say what a template stops at: tool turns, a system turn at all or later than first, two user
    turns and two answers in a row.
    """

    tools: bool = False
    system: bool = False
    later_system: bool = False
    questions: bool = False
    answers: bool = False

    @property
    def words(self) -> list[str]:
        """Name what is refused, in words."""
        names = {
            "tool turns": self.tools,
            "system turns": self.system,
            "later system turns": self.later_system and not self.system,
            "user after user": self.questions,
            "answer after answer": self.answers,
        }
        return [name for name, is_refused in names.items() if is_refused]


def find_refused(renderer: Renderer) -> Refused:
    """Return what the template of `renderer` stops at; nothing where it refuses the smallest chat.

    Templates that refuse the smallest chat refuse every row, in their own words.
    """
    if not _takes(renderer, "u a"):
        return Refused()
    return Refused(
        tools=not (_takes(renderer, "T u c t a") or _takes(renderer, "T u ac t a")),
        system=not _takes(renderer, "s u a"),
        later_system=not _takes(renderer, "u a s u a"),
        questions=not _takes(renderer, "u u a"),
        answers=not _takes(renderer, "u a a u a"),
    )


def rewrite(
    chat: Conversation, refused: Refused, trained: Collection[str] = ("assistant",)
) -> Conversation:
    """Return `chat` without what is refused; itself where it has nothing of that kind.

    Turns of one role stay apart where joining them would lose a weight or a thought of the second.
    `trained` are the roles that are trained on: what becomes a question keeps the weight it had.
    """
    turns, tools = chat.turns, chat.tools
    if refused.tools and (tools or any(turn.role == "tool" or turn.tool_calls for turn in turns)):
        weight = None if ("tool" in trained) == ("user" in trained) else float("tool" in trained)
        turns = tuple(_without_tools(turns, weight))
        if tools:
            turns, tools = _declared(turns, tools, refused.system), ()
    is_alike = ("system" in trained) == ("user" in trained)
    if is_alike and (refused.system or refused.later_system):
        turns = tuple(_without_system(turns, keeps_first=not refused.system))
    if refused.questions or refused.answers:
        turns = tuple(_joined(turns, refused))
    is_same = len(turns) == len(chat.turns) and all(map(operator.is_, turns, chat.turns))
    return chat if is_same else replace(chat, turns=turns, tools=tools)


def _takes(renderer: Renderer, form: str) -> bool:
    chat = conversation(form)
    try:
        renderer.apply([Chat(chat.turns, chat.tools)], False)
    except render_errors():
        return False
    return True


def _without_tools(turns: Iterable[Turn], weight: float | None) -> Iterable[Turn]:
    """Write calls as text of their answers, and results that follow each other as one question.

    `weight`: of a result that has none of its own; None where the role's is right.
    """
    waiting: Turn | None = None
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{turn.content}\n</tool_response>"
            own = weight if turn.weight is None else turn.weight
            if waiting is not None and waiting.weight == own:
                waiting = replace(waiting, content=f"{waiting.content}\n{text}")
                continue
            if waiting is not None:
                yield waiting
            waiting = Turn("user", text, own)
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if turn.tool_calls:
            calls = [
                {"name": call.name, "arguments": dict(call.arguments)} for call in turn.tool_calls
            ]
            texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
            content = "\n".join([turn.content, *texts] if turn.content else texts)
            turn = replace(turn, content=content, tool_calls=())
        yield turn
    if waiting is not None:
        yield waiting


def _declared(
    turns: tuple[Turn, ...], tools: Iterable[object], refuses_system: bool
) -> tuple[Turn, ...]:
    """Write the tools that may be called at the head of the system turn or the first question."""
    text = _TOOLS_TEXT.format(tools="\n".join(map(_json, tools)))
    if turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{text}"), *turns[1:])
    if not refuses_system:
        return (Turn("system", text), *turns)
    first = next((n for n, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    return (*turns[:first], _headed(text, turns[first]), *turns[first + 1 :])


def _without_system(turns: Iterable[Turn], keeps_first: bool) -> Iterable[Turn]:
    """Write system turns at the head of the question that follows; one without it stays."""
    waiting: list[Turn] = []
    for number, turn in enumerate(turns):
        if turn.role == "system" and not (keeps_first and number == 0) and not turn.weight:
            waiting.append(turn)
            continue
        if waiting and turn.role == "user":
            turn = _headed("\n\n".join(one.content for one in waiting), turn)
            waiting = []
        yield from waiting
        waiting = []
        yield turn
    yield from waiting


def _joined(turns: Iterable[Turn], refused: Refused) -> Iterable[Turn]:
    """Join turns of one role that follow each other."""
    roles = {"user": refused.questions, "assistant": refused.answers}
    last: Turn | None = None
    for turn in turns:
        if last is None:
            last = turn
        elif (
            roles.get(turn.role)
            and last.role == turn.role
            and last.weight == turn.weight
            and turn.reasoning is None
            and not (last.tool_calls or turn.tool_calls)
            and last.content.strip()
            and turn.content.strip()
        ):
            last = replace(last, content=f"{last.content}\n\n{turn.content}")
        else:
            yield last
            last = turn
    if last is not None:
        yield last


def _headed(head: str, turn: Turn) -> Turn:
    """Put `head` in front of the content of a turn."""
    moved = len(head) + 2
    start = turn.input_start + moved if turn.input_start else 0
    return replace(turn, content=f"{head}\n\n{turn.content}", input_start=start)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
