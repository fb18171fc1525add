"""Find where each turn stands in a rendered conversation.

A skeleton, made once for all conversations of a form by rendering one whose contents are marks, is
matched against the row's text, to the last character. Where none fits a row, marks are put around
the row's own texts (`search`), and the text without them must be the row's. Never calls
`{% generation %}`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data_modules.messages import shown
from data_modules.template.bounds import BoundFinder, Bounds, TurnSpan
from data_modules.template.marks import (
    PRIVATE,
    TOOLS,
    WRAPS,
    Mark,
    Wrap,
    form_of,
    holds_content,
    ids_of,
    marked_chat,
    marks_in,
    part_of,
    strings_in,
    unmarked,
    wrapped_chat,
)
from data_modules.template.rendering import Chat, Renderer, RowRefusedError

_GAPS = "kt"
MAX_SKELETONS = 1024
MAX_TRIED_TURNS = 64
LOST = {
    "system": "lost_system",
    "user": "lost_user",
    "assistant": "lost_content",
    "tool": "lost_tool_turn",
}
"""role -> the note on a row whose template does not write the content of such a turn"""


class RenderedChat(NamedTuple):
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


class _Position(NamedTuple):
    piece: int
    offset: int


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Hold the pieces of a marked text, and the slots between them."""

    pieces: list[str]
    slots: list[Slot]

    @classmethod
    def of(
        cls,
        text: str,
        marks: Sequence[Mark],
        calls: Iterable[tuple[int, int]],
        special: re.Pattern[str],
    ) -> MarkedText | None:
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
        return cls(pieces, slots)

    def place(self, offset: int) -> _Position | None:
        """Return the piece that holds a character of the marked text; None inside a slot."""
        piece = bisect_right(self.slots, offset, key=lambda slot: slot.end)
        start = self.slots[piece - 1].end if piece else 0
        return (
            _Position(piece, offset - start) if offset - start <= len(self.pieces[piece]) else None
        )


class Skeleton:
    """Lay the pieces of a marked text over rendered rows; `bounds` are those of the marked text."""

    def __init__(self, marked: MarkedText, bounds: Bounds, lost: tuple[str, ...]) -> None:
        self._first = marked.pieces[0]
        self._steps = [
            (slot, piece) for slot, piece in zip(marked.slots, marked.pieces[1:], strict=True)
        ]
        self._extents: list[tuple[TurnSpan, _Position, _Position, _Position]] = []
        self.is_whole = True
        """whether every span begins and ends between the slots"""
        for span in bounds.spans:
            start, end, stop_end = map(marked.place, (span.start, span.end, span.stop_end))
            if start and end and stop_end:
                self._extents.append((span, start, end, stop_end))
            else:
                self.is_whole = False
        self._suffix, self._lost = bounds.suffix, lost

    def fit(self, text: str, chat: Chat) -> RenderedChat | None:
        """Return the turns in `text`; None where skeleton and text differ in any character."""
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
        return RenderedChat(*with_suffix(text, spans, self._suffix), self._lost)


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


def _same_text(
    text: str | RowRefusedError, placed: RenderedChat | RowRefusedError
) -> RenderedChat | RowRefusedError:
    """Return the turns that the twin found, where its text is the row's own."""
    if isinstance(text, RowRefusedError) or isinstance(placed, RowRefusedError):
        return text if isinstance(text, RowRefusedError) else placed
    if placed.text == text:
        return placed
    return RowRefusedError(
        "the chat template writes this row otherwise than the named one by which its answers are "
        "found, so they cannot be located; set data.chat_template=plain"
    )


