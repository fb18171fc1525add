"""Mark the texts of a conversation, and match the marked render against the renders of rows.

A mark is a short string of private-use characters that names a turn and a part of it. Marks either
replace all texts of a conversation, or are put around them. The render of a conversation with all
texts replaced is a skeleton: the template's own text, with slots for the texts of a row. Rows with
the same roles, calls and ids share a skeleton; it must match a row's render to the last character.
Never renders.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from data_modules.template.rendering import Chat, split_reasoning
from data_modules.types import ToolCall, Turn

TOOLS_TURN = -1
"""turn number of the marks in declared tools"""
# The letter of a mark names the part: a turn's content (c), reasoning (r) or name (n), the name (f)
# and arguments (k) of a call, declared tools (t), an id (i). An opening mark ends at _CLOSE. Ids
# are nine letters and digits, because some templates accept no others.
_POINT, _OPEN, _CLOSE = "\ue0f2", "\ue0f4", "\ue0f3"
_MARK = re.compile(
    "\ue0f1(?P<part>[a-zA-Z])(?P<turn>\\d+)(?:[.](?P<call>\\d+))?(?P<kind>[\ue0f2\ue0f4])"
    "|\ue0f3|Zq7k(?P<id>\\d{5})"
)
_TAG, _END_TAG = re.compile(r"\s*<\w+>\s*"), re.compile(r"</\w+>")
PRIVATE = re.compile("[\ue0f1-\ue0f4]")
_CALL_PARTS = "fki"
_GAP_PARTS = "kt"


class Mark(NamedTuple):
    """A mark in a text, or the slot that it stands for in a skeleton.

    `call` is the number of the call in its turn, or of the id in its chat.
    """

    turn: int
    part: str
    call: int
    start: int
    end: int

    @property
    def key(self) -> tuple[str, int]:
        """Return the part of the turn that is marked."""
        return self.part, self.call


def replace_with_marks(chat: Chat) -> Chat:
    """Return `chat` with marks in place of all its texts."""
    ids = {id_: f"Zq7k{number:05d}" for number, id_ in enumerate(_turns_by_id(chat))}
    turns = []
    for number, turn in enumerate(chat.turns):
        calls = []
        for index, call in enumerate(turn.tool_calls):
            argument = _mark("k", number, index)
            id_ = ids.get(call.id) if call.id else call.id
            calls.append(ToolCall(_mark("f", number, index), {argument: argument}, id_))
        content_mark, reasoning_mark = _mark("c", number), _mark("r", number)
        content = content_mark if turn.content else ""
        reasoning = reasoning_mark if turn.reasoning else turn.reasoning
        if parts := _split_content(turn):
            opening, thought, closing, answer, end = parts
            content = opening + (thought and reasoning_mark) + closing
            content, reasoning = content + (answer and content_mark) + end, turn.reasoning
        marked = replace(
            turn,
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(calls),
            name=_mark("n", number) if turn.name else turn.name,
            tool_call_id=ids[turn.tool_call_id] if turn.tool_call_id else turn.tool_call_id,
        )
        turns.append(marked)
    return chat._replace(turns=tuple(turns), tools=(_marked_tool(),) if chat.tools else ())


def find_marks(text: str, chat: Chat) -> list[Mark] | None:
    """Return the marks in a text, in order; None if an opening mark is not closed.

    `chat` is the marked chat: it tells which turn an id belongs to.
    """
    marks: list[Mark] = []
    opened: tuple[int, str, int, int] | None = None
    turns_of_ids = list(_turns_by_id(chat).values())
    for found in _MARK.finditer(text):
        start, end = found.span()
        if found["id"]:
            number = int(found["id"])
            # Inside a mark, it belongs to the row's own text.
            if opened is None and number < len(turns_of_ids):
                marks.append(Mark(turns_of_ids[number], "i", number, start, end))
            continue
        if found["kind"] is None:
            if opened is None:
                return None
            marks.append(Mark(*opened, end))
            opened = None
            continue
        if opened is not None:
            return None
        part = found["part"].lower()  # a template may convert text to upper case
        turn = TOOLS_TURN if part == "t" else int(found["turn"])
        fields = turn, part, int(found["call"] or 0), start
        if found["kind"] == _OPEN:
            opened = fields
        else:
            marks.append(Mark(*fields, end))
    return None if opened else marks


def has_content_mark(text: str) -> bool:
    return any(found["part"] in ("c", "C") for found in _MARK.finditer(text))


def remove_marks(text: str) -> tuple[str, Callable[[int], int]]:
    """Return `text` without marks, and a function from old character positions to new ones."""
    pieces: list[str] = []
    ends: list[int] = []
    removed: list[int] = []
    position = num_removed = 0
    for found in _MARK.finditer(text):
        if found["id"]:
            continue
        pieces.append(text[position : found.start()])
        position = found.end()
        num_removed += position - found.start()
        ends.append(position)
        removed.append(num_removed)
    pieces.append(text[position:])

    def new_position(offset: int) -> int:
        num_before = bisect_right(ends, offset)
        return offset - (removed[num_before - 1] if num_before else 0)

    return "".join(pieces), new_position


def skeleton_key(chat: Chat) -> tuple[object, ...]:
    """Return the properties of `chat` that decide how the template writes it, except its texts."""
    key: list[object] = [bool(chat.tools), kwargs_key(chat)]
    has_ids = False
    for turn in chat.turns:
        parts = _split_content(turn) if "</" in turn.content else None
        tags = parts and (*parts[::2], str(bool(parts[1])), str(bool(parts[3])))
        key.append((turn.role, bool(turn.content), tags))
        if turn.reasoning is not None or turn.tool_calls or turn.name or turn.tool_call_id:
            key.append((turn.reasoning and True, len(turn.tool_calls)))
            key.append((turn.name and True, turn.tool_call_id and True))
            has_ids = has_ids or bool(turn.tool_call_id) or any(c.id for c in turn.tool_calls)
    if has_ids:
        numbers = {id_: number for number, id_ in enumerate(_turns_by_id(chat))}
        key += [
            numbers[id_] if id_ else None
            for turn in chat.turns
            for id_ in (*(call.id for call in turn.tool_calls), turn.tool_call_id)
        ]
    return tuple(key)


def kwargs_key(chat: Chat) -> str:
    """Return the arguments of the template as text, "" without any."""
    return json.dumps(chat.kwargs, sort_keys=True, default=str) if chat.kwargs else ""


def _split_content(turn: Turn) -> tuple[str, ...] | None:
    """Split a content that has tags which templates look for into five parts; None for others.

    An answer: tag, reasoning, tag, text, white space. Another turn, as tool results in the text of
    a question: tag, nothing, nothing, text, tag. Reasoning and text have no white space around.
    """
    content = turn.content
    if "</" not in content:
        return None
    if turn.role == "assistant":
        return split_reasoning(content) if content.count("</think>") == 1 else None
    opening, text = _TAG.match(content), content.rstrip()
    closing = _END_TAG.fullmatch(text, text.rfind("</"))
    if not opening or not closing:
        return None
    core = text[opening.end() : closing.start()].rstrip()
    return opening[0], "", "", core, content[opening.end() + len(core) :]


def _text_of_part(turn: Turn, part: str, call: int) -> str:
    """Return the text of `turn` that a mark of this part and call stands for."""
    if part == "n":
        return turn.name or ""
    if part == "f":
        return turn.tool_calls[call].name
    parts = _split_content(turn) if "</" in turn.content else None
    if parts:
        return parts[3] if part == "c" else parts[1]
    return turn.content if part == "c" else turn.reasoning or ""


def strings_in(value: object) -> Iterable[str]:
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
"""puts marks around the texts of a turn, given its number"""


def _mark_around(part: str, text: str, number: int, call: int = 0) -> str:
    """Put a mark around a text without its surrounding white space, which templates may strip."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    opened = f"\ue0f1{part}{number}.{call}{_OPEN}"
    return f"{text[:start]}{opened}{core}{_CLOSE}{text[start + len(core) :]}"


