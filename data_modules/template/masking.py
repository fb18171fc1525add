"""Decide the loss weight of each character range of a row's text: trained on or masked.

Weights depend on the settings and the turns. Also decides what happens to control tokens in a row's
own text, and encodes rows for encoder-decoder models, as a source and a target: the target is the
last answer, the source everything before it. Both get the special tokens that the tokenizer adds,
and a target always ends with the EOS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import DataError
from common.facts import as_typed, default_of
from common.text import shown
from data_modules.template import rendering
from data_modules.template.marks import RenderedChat, TurnSpan
from data_modules.template.rendering import Chat, Renderer, RowRefusedError, UnusableTemplateError
from data_modules.template.spans import SpanFinder
from data_modules.types import Conversation, Document, Encoded, Item, Note, Ranges, Tokens, Turn

if TYPE_CHECKING:
    import transformers

    from data_modules.settings import DataConfig

_BLOCK_END = re.compile(r"(?:\s*<think>)?\s*</think>\s*")
_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_BLANK_BEFORE_WORD = re.compile(r" \S")
_SHOWN_PROMPT = 40


@dataclass(kw_only=True, slots=True)
class MaskConfig:
    """The settings of DataConfig that decide which tokens of a conversation are trained on."""

    train_on_inputs: bool = False
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    train_on_eos: str = "turn"
    last_turn_only: bool = False
    reasoning: str = "keep"
    control_tokens: str = "keep"
    unsupported_turns: str = "rewrite"

    @classmethod
    def of(cls, config: DataConfig) -> MaskConfig:
        """Return the settings of these names in `config`."""
        return cls(**{setting.name: getattr(config, setting.name) for setting in fields(cls)})

    def changed(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, as typed."""
        values = {each.name: (getattr(self, each.name), default_of(each)) for each in fields(self)}
        return {name: as_typed(own) for name, (own, default) in values.items() if own != default}


class WeightedRange(NamedTuple):
    """Characters `start` to `end` of a text, and their weight as labels."""

    start: int
    end: int
    weight: float


class LossWeights(NamedTuple):
    """The weights of a text: `base` for all of it, overridden by the ranges, later ones last.

    `every_stop` are the texts of the stop tokens that are trained on wherever they occur.
    """

    base: float
    ranges: list[WeightedRange]
    every_stop: frozenset[str] = frozenset()
    every_stop_weight: float = 1.0


def _chat_loss_weights(
    chat: Conversation,
    prepared_turns: Sequence[Turn],
    rendered: RenderedChat,
    mask: MaskConfig,
    tails: rendering.ReasoningTails | None = None,
) -> LossWeights:
    """Return the loss weights of a rendered conversation.

    `prepared_turns` are its turns as the template received them; `tails` are needed to mask
    reasoning.
    """
    weights = _span_weights(chat, prepared_turns, rendered, mask)
    last = max((i for i, weight in enumerate(weights) if weight > 0), default=-1)
    ranges = []
    for index, (span, weight) in enumerate(zip(rendered.spans, weights, strict=True)):
        turn = chat.turns[span.turn]
        if weight == 0 and not mask.train_on_inputs:
            continue
        if weight == 0 and turn.weight is None:
            weight = 1.0
        weight *= chat.weight
        trains_stop = mask.train_on_eos in ("all", "turn") or (
            mask.train_on_eos == "last" and index == last
        )
        if trains_stop:
            ranges.append(WeightedRange(span.start, span.stop_end, weight))
        else:
            ranges.append(WeightedRange(span.start, span.end, weight))
            ranges.append(WeightedRange(span.end, span.stop_end, 0.0))
        if turn.trained is not None and weight:
            ranges += _untrained(turn, turn.trained, span, rendered.text)
        if tails is not None and turn.role == "assistant":
            ranges += _masked_reasoning(prepared_turns[span.turn], span, rendered.text, tails)
    every_stop = frozenset(span.stop for span in rendered.spans if span.stop)
    return LossWeights(
        chat.weight if mask.train_on_inputs else 0.0,
        ranges,
        every_stop if mask.train_on_eos == "all" else frozenset(),
        chat.weight,
    )


