"""Encode rows for encoder-decoder models, as a source and a target.

The target is the last answer, the source everything before it. Both get the special tokens that
the tokenizer adds, and a target always ends with the EOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import DataError
from data_modules.template.masking import LayoutBuilder, MaskConfig
from data_modules.template.rendering import (
    Chat,
    Renderer,
    RowRefusedError,
    move_to_tags,
    split_reasoning,
)
from data_modules.types import Conversation, Document, Encoded, Item, Note, Tokens

if TYPE_CHECKING:
    import transformers


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
        token = self._layout_builder.control_token(item)
        contents = [(token, 0, 0)] if token else []
        try:
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
            return _pair_of_document(item)
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
        turn = move_to_tags(chat.turns[-1])
        target = turn.content
        parts = split_reasoning(target) if self._mask.reasoning == "mask" else None
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


def _pair_of_document(document: Document) -> Pair | RowRefusedError:
    source = "".join(segment.text for segment in document.segments[:-1])
    if not source:
        return RowRefusedError(
            "an encoder-decoder model needs a prompt and an answer; this row is one text; give it "
            "as prompt and completion"
        )
    last = document.segments[-1]
    return Pair(source, last.text, last.weight)
