"""Choose what of a rendered conversation is learned.

Decides the weight of each stretch of text from the settings and the turns. Never renders and
never tokenises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from data_modules.template.bounds import TurnSpan
from data_modules.template.skeleton import Placed
from data_modules.types import Conversation, Document, Note, Turn, shown

_AFTER_THOUGHT = re.compile(r"</think>\s*")


@dataclass(kw_only=True, slots=True)
class MaskConfig:
    """What of a conversation is trained on: the settings of these names in `DataConfig`."""

    train_on_inputs: bool = False
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    train_on_eos: str = "turn"
    last_turn_only: bool = False
    reasoning: str = "keep"
    control_tokens: str = "keep"


class Stretch(NamedTuple):
    """Hold characters `start` to `end` of a text and their weight as labels."""

    start: int
    end: int
    weight: float


class Learned(NamedTuple):
    """Hold the weights of a text: `base` for all of it, a later stretch over earlier ones.

    `every_stop` has the texts of the stop tokens that are learned wherever they stand.
    """

    base: float
    stretches: list[Stretch]
    every_stop: frozenset[str] = frozenset()
    every_stop_weight: float = 1.0


def learned_of_chat(
    chat: Conversation, given: Sequence[Turn], placed: Placed, mask: MaskConfig
) -> Learned:
    """Return what is learned of a rendered conversation; `given` are its turns as rendered."""
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
    return Learned(
        scale if mask.train_on_inputs else 0.0,
        stretches,
        every if mask.train_on_eos == "all" else frozenset(),
        scale,
    )


def learned_of_document(document: Document, mask: MaskConfig) -> Learned:
    """Return what is learned of a document: its segments by their weights."""
    stretches, start = [], 0
    for segment in document.segments:
        end = start + len(segment.text)
        if segment.weight > 0 or not mask.train_on_inputs:
            stretches.append(Stretch(start, end, segment.weight))
        start = end
    return Learned(1.0 if mask.train_on_inputs else 0.0, stretches)


def lost_reasoning(
    chat: Conversation,
    text: str,
    extents: Mapping[int, tuple[int, int]],
    mask: MaskConfig,
    thought: re.Pattern[str],
) -> list[Note]:
    """Note the first thought that the template did not write; `extents` of turns are in `text`."""
    if mask.reasoning == "strip":
        return []
    for number, turn in enumerate(chat.turns):
        if turn.reasoning is None and "</think>" not in turn.content:
            continue
        found = thought.search(turn.content)
        said = turn.reasoning or (found[1] if found else "")
        start, end = extents.get(number, (0, 0))
        if said.strip() and said.strip() not in text[start:end]:
            return [Note("lost_reasoning", shown(said.strip()))]
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
    """Return the stretch of an answer up to the end of its thought, not learned."""
    closed = _AFTER_THOUGHT.search(text, span.start, span.end)
    if closed:
        return [Stretch(span.start, closed.end(), 0.0)]
    thought = (turn.reasoning or "").strip()
    found = text.find(thought, span.start, span.end) if thought else -1
    return [Stretch(found, found + len(thought), 0.0)] if found >= 0 else []
