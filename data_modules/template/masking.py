"""Weigh the text of a row in the loss: which stretches are trained on, which are masked.

Decides the weight of each stretch of text from the settings and the turns, and what becomes of the
control tokens in a row's own text. Never tokenizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from data_modules.messages import shown
from data_modules.template.bounds import TurnSpan
from data_modules.template.rendering import THOUGHT, Chat, Renderer, RowRefusedError
from data_modules.template.spans import RenderedChat, SpanFinder
from data_modules.types import Conversation, Document, Item, Note, Tokens, Turn

if TYPE_CHECKING:
    from data_modules.settings import DataConfig

_AFTER_THOUGHT = re.compile(r"</think>\s*")
Plain = tuple[tuple[int, int], ...]
"""stretches of a text that hold control tokens, to be tokenized as plain text"""


@dataclass(kw_only=True, slots=True)
class MaskConfig:
    """What of a conversation is trained on: the settings of these names in `DataConfig`."""

    train_on_inputs: bool = False
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    train_on_eos: str = "turn"
    last_turn_only: bool = False
    reasoning: str = "keep"
    control_tokens: str = "keep"
    unsupported_turns: str = "rewrite"

    @classmethod
    def of(cls, config: DataConfig) -> MaskConfig:
        """Return what of `config` decides which tokens are trained on."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(cls)})


class Stretch(NamedTuple):
    """Hold characters `start` to `end` of a text and their weight as labels."""

    start: int
    end: int
    weight: float


class LossWeights(NamedTuple):
    """Hold the weights of a text: `base` for all of it, a later stretch over earlier ones.

    `every_stop` has the texts of the stop tokens that are trained on wherever they stand.
    """

    base: float
    stretches: list[Stretch]
    every_stop: frozenset[str] = frozenset()
    every_stop_weight: float = 1.0


def chat_loss_weights(
    chat: Conversation, given: Sequence[Turn], placed: RenderedChat, mask: MaskConfig
) -> LossWeights:
    """Return the loss weights of a rendered conversation; `given` are its turns as rendered."""
    weights = [
        _turn_weight(chat.turns[span.turn], given[span.turn], mask)
        # A call that the template does not write leaves nothing to say.
        if placed.text[span.start : span.end].strip()
        else 0.0
        for span in placed.spans
    ]
    if mask.last_turn_only:
        weights = _only_last(chat, placed.spans, weights, mask)
    last = max((i for i, weight in enumerate(weights) if weight > 0), default=-1)
    scale = chat.weight
    stretches = []
    for index, (span, weight) in enumerate(zip(placed.spans, weights, strict=True)):
        turn = chat.turns[span.turn]
        if weight == 0 and not mask.train_on_inputs:
            continue
        if weight == 0 and turn.weight is None:
            weight = 1.0
        weight *= scale
        has_stop = mask.train_on_eos in ("all", "turn") or (
            mask.train_on_eos == "last" and index == last
        )
        if has_stop:
            stretches.append(Stretch(span.start, span.stop_end, weight))
        else:
            stretches.append(Stretch(span.start, span.end, weight))
            stretches.append(Stretch(span.end, span.stop_end, 0.0))
        if mask.reasoning == "mask" and turn.role == "assistant":
            stretches += _thought(turn, span, placed.text)
    every = frozenset(span.stop for span in placed.spans if span.stop)
    return LossWeights(
        scale if mask.train_on_inputs else 0.0,
        stretches,
        every if mask.train_on_eos == "all" else frozenset(),
        scale,
    )


def document_loss_weights(document: Document, mask: MaskConfig) -> LossWeights:
    """Return the loss weights of a document: those of its segments."""
    stretches, start = [], 0
    for segment in document.segments:
        end = start + len(segment.text)
        if segment.weight > 0 or not mask.train_on_inputs:
            stretches.append(Stretch(start, end, segment.weight))
        start = end
    return LossWeights(1.0 if mask.train_on_inputs else 0.0, stretches)


def lost_reasoning(
    chat: Conversation,
    text: str,
    extents: Mapping[int, tuple[int, int]],
    mask: MaskConfig,
) -> list[Note]:
    """Note the first thought that the template did not write; `extents` of turns are in `text`."""
    if mask.reasoning == "strip":
        return []
    for number, turn in enumerate(chat.turns):
        if turn.reasoning is None and "</think>" not in turn.content:
            continue
        found = THOUGHT.search(turn.content)
        reasoning = turn.reasoning or (found[1] if found else "")
        start, end = extents.get(number, (0, 0))
        if reasoning.strip() and reasoning.strip() not in text[start:end]:
            return [Note("lost_reasoning", shown(reasoning.strip()))]
    return []


