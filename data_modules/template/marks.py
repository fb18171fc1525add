"""Put marks in a conversation, and find them in its render.

A mark is a text of private-use characters that says whose it is. Either marks take the place of all
that is a row's own, or they are put around it. Decides how turns are marked; never renders.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from data_modules.template.rendering import Chat
from data_modules.types import ToolCall, Turn

TOOLS = -1
"""the turn that the marks of declared tools belong to"""
# The letter says what a mark stands for: a turn's content (c), reasoning (r) or name (n), the name
# (f) and arguments (k) of its calls, the tools (t), an id (i). Opened ones end at a CLOSE. Ids are
# nine letters and digits, which is all that some templates take.
_POINT, _OPEN, _CLOSE = "\ue0f2", "\ue0f4", "\ue0f3"
_MARK = re.compile(
    "\ue0f1(?P<part>[a-zA-Z])(?P<turn>\\d+)(?:[.](?P<call>\\d+))?(?P<kind>[\ue0f2\ue0f4])"
    "|\ue0f3|Zq7k(?P<id>\\d{5})"
)
_THOUGHT = re.compile(r"(<think>\s*)(.*?)(\s*</think>\s*)(.*?)(\s*)", re.DOTALL)
PRIVATE = re.compile("[\ue0f1-\ue0f4]")
CALL_PARTS = "fki"


class Mark(NamedTuple):
    """Say whose a stretch of a text is: `call` numbers a turn's calls, or the ids of a chat."""

    turn: int
    part: str
    call: int
    start: int
    end: int

    @property
    def what(self) -> tuple[str, int]:
        """Return what of its turn it is."""
        return self.part, self.call


def marked_chat(chat: Chat) -> Chat:
    """Return `chat` with marks in place of all that is its own."""
    ids = {id_: f"Zq7k{number:05d}" for number, id_ in enumerate(ids_of(chat))}
    turns = tuple(_marked(turn, number, ids) for number, turn in enumerate(chat.turns))
    return Chat(turns, (_marked_tool(),) if chat.tools else ())


def wrapped_chat(chat: Chat, wraps: Sequence[Wrap | None]) -> Chat:
    """Return `chat` with marks around what is each turn's own; its tools are as they are."""
    turns = enumerate(zip(chat.turns, wraps, strict=True))
    return Chat(tuple(wrap(turn, n) if wrap else turn for n, (turn, wrap) in turns), chat.tools)


def marks_in(text: str, chat: Chat) -> list[Mark] | None:
    """Return the marks of a text, in order; None where an opened one is not closed.

    `chat` is the one that was marked: it says whose an id is.
    """
    marks: list[Mark] = []
    opened: tuple[int, str, int, int] | None = None
    owners = _owners_of_ids(chat)
    for found in _MARK.finditer(text):
        start, end = found.span()
        if found["id"]:
            number = int(found["id"])
            if number < len(owners):
                marks.append(Mark(owners[number], "i", number, start, end))
            continue
        if found["kind"] is None:
            if opened is None:
                return None
            marks.append(Mark(*opened, end))
            opened = None
            continue
        if opened is not None:
            return None
        part = found["part"].lower()  # a template may write all in capitals
        turn = TOOLS if part == "t" else int(found["turn"])
        whose = turn, part, int(found["call"] or 0), start
        if found["kind"] == _OPEN:
            opened = whose
        else:
            marks.append(Mark(*whose, end))
    return None if opened else marks


def holds_content(text: str) -> bool:
    """Tell whether the mark of a content stands in a text."""
    return any(found["part"] in ("c", "C") for found in _MARK.finditer(text))


def unmarked(text: str) -> tuple[str, Callable[[int], int]]:
    """Return `text` without marks, and where in it a character of the marked text stands."""
    pieces: list[str] = []
    ends: list[int] = []
    removed: list[int] = []
    position = gone = 0
    for found in _MARK.finditer(text):
        if found["id"]:
            continue
        pieces.append(text[position : found.start()])
        position = found.end()
        gone += position - found.start()
        ends.append(position)
        removed.append(gone)
    pieces.append(text[position:])

    def place(offset: int) -> int:
        before = bisect_right(ends, offset)
        return offset - (removed[before - 1] if before else 0)

    return "".join(pieces), place


def form_of(chat: Chat) -> tuple[object, ...]:
    """Return what decides how the template writes `chat`, its contents aside."""
    form: list[object] = [bool(chat.tools)]
    has_ids = False
    for turn in chat.turns:
        content = turn.content
        parts = thought_and_answer(turn) if "</think>" in content else None
        blanks = parts and (*parts[::2], str(bool(parts[1])), str(bool(parts[3])))
        form.append((turn.role, bool(content), blanks))
        if turn.reasoning is not None or turn.tool_calls or turn.name or turn.tool_call_id:
            form.append((turn.reasoning and True, len(turn.tool_calls)))
            form.append((turn.name and True, turn.tool_call_id and True))
            has_ids = has_ids or bool(turn.tool_call_id) or any(c.id for c in turn.tool_calls)
    if has_ids:
        numbers = {id_: number for number, id_ in enumerate(ids_of(chat))}
        form += [numbers[id_] if id_ else None for id_ in _all_ids(chat)]
    return tuple(form)


