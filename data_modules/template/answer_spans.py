"""Find where each turn stands in a rendered conversation.

Decides how: a scaffold, learned once for all conversations of a form, is laid over the row's text;
where none fits a row, marks are put around the row's own texts (`search`), and what it becomes with
them must be its text to the last character. Never calls `{% generation %}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from data_modules.template.bounds import BoundFinder, Bounds, TurnSpan
from data_modules.template.marks import (
    PRIVATE,
    TOOLS,
    WRAPS,
    Mark,
    Wrap,
    form_of,
    holds_content,
    marked_chat,
    marks_in,
    strings_in,
    unmarked,
    wrapped_chat,
)
from data_modules.template.rendering import Chat, Renderer, RowRefusedError
from data_modules.template.skeleton import Layout, Placed, Scaffold, with_suffix
from data_modules.types import shown

MAX_SCAFFOLDS = 1024
MAX_TRIED_TURNS = 64


LOST = {
    "system": "lost_system",
    "user": "lost_user",
    "assistant": "lost_content",
    "tool": "lost_tool_turn",
}
"""role -> the note on a row whose template does not write the content of such a turn"""


class SpanFinder:
    """Render conversations and find their turns.

    `specials` are the texts that can end a turn, `framing` the tokenizer's BOS and EOS.
    """

    def __init__(
        self, renderer: Renderer, specials: Iterable[str], framing: Iterable[str] = ()
    ) -> None:
        self._renderer = renderer
        self._bounds = BoundFinder(renderer, specials, framing)
        self._scaffolds: dict[object, Scaffold | None] = {}

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
            "its answers cannot be told apart; set data.chat_template=plain"
        )

    def _searched(self, chat: Chat, wraps: Sequence[Wrap | None], text: str) -> Placed | None:
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
        lost = _lost(wrapped, marks)
        if chat.tools and self._renderer.render([Chat(chat.turns)], False) == [text]:
            lost = ("lost_tools", *lost)
        return Placed(*with_suffix(text, spans, bounds.suffix), lost)

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
                    "when this text is another, so it cannot be told apart; set "
                    "data.chat_template=plain"
                )
        return [*wraps, *[WRAPS[0]] * (len(chat.turns) - len(wraps))]

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
        """Render a marked chat, and find its turns."""
        (text,) = self._renderer.render([chat], False)
        marks = None if isinstance(text, RowRefusedError) else marks_in(text, chat)
        if isinstance(text, RowRefusedError) or marks is None:
            return None
        bounds = self._bounds.find(chat, text, marks)
        layout = Layout.of(text, marks, bounds.calls, self._bounds.special)
        if layout is None:
            return None
        spans = self._with_others(chat, text, marks, bounds)
        lost = _lost(chat, marks)
        if chat.tools and not any(mark.turn == TOOLS for mark in marks):
            lost = ("lost_tools", *lost)
        scaffold = Scaffold(layout, bounds._replace(spans=spans), lost)
        return scaffold if scaffold.is_whole else None

    def _with_others(
        self, chat: Chat, text: str, marks: Sequence[Mark], bounds: Bounds
    ) -> list[TurnSpan]:
        """Add the spans of the turns that are no answers, each where its content stands first."""
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


def _lost(chat: Chat, marks: Sequence[Mark]) -> tuple[str, ...]:
    """Return what of a marked chat is not in its text, its tools aside."""
    held = {mark[:3] for mark in marks}
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
