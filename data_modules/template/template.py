"""Turn a conversation or a document into token ids and the loss weight of each token.

Chooses the chat template and runs the steps: render, find the turns, weigh them, tokenize.
A row that cannot be encoded becomes a RowRefusedError, which is returned and not raised.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from common.errors import DataError, Origin
from common.untrusted import LimitError, ProcessLimits, run_limited
from data_modules.template import named_templates, rendering
from data_modules.template.encoding import TextTokenizer, TokenizedText, control_texts, stop_texts
from data_modules.template.marks import RenderedChat
from data_modules.template.masking import Layout, LayoutBuilder, MaskConfig, PairEncoder
from data_modules.template.named_templates import OWN_TEMPLATE, TEMPLATE_NAMES, TEST_CHATS
from data_modules.template.rendering import Chat, MessageFormat, Renderer, RowRefusedError
from data_modules.template.spans import SpanFinder
from data_modules.types import Conversation, Document, Encoded, Item, Note, Tokens, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers

_CHUNK_ROWS = 256
_SMALL_CHAT = Chat((Turn("user", "a"), Turn("assistant", "b")))
_checked: set[bytes] = set()
"""hashes of the templates that were checked"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt (all tokens before the last answer) and the expected answer."""

    input_ids: list[int]
    answer: str
    origin: Origin