def _mark_after(part: str, text: str, number: int, call: int = 0) -> str:
    """Put a mark after a text without its trailing white space, which templates may strip."""
    core = text.rstrip()
    return f"{core}{_mark(part, number, call)}{text[len(core) :]}" if core else text


def _wrap_content(put_mark: Callable[..., str]) -> Wrap:
    def wrap(turn: Turn, number: int) -> Turn:
        parts = None if turn.role == "assistant" else _split_content(turn)
        if parts is None:
            return _wrap_fields(turn, number, put_mark("c", turn.content, number))
        *opening, text, closing = parts
        content = "".join((*opening, put_mark("c", text, number), closing))
        return _wrap_fields(turn, number, content)

    return wrap


_WRAP_WHOLE = _wrap_content(_mark_around)


def _wrap_reasoning_and_answer(find_tag: Callable[[str, str], int]) -> Wrap:
    """Wrap the reasoning in a content and the answer after it, split at a closing tag."""

    def wrap(turn: Turn, number: int) -> Turn:
        content, tag = turn.content, "</think>"
        at = find_tag(content, tag) if turn.role == "assistant" else -1
        if at < 0:
            return _WRAP_WHOLE(turn, number)
        before, answer = content[:at], content[at + len(tag) :]
        opening = before.find("<think>")
        first = opening + len("<think>") if opening >= 0 else 0
        reasoning = before[:first] + _mark_around("r", before[first:], number)
        return _wrap_fields(turn, number, reasoning + tag + _mark_around("c", answer, number))

    return wrap