def _turn_weight(turn: Turn, given: Turn, mask: MaskConfig) -> float:
    if turn.role == "assistant" and not (
        given.content.strip() or given.reasoning or given.tool_calls
    ):
        return 0.0
    if turn.weight is not None:
        return turn.weight
    return 1.0 if turn.role in mask.roles_to_train else 0.0


def _only_last(
    chat: Conversation, spans: Sequence[TurnSpan], weights: list[float], mask: MaskConfig
) -> list[float]:
    turns = [span.turn for span in spans if chat.turns[span.turn].role in mask.roles_to_train]
    last = max(turns, default=-1)
    return [
        weight if span.turn == last else 0.0 for span, weight in zip(spans, weights, strict=True)
    ]


def extents_of(spans: Iterable[TurnSpan]) -> dict[int, tuple[int, int]]:
    """Return from where to where each turn stands, its parts together."""
    extents: dict[int, tuple[int, int]] = {}
    for span in spans:
        known = extents.get(span.turn)
        extents[span.turn] = (
            (min(known[0], span.start), max(known[1], span.end)) if known else span[1:3]
        )
    return extents


def _thought(turn: Turn, span: TurnSpan, text: str) -> list[Stretch]:
    """Return the stretch of an answer up to the end of its thought, masked."""
    closed = _AFTER_THOUGHT.search(text, span.start, span.end)
    if closed:
        return [Stretch(span.start, closed.end(), 0.0)]
    thought = (turn.reasoning or "").strip()
    found = text.find(thought, span.start, span.end) if thought else -1
    return [Stretch(found, found + len(thought), 0.0)] if found >= 0 else []


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the text of an item, its loss weights, and the stretches that are control tokens."""

    text: str
    loss_weights: LossWeights
    notes: tuple[Note, ...] = ()
    plain: Plain = ()
    spans: Sequence[TurnSpan] = ()


class LayoutBuilder:
    """Build layouts of conversations and documents; `seen_stops` are texts found to end answers."""

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

    def build(self, items: Sequence[Conversation | Document]) -> list[Layout | RowRefusedError]:
        """Return the layout of each item; conversations are rendered, documents are not."""
        mask = self._mask
        chats = [item for item in items if isinstance(item, Conversation)]
        given = [self._renderer.given(chat, mask.reasoning) for chat in chats]
        placed = iter(zip(given, self._finder.place(given), strict=True))
        layouts: list[Layout | RowRefusedError] = []
        for item in items:
            try:
                if isinstance(item, Document):
                    layouts.append(self._document_layout(item))
                else:
                    layouts.append(self._chat_layout(item, *next(placed)))
            except RowRefusedError as refused:
                layouts.append(refused)
        return layouts

    def _document_layout(self, document: Document) -> Layout:
        text = "".join(segment.text for segment in document.segments)
        control, plain = self.control_in([(text, 0, len(text))], text)
        return Layout(text, document_loss_weights(document, self._mask), control, plain)

    def _chat_layout(
        self, chat: Conversation, given: Chat, placed: RenderedChat | RowRefusedError
    ) -> Layout:
        if isinstance(placed, RowRefusedError):
            raise placed
        notes = [Note(kind) for kind in placed.lost]
        if given.turns is not chat.turns:
            notes += self._moved_thought(chat, given)
        extents = extents_of(placed.spans)
        notes += lost_reasoning(chat, placed.text, extents, self._mask)
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
        loss_weights = chat_loss_weights(chat, given.turns, placed, self._mask)
        return Layout(placed.text, loss_weights, (*notes, *control), plain, placed.spans)

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

    def prompt(self, item: Conversation | Document) -> tuple[str, int, Plain] | None:
        """Return a text, where in it the last answer begins, and its stretches of plain text."""
        layout = self.build([item])[0]
        if isinstance(layout, RowRefusedError):
            return None
        if isinstance(item, Document):
            start = len(layout.text) - len(item.segments[-1].text)
            return (layout.text, start, layout.plain) if len(item.segments) > 1 else None
        numbers = [n for n, turn in enumerate(item.turns) if turn.role == "assistant"]
        if not numbers:
            return None
        span = next((span for span in layout.spans if span.turn == numbers[-1]), None)
        given = self._renderer.given(item, self._mask.reasoning)
        prompt = self._renderer.render([Chat(given.turns[: numbers[-1]], given.tools)], True)[0]
        if isinstance(prompt, RowRefusedError):
            return None
        if span and layout.text.startswith(prompt):
            return layout.text, span.start, layout.plain
        return prompt, len(prompt), ()

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
