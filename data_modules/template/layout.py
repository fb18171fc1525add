"""Lay out rows as text: what is learned of it, and what of it must stay plain text.

Decides what becomes of control tokens that stand in a row's own text. Never tokenises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_modules.template.answer_spans import SpanFinder
from data_modules.template.bounds import TurnSpan
from data_modules.template.masking import (
    Learned,
    MaskConfig,
    extents_of,
    learned_of_chat,
    learned_of_document,
    lost_reasoning,
)
from data_modules.template.rendering import THOUGHT, Chat, Renderer, RowRefusedError
from data_modules.template.skeleton import Placed
from data_modules.types import Conversation, Document, Item, Note, Tokens, Turn

Plain = tuple[tuple[int, int], ...]
"""stretches of a text that hold control tokens, to be spelled as plain text"""


@dataclass(frozen=True, slots=True)
class Laid:
    """Hold one item as text: what is learned of it, and which stretches spell control tokens."""

    text: str
    learned: Learned
    notes: tuple[Note, ...] = ()
    plain: Plain = ()
    spans: Sequence[TurnSpan] = ()


class Layer:
    """Lay out conversations and documents; `seen_stops` are the texts found to end answers."""

    def __init__(
        self,
        renderer: Renderer,
        finder: SpanFinder,
        mask: MaskConfig,
        control_texts: Iterable[str],
    ) -> None:
        self._renderer, self._finder, self._mask = renderer, finder, mask
        self._control = re.compile("|".join(map(re.escape, control_texts)) or "(?!)")
        self.seen_stops: set[str] = set()

    def lay(self, items: Sequence[Conversation | Document]) -> list[Laid | RowRefusedError]:
        """Render what is to be rendered, and choose what is learned of each item."""
        mask = self._mask
        chats = [item for item in items if isinstance(item, Conversation)]
        given = [self._renderer.given(chat, mask.reasoning) for chat in chats]
        placed = iter(zip(given, self._finder.place(given), strict=True))
        laid: list[Laid | RowRefusedError] = []
        for item in items:
            try:
                if isinstance(item, Document):
                    laid.append(self._lay_document(item))
                else:
                    laid.append(self._lay_chat(item, *next(placed)))
            except RowRefusedError as refused:
                laid.append(refused)
        return laid

    def _lay_document(self, document: Document) -> Laid:
        text = "".join(segment.text for segment in document.segments)
        control, plain = self.control_in([(text, 0, len(text))], text)
        return Laid(text, learned_of_document(document, self._mask), control, plain)

    def _lay_chat(self, chat: Conversation, given: Chat, placed: Placed | RowRefusedError) -> Laid:
        if isinstance(placed, RowRefusedError):
            raise placed
        notes = [Note(kind) for kind in placed.lost]
        if given.turns is not chat.turns:
            notes += self._moved_thought(chat, given)
        extents = extents_of(placed.spans)
        notes += lost_reasoning(chat, placed.text, extents, self._mask, THOUGHT)
        self.seen_stops.update(
            span.stop
            for span in placed.spans
            if span.stop and chat.turns[span.turn].role == "assistant"
        )
        contents = []
        for number, turn in enumerate(given.turns):
            start, end = extents.get(number, (0, 0))
            own = _own_texts(turn)
            if end or any(text.strip() in placed.text for text in own):
                contents += [(text, start, end) for text in own]
        control, plain = self.control_in(contents, placed.text)
        learned = learned_of_chat(chat, given.turns, placed, self._mask)
        return Laid(placed.text, learned, (*notes, *control), plain, placed.spans)

    def _moved_thought(self, chat: Conversation, given: Chat) -> list[Note]:
        """Note that a thought was written in <think> tags, as the template knows no other."""
        for own, turn in zip(chat.turns, given.turns, strict=True):
            if own.reasoning is not None and turn.reasoning is None and turn.content != own.content:
                return [] if self._mask.reasoning == "strip" else [Note("reasoning_in_tags")]
        return []

    def control_in(
        self, contents: Sequence[tuple[str, int, int]], text: str
    ) -> tuple[tuple[Note, ...], Plain]:
        """Note the control token that stands in contents, and say where those to be escaped are.

        Each content stands in `text` between two characters.
        """
        held = [
            (content, start, end, found)
            for content, start, end in contents
            if (found := self._control.search(content))
        ]
        if not held:
            return (), ()
        token = held[0][3][0]
        if self._mask.control_tokens == "error":
            raise RowRefusedError(
                f"its text holds the control token `{token}`; remove it, or set "
                "data.control_tokens=escape (read as plain text) or keep"
            )
        plain: list[tuple[int, int]] = []
        if self._mask.control_tokens == "escape":
            for content, start, end, _ in held:
                core = content.strip()
                at = text.find(core, start, end)
                if at < 0:
                    raise RowRefusedError(
                        f"its text holds the control token `{token}`, and the chat template does "
                        "not write that text as it is, so it cannot be escaped; remove the token"
                    )
                matches = self._control.finditer(text, at, at + len(core))
                plain += [match.span() for match in matches]
        return (Note("control_token", token),), tuple(sorted(plain))

    def asked(self, item: Conversation | Document) -> tuple[str, int, Plain] | None:
        """Return a text, where in it the last answer begins, and its stretches of plain text."""
        laid = self.lay([item])[0]
        if isinstance(laid, RowRefusedError):
            return None
        if isinstance(item, Document):
            start = len(laid.text) - len(item.segments[-1].text)
            return (laid.text, start, laid.plain) if len(item.segments) > 1 else None
        numbers = [n for n, turn in enumerate(item.turns) if turn.role == "assistant"]
        if not numbers:
            return None
        span = next((span for span in laid.spans if span.turn == numbers[-1]), None)
        given = self._renderer.given(item, self._mask.reasoning)
        prompted = self._renderer.render([Chat(given.turns[: numbers[-1]], given.tools)], True)[0]
        if isinstance(prompted, RowRefusedError):
            return None
        if span and laid.text.startswith(prompted):
            return laid.text, span.start, laid.plain
        return prompted, len(prompted), ()

    def control_token(self, item: Item) -> str | None:
        """Return the first control token that stands in an item's own text, None without one."""
        if isinstance(item, Tokens):
            return None
        if isinstance(item, Document):
            texts = ["".join(segment.text for segment in item.segments)]
        else:
            texts = [text for turn in item.turns for text in _own_texts(turn)]
        found = next((match for text in texts if (match := self._control.search(text))), None)
        return found[0] if found else None


def _own_texts(turn: Turn) -> list[str]:
    """Return what a turn brings into the text: its content, thought and calls."""
    if turn.reasoning is None and not turn.tool_calls:
        return [turn.content]
    calls = [json.dumps(dict(call.arguments), ensure_ascii=False) for call in turn.tool_calls]
    return [turn.content, turn.reasoning or "", *calls]