def _span_weights(
    chat: Conversation, prepared_turns: Sequence[Turn], rendered: RenderedChat, mask: MaskConfig
) -> list[float]:
    """Return the weight of each span of a rendered conversation by its turn."""
    weights = []
    for span in rendered.spans:
        turn, prepared = chat.turns[span.turn], prepared_turns[span.turn]
        is_filled = prepared.content.strip() or prepared.reasoning or prepared.tool_calls
        weight = float(turn.role in mask.roles_to_train) if turn.weight is None else turn.weight
        # The span of a call that the template does not write is empty.
        is_written = rendered.text[span.start : span.end].strip()
        weights.append(weight if is_written and (is_filled or turn.role != "assistant") else 0.0)
    if mask.last_turn_only:
        roles = mask.roles_to_train
        trained_turns = [s.turn for s in rendered.spans if chat.turns[s.turn].role in roles]
        last_turn = max(trained_turns, default=-1)
        weights = [
            weight if span.turn == last_turn else 0.0
            for span, weight in zip(rendered.spans, weights, strict=True)
        ]
    return weights


def _find_lost_reasoning(
    turns: Sequence[Turn], text: str, extents: Mapping[int, tuple[int, int]]
) -> list[Note]:
    """Return a note on the first reasoning that is missing in its turn's extent of `text`.

    `turns` are as the template received them.
    """
    for number, turn in enumerate(turns):
        if turn.role != "assistant" or not (turn.reasoning or "</think>" in turn.content):
            continue
        reasoning = rendering.reasoning_of(turn)
        start, end = extents.get(number, (0, 0))
        if reasoning and reasoning not in text[start:end]:
            return [Note("lost_reasoning", shown(reasoning))]
    return []


def _untrained(turn: Turn, trained: Ranges, span: TurnSpan, text: str) -> Iterator[WeightedRange]:
    """Yield with weight 0 what an answer has up to its last character outside of `trained`.

    Raises UnusableTemplateError if the answer is not written as it is.
    """
    is_whole = turn.content in text[span.start : span.end]
    written = turn.content if is_whole else turn.content.strip()
    at = text.rfind(written, span.start, span.end)
    if at < 0:
        raise UnusableTemplateError(
            f"turn {span.turn + 1} ({turn.role}): the chat template does not write the answer "
            f"`{shown(turn.content)}` unchanged, so the characters of its train_detail cannot be "
            "located; set 'train' for the whole turn, or data.chat_template=plain"
        )
    first, start = at - turn.content.index(written), span.start
    for begin, end in trained:
        stop = first + begin
        if _BLANK_BEFORE_WORD.match(text, stop - 1):  # which are one token
            stop -= 1
        if start < stop:
            yield WeightedRange(start, stop, 0.0)
        start = max(first + end, span.start)
    if start < (stop := min(first + len(turn.content), span.end)):
        yield WeightedRange(start, stop, 0.0)