class SpanFinder:
    """Render conversations and find their turns.

    `specials` are the texts that can end a turn, `framing` the tokenizer's BOS and EOS. Once
    `twin` is set, it finds the turns: in texts of another template, for rows that both write alike.
    """

    def __init__(
        self, renderer: Renderer, specials: Iterable[str], framing: Iterable[str] = ()
    ) -> None:
        self._renderer = renderer
        self._bounds = BoundFinder(renderer, specials, framing)
        self._skeletons: dict[object, Skeleton | None] = {}
        self.twin: SpanFinder | None = None

    def place(self, chats: Sequence[Chat]) -> list[RenderedChat | RowRefusedError]:
        """Render each chat once, and say where its turns stand."""
        if self.twin is not None:
            texts = self._renderer.render(chats, False)
            return list(map(_same_text, texts, self.twin.place(chats)))
        placed: list[RenderedChat | RowRefusedError] = []
        for chat, text in zip(chats, self._renderer.render(chats, False), strict=True):
            if isinstance(text, RowRefusedError):
                placed.append(text)
                continue
            skeleton = self._skeleton(chat)
            found = skeleton.fit(text, chat) if skeleton else None
            try:
                placed.append(found or self.search(chat, text))
            except RowRefusedError as refused:
                placed.append(refused)
        return placed

    def search(self, chat: Chat, text: str) -> RenderedChat:
        """Find the turns with marks around the row's own texts: slow, and right for any row."""
        if any(PRIVATE.search(own) for own in strings_in(_own_texts(chat))):
            raise RowRefusedError(
                "its text holds one of the private characters U+E0F1 to U+E0F4, and the chat "
                "template does not write that text as it is; remove them"
            )
        refused: RowRefusedError | None = None
        for wrap in WRAPS:
            try:
                placed = self._searched(chat, [wrap] * len(chat.turns), text)
            except RowRefusedError as error:
                refused = refused or error
                continue
            if placed is not None:
                return placed
        if refused is None:
            placed = self._searched(chat, self._wraps_by_turn(chat, text), text)
            if placed is not None:
                return placed
        raise refused or RowRefusedError(
            "the chat template writes its turns otherwise when one of their texts is another, so "
            "its answers cannot be located; set data.chat_template=plain"
        )

    def _searched(self, chat: Chat, wraps: Sequence[Wrap | None], text: str) -> RenderedChat | None:
        """Return the turns that marks show; None where `text` is another one without them."""
        wrapped = wrapped_chat(chat, wraps)
        (rendered,) = self._renderer.render([wrapped], False)
        marks = None if isinstance(rendered, RowRefusedError) else marks_in(rendered, wrapped)
        if isinstance(rendered, RowRefusedError) or marks is None:
            return None
        plain, place = unmarked(rendered)
        if plain != text:
            return None
        bounds = self._bounds.find(wrapped, rendered, marks)
        _check_written(chat, rendered, marks)
        spans = [
            span._replace(
                start=place(span.start), end=place(span.end), stop_end=place(span.stop_end)
            )
            for span in self._with_others(wrapped, rendered, marks, bounds)
        ]
        lost = _lost(wrapped, marks, bounds)
        if chat.tools and self._renderer.render([Chat(chat.turns)], False) == [text]:
            lost = ("lost_tools", *lost)
        return RenderedChat(*with_suffix(text, spans, bounds.suffix), lost)

    def _wraps_by_turn(self, chat: Chat, text: str) -> list[Wrap | None]:
        """Return for each turn how it can be marked alone."""
        wraps: list[Wrap | None] = []
        for number, turn in enumerate(chat.turns[:MAX_TRIED_TURNS]):
            for wrap in WRAPS:
                alone = [wrap if n == number else None for n in range(len(chat.turns))]
                (rendered,) = self._renderer.render([wrapped_chat(chat, alone)], False)
                if isinstance(rendered, str) and unmarked(rendered)[0] == text:
                    wraps.append(wrap)
                    break
            else:
                raise RowRefusedError(
                    f"turn {number + 1} ({turn.role}): the chat template writes the row otherwise "
                    "when this text is another, so it cannot be located; set "
                    "data.chat_template=plain"
                )
        return [*wraps, *[WRAPS[0]] * (len(chat.turns) - len(wraps))]

    def _skeleton(self, chat: Chat) -> Skeleton | None:
        key = form_of(chat)
        if key not in self._skeletons:
            if len(self._skeletons) >= MAX_SKELETONS:
                del self._skeletons[next(iter(self._skeletons))]
            try:
                self._skeletons[key] = self._build(marked_chat(chat))
            except RowRefusedError:
                self._skeletons[key] = None
        return self._skeletons[key]

    def _build(self, chat: Chat) -> Skeleton | None:
        """Render a marked chat, and find its turns."""
        (text,) = self._renderer.render([chat], False)
        marks = None if isinstance(text, RowRefusedError) else marks_in(text, chat)
        if isinstance(text, RowRefusedError) or marks is None:
            return None
        bounds = self._bounds.find(chat, text, marks)
        marked = MarkedText.of(text, marks, bounds.calls, self._bounds.special)
        if marked is None:
            return None
        spans = self._with_others(chat, text, marks, bounds)
        lost = _lost(chat, marks, bounds)
        if chat.tools and not any(mark.turn == TOOLS for mark in marks):
            lost = ("lost_tools", *lost)
        skeleton = Skeleton(marked, bounds._replace(spans=spans), lost)
        return skeleton if skeleton.is_whole else None

    def _with_others(
        self, chat: Chat, text: str, marks: Sequence[Mark], bounds: Bounds
    ) -> list[TurnSpan]:
        """Add the spans of the turns other than answers, each where its content first occurs."""
        stops = {span.stop for span in bounds.spans if span.stop}
        spans = {}
        for mark in marks:
            is_other = mark.part == "c" and chat.turns[mark.turn].role != "assistant"
            if is_other and mark.turn not in spans:
                stop = self._bounds.stop_at(text, mark.end)
                if stop is not None and stop[1] in stops:
                    spans[mark.turn] = TurnSpan(
                        mark.turn, mark.start, mark.end, stop.end(), stop[1]
                    )
                else:
                    spans[mark.turn] = TurnSpan(mark.turn, mark.start, mark.end, mark.end, "")
        return sorted([*bounds.spans, *spans.values()])


