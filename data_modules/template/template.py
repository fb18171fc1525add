"""Turn a conversation or a document into token ids and the weight of each token.

Decides which template is used, and joins the steps: render, find the turns, weigh them, tokenize.
A row that cannot be encoded becomes a RowProblem; nothing is raised for single rows.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from data_modules.messages import DataError, Origin, shown
from data_modules.template.checks import (
    FORMS,
    LimitError,
    Limits,
    Refused,
    Traced,
    attempt,
    find_refused,
    prove,
    rewrite,
)
from data_modules.template.encoder_decoder import PairEncoder
from data_modules.template.encoding import (
    TextTokenizer,
    TokenizedText,
    control_texts,
    stop_texts,
)
from data_modules.template.masking import Layout, LayoutBuilder, MaskConfig
from data_modules.template.named_templates import (
    TEMPLATE_NAMES,
    add_bos,
    check_named,
    named_template,
    read_template,
    templates_alike,
)
from data_modules.template.rendering import (
    Chat,
    MessageFormat,
    Renderer,
    RowRefusedError,
    render_errors,
)
from data_modules.template.spans import RenderedChat, SpanFinder
from data_modules.types import Conversation, Document, Encoded, Item, Note, Tokens, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers

CHUNK_ROWS = 256
_SMALL_CHAT = Chat((Turn("user", "a"), Turn("assistant", "b")))
_proven: dict[bytes, tuple[str, str] | None] = {}
"""hash of a template that was proven -> name and text of its twin, None where it needs none"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold a prompt (all tokens before the last answer) and the expected answer."""

    input_ids: list[int]
    answer: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Stand in the place of a row that cannot be encoded; `reason` is without the place."""

    origin: Origin
    reason: str

    @property
    def problem(self) -> str:
        """Return the whole line: file, line and reason."""
        return f"{self.origin} {self.reason}"


class ChatTemplate:
    """Encode conversations through a chat template, and documents without one.

    The template chosen is written to `tokenizer.chat_template`, so that it is saved with the
    model: a chat's tokens are those of `tokenizer.apply_chat_template`. `note` says in words which
    one it is and why; `bos_token_id` is what every document begins with, if anything.
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
        self._mask = mask or MaskConfig()
        self._tokenizer = tokenizer
        self.bos_token_id = self._added_bos()
        self.stop_texts = stop_texts(tokenizer)
        self._renderer = Renderer(tokenizer)
        self._finder = self._build_finder(self._renderer)
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
        limits: Limits | None = None,
        *,
        renders_chats: bool = True,
    ) -> ChatTemplate:
        """Choose the template `name`: one of TEMPLATE_NAMES, a .jinja file, None = the tokenizer's.

        A tokenizer without a template gets `plain`, and `t5` for an encoder-decoder model. Raises
        DataError for an unknown name, for a template that takes more than `limits`, and for one
        whose trained tokens are not those of the answers, unless no row goes through it
        (`renders_chats` False).
        """
        own = tokenizer.chat_template
        if name is None and own:
            note, checked = "chat template: the tokenizer's", "the tokenizer's own chat template"
            text = default_of(own)
        elif name is None or name in TEMPLATE_NAMES:
            chosen = name or ("t5" if is_encoder_decoder else "plain")
            check_named(tokenizer, chosen)
            text = named_template(chosen)
            checked = f"chat template `{chosen}`"
            note = f"chat template: {chosen}" if name else _note_of_default(chosen)
        else:
            note, checked = f"chat template: {name}", f"data.chat_template={name}"
            text = read_template(name)
        template = cls(tokenizer, text, note, mask, is_encoder_decoder)
        template._check_on_forms(checked, limits or Limits(), renders_chats)
        if template._write_bos():
            template._check_on_forms(checked, limits or Limits(), renders_chats)
        return template

    @property
    def hash(self) -> str:
        """Return the sha256 of the template's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def date_key(self) -> str:
        """Return today's date for a template that writes it: the tokens hold for that day only.

        "" for all others.
        """
        return datetime.date.today().isoformat() if "strftime_now" in self.text else ""

    @property
    def is_encoder_decoder(self) -> bool:
        """Tell whether items become a source and a target."""
        return self._pairs is not None

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end answers: of a small chat, and of all rows encoded so far."""
        small = self._finder.place([_SMALL_CHAT])[0]
        stops = {span.stop for span in small.spans} if isinstance(small, RenderedChat) else set()
        return {self.stop_texts[stop] for stop in stops | self._layout_builder.seen_stops if stop}

    def encode(self, items: Sequence[Item]) -> Iterator[Encoded | RowProblem]:
        """Yield what becomes of each item, in order.

        Tokens after the last trained one are left out: nothing depends on them. A row whose answer
        cannot be found in the rendered text, or has no stop token, is a RowProblem.
        """
        for first in range(0, len(items), CHUNK_ROWS):
            chunk = items[first : first + CHUNK_ROWS]
            written = [
                self._written(item) if isinstance(item, Conversation) else item for item in chunk
            ]
            results = self._pairs.encode(chunk) if self._pairs else self._encode_chunk(written)
            for item, given, result in zip(chunk, written, results, strict=True):
                if isinstance(result, RowRefusedError):
                    yield RowProblem(item.origin, str(result))
                elif given is item:
                    yield result
                else:
                    note = Note("rewritten_turns", ", ".join(self._refused.words))
                    yield replace(result, notes=(*result.notes, note))

    def prompt(self, item: Item) -> Prompt | None:
        """Return what comes before the last answer, and that answer; None where nothing does.

        Its tokens are those that training sees there: the whole item is tokenized and cut where
        the last answer begins. Only where the template's generation prompt is not a prefix of the
        whole conversation, it is tokenized alone, as whoever serves the model does.
        """
        if isinstance(item, Tokens):
            return None
        if self._pairs:
            ids = self._pairs.prompt_ids(item)
            return Prompt(ids, _last_answer(item), item.origin) if ids else None
        if isinstance(item, Conversation):
            item = self._written(item)
        prompt = self._layout_builder.prompt(item)
        if prompt is None:
            return None
        text, start, plain = prompt
        tokenized = self._text_tokenizer.tokenize([text], {0: plain} if plain else {})[0]
        if isinstance(tokenized, RowRefusedError):
            return None
        prompt_ids = tokenized.ids[: tokenized.first(start, len(text))]
        is_document = isinstance(item, Document)
        ids = (self._with_bos(prompt_ids) if is_document else prompt_ids).tolist()
        return Prompt(ids, _last_answer(item), item.origin) if ids else None

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens of a chat that waits for its answer: those of `apply_chat_template`.

        An encoder's have the special tokens that its tokenizer adds. DataError where the template
        refuses the chat.
        """
        (text,) = self._renderer.render([self._waiting(turns)], True)
        if isinstance(text, RowRefusedError):
            raise DataError(str(text))
        if self._pairs:
            return self._pairs.source_ids([text])[0]
        (tokenized,) = self._text_tokenizer.tokenize([text], {})
        if isinstance(tokenized, RowRefusedError):
            raise DataError(str(tokenized))
        ids: list[int] = tokenized.ids.tolist()
        return ids

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return a chat in the form in which this template reads it, OpenAI's."""
        return self._renderer.messages(self._waiting(turns))

    def trace(self, chat: Conversation) -> Traced | RowRefusedError:
        """Encode one conversation, and say which characters its tokens hold."""
        return self._trace(self._layout_builder, chat)

    def _trace(self, layout_builder: LayoutBuilder, chat: Conversation) -> Traced | RowRefusedError:
        import numpy as np

        chat = self._written(chat)
        (layout,) = layout_builder.build([chat])
        if isinstance(layout, RowRefusedError):
            return layout
        (tokenized,) = self._text_tokenizer.tokenize(
            [layout.text], {0: layout.plain} if layout.plain else {}
        )
        if isinstance(tokenized, RowRefusedError):
            return tokenized
        weights = np.zeros(len(tokenized.ids), np.float32)
        trained = self._weigh(chat, layout, tokenized).weights
        weights[: len(trained)] = trained
        return Traced(
            layout.text, tokenized, weights, frozenset(note.kind for note in layout.notes)
        )

    @cached_property
    def _refused(self) -> Refused:
        if self._pairs or self._mask.unsupported_turns == "refuse":
            return Refused()
        return find_refused(self._renderer)

    def _written(self, chat: Conversation) -> Conversation:
        """Return a conversation in turns that the template takes."""
        return rewrite(chat, self._refused, self._mask.roles_to_train)

    def _waiting(self, turns: Sequence[Turn]) -> Chat:
        """Return what the template is given of a chat that waits for its answer."""
        return Chat(rewrite(Conversation(tuple(turns), Origin("chat", 1)), self._refused).turns)

    def _write_bos(self) -> bool:
        """Let the template write the BOS that the tokenizer adds to texts; tell whether it had to.

        A template that writes it already stays as it is.
        """
        if self.bos_token_id is None or self._pairs:
            return False
        bos = str(self._tokenizer.bos_token)
        text = add_bos(self.text, bos, self._renderer)
        is_changed = text != self.text
        if is_changed:
            self.text = self._tokenizer.chat_template = text
            self.note += (
                f"; `{bos}`, which this tokenizer puts before every text, is written in front of "
                "it, in the saved template too"
            )
        return is_changed

    def _check_on_forms(self, name: str, limits: Limits, renders_chats: bool) -> None:
        """Prove the masks of the template; DataError where one is wrong, or it takes too much."""
        backend = self._tokenizer.backend_tokenizer.to_str()
        special_tokens = self._tokenizer.special_tokens_map
        whole = repr((name, self.text, backend, special_tokens, limits, renders_chats))
        key = hashlib.sha256(whole.encode()).digest()
        if key in _proven:
            self._use_twin(_proven[key])
            return
        try:
            faults, twin = attempt(partial(self._prove, name, renders_chats), limits)
        except LimitError as error:
            raise DataError(
                f"{name} does not render {len(FORMS)} small chats {error}: look for a loop or a "
                "text without end in it, raise data.template_seconds or data.template_memory_mb, "
                "or set data.chat_template=plain"
            ) from error
        if faults:
            raise DataError(faults)
        _proven[key] = twin
        self._use_twin(twin)

    def _use_twin(self, twin: tuple[str, str] | None) -> None:
        """Find answers by the template `twin` (name, text) from now on, None = by the own one."""
        self._finder.twin = None
        if twin is None:
            return
        name, text = twin
        self._finder.twin = self._build_finder(Renderer(self._tokenizer, text))
        note = f"; its answers are located by `{name}`, which renders the same text"
        self.note = self.note.replace(note, "") + note

    def _build_finder(self, renderer: Renderer) -> SpanFinder:
        framing = filter(None, (self._tokenizer.bos_token, self._tokenizer.eos_token))
        return SpanFinder(renderer, self.stop_texts, framing)

    def _prove(self, name: str, renders_chats: bool) -> tuple[list[str], tuple[str, str] | None]:
        """Return what is wrong with the template, and the twin by which nothing is.

        A form that the template refuses is not wrong.
        """
        import jinja2

        try:
            self._renderer.apply([_SMALL_CHAT], False, MessageFormat())
        except jinja2.TemplateSyntaxError as error:
            return [
                f"{name} is not a valid template: line {error.lineno}: {shown(str(error.message))}"
                "; mend it, or set data.chat_template=plain"
            ], None
        except MemoryError:
            raise
        except render_errors():
            pass  # A row that it refuses is named when that row is encoded.
        if self._pairs or not renders_chats:
            return [], None
        finder, controls = self._finder, control_texts(self._tokenizer)
        layout_builder = LayoutBuilder(self._renderer, finder, MaskConfig(), controls)
        trace = partial(self._trace, layout_builder)
        proof = prove(trace)
        if proof.is_whole:
            return [], None
        for twin in templates_alike(self._tokenizer, self._renderer):
            finder.twin = self._build_finder(Renderer(self._tokenizer, twin[1]))
            if prove(trace).is_whole:
                return [], twin
        finder.twin = None
        return [
            f"{name}: {fault}, so its loss mask is wrong; set data.chat_template=plain"
            for fault in proof.faults
        ], None

    def _encode_chunk(self, items: Sequence[Item]) -> Iterator[Encoded | RowRefusedError]:
        texts = [item for item in items if not isinstance(item, Tokens)]
        layouts = self._layout_builder.build(texts)
        good = [one for one in layouts if isinstance(one, Layout)]
        plain = {index: one.plain for index, one in enumerate(good) if one.plain}
        tokenized = iter(self._text_tokenizer.tokenize([one.text for one in good], plain))
        waiting = iter(layouts)
        for item in items:
            if isinstance(item, Tokens):
                yield self._given_tokens(item)
                continue
            one = next(waiting)
            if isinstance(one, RowRefusedError):
                yield one
                continue
            tokens = next(tokenized)
            yield tokens if isinstance(tokens, RowRefusedError) else self._weigh(item, one, tokens)

    def _given_tokens(self, item: Tokens) -> Encoded | RowRefusedError:
        import numpy as np

        ids = np.array(item.input_ids, np.int64)
        known = len(self._tokenizer)
        wrong = ids[(ids < 0) | (ids >= known)]
        if len(wrong):
            return RowRefusedError(
                f"input_ids has {int(wrong[0]):,}, but the tokenizer has the ids 0 to {known - 1:,}"
                "; tokenize the row with this model's tokenizer"
            )
        return Encoded(ids.astype(np.int32), np.array(item.weights, np.float32))

    def _weigh(
        self, item: Conversation | Document, layout: Layout, tokenized: TokenizedText
    ) -> Encoded:
        import numpy as np

        ids, mask = tokenized.ids, layout.loss_weights
        weights = np.zeros(len(ids), np.float32)
        if mask.base:
            weights += mask.base
        for start, end, weight in mask.stretches:
            first = tokenized.first(start, end)
            if first is not None:
                weights[first : tokenized.after(end)] = weight
        if mask.every_stop:
            stops = [self.stop_texts[stop] for stop in mask.every_stop]
            weights[np.isin(ids, stops) & (weights == 0)] = mask.every_stop_weight
        eos = self._tokenizer.eos_token_id
        if isinstance(item, Document) and eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
            weights = np.append(weights, np.float32(_last_weight(item) or mask.base))
        if isinstance(item, Document):
            ids = self._with_bos(ids)
        if len(ids) > len(weights):
            weights = np.concatenate([np.full(1, mask.base, np.float32), weights])
        trained_at = weights.nonzero()[0]
        if len(trained_at):
            ids, weights = ids[: trained_at[-1] + 1], weights[: trained_at[-1] + 1]
        return Encoded(ids, weights, notes=layout.notes)

    def _added_bos(self) -> int | None:
        bos: int | None = self._tokenizer.bos_token_id
        first = self._tokenizer("a")["input_ids"][:1]
        return bos if bos is not None and first == [bos] else None

    def _with_bos(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        import numpy as np

        if self.bos_token_id is None or (len(ids) and ids[0] == self.bos_token_id):
            return ids
        return np.concatenate([np.full(1, self.bos_token_id, np.int32), ids])


def _note_of_default(name: str) -> str:
    looks = "contents only" if name == "t5" else "### User: / ### Assistant: turns"
    return (
        f"chat template: {name} ({looks}), because the tokenizer has none; set data.chat_template "
        "to choose another"
    )


def _last_answer(item: Conversation | Document) -> str:
    if isinstance(item, Document):
        return item.segments[-1].text
    return [turn.content for turn in item.turns if turn.role == "assistant"][-1]


def _last_weight(document: Document) -> float:
    """Return the weight of the last trained segment, which the EOS gets; 0 if they are blank."""
    weights = [s.weight for s in document.segments if s.weight > 0 and s.text.strip()]
    return weights[-1] if weights else 0.0


def default_of(template: str | dict[str, str]) -> str:
    """Return the default of a tokenizer's template; some ship several by name."""
    if isinstance(template, str):
        return template
    if "default" in template:
        return template["default"]
    raise DataError(
        f"the tokenizer has the chat templates {', '.join(template)} but no default; save one of "
        "them as a file and set data.chat_template=FILE.jinja"
    )
