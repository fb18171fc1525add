"""Learn what a template writes around the contents of a conversation.

A conversation is rendered with marks in the place of its contents, calls and tools; what stands
between the marks is the same for all conversations of that form. Decides how such a scaffold is
laid over a rendered row, exactly to the last character or not at all.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from data_modules.template.rendering import Chat
from data_modules.types import ToolCall, Turn

# Private-use characters that no text and no template holds. The letter says what the mark stands
# for: a turn's content, reasoning, name or id of the call it answers; the gaps of its calls (k) and
# of the tools (t), which the template writes in its own way.
MARK = re.compile("\ue0f1([crnikt])(\\d+)\ue0f2")
_GAPS = "kt"


class TurnSpan(NamedTuple):
    """Say where a turn stands in the text: `start` to `end`, its stop token up to `stop_end`.

    `start` is the first character that an assistant has to say. `stop` is the token's text, empty
    where none follows. `is_prompted`: what comes before is what the model is asked at that place.
    """

    turn: int
    start: int
    end: int
    stop_end: int
    stop: str
    is_prompted: bool


class Placed(NamedTuple):
    """Hold a rendered conversation: its text, its turns, and what the template left out."""

    text: str
    spans: list[TurnSpan]
    lost: tuple[str, ...]


class Slot(NamedTuple):
    """Name what stands between two pieces, and its place in the marked text."""

    turn: int
    part: str
    start: int
    end: int


class _Place(NamedTuple):
    piece: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the pieces of a marked text, and the slots between them."""

    text: str
    pieces: list[str]
    slots: list[Slot]

    @classmethod
    def of(cls, text: str, special: re.Pattern[str]) -> Layout | None:
        """Take a marked text apart; None where a content stands twice, or a gap has no end.

        A gap ends at the next special token, which no call and no tool changes; where there is
        none, at the next line.
        """
        slots: list[Slot] = []
        for mark in MARK.finditer(text):
            slot = Slot(int(mark[2]), mark[1], mark.start(), mark.end())
            if slots and slot.part in _GAPS and slot[:2] == slots[-1][:2]:
                slots[-1] = slots[-1]._replace(end=slot.end)
            else:
                slots.append(slot)
        for index, slot in enumerate(slots):
            if slot.part in _GAPS:
                until = slots[index + 1].start if index + 1 < len(slots) else len(text)
                ends = special.search(text, slot.end, until)
                end = ends.start() if ends else text.find("\n", slot.end, until)
                if end < 0:
                    return None
                slots[index] = slot._replace(end=end)
        starts = [0, *(slot.end for slot in slots)]
        ends_at = [*(slot.start for slot in slots), len(text)]
        pieces = [text[start:end] for start, end in zip(starts, ends_at, strict=True)]
        if len({slot[:2] for slot in slots}) < len(slots) or "\ue0f1" in "".join(pieces):
            return None
        return cls(text, pieces, slots)

    def place(self, offset: int) -> _Place | None:
        """Return the piece that holds a character of the marked text; None inside a slot."""
        piece = bisect_right(self.slots, offset, key=lambda slot: slot.end)
        start = self.slots[piece - 1].end if piece else 0
        return _Place(piece, offset - start) if offset - start <= len(self.pieces[piece]) else None


