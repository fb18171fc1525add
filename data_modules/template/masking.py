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

ROLES = ("system", "user", "assistant", "tool")
EOS_MODES = ("all", "turn", "last", "none")
REASONING_MODES = ("keep", "strip", "mask")
CONTROL_MODES = ("keep", "escape", "error")
_AFTER_THOUGHT = re.compile(r"</think>\s*")


@dataclass(kw_only=True, slots=True)
class MaskConfig:
    """Choose what is learned of a conversation."""

    train_on_inputs: bool = False
    """learn prompts too, not only answers"""
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    """whose turns are learned: of system, user, assistant, tool; a turn's own weight goes before"""
    train_on_eos: str = "turn"
    """which stop tokens are learned: all in the row, those of each learned turn, the last learned
    turn's (last), or none"""
    last_turn_only: bool = False
    """learn only the last turn of those roles"""
    reasoning: str = "keep"
    """what an answer thinks before it speaks: keep (learned), strip (taken out of the text) or mask
    (seen, not learned)"""
    control_tokens: str = "keep"
    """control tokens written out in a row's own text: keep (they act as such), escape (encoded as
    plain text) or error"""


def check_mask(config: MaskConfig) -> list[str]:
    """Return what is wrong with the settings, a line each; empty when all is well."""
    problems = [
        f"data.{name}={value}: expected {', '.join(known[:-1])} or {known[-1]}"
        for name, value, known in (
            ("train_on_eos", config.train_on_eos, EOS_MODES),
            ("reasoning", config.reasoning, REASONING_MODES),
            ("control_tokens", config.control_tokens, CONTROL_MODES),
        )
        if value not in known
    ]
    if unknown := [role for role in config.roles_to_train if role not in ROLES]:
        problems.append(
            f"data.roles_to_train={config.roles_to_train}: unknown {', '.join(unknown)}; use of "
            f"{', '.join(ROLES)}"
        )
    if not config.roles_to_train and not config.train_on_inputs:
        problems.append(
            "data.roles_to_train=[]: nothing of a conversation would be learned; set "
            "data.roles_to_train=[assistant]"
        )
    return problems


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