def _masked_reasoning(
    turn: Turn, span: TurnSpan, text: str, tails: rendering.ReasoningTails
) -> list[WeightedRange]:
    """Return what an answer has in front of its text or calls, and later blocks, with weight 0.

    With the reasoning, this is what a template writes around it: tags, or the headers of channels.
    """
    parts = rendering.split_reasoning(turn.content)
    reasoning = rendering.reasoning_of(turn)
    answer = parts.answer if parts else turn.content.strip()
    end = span.start
    if not reasoning and (block := _BLOCK_END.match(text, end, span.end)):
        end = block.end()
    elif reasoning and (found := text.find(reasoning, end, span.end)) >= 0:
        after = found + len(reasoning)
        tail = tails.before_text if answer else tails.before_call
        if text.startswith(tail, after):
            after += len(tail)
        elif block := _BLOCK_END.match(text, after, span.end):
            after = block.end()
        # Reasoning that the template left out may be found in the answer.
        end = max(end, text.find(answer, after, span.end))
        # A blank before a word is part of its token.
        end = span.start + len(text[span.start : end].rstrip(" "))
    blocks = [match.span() for match in _BLOCK.finditer(text, end, span.end)]
    return [WeightedRange(start, stop, 0.0) for start, stop in [(span.start, end), *blocks]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The text of an item, its loss weights, and the control tokens to tokenize as plain text."""

    text: str
    loss_weights: LossWeights
    notes: tuple[Note, ...] = ()
    plain_ranges: Ranges = ()
    spans: Sequence[TurnSpan] = ()


class LayoutBuilder:
    """Build the layouts of conversations and documents.

    `seen_stops` are the texts of the stop tokens found after answers so far.
    """

    def __init__(
        self, renderer: Renderer, finder: SpanFinder, mask: MaskConfig, control_texts: Iterable[str]
    ) -> None:
        self._renderer, self._finder, self._mask = renderer, finder, mask
        self._control = re.compile("|".join(map(re.escape, control_texts)) or "(?!)")
        self.seen_stops: set[str] = set()

    def build(self, items: Sequence[Conversation | Document]) -> list[Layout | RowRefusedError]:
        """Return the layout of each item; conversations are rendered, documents are not."""
        chats = [item for item in items if isinstance(item, Conversation)]
        prepared = [self._renderer.prepare(chat, self._mask.reasoning) for chat in chats]
        rendered = iter(zip(prepared, self._finder.render(prepared), strict=True))
        layouts: list[Layout | RowRefusedError] = []
        for item in items:
            try:
                if isinstance(item, Document):
                    layouts.append(self._document_layout(item))
                else:
                    layouts.append(self._chat_layout(item, *next(rendered)))
            except RowRefusedError as error:
                layouts.append(error)
        return layouts

    def _document_layout(self, document: Document) -> Layout:
        text = document.text
        base = document.weight if self._mask.train_on_inputs else 0.0
        notes, plain_ranges = self.find_control_tokens([(text, 0, len(text))], text)
        ranges, start = [], 0
        for segment in document.segments:
            end = start + len(segment.text)
            if segment.weight > 0 or not base:
                ranges.append(WeightedRange(start, end, segment.weight))
            start = end
        return Layout(text, LossWeights(base, ranges), notes, plain_ranges)

    def _chat_layout(
        self, chat: Conversation, prepared: Chat, rendered: RenderedChat | RowRefusedError
    ) -> Layout:
        if isinstance(rendered, RowRefusedError):
            raise rendered
        notes = [Note(kind) for kind in rendered.lost]
        if prepared.kwargs and (unread := self._renderer.unread(prepared.kwargs)):
            notes.append(Note("unread_kwargs", unread[0]))
        if self._mask.reasoning != "strip" and any(
            turn.reasoning is not None and new.reasoning is None and new.content != turn.content
            for turn, new in zip(chat.turns, prepared.turns, strict=True)
        ):
            notes.append(Note("reasoning_in_tags"))
        extents: dict[int, tuple[int, int]] = {}
        for span in rendered.spans:
            start, end = extents.get(span.turn, (span.start, span.end))
            extents[span.turn] = min(start, span.start), max(end, span.end)
        notes += _find_lost_reasoning(prepared.turns, rendered.text, extents)
        if any(span.other_prompt for span in rendered.spans):
            weights = _span_weights(chat, prepared.turns, rendered, self._mask)
            pairs = zip(rendered.spans, weights, strict=True)
            prompts = (span.other_prompt for span, weight in pairs if weight)
            if prompt := next(filter(None, prompts), ""):
                seen = f"(prompt: ...{shown(prompt[-_SHOWN_PROMPT:])})"
                notes.append(Note("other_prompt", seen))
        self.seen_stops.update(
            span.stop
            for span in rendered.spans
            if span.stop and chat.turns[span.turn].role == "assistant"
        )
        contents = []
        for number, turn in enumerate(prepared.turns):
            start, end = extents.get(number, (0, 0))
            texts = _texts_of(turn)
            if end or any(text.strip() in rendered.text for text in texts):
                contents += [(text, start, end) for text in texts]
        control_notes, plain_ranges = self.find_control_tokens(contents, rendered.text)
        tails = self._renderer.reasoning_tails if self._mask.reasoning == "mask" else None
        loss_weights = _chat_loss_weights(chat, prepared.turns, rendered, self._mask, tails)
        return Layout(
            rendered.text, loss_weights, (*notes, *control_notes), plain_ranges, rendered.spans
        )

    def find_control_tokens(
        self, contents: Sequence[tuple[str, int, int]], text: str
    ) -> tuple[tuple[Note, ...], Ranges]:
        """Return a note on the first control token in `contents`, and the ranges to escape.

        Each content is (text, start, end): it occurs in `text` between these characters.
        Raises RowRefusedError with data.control_tokens=error, or if a token cannot be escaped.
        """
        affected = [
            (content, start, end, found)
            for content, start, end in contents
            if (found := self._control.search(content))
        ]
        if not affected:
            return (), ()
        token = affected[0][3][0]
        if self._mask.control_tokens == "error":
            raise RowRefusedError(
                f"its text contains the control token `{token}`; remove it, or set "
                "data.control_tokens=escape (read as plain text) or keep"
            )
        plain_ranges: list[tuple[int, int]] = []
        if self._mask.control_tokens == "escape":
            for content, start, end, _ in affected:
                core = content.strip()
                at = text.find(core, start, end)
                if at < 0:
                    raise UnusableTemplateError(
                        f"its text contains the control token `{token}`, and the chat template "
                        "does not copy that text unchanged, so it cannot be escaped; remove the "
                        "token"
                    )
                matches = self._control.finditer(text, at, at + len(core))
                plain_ranges += [match.span() for match in matches]
        return (Note("control_token", token),), tuple(sorted(plain_ranges))

    def prompt(self, item: Conversation | Document) -> tuple[str, int, Ranges] | None:
        """Return a text, where the last answer starts in it, and its plain ranges; or None."""
        layout = self.build([item])[0]
        if isinstance(layout, RowRefusedError):
            return None
        if isinstance(item, Document):
            start = len(layout.text) - len(item.segments[-1].text)
            return (layout.text, start, layout.plain_ranges) if len(item.segments) > 1 else None
        answers = [n for n, turn in enumerate(item.turns) if turn.role == "assistant"]
        if not answers:
            return None
        span = next((span for span in layout.spans if span.turn == answers[-1]), None)
        prepared = self._renderer.prepare(item, self._mask.reasoning)
        before_answer = prepared._replace(turns=prepared.turns[: answers[-1]])
        (prompt,) = self._renderer.render([before_answer], add_prompt=True)
        if isinstance(prompt, RowRefusedError):
            return None
        if span and layout.text.startswith(prompt):
            return layout.text, span.start, layout.plain_ranges
        return prompt, len(prompt), ()


def _texts_of(turn: Turn) -> list[str]:
    """Return the texts that a turn contributes to the render: content, reasoning and calls."""
    if turn.reasoning is None and not turn.tool_calls:
        return [turn.content]
    calls = [json.dumps(dict(call.arguments), ensure_ascii=False) for call in turn.tool_calls]
    return [turn.content, turn.reasoning or "", *calls]


class Pair(NamedTuple):
    """The texts of source and target; `num_masked` leading characters of the target are masked."""

    source: str
    target: str
    weight: float
    num_masked: int = 0
    notes: tuple[Note, ...] = ()


class PairEncoder:
    """Encode rows as a source and a target."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        renderer: Renderer,
        layout_builder: LayoutBuilder,
        mask: MaskConfig,
    ) -> None:
        problems = [
            f"data.{name}={value}: an encoder-decoder model is trained on the last answer only; "
            f"set data.{name}={instead}"
            for name, value, instead in (
                ("train_on_inputs", mask.train_on_inputs, False),
                ("roles_to_train", mask.roles_to_train, "[assistant]"),
                ("control_tokens", mask.control_tokens, "keep"),
            )
            if value not in (False, ["assistant"], "keep", "error")
        ]
        if problems:
            raise DataError(problems)
        self._tokenizer, self._renderer = tokenizer, renderer
        self._layout_builder, self._mask = layout_builder, mask

    def encode(self, items: Sequence[Item]) -> Iterator[Encoded | RowRefusedError]:
        """Yield the encoder's ids of each item, and the decoder's ids with their weights."""
        pairs = self._pairs(items)
        encoded = iter(self._encode([pair for pair in pairs if isinstance(pair, Pair)]))
        for pair in pairs:
            yield next(encoded) if isinstance(pair, Pair) else pair

    def prompt_ids(self, item: Item) -> list[int]:
        """Return the encoder's ids of an item; none if it lacks a source or a target."""
        (pair,) = self._pairs([item])
        return self.source_ids([pair.source])[0] if isinstance(pair, Pair) else []

    def _pairs(self, items: Sequence[Item]) -> list[Pair | RowRefusedError]:
        """Return source and target of each item; all sources are rendered together."""
        prepared = [self._prepare(item) for item in items]
        chats = [chat for chat in prepared if isinstance(chat, Chat)]
        prompts = [chat._replace(turns=chat.turns[:-1]) for chat in chats]
        sources = iter(self._renderer.render(prompts, add_prompt=True))
        pairs: list[Pair | RowRefusedError] = []
        for item, pair in zip(items, prepared, strict=True):
            if isinstance(pair, Chat):
                pair = self._pair_of_chat(item, pair, next(sources))
            pairs.append(self._with_notes(item, pair) if isinstance(pair, Pair) else pair)
        return pairs

    def _with_notes(self, item: Item, pair: Pair) -> Pair | RowRefusedError:
        texts = [item.text] if isinstance(item, Document) else []
        if isinstance(item, Conversation):
            texts = [text for turn in item.turns for text in _texts_of(turn)]
        try:
            contents = [(text, 0, 0) for text in texts]
            notes, _ = self._layout_builder.find_control_tokens(contents, "")
        except RowRefusedError as error:
            return error
        return pair._replace(notes=(*pair.notes, *notes))

    def _prepare(self, item: Item) -> Chat | Pair | RowRefusedError:
        """Return a chat up to its last answer, or the pair of a document."""
        if isinstance(item, Tokens):
            return RowRefusedError(
                "an encoder-decoder model needs a prompt and an answer, and this row is already "
                "tokenized; give it as text"
            )
        if isinstance(item, Document):
            *before, last_segment = item.segments
            if not any(segment.text for segment in before):
                return RowRefusedError(
                    "an encoder-decoder model needs a prompt and an answer; this row is one text; "
                    "give it as prompt and completion"
                )
            source = "".join(segment.text for segment in before)
            return Pair(source, last_segment.text, last_segment.weight)
        chat = self._renderer.prepare(item, self._mask.reasoning)
        last = max((i for i, t in enumerate(chat.turns) if t.role == "assistant"), default=0)
        if not last:
            return RowRefusedError(
                "an encoder-decoder model needs a prompt and an answer; this row has no answer"
            )
        if chat.turns[last].tool_calls:
            return RowRefusedError(
                "the last answer calls a tool, which encoder-decoder templates do not support; "
                "remove the row, or write the call into its content"
            )
        if chat.turns[last].trained is not None:
            return RowRefusedError(
                "train_detail is read for causal models only; set 'train' for the whole turn"
            )
        return chat._replace(turns=chat.turns[: last + 1])

    def _encode(self, pairs: Sequence[Pair]) -> list[Encoded]:
        import numpy as np

        if not pairs:
            return []
        sources = self.source_ids([pair.source for pair in pairs])
        targets = self._tokenizer(text_target=[pair.target for pair in pairs])
        eos = self._tokenizer.eos_token_id
        encoded = []
        for number, (pair, source) in enumerate(zip(pairs, sources, strict=True)):
            ids = list(targets["input_ids"][number])
            weights = np.full(len(ids), pair.weight, np.float32)
            if pair.num_masked:
                for index, (_, end) in enumerate(targets.encodings[number].offsets):
                    if 0 < end <= pair.num_masked:
                        weights[index] = 0.0
            if eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
                weights = np.append(weights, np.float32(pair.weight))
            if self._mask.train_on_eos == "none" and ids[-1:] == [eos]:
                weights[-1] = 0.0
            if not pair.target.strip():
                weights[:] = 0.0
            encoded.append(
                Encoded(
                    np.array(source, np.int32), weights, np.array(ids, np.int32), notes=pair.notes
                )
            )
        return encoded

    def source_ids(self, texts: Sequence[str]) -> list[list[int]]:
        backend: Any = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=True)
        return [encoding.ids for encoding in encodings]

    def _pair_of_chat(
        self, item: Item, chat: Chat, source: str | RowRefusedError
    ) -> Pair | RowRefusedError:
        if isinstance(source, RowRefusedError):
            return source
        turn = rendering.move_to_tags(chat.turns[-1])
        target = turn.content
        parts = rendering.split_reasoning(target) if self._mask.reasoning == "mask" else None
        first = chat.turns[0]
        is_lost = first.role == "system" and first.content.strip() not in source
        weight = 1.0 if turn.weight is None else turn.weight
        return Pair(
            source,
            target,
            weight * (item.weight if isinstance(item, Conversation) else 1.0),
            sum(map(len, parts[:3])) if parts else 0,
            (Note("lost_system"),) if is_lost else (),
        )
