"""Learn what a template writes around the contents of a conversation.

A conversation is rendered with marks in the place of its contents, calls and tools; what stands
between the marks is the same for all conversations of that form. Decides how such a scaffold is
laid over a rendered row, exactly to the last character or not at all.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data_modules.template.bounds import Bounds, TurnSpan
from data_modules.template.marks import TOOLS, Mark, ids_of, part_of, strings_in
from data_modules.template.rendering import Chat

_GAPS = "kt"


class Placed(NamedTuple):
    """Hold a rendered conversation: its text, its turns, and what the template left out."""

    text: str
    spans: list[TurnSpan]
    lost: tuple[str, ...]


class Slot(NamedTuple):
    """Name what stands between two pieces, and its place in the marked text.

    Of the parts that marks name, calls (k) and tools (t) are gaps, which the template writes in its
    own way.
    """

    turn: int
    part: str
    call: int
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
    def of(
        cls,
        text: str,
        marks: Sequence[Mark],
        calls: Iterable[tuple[int, int]],
        special: re.Pattern[str],
    ) -> Layout | None:
        """Take a marked text apart; None where a gap has no end.

        `calls` are the stretches that calls take. A gap ends at the next special token, which no
        call and no tool changes; where there is none, at the next line.
        """
        slots = _slots(marks, dict(calls))
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
        return cls(text, pieces, slots)

    def place(self, offset: int) -> _Place | None:
        """Return the piece that holds a character of the marked text; None inside a slot."""
        piece = bisect_right(self.slots, offset, key=lambda slot: slot.end)
        start = self.slots[piece - 1].end if piece else 0
        return _Place(piece, offset - start) if offset - start <= len(self.pieces[piece]) else None


class Scaffold:
    """Lay the pieces of a layout over rendered rows; `bounds` are those of the marked text."""

    def __init__(self, layout: Layout, bounds: Bounds, lost: tuple[str, ...]) -> None:
        self._first = layout.pieces[0]
        self._steps = [
            (slot, piece) for slot, piece in zip(layout.slots, layout.pieces[1:], strict=True)
        ]
        self._extents: list[tuple[TurnSpan, _Place, _Place, _Place]] = []
        self.is_whole = True
        """whether every span begins and ends between the slots"""
        for span in bounds.spans:
            start, end, stop_end = map(layout.place, (span.start, span.end, span.stop_end))
            if start and end and stop_end:
                self._extents.append((span, start, end, stop_end))
            else:
                self.is_whole = False
        self._suffix, self._lost = bounds.suffix, lost

    def fit(self, text: str, chat: Chat) -> Placed | None:
        """Return the turns in `text`; None where scaffold and text differ in any character."""
        if not text.startswith(self._first):
            return None
        starts = [0]
        position = len(self._first)
        ids: list[str] | None = None
        for slot, piece in self._steps:
            if slot.part in _GAPS:
                end = _gap_end(text, position, piece, slot, chat)
                if end < 0:
                    return None
            else:
                if slot.part == "i":
                    ids = ids_of(chat) if ids is None else ids
                    value = ids[slot.call]
                else:
                    value = part_of(chat.turns[slot.turn], slot.part, slot.call)
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
            )
            for span, start, end, stop_end in self._extents
        ]
        return Placed(*with_suffix(text, spans, self._suffix), self._lost)


def with_suffix(text: str, spans: list[TurnSpan], suffix: str) -> tuple[str, list[TurnSpan]]:
    """End a text with the stop token that the template writes in front of a next message only."""
    if not suffix:
        return text, spans
    last = max(spans, key=lambda span: span.stop_end)
    whole = text + suffix
    return whole, [span._replace(stop_end=len(whole)) if span is last else span for span in spans]


def _slots(marks: Sequence[Mark], calls: dict[int, int]) -> list[Slot]:
    """Return the slots of a marked text: one for each mark, one for all marks of a gap."""
    slots: list[Slot] = []
    for mark in marks:
        if slots and mark.end <= slots[-1].end:
            continue  # in a call
        end = calls.get(mark.start)
        if end is not None:
            slots.append(Slot(mark.turn, "k", 0, mark.start, end))
        elif slots and mark.turn == TOOLS == slots[-1].turn:
            slots[-1] = slots[-1]._replace(end=mark.end)
        else:
            slots.append(Slot(*mark))
    return slots


def _gap_end(text: str, position: int, piece: str, slot: Slot, chat: Chat) -> int:
    """Return where a gap ends; -1 where nothing ends it, or its own text could."""
    own: Iterable[object] = (
        chat.tools
        if slot.turn == TOOLS
        else ((call.name, call.arguments) for call in chat.turns[slot.turn].tool_calls)
    )
    if any(piece in string for string in strings_in(list(own))):
        return -1
    return text.find(piece, position)


def _forms(value: str) -> Iterable[str]:
    """Yield the forms in which templates write a content that they do not write as it is."""
    yield value.strip()
    yield value.rstrip()
    yield value.lstrip()
    yield value.strip("\n")
    yield value.lstrip("\n")
    yield value.rstrip("\n")
    yield json.dumps(value, ensure_ascii=False)[1:-1]  # results that are written as JSON strings