def _lost(chat: Chat, marks: Sequence[Mark], bounds: Bounds) -> tuple[str, ...]:
    """Return what of a marked chat is not in its text, or in no span of its turn; no tools."""
    spans: dict[int, list[TurnSpan]] = {}
    for span in bounds.spans:
        spans.setdefault(span.turn, []).append(span)
    held = {
        mark[:3]
        for mark in marks
        if mark.turn not in spans
        or any(span.start <= mark.start < span.stop_end for span in spans[mark.turn])
    }
    lost = []
    for number, turn in enumerate(chat.turns):
        if holds_content(turn.content) and (number, "c", 0) not in held:
            lost.append(LOST[turn.role])
        if any((number, "f", call) not in held for call in range(len(turn.tool_calls))):
            lost.append("lost_tool_calls")
    return tuple(dict.fromkeys(lost))


def _check_written(chat: Chat, text: str, marks: Sequence[Mark]) -> None:
    """Raise RowRefusedError where the template writes an answer in other words."""
    for mark in marks:
        turn = chat.turns[mark.turn]
        if mark.part != "c" or turn.role != "assistant":
            continue
        written, _ = unmarked(text[mark.start : mark.end])
        if not written:  # a mark behind the content
            written, _ = unmarked(text[: mark.start])
            written = written[-len(turn.content.rpartition("</think>")[2].strip()) :]
        if written not in turn.content:
            raise RowRefusedError(
                f"turn {mark.turn + 1} (assistant): the chat template does not write the answer "
                f"`{shown(turn.content)}` as it is; set data.chat_template=plain, or give a .jinja "
                "file that does"
            )


def _own_texts(chat: Chat) -> list[object]:
    return [
        [turn.content, turn.reasoning, [[call.name, call.arguments] for call in turn.tool_calls]]
        for turn in chat.turns
    ]