def thought_and_answer(turn: Turn) -> tuple[str, ...] | None:
    """Take an answer apart whose content is a thought in tags and what is said after it.

    The second and fourth parts are the thought and what is said, without the blanks around them.
    """
    content = turn.content
    if turn.role != "assistant" or content.count("</think>") != 1:
        return None
    parts = _THOUGHT.fullmatch(content)
    return parts and parts.groups()


def ids_of(chat: Chat) -> list[str]:
    """Return the ids of calls and of results, each once."""
    return [id_ for id_ in dict.fromkeys(_all_ids(chat)) if id_]


def part_of(turn: Turn, part: str, call: int) -> str:
    """Return what of a turn stands where a mark stood."""
    if part == "n":
        return turn.name or ""
    if part == "f":
        return turn.tool_calls[call].name
    content = turn.content
    parts = thought_and_answer(turn) if "</think>" in content else None
    if parts:
        return parts[3] if part == "c" else parts[1]
    return content if part == "c" else turn.reasoning or ""


def strings_in(value: object) -> Iterable[str]:
    """Yield the strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings_in(key)
            yield from strings_in(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from strings_in(inner)


Wrap = Callable[[Turn, int], Turn]


def _around(part: str, text: str, number: int, call: int = 0) -> str:
    """Put a mark around what templates keep of a text when they strip it."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    opened = f"\ue0f1{part}{number}.{call}{_OPEN}"
    return f"{text[:start]}{opened}{core}{_CLOSE}{text[start + len(core) :]}"


def _behind(part: str, text: str, number: int, call: int = 0) -> str:
    """Put a mark behind what templates keep of a text when they strip it."""
    core = text.rstrip()
    return f"{core}{_mark(part, number, call)}{text[len(core) :]}" if core else text


def _whole(put: Callable[..., str]) -> Wrap:
    def wrap(turn: Turn, number: int) -> Turn:
        return _wrapped_rest(turn, number, put("c", turn.content, number))

    return wrap


def _thought_and_answer(find: Callable[[str, str], int]) -> Wrap:
    """Mark the thought in a content and what is said after it, parted at a closing tag."""

    def wrap(turn: Turn, number: int) -> Turn:
        content, tag = turn.content, "</think>"
        at = find(content, tag) if turn.role == "assistant" else -1
        if at < 0:
            return _wrapped_rest(turn, number, _around("c", content, number))
        before, answer = content[:at], content[at + len(tag) :]
        head = before.find("<think>")
        first = head + len("<think>") if head >= 0 else 0
        thought = before[:first] + _around("r", before[first:], number)
        return _wrapped_rest(turn, number, thought + tag + _around("c", answer, number))

    return wrap


def _wrapped_rest(turn: Turn, number: int, content: str) -> Turn:
    calls = tuple(
        replace(
            call,
            name=_around("f", call.name, number, index),
            arguments={
                key: _around("k", value, number, index) if isinstance(value, str) else value
                for key, value in call.arguments.items()
            },
        )
        for index, call in enumerate(turn.tool_calls)
    )
    reasoning = turn.reasoning and _around("r", turn.reasoning, number)
    return replace(turn, content=content, reasoning=reasoning, tool_calls=calls)


WRAPS: tuple[Wrap, ...] = (
    _whole(_around),
    _thought_and_answer(str.find),
    _thought_and_answer(str.rfind),
    _whole(_behind),
)
"""the ways to mark a row's own texts, tried in this order: templates look at some of them"""


def _mark(part: str, number: int, call: int = 0) -> str:
    return f"\ue0f1{part}{number}.{call}{_POINT}"


def _marked(turn: Turn, number: int, ids: Mapping[str, str]) -> Turn:
    calls = []
    for index, call in enumerate(turn.tool_calls):
        argument = _mark("k", number, index)
        id_ = ids.get(call.id) if call.id else call.id
        calls.append(ToolCall(_mark("f", number, index), {argument: argument}, id_))
    turn = replace(
        turn,
        tool_calls=tuple(calls),
        name=_mark("n", number) if turn.name else turn.name,
        tool_call_id=ids[turn.tool_call_id] if turn.tool_call_id else turn.tool_call_id,
    )
    said, thought = _mark("c", number), _mark("r", number)
    if parts := thought_and_answer(turn):
        first, own, middle, rest, last = parts
        content = first + (thought if own else "") + middle + (said if rest else "") + last
        return replace(turn, content=content)
    return replace(
        turn,
        content=said if turn.content else "",
        reasoning=thought if turn.reasoning else turn.reasoning,
    )


def _marked_tool() -> dict[str, Any]:
    mark = _mark("t", 0)
    parameters = {
        "type": "object",
        "properties": {mark: {"type": "string", "description": mark}},
        "required": [mark],
    }
    function = {"name": mark, "description": mark, "parameters": parameters}
    return {"type": "function", "function": function}


def _all_ids(chat: Chat) -> list[str | None]:
    ids: list[str | None] = []
    for turn in chat.turns:
        ids += [call.id for call in turn.tool_calls]
        if turn.tool_call_id:
            ids.append(turn.tool_call_id)
    return ids


def _owners_of_ids(chat: Chat) -> list[int]:
    owners: dict[str, int] = {}
    for number, turn in enumerate(chat.turns):
        for id_ in (*(call.id for call in turn.tool_calls), turn.tool_call_id):
            if id_:
                owners.setdefault(id_, number)
    return list(owners.values())