def _wrap_fields(turn: Turn, number: int, content: str) -> Turn:
    """Return `turn` with this wrapped content, and its reasoning and calls wrapped."""
    calls = tuple(
        replace(
            call,
            name=_mark_around("f", call.name, number, index),
            arguments={
                key: _mark_around("k", value, number, index) if isinstance(value, str) else value
                for key, value in call.arguments.items()
            },
        )
        for index, call in enumerate(turn.tool_calls)
    )
    reasoning = turn.reasoning and _mark_around("r", turn.reasoning, number)
    return replace(turn, content=content, reasoning=reasoning, tool_calls=calls)


WRAPS: tuple[Wrap, ...] = (
    _WRAP_WHOLE,
    _wrap_reasoning_and_answer(str.find),
    _wrap_reasoning_and_answer(str.rfind),
    _wrap_content(_mark_after),
)
"""ways to wrap a row's texts, in the order in which they are tried: some templates inspect texts"""


def _mark(part: str, number: int, call: int = 0) -> str:
    return f"\ue0f1{part}{number}.{call}{_POINT}"


def _marked_tool() -> dict[str, Any]:
    mark = _mark("t", 0)
    parameters = {
        "type": "object",
        "properties": {mark: {"type": "string", "description": mark}},
        "required": [mark],
    }
    function = {"name": mark, "description": mark, "parameters": parameters}
    return {"type": "function", "function": function}


def _turns_by_id(chat: Chat) -> dict[str, int]:
    """Return the distinct ids of calls and results, and the first turn that has each."""
    turns: dict[str, int] = {}
    for number, turn in enumerate(chat.turns):
        for id_ in (*(call.id for call in turn.tool_calls), turn.tool_call_id):
            if id_:
                turns.setdefault(id_, number)
    return turns


class MarkRun(NamedTuple):
    """Consecutive marks of one turn, and the marks of other turns before and after them."""

    marks: list[Mark]
    before: Mark | None
    after: Mark | None


def runs_by_turn(marks: Sequence[Mark]) -> dict[int, list[MarkRun]]:
    """Return the runs of each turn's marks, in order."""
    runs: dict[int, list[MarkRun]] = {}
    first = 0
    for index, mark in enumerate(marks):
        after = marks[index + 1] if index + 1 < len(marks) else None
        if after is None or after.turn != mark.turn:
            before = marks[first - 1] if first else None
            runs.setdefault(mark.turn, []).append(
                MarkRun(list(marks[first : index + 1]), before, after)
            )
            first = index + 1
    return runs


def call_ranges(marks: Sequence[Mark]) -> list[tuple[int, int]]:
    """Return the character ranges of the calls among the marks of an answer."""
    ranges: list[tuple[int, int]] = []
    is_call = False
    for mark in marks:
        if mark.part in _CALL_PARTS:
            start = ranges.pop()[0] if is_call else mark.start
            ranges.append((start, mark.end))
        is_call = mark.part in _CALL_PARTS
    return ranges


class TurnSpan(NamedTuple):
    """The characters of a turn in a text: `start` to `end`, its stop token up to `stop_end`.

    The span of an answer starts at the first character that the model has to generate. `stop` is
    the text of the stop token, "" without one. A turn that is interrupted by another one has a span
    for each of its parts. `other_prompt` is the end of the generation prompt if the text before the
    answer is another one, "" if it is the same.
    """

    turn: int
    start: int
    end: int
    stop_end: int
    stop: str
    other_prompt: str = ""


class AnswerSpans(NamedTuple):
    """The spans of the answers in a marked text.

    `suffix` is the stop token of a template that writes it only before the next message: it is
    appended to the text. `calls` are the character ranges of calls, from mark to mark.
    """

    spans: list[TurnSpan]
    suffix: str
    calls: list[tuple[int, int]]


class RenderedChat(NamedTuple):
    """A rendered conversation: its text, its turns, and what the template omitted (note kinds)."""

    text: str
    spans: list[TurnSpan]
    lost: tuple[str, ...]