class Scaffold:
    """Lay the pieces of a layout over rendered rows; `spans` are those of the marked text."""

    def __init__(self, layout: Layout, spans: Iterable[TurnSpan], lost: tuple[str, ...]) -> None:
        self._first = layout.pieces[0]
        self._steps = [
            (slot.turn, slot.part, piece)
            for slot, piece in zip(layout.slots, layout.pieces[1:], strict=True)
        ]
        self._extents: list[tuple[TurnSpan, _Place, _Place, _Place]] = []
        self.is_whole = True
        """whether every span begins and ends between the slots"""
        for span in spans:
            start, end, stop_end = map(layout.place, (span.start, span.end, span.stop_end))
            if start and end and stop_end:
                self._extents.append((span, start, end, stop_end))
            else:
                self.is_whole = False
        self._lost = lost

    def fit(self, text: str, chat: Chat) -> Placed | None:
        """Return the turns in `text`; None where scaffold and text differ in any character."""
        if not text.startswith(self._first):
            return None
        starts = [0]
        position = len(self._first)
        for turn, part, piece in self._steps:
            if part in _GAPS:
                end = text.find(piece, position)
                if end < 0:
                    return None
            else:
                value = _part(chat.turns[turn], part)
                end = position + len(value)
                if not (text.startswith(value, position) and text.startswith(piece, end)):
                    for form in _forms(value):
                        end = position + len(form)
                        if text.startswith(form, position) and text.startswith(piece, end):
                            break
                    else:
                        return None
            starts.append(end)
            position = end + len(piece)
        if position != len(text):
            return None
        spans = [
            TurnSpan(
                span.turn,
                starts[start.piece] + start.offset,
                starts[end.piece] + end.offset,
                starts[stop_end.piece] + stop_end.offset,
                span.stop,
                span.is_prompted,
            )
            for span, start, end, stop_end in self._extents
        ]
        return Placed(text, spans, self._lost)


def form_of(chat: Chat) -> tuple[object, ...]:
    """Return what decides how the template lays out `chat`, its contents aside."""
    form: list[object] = [bool(chat.tools)]
    for turn in chat.turns:
        content = turn.content
        form.append((turn.role, bool(content), "</think>" in content and _thinks(turn)))
        if turn.reasoning is not None or turn.tool_calls or turn.name or turn.tool_call_id:
            form.append((turn.reasoning and True, bool(turn.tool_calls)))
            form.append((turn.name and True, turn.tool_call_id and True))
    return tuple(form)


def marked_chat(chat: Chat) -> Chat:
    """Return `chat` with marks in place of all that is its own."""
    turns = tuple(_marked(turn, number) for number, turn in enumerate(chat.turns))
    return Chat(turns, (_marked_tool(),) if chat.tools else ())


def _mark(part: str, number: int) -> str:
    return f"\ue0f1{part}{number}\ue0f2"


def _marked(turn: Turn, number: int) -> Turn:
    call = _mark("k", number)
    turn = replace(
        turn,
        tool_calls=(ToolCall(call, {call: call}),) if turn.tool_calls else (),
        name=_mark("n", number) if turn.name else turn.name,
        tool_call_id=_mark("i", number) if turn.tool_call_id else turn.tool_call_id,
    )
    said, thought = _mark("c", number), _mark("r", number)
    if _thinks(turn):
        rest = turn.content.partition("</think>")[2]
        return replace(turn, content=f"<think>{thought}</think>{said if rest else ''}")
    return replace(
        turn,
        content=said if turn.content else "",
        reasoning=thought if turn.reasoning else turn.reasoning,
    )


def _marked_tool() -> dict[str, object]:
    mark = _mark("t", 0)
    parameters = {
        "type": "object",
        "properties": {mark: {"type": "string", "description": mark}},
        "required": [mark],
    }
    function = {"name": mark, "description": mark, "parameters": parameters}
    return {"type": "function", "function": function}


def _thinks(turn: Turn) -> bool:
    """Tell whether an answer's content is one thought in tags, and what is said after it."""
    content = turn.content
    return (
        turn.role == "assistant"
        and content.startswith("<think>")
        and content.count("</think>") == 1
    )


def _part(turn: Turn, part: str) -> str:
    if part == "n":
        return turn.name or ""
    if part == "i":
        return turn.tool_call_id or ""
    content = turn.content
    if "</think>" in content and _thinks(turn):
        thought, _, said = content.removeprefix("<think>").partition("</think>")
        return said if part == "c" else thought
    return content if part == "c" else turn.reasoning or ""


def _forms(value: str) -> Iterable[str]:
    """Yield the forms in which templates write a content that they do not write as it is."""
    yield value.strip()
    yield value.rstrip()
    yield value.lstrip()
    yield value.strip("\n")
    yield value.lstrip("\n")
    yield value.rstrip("\n")