class ChatTemplate:
    """Encode conversations through a chat template, and documents without one.

    The template is written to `tokenizer.chat_template`, so that it is saved with the model: a
    chat's tokens are those of `tokenizer.apply_chat_template`. `note` is a log line: which template
    it is, and why. `bos_token_id` starts every document; None if the tokenizer adds no BOS.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        text: str,
        note: str,
        mask: MaskConfig | None = None,
        is_encoder_decoder: bool = False,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer has no tokenizer.json, so characters cannot be mapped to tokens; "
                "set model.tokenizer_path to a folder that has one"
            )
        tokenizer.chat_template = text
        self.text, self.note = text, note
        self.is_tokenizers_own, self.is_encoder_decoder = False, is_encoder_decoder
        self._mask = mask or MaskConfig()
        self.tokenizer = tokenizer
        bos: int | None = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        self.bos_token_id = bos if adds_bos else None
        self.stop_texts = stop_texts(tokenizer)
        self._renderer = Renderer(tokenizer)
        framing = filter(None, (tokenizer.bos_token, tokenizer.eos_token))
        self._finder = SpanFinder(self._renderer, self.stop_texts, framing)
        self._layout_builder = LayoutBuilder(
            self._renderer, self._finder, self._mask, control_texts(tokenizer)
        )
        self._text_tokenizer = TextTokenizer(tokenizer)
        self._pairs = (
            PairEncoder(tokenizer, self._renderer, self._layout_builder, self._mask)
            if is_encoder_decoder
            else None
        )

    @classmethod
    def resolve(
        cls,
        tokenizer: transformers.PreTrainedTokenizerBase,
        name: str | None,
        mask: MaskConfig | None = None,
        is_encoder_decoder: bool = False,
        limits: ProcessLimits | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        renders_chats: bool = True,
    ) -> ChatTemplate:
        """Choose the template `name`: one of TEMPLATE_NAMES, a .jinja file, None = the tokenizer's.

        `template_kwargs` become defaults in the template, also in the saved one: whatever renders a
        chat with it later does so as in training. A tokenizer without a template gets `plain`, or
        `t5` for an encoder-decoder model. Raises DataError for an unknown name, for a template that
        exceeds `limits`, and for one with a wrong loss mask, unless no row goes through it
        (`renders_chats` False).
        """
        own = tokenizer.chat_template
        if name is None and own:
            note, label = "chat template: the tokenizer's", OWN_TEMPLATE
            text = named_templates.merge_templates(own)
            if not isinstance(own, str) and text != own["default"]:
                note += f" (`{named_templates.FOR_TOOLS}` for rows with tools)"
        elif name is None or name in TEMPLATE_NAMES:
            chosen = name or ("t5" if is_encoder_decoder else "plain")
            named_templates.check_named(tokenizer, chosen)
            text = named_templates.named_template(chosen)
            label = f"chat template `{chosen}`"
            note = f"chat template: {chosen}"
            if not name:
                style = "contents only" if chosen == "t5" else "### User: / ### Assistant: turns"
                note += (
                    f" ({style}), because the tokenizer has none; set data.chat_template to "
                    "choose another"
                )
        else:
            note, label = f"chat template: {name}", f"data.chat_template={name}"
            text = named_templates.read_template(name)
        if template_kwargs:
            text, plain = named_templates.set_defaults(text, template_kwargs), text
            described = (
                f"{key}={json.dumps(value)}{'' if key in plain else ' (which it does not read)'}"
                for key, value in template_kwargs.items()
            )
            note += f"; with {', '.join(described)}"
        template = cls(tokenizer, text, note, mask, is_encoder_decoder)
        template.is_tokenizers_own = name is None and bool(own)
        template._renderer.seconds = (limits or ProcessLimits()).seconds
        template._check(label, limits or ProcessLimits(), renders_chats)
        if template._add_missing_bos():
            template._check(label, limits or ProcessLimits(), renders_chats)
        return template

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def date_key(self) -> str:
        """Return today's date if the template writes it, "" otherwise.

        The tokens of such a template are valid on that day only.
        """
        return datetime.date.today().isoformat() if "strftime_now" in self.text else ""

    @cached_property
    def _small(self) -> RenderedChat:
        """A small chat as the template writes it; without turns if it refuses it."""
        (small,) = self._finder.render([_SMALL_CHAT])
        return small if isinstance(small, RenderedChat) else RenderedChat("", [], ())

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end answers: of a small chat, and of all rows encoded so far."""
        stops = {span.stop for span in self._small.spans} | self._layout_builder.seen_stops
        return {self.stop_texts[stop] for stop in stops if stop}

    @cached_property
    def tail_ids(self) -> list[int]:
        """Return the tokens that the template writes after the last stop token: often a newline."""
        if not self._small.spans:
            return []
        tail = self._small.text[max(span.stop_end for span in self._small.spans) :]
        return list(self.tokenizer(tail, add_special_tokens=False)["input_ids"]) if tail else []

    def encode(self, items: Sequence[Item]) -> Iterator[Encoded | RowRefusedError]:
        """Yield the tokens of each item, in order.

        Tokens after the last trained one are left out: nothing depends on them. A row whose answer
        cannot be found in the rendered text, or has no stop token, is a RowRefusedError.
        """
        for first in range(0, len(items), _CHUNK_ROWS):
            chunk = items[first : first + _CHUNK_ROWS]
            rewritten = [
                self._rewrite(item) if isinstance(item, Conversation) else item for item in chunk
            ]
            results = self._pairs.encode(chunk) if self._pairs else self._encode_chunk(rewritten)
            for item, new_item, result in zip(chunk, rewritten, results, strict=True):
                if isinstance(result, RowRefusedError) or new_item is item:
                    yield result
                else:
                    note = Note("rewritten_turns", ", ".join(self._unsupported))
                    yield replace(result, notes=(*result.notes, note))

    def prompt(self, item: Item) -> Prompt | None:
        """Return the tokens before the last answer, and that answer; None without either.

        The tokens are those of training: the whole item is tokenized and cut where the last answer
        starts. Only if the generation prompt is not a prefix of the whole conversation, the prompt
        is tokenized alone, as an inference server does.
        """
        if isinstance(item, Tokens):
            return None
        if self._pairs:
            ids = self._pairs.prompt_ids(item)
            return Prompt(ids, _last_answer(item), item.origin) if ids else None
        if isinstance(item, Conversation):
            item = self._rewrite(item)
        prompt = self._layout_builder.prompt(item)
        if prompt is None:
            return None
        text, start, plain_ranges = prompt
        (tokenized,) = self._text_tokenizer.tokenize([text], {0: plain_ranges})
        if isinstance(tokenized, RowRefusedError):
            return None
        prompt_ids = tokenized.ids[: tokenized.first(start, len(text))]
        is_document = isinstance(item, Document)
        ids = (self._with_bos(prompt_ids) if is_document else prompt_ids).tolist()
        return Prompt(ids, _last_answer(item), item.origin) if ids else None

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens of a chat without its next answer: those of `apply_chat_template`.

        For an encoder they include the special tokens that its tokenizer adds. Raises DataError if
        the template rejects the chat.
        """
        (text,) = self._renderer.render([self._prompt_chat(turns)], add_prompt=True)
        if isinstance(text, RowRefusedError):
            raise DataError(str(text))
        if self._pairs:
            return self._pairs.source_ids([text])[0]
        (tokenized,) = self._text_tokenizer.tokenize([text], {})
        if isinstance(tokenized, RowRefusedError):
            raise DataError(str(tokenized))
        ids: list[int] = tokenized.ids.tolist()
        return ids

    def answered_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens of a chat with its last answer, as in training; raises DataError."""
        (encoded,) = self.encode([Conversation(tuple(turns), Origin("chat", 1))])
        if isinstance(encoded, RowRefusedError):
            raise DataError(str(encoded))
        ids: list[int] = encoded.input_ids.tolist()
        # What follows the last stop token is left out in training; here also after an empty answer.
        num_tail = len(self.tail_ids)
        return ids[:-num_tail] if num_tail and ids[-num_tail:] == self.tail_ids else ids

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return a chat as the OpenAI messages that this template reads."""
        return self._renderer.messages(self._prompt_chat(turns))

    def trace(
        self, chat: Conversation, layout_builder: LayoutBuilder | None = None
    ) -> named_templates.TracedChat | RowRefusedError:
        """Encode one conversation, and return which characters its tokens hold."""
        import numpy as np

        chat = self._rewrite(chat)
        (layout,) = (layout_builder or self._layout_builder).build([chat])
        if isinstance(layout, RowRefusedError):
            return layout
        (tokenized,) = self._text_tokenizer.tokenize([layout.text], {0: layout.plain_ranges})
        if isinstance(tokenized, RowRefusedError):
            return tokenized
        weights = np.zeros(len(tokenized.ids), np.float32)
        trained = self._weigh(chat, layout, tokenized).weights
        weights[: len(trained)] = trained
        return named_templates.TracedChat(
            layout.text, tokenized, weights, frozenset(note.kind for note in layout.notes)
        )

    @cached_property
    def _unsupported(self) -> tuple[str, ...]:
        if self._pairs or self._mask.unsupported_turns == "refuse":
            return ()
        return named_templates.find_unsupported_turns(self._renderer)

    def _rewrite(self, chat: Conversation) -> Conversation:
        return rendering.rewrite_turns(chat, self._unsupported, self._mask.roles_to_train)

    def _prompt_chat(self, turns: Sequence[Turn]) -> Chat:
        """Return a chat without its next answer as the template receives it."""
        chat = Conversation(tuple(turns), Origin("chat", 1))
        return self._renderer.prepare(rendering.rewrite_turns(chat, self._unsupported), "keep")

    def _add_missing_bos(self) -> bool:
        """Make the template write the BOS that the tokenizer adds to texts.

        Returns whether the template had to be changed.
        """
        if self.bos_token_id is None or self._pairs:
            return False
        bos = str(self.tokenizer.bos_token)
        text = named_templates.add_bos(self.text, bos, self._renderer)
        is_changed = text != self.text
        if is_changed:
            self.text = self.tokenizer.chat_template = text
            self.note += (
                f"; changed to start with `{bos}`, which this tokenizer puts before every text "
                "(also in the saved template)"
            )
        return is_changed

    def _check(self, label: str, limits: ProcessLimits, renders_chats: bool) -> None:
        """Raise DataError if the template has a wrong loss mask or exceeds `limits`."""
        backend = self.tokenizer.backend_tokenizer.to_str()
        special_tokens = self.tokenizer.special_tokens_map
        facts = repr((label, self.text, backend, special_tokens, limits, renders_chats))
        key = hashlib.sha256(facts.encode()).digest()
        if key in _checked:
            return
        try:
            faults = run_limited(partial(self._find_faults, label, renders_chats), limits)
        except LimitError as error:
            raise DataError(
                f"{label} does not render {len(TEST_CHATS)} small chats {error}: look for an "
                "endless loop or an endless text in it, raise data.template_seconds or "
                "data.template_memory_mb, or set data.chat_template=plain"
            ) from error
        if faults:
            raise DataError(faults)
        _checked.add(key)

    def _find_faults(self, label: str, renders_chats: bool) -> list[str]:
        """Return the faults of the template; it is none that it rejects a test chat."""
        import jinja2

        try:
            self._renderer.apply_template([_SMALL_CHAT], message_format=MessageFormat())
        except (jinja2.TemplateSyntaxError, SyntaxError) as error:
            return [named_templates.syntax_error(label, error)]
        except MemoryError:
            raise
        except rendering.render_errors():
            pass  # A row that it rejects is reported when that row is encoded.
        if self._pairs or not renders_chats:
            return []
        controls = control_texts(self.tokenizer)
        layout_builder = LayoutBuilder(self._renderer, self._finder, MaskConfig(), controls)
        found = named_templates.run_test_chats(partial(self.trace, layout_builder=layout_builder))
        faults = [
            f"in the test chat `{name}` {fault}"
            for name, of_chat in found.items()
            if isinstance(of_chat, list)
            for fault in of_chat
        ]
        if not faults:
            return []
        more = len(faults) - 1
        also = f" (and {more} more faults in {len(TEST_CHATS)} test chats)" if more else ""
        return [
            f"{label}: {faults[0]}{also}, so its loss mask is wrong; set data.chat_template=plain"
        ]

    def _encode_chunk(self, items: Sequence[Item]) -> Iterator[Encoded | RowRefusedError]:
        texts = [item for item in items if not isinstance(item, Tokens)]
        layouts = self._layout_builder.build(texts)
        good = [layout for layout in layouts if isinstance(layout, Layout)]
        plain_ranges = {index: layout.plain_ranges for index, layout in enumerate(good)}
        all_tokenized = iter(
            self._text_tokenizer.tokenize([layout.text for layout in good], plain_ranges)
        )
        next_layout = iter(layouts)
        for item in items:
            if isinstance(item, Tokens):
                yield self._check_tokens(item)
                continue
            layout = next(next_layout)
            if isinstance(layout, RowRefusedError):
                yield layout
                continue
            tokenized = next(all_tokenized)
            if isinstance(tokenized, RowRefusedError):
                yield tokenized
            else:
                yield self._weigh(item, layout, tokenized)

    def _check_tokens(self, item: Tokens) -> Encoded | RowRefusedError:
        """Return a row of token ids; a RowRefusedError if the tokenizer does not have an id."""
        import numpy as np

        ids = np.array(item.input_ids, np.int64)
        vocab_size = len(self.tokenizer)
        unknown = ids[(ids < 0) | (ids >= vocab_size)]
        if len(unknown):
            return RowRefusedError(
                f"input_ids has {int(unknown[0]):,}, but the tokenizer has the ids 0 to "
                f"{vocab_size - 1:,}; tokenize the row with this model's tokenizer"
            )
        return Encoded(ids.astype(np.int32), np.array(item.weights, np.float32))

    def _weigh(
        self, item: Conversation | Document, layout: Layout, tokenized: TokenizedText
    ) -> Encoded:
        """Return the tokens of an item with their weights, up to the last trained token."""
        import numpy as np

        ids, loss_weights = tokenized.ids, layout.loss_weights
        weights = np.zeros(len(ids), np.float32)
        if loss_weights.base:
            weights += loss_weights.base
        for start, end, weight in loss_weights.ranges:
            first = tokenized.first(start, end)
            if first is not None:
                weights[first : tokenized.after(end)] = weight
        if loss_weights.every_stop:
            stops = [self.stop_texts[stop] for stop in loss_weights.every_stop]
            weights[np.isin(ids, stops) & (weights == 0)] = loss_weights.every_stop_weight
        eos = self.tokenizer.eos_token_id
        if isinstance(item, Document) and eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
            trained = [s.weight for s in item.segments if s.weight > 0 and s.text.strip()]
            last = trained[-1] if trained else loss_weights.base
            weights = np.append(weights, np.float32(last))
        if isinstance(item, Document):
            if self._mask.train_on_eos == "none" and len(ids) and ids[-1] == eos:
                weights[-1] = 0.0
            ids = self._with_bos(ids)
        if len(ids) > len(weights):
            weights = np.concatenate([np.full(1, loss_weights.base, np.float32), weights])
        trained_at = weights.nonzero()[0]
        if len(trained_at):
            ids, weights = ids[: trained_at[-1] + 1], weights[: trained_at[-1] + 1]
        return Encoded(ids, weights, notes=layout.notes)

    def _with_bos(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        import numpy as np

        if self.bos_token_id is None or (len(ids) and ids[0] == self.bos_token_id):
            return ids
        return np.concatenate([np.full(1, self.bos_token_id, np.int32), ids])


def _last_answer(item: Conversation | Document) -> str:
    if isinstance(item, Document):
        return item.segments[-1].text
    return [turn.content for turn in item.turns if turn.role == "assistant"][-1]