class Skeleton:
    """A marked text that is matched against the renders of rows, to find their turns.

    Its pieces are the template's own text; between two of them is the slot of a row's text. Slots
    of calls (k) and tools (t) are gaps: the template writes their texts in its own way.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        slots: Sequence[Mark],
        spans: Sequence[tuple[TurnSpan, list[tuple[int, int]]]],
        suffix: str,
        lost: tuple[str, ...],
    ) -> None:
        self._first = pieces[0]
        self._steps = list(zip(slots, pieces[1:], strict=True))
        self._spans, self._suffix, self._lost = spans, suffix, lost

    @classmethod
    def build(
        cls,
        text: str,
        marks: Sequence[Mark],
        answers: AnswerSpans,
        special: re.Pattern[str],
        lost: tuple[str, ...],
    ) -> Skeleton | None:
        """Split a marked text; None if a gap has no end, or a span starts or ends inside a slot.

        A gap ends at the next special token, which no call and no tool changes; without one, at the
        end of the line.
        """
        slots = _find_slots(marks, dict(answers.calls))
        for index, slot in enumerate(slots):
            if slot.part in _GAP_PARTS:
                until = slots[index + 1].start if index + 1 < len(slots) else len(text)
                found = special.search(text, slot.end, until)
                end = found.start() if found else text.find("\n", slot.end, until)
                if end < 0:
                    return None
                slots[index] = slot._replace(end=end)
        starts = [0, *(slot.end for slot in slots)]
        ends = [*(slot.start for slot in slots), len(text)]
        spans = []
        for span in answers.spans:
            places = []
            for offset in (span.start, span.end, span.stop_end):
                piece = bisect_right(starts, offset) - 1
                if offset > ends[piece]:
                    return None
                places.append((piece, offset - starts[piece]))
            spans.append((span, places))
        pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        return cls(pieces, slots, spans, answers.suffix, lost)

    def match(self, text: str, chat: Chat) -> RenderedChat | None:
        """Return the turns in the render of `chat`; None if any character differs."""
        if not text.startswith(self._first):
            return None
        starts = [0]
        position = len(self._first)
        ids: list[str] | None = None
        for slot, piece in self._steps:
            if slot.part in _GAP_PARTS:
                end = _gap_end(text, position, piece, slot, chat)
                if end < 0:
                    return None
            else:
                if slot.part == "i":
                    ids = list(_turns_by_id(chat)) if ids is None else ids
                    value = ids[slot.call]
                else:
                    value = _text_of_part(chat.turns[slot.turn], slot.part, slot.call)
                end = position + len(value)
                if not (text.startswith(value, position) and text.startswith(piece, end)):
                    for variant in _written_variants(value):
                        end = position + len(variant)
                        if text.startswith(variant, position) and text.startswith(piece, end):
                            break
                    else:
                        return None
            starts.append(end)
            position = end + len(piece)
        if position != len(text):
            return None

        spans = []
        for span, places in self._spans:
            start, end, stop_end = (starts[piece] + offset for piece, offset in places)
            spans.append(TurnSpan(span.turn, start, end, stop_end, span.stop, span.other_prompt))
        return RenderedChat(*append_stop(text, spans, self._suffix), self._lost)


def append_stop(text: str, spans: list[TurnSpan], suffix: str) -> tuple[str, list[TurnSpan]]:
    """Append the stop token that the template writes only before a next message."""
    if not suffix:
        return text, spans
    last = max(spans, key=lambda span: span.stop_end)
    whole = text + suffix
    return whole, [span._replace(stop_end=len(whole)) if span is last else span for span in spans]


def _find_slots(marks: Sequence[Mark], calls: dict[int, int]) -> list[Mark]:
    """Return the slots of a marked text: one for each mark, but one for all marks of a gap."""
    slots: list[Mark] = []
    for mark in marks:
        if slots and mark.end <= slots[-1].end:
            continue  # inside a call
        end = calls.get(mark.start)
        if end is not None:
            slots.append(Mark(mark.turn, "k", 0, mark.start, end))
        elif slots and mark.turn == TOOLS_TURN == slots[-1].turn:
            slots[-1] = slots[-1]._replace(end=mark.end)
        else:
            slots.append(mark)
    return slots


def _gap_end(text: str, position: int, piece: str, slot: Mark, chat: Chat) -> int:
    """Return where a gap ends; -1 if `piece` does not follow, or occurs in the gap's own texts."""
    values: Iterable[object] = (
        chat.tools
        if slot.turn == TOOLS_TURN
        else ((call.name, call.arguments) for call in chat.turns[slot.turn].tool_calls)
    )
    if any(piece in string for string in strings_in(list(values))):
        return -1
    return text.find(piece, position)


def _written_variants(value: str) -> Iterable[str]:
    """Yield the variants in which templates write a content that they do not copy unchanged."""
    yield value.strip()
    yield value.rstrip()
    yield value.lstrip()
    yield value.strip("\n")
    yield value.lstrip("\n")
    yield value.rstrip("\n")
    yield json.dumps(value, ensure_ascii=False)[1:-1]  # tool results written as JSON strings
