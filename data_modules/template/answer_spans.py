"""Find where each turn stands in a rendered conversation.

Decides where an answer begins (after the generation prompt), where its content ends and which
token stops it. Never calls `{% generation %}`. Each conversation is rendered once: a scaffold says
where its turns are. Where none fits a row, the row's own beginnings are rendered (`search`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from data_modules.template.rendering import Chat, Renderer, RowRefusedError
from data_modules.template.scaffold import (
    MARK,
    Layout,
    Placed,
    Scaffold,
    TurnSpan,
    form_of,
    marked_chat,
)
from data_modules.types import Turn, shown

MAX_SCAFFOLDS = 1024
_OPENS_THOUGHT = re.compile(r"<think>\s*$")


class SpanFinder:
    """Render conversations and find their turns; `specials` are the texts that can end a turn."""

    def __init__(self, renderer: Renderer, specials: Iterable[str]) -> None:
        self._renderer = renderer
        either = "|".join(map(re.escape, specials)) or "(?!)"
        self._stop = re.compile(rf"\s*({either})")
        self._special = re.compile(either)
        self._scaffolds: dict[object, Scaffold | None] = {}
        self._usual_stop: str | None = None

    def place(self, chats: Sequence[Chat]) -> list[Placed | RowRefusedError]:
        """Render each chat once, and say where its turns stand."""
        placed: list[Placed | RowRefusedError] = []
        for chat, text in zip(chats, self._renderer.render(chats, False), strict=True):
            if isinstance(text, RowRefusedError):
                placed.append(text)
                continue
            scaffold = self._scaffold(chat)
            found = scaffold.fit(text, chat) if scaffold else None
            try:
                placed.append(found or self.search(chat, text))
            except RowRefusedError as refused:
                placed.append(refused)
        return placed

    def search(self, chat: Chat, text: str) -> Placed:
        """Find the turns by rendering the beginnings of this chat: slow, and right for any row."""
        spans: list[TurnSpan] = []
        marked: list[int] = []
        numbers = _answers(chat.turns)
        prefixes = [self._prefix(chat, number) for number in numbers]
        for position, (number, (prompted, unprompted)) in enumerate(
            zip(numbers, prefixes, strict=True)
        ):
            turn = chat.turns[number]
            if is_prompted := text.startswith(prompted):
                start, exact = len(prompted), prompted != unprompted
            else:
                marked = marked or self._answer_starts(chat, text)
                start, exact = marked[position], True
            # Never beyond the next answer's prefix, where the same words may stand again.
            after = prefixes[position + 1][0] if position + 1 < len(prefixes) else text
            here = text[: len(after)] if text.startswith(after) else text
            if turn.tool_calls or (turn.reasoning and not turn.content):
                span = self._closed_span(chat, number, here, start, is_prompted)
            elif not turn.content:
                continue
            else:
                span = self._content_span(turn, number, here, start, exact, is_prompted)
            spans.append(span)
        spans = self._add_others(chat, text, spans)
        return Placed(text, spans, self._lost(chat, text))

    def _scaffold(self, chat: Chat) -> Scaffold | None:
        key = form_of(chat)
        if key not in self._scaffolds:
            if len(self._scaffolds) >= MAX_SCAFFOLDS:
                del self._scaffolds[next(iter(self._scaffolds))]
            try:
                self._scaffolds[key] = self._build(marked_chat(chat))
            except RowRefusedError:
                self._scaffolds[key] = None
        return self._scaffolds[key]

    def _build(self, chat: Chat) -> Scaffold | None:
        """Render a marked chat, and find its turns by its own prefixes."""
        layout = Layout.of(self._text(chat), self._special)
        if layout is None:
            return None
        spans = []
        for number in _answers(chat.turns):
            span = self._marked_span(chat, number, layout)
            if span is None and _says(chat.turns[number]):
                return None
            if span:
                spans.append(span)
        stops = {span.stop for span in spans}
        for slot in layout.slots:
            if slot.part == "c" and chat.turns[slot.turn].role != "assistant":
                stop = self._stop.match(layout.text, slot.end)
                held = stop if stop and stop[1] in stops else None
                stop_end, name = (held.end(), held[1]) if held else (slot.end, "")
                spans.append(TurnSpan(slot.turn, slot.start, slot.end, stop_end, name, True))
        scaffold = Scaffold(layout, sorted(spans), _lost_marks(chat, layout))
        return scaffold if scaffold.is_whole else None

    def _marked_span(self, chat: Chat, number: int, layout: Layout) -> TurnSpan | None:
        """Find an answer in a marked text; None where its beginning or end is not to be seen."""
        text, turn = layout.text, chat.turns[number]
        own = [slot for slot in layout.slots if slot.turn == number and slot.part in "cr"]
        first = own[0].start if own else None
        # A thought's opening tag may stand before its mark, and belongs to the answer.
        if first is not None and turn.content.startswith("<think>"):
            opened = _OPENS_THOUGHT.search(text[:first])
            first = opened.start() if opened else first
        prompted, unprompted = self._prefix(chat, number)
        if is_prompted := text.startswith(prompted):
            start = len(prompted)
            if first is not None and (
                start > first or (prompted == unprompted and text[start:first].strip())
            ):
                start = first
        elif first is not None:
            start = first
        else:
            return None
        if turn.content and not turn.tool_calls:
            end = next((slot.end for slot in own if slot.part == "c"), None)
            stop = None if end is None else self._stop.match(text, end)
            if end is None or stop is None:
                return None
            return TurnSpan(number, start, end, stop.end(), stop[1], is_prompted)
        stop = self._last_special(chat, number, text, start)
        if not stop:
            return None
        return TurnSpan(number, start, stop.start(), stop.end(), stop[0], is_prompted)

    def _last_special(self, chat: Chat, number: int, text: str, start: int) -> re.Match[str] | None:
        """Return the token that ends a turn whose end no content shows."""
        closed = self._text(Chat(chat.turns[: number + 1], chat.tools))
        if text.startswith(closed):
            found = list(self._special.finditer(text, start, len(closed)))
            return found[-1] if found else None
        usual = self._stop_of_small_chat()
        return re.compile(re.escape(usual)).search(text, start) if usual else None

    def _stop_of_small_chat(self) -> str:
        if self._usual_stop is None:
            small = marked_chat(Chat((Turn("user", "a"), Turn("assistant", "b"))))
            stop = self._stop.match(MARK.split(self._text(small))[-1])
            self._usual_stop = stop[1] if stop else ""
        return self._usual_stop

    def _prefix(self, chat: Chat, number: int) -> tuple[str, str]:
        """Return what comes before an answer, with and without the generation prompt."""
        before = Chat(chat.turns[:number], chat.tools)
        return self._text(before, True), self._text(before, False)

    def _text(self, chat: Chat, prompt: bool = False) -> str:
        text = self._renderer.render([chat], prompt)[0]
        if isinstance(text, RowRefusedError):
            raise text
        return text

    def _lost(self, chat: Chat, text: str) -> tuple[str, ...]:
        """Return what of `chat` its render does not show."""
        lost = []
        for turn in chat.turns:
            if turn.role == "system" and turn.content.strip() not in text:
                lost.append("lost_system")
            if turn.role == "tool" and turn.content.strip() not in text:
                lost.append("lost_tool_turn")
        if chat.tools and self._renderer.render([Chat(chat.turns)], False) == [text]:
            lost.append("lost_tools")
        if any(turn.tool_calls for turn in chat.turns):
            silent = tuple(replace(turn, tool_calls=()) for turn in chat.turns)
            if self._renderer.render([Chat(silent, chat.tools)], False) == [text]:
                lost.append("lost_tool_calls")
        return tuple(dict.fromkeys(lost))

    def _answer_starts(self, chat: Chat, text: str) -> list[int]:
        """Return where the answers begin, for templates whose prefix renders are no prefixes.

        The conversation is rendered once more with a mark in the place of each answer: `text` must
        be the pieces around the marks with the answers between them.
        """
        numbers = [number for number in _answers(chat.turns) if chat.turns[number].content]
        turns = list(chat.turns)
        for number in numbers:
            turns[number] = replace(turns[number], content=f"\ue0f1c{number}\ue0f2")
        pieces = MARK.split(self._text(Chat(tuple(turns), chat.tools)))[::3]
        starts = {numbers[0]: len(pieces[0])} if numbers else {}
        position = len(pieces[0])
        for order, (number, piece) in enumerate(zip(numbers, pieces[1:], strict=False)):
            starts[number] = position
            forms = _variants(chat.turns[number].content)
            form = next((f for f in forms if text.startswith(f + piece, position)), None)
            if form is None:
                raise self._lost_answer(chat.turns[number], text, position)
            position += len(form + piece)
            if order + 1 < len(numbers):
                starts[numbers[order + 1]] = position
        return [starts.get(number, len(text)) for number in _answers(chat.turns)]

    def _content_span(
        self, turn: Turn, number: int, text: str, start: int, exact: bool, is_prompted: bool
    ) -> TurnSpan:
        """Find one answer from `start` on, with its stop token.

        `exact`: all from `start` on is what the model has to say; else a header may come first,
        which is not learned.
        """
        # The first place counts: a later turn may hold the same words in another form.
        forms = _variants(turn.content)
        places = [p for form in forms if form and (p := self._ended(form, text, start))]
        if not places and "" in forms and (place := self._ended("", text, start)):
            places = [place]
        if places:
            found, end, stop = min(places, key=lambda place: (place[0], -place[1]))
            header = text[start:found]
            first = found if not exact and header.strip() else start
            return TurnSpan(number, first, end, stop.end(), stop[1], is_prompted)
        raise self._lost_answer(turn, text, start)

    def _ended(self, content: str, text: str, start: int) -> tuple[int, int, re.Match[str]] | None:
        """Return where `content` stands with a stop token behind it: its start, end and stop."""
        found = text.find(content, start)
        while found >= 0:
            stop = self._stop.match(text, found + len(content))
            if stop:
                return found, found + len(content), stop
            found = text.find(content, found + 1) if content else -1
        return None

    def _closed_span(
        self, chat: Chat, number: int, text: str, start: int, is_prompted: bool
    ) -> TurnSpan:
        stop = self._last_special(chat, number, text, start)
        if not stop:
            raise self._lost_answer(chat.turns[number], text, start)
        return TurnSpan(number, start, stop.start(), stop.end(), stop[0], is_prompted)

    def _add_others(self, chat: Chat, text: str, answers: list[TurnSpan]) -> list[TurnSpan]:
        """Add the spans of the turns that are no answers: the first place that holds each."""
        by_turn = {span.turn: span for span in answers}
        stops = {span.stop for span in answers}
        position, spans = 0, []
        for number, turn in enumerate(chat.turns):
            if span := by_turn.get(number):
                spans.append(span)
                position = span.stop_end
                continue
            if turn.role == "assistant" or not turn.content:
                continue
            limit = next((s.start for s in answers if s.turn > number), len(text))
            for content in (turn.content, turn.content.strip()):
                found = text.find(content, position, limit)
                if found >= 0:
                    end = found + len(content)
                    stop = self._stop.match(text, end)
                    held = stop if stop and stop[1] in stops else None
                    stop_end = held.end() if held else end
                    name = held[1] if held else ""
                    spans.append(TurnSpan(number, found, end, stop_end, name, True))
                    position = end
                    break
        return spans

    def _lost_answer(self, turn: Turn, text: str, start: int) -> RowRefusedError:
        fix = "set data.chat_template=plain, or give a .jinja file that does"
        answer = shown(turn.content)
        if any(content in text[start:] for content in _variants(turn.content)):
            return RowRefusedError(
                f"the chat template writes no stop token after the answer `{answer}`, so the model "
                f"would never learn to stop; {fix}"
            )
        return RowRefusedError(
            f"the chat template does not write the answer `{answer}` as it is; {fix}"
        )


def _answers(turns: Sequence[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn.role == "assistant"]


def _lost_marks(chat: Chat, layout: Layout) -> tuple[str, ...]:
    """Return what of a marked chat is not in its text."""
    held = {slot[:2] for slot in layout.slots}
    lost = []
    for number, turn in enumerate(chat.turns):
        if turn.content and (number, "c") not in held and turn.role in ("system", "tool"):
            lost.append("lost_system" if turn.role == "system" else "lost_tool_turn")
    if chat.tools and (0, "t") not in held:
        lost.append("lost_tools")
    if any(turn.tool_calls and (n, "k") not in held for n, turn in enumerate(chat.turns)):
        lost.append("lost_tool_calls")
    return tuple(dict.fromkeys(lost))


def _says(turn: Turn) -> bool:
    return bool(turn.content.strip() or turn.tool_calls or turn.reasoning)


def _variants(content: str) -> list[str]:
    """Return the forms in which templates write an answer: as it is, stripped, without thinking."""
    thought = content.rsplit("</think>", 1)[-1].strip()
    return list(dict.fromkeys((content, content.strip(), thought)))
