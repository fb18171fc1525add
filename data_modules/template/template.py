"""Turn a conversation or a document into token ids and the weight of each token.

Decides which template is used, and joins the steps: render, find the turns, choose what is learned,
tokenise. A row that cannot be encoded becomes a RowProblem; nothing is raised for single rows.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from data_modules.template.answer_spans import SpanFinder
from data_modules.template.bos import begun_with_bos
from data_modules.template.encoder_decoder import PairEncoder
from data_modules.template.encoding import Spelled, Tokeniser, control_texts, stop_texts
from data_modules.template.layout import Laid, Layer
from data_modules.template.masking import MaskConfig as MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES as TEMPLATE_NAMES
from data_modules.template.named_templates import TEMPLATES_WITH_TOOLS as TEMPLATES_WITH_TOOLS
from data_modules.template.named_templates import (
    check_named,
    default_of,
    named_template,
    read_template,
)
from data_modules.template.proof import FORMS, Traced, prove
from data_modules.template.rendering import (
    Chat,
    MessageFormat,
    Renderer,
    RowRefusedError,
    render_errors,
)
from data_modules.template.skeleton import Placed
from data_modules.template.trial import LimitError, Limits, attempt
from data_modules.types import (
    Conversation,
    DataError,
    Document,
    Encoded,
    Item,
    Origin,
    Prompt,
    Tokens,
    Turn,
    shown,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers

CHUNK_ROWS = 256
_SMALL_CHAT = Chat((Turn("user", "a"), Turn("assistant", "b")))


_proven: set[bytes] = set()


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
        framing = filter(None, (tokenizer.bos_token, tokenizer.eos_token))
        self._finder = SpanFinder(self._renderer, self.stop_texts, framing)
        self._layer = Layer(self._renderer, self._finder, self._mask, control_texts(tokenizer))
        self._tokeniser = Tokeniser(tokenizer)
        self._pairs = (
            PairEncoder(tokenizer, self._renderer, self._layer, self._mask)
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
    ) -> ChatTemplate:
        """Choose the template `name`: one of TEMPLATE_NAMES, a .jinja file, None = the tokenizer's.

        A tokenizer without a template gets `plain`, and `t5` for an encoder-decoder model. Raises
        DataError for an unknown name, for a template that takes more than `limits`, and for one
        whose trained tokens are not those of the answers.
        """
        own = tokenizer.chat_template
        if name is None and own:
            note = checked = "the tokenizer's own chat template"
            text = default_of(own)
        elif name is None or name in TEMPLATE_NAMES:
            chosen = name or ("t5" if is_encoder_decoder else "plain")
            check_named(tokenizer, chosen)
            text = named_template(chosen)
            checked = f"chat template `{chosen}`"
            note = checked if name else _note_of_default(chosen)
        else:
            note, checked = f"chat template {name}", f"data.chat_template={name}"
            text = read_template(name)
        template = cls(tokenizer, text, note, mask, is_encoder_decoder)
        template._check_on_forms(checked, limits or Limits())
        if template._write_bos():
            template._check_on_forms(checked, limits or Limits())
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
        stops = {span.stop for span in small.spans} if isinstance(small, Placed) else set()
        return {self.stop_texts[stop] for stop in stops | self._layer.seen_stops if stop}

    def encode(self, items: Sequence[Item]) -> Iterator[Encoded | RowProblem]:
        """Yield what becomes of each item, in order.

        Tokens after the last learned one are left out: nothing depends on them. A row whose answer
        cannot be found in the rendered text, or has no stop token, is a RowProblem.
        """
        for first in range(0, len(items), CHUNK_ROWS):
            chunk = items[first : first + CHUNK_ROWS]
            results = self._pairs.encode(chunk) if self._pairs else self._encode_chunk(chunk)
            for item, result in zip(chunk, results, strict=True):
                if isinstance(result, RowRefusedError):
                    yield RowProblem(item.origin, str(result))
                else:
                    yield result

    def prompt(self, item: Item) -> Prompt | None:
        """Return what comes before the last answer, and that answer; None where nothing does.

        Its tokens are those that training sees there: the whole item is tokenised and cut where
        the last answer begins. Only where the template's generation prompt is no beginning of the
        whole conversation, it is tokenised alone, as anybody who asks the model will do it.
        """
        if isinstance(item, Tokens):
            return None
        if self._pairs:
            ids = self._pairs.prompt_ids(item)
            return Prompt(ids, _last_answer(item), item.origin) if ids else None
        asked = self._layer.asked(item)
        if asked is None:
            return None
        text, start, plain = asked
        spelled = self._tokeniser.spell([text], {0: plain} if plain else {})[0]
        if isinstance(spelled, RowRefusedError):
            return None
        asked_ids = spelled.ids[: spelled.first(start, len(text))]
        is_document = isinstance(item, Document)
        ids = (self._with_bos(asked_ids) if is_document else asked_ids).tolist()
        return Prompt(ids, _last_answer(item), item.origin) if ids else None

    def control_token(self, item: Item) -> str | None:
        """Return the first control token that stands in an item's own text, None without one."""
        return self._layer.control_token(item)

    def trace(self, chat: Conversation) -> Traced | RowRefusedError:
        """Encode one conversation, and say which characters its tokens hold."""
        return self._trace(self._layer, chat)

    def _trace(self, layer: Layer, chat: Conversation) -> Traced | RowRefusedError:
        import numpy as np

        (laid,) = layer.lay([chat])
        if isinstance(laid, RowRefusedError):
            return laid
        (spelled,) = self._tokeniser.spell([laid.text], {0: laid.plain} if laid.plain else {})
        if isinstance(spelled, RowRefusedError):
            return spelled
        weights = np.zeros(len(spelled.ids), np.float32)
        trained = self._weigh(chat, laid, spelled).weights
        weights[: len(trained)] = trained
        return Traced(laid.text, spelled, weights, frozenset(note.kind for note in laid.notes))

    def _write_bos(self) -> bool:
        """Let the template write the BOS that the tokenizer adds to texts; tell whether it had to.

        A template that writes it already stays as it is.
        """
        if self.bos_token_id is None or self._pairs:
            return False
        bos = str(self._tokenizer.bos_token)
        text = begun_with_bos(self.text, bos, self._renderer)
        is_changed = text != self.text
        if is_changed:
            self.text = self._tokenizer.chat_template = text
            self.note += (
                f"; `{bos}`, which this tokenizer puts before every text, is written in front of "
                "it, in the saved template too"
            )
        return is_changed

    def _check_on_forms(self, name: str, limits: Limits) -> None:
        """Prove the masks of the template; DataError where it is none, takes too much, or lies."""
        backend = self._tokenizer.backend_tokenizer.to_str()
        whole = repr((name, self.text, backend, self._tokenizer.special_tokens_map, limits))
        key = hashlib.sha256(whole.encode()).digest()
        if key in _proven:
            return
        try:
            faults = attempt(partial(self._prove, name), limits)
        except LimitError as error:
            raise DataError(
                f"{name} does not render {len(FORMS)} small chats {error}: look for a loop or a "
                "text without end in it, raise data.template_seconds or data.template_memory_mb, "
                "or set data.chat_template=plain"
            ) from error
        if faults:
            raise DataError(faults)
        _proven.add(key)

    def _prove(self, name: str) -> list[str]:
        """Return what is wrong with the template; a form that it refuses is not."""
        import jinja2

        try:
            self._renderer.apply([_SMALL_CHAT], False, MessageFormat())
        except jinja2.TemplateSyntaxError as error:
            return [
                f"{name} is no valid template: line {error.lineno}: {shown(str(error.message))}"
                "; mend it, or set data.chat_template=plain"
            ]
        except MemoryError:
            raise
        except render_errors():
            pass  # A row that it refuses is named when that row is encoded.
        if self._pairs:
            return []
        finder, controls = self._finder, control_texts(self._tokenizer)
        layer = Layer(self._renderer, finder, MaskConfig(), controls)
        return [
            f"{name}: {fault}, so its loss mask is wrong; set data.chat_template=plain"
            for fault in prove(partial(self._trace, layer)).faults
        ]

    def _encode_chunk(self, items: Sequence[Item]) -> Iterator[Encoded | RowRefusedError]:
        texts = [item for item in items if not isinstance(item, Tokens)]
        laid = self._layer.lay(texts)
        good = [one for one in laid if isinstance(one, Laid)]
        plain = {index: one.plain for index, one in enumerate(good) if one.plain}
        spelled = iter(self._tokeniser.spell([one.text for one in good], plain))
        waiting = iter(laid)
        for item in items:
            if isinstance(item, Tokens):
                yield self._given_tokens(item)
                continue
            one = next(waiting)
            if isinstance(one, RowRefusedError):
                yield one
                continue
            tokens = next(spelled)
            yield tokens if isinstance(tokens, RowRefusedError) else self._weigh(item, one, tokens)

    def _given_tokens(self, item: Tokens) -> Encoded | RowRefusedError:
        import numpy as np

        ids = np.array(item.input_ids, np.int64)
        known = len(self._tokenizer)
        wrong = ids[(ids < 0) | (ids >= known)]
        if len(wrong):
            return RowRefusedError(
                f"input_ids has {int(wrong[0]):,}, but the tokenizer has the ids 0 to {known - 1:,}"
                "; tokenise the row with this model's tokenizer"
            )
        return Encoded(ids.astype(np.int32), np.array(item.weights, np.float32))

    def _weigh(self, item: Conversation | Document, laid: Laid, spelled: Spelled) -> Encoded:
        import numpy as np

        ids, learned = spelled.ids, laid.learned
        weights = np.zeros(len(ids), np.float32)
        if learned.base:
            weights += learned.base
        for start, end, weight in learned.stretches:
            first = spelled.first(start, end)
            if first is not None:
                weights[first : spelled.after(end)] = weight
        if learned.every_stop:
            stops = [self.stop_texts[stop] for stop in learned.every_stop]
            weights[np.isin(ids, stops) & (weights == 0)] = learned.every_stop_weight
        eos = self._tokenizer.eos_token_id
        if isinstance(item, Document) and eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
            weights = np.append(weights, np.float32(_last_weight(item) or learned.base))
        if isinstance(item, Document):
            ids = self._with_bos(ids)
        if len(ids) > len(weights):
            weights = np.concatenate([np.full(1, learned.base, np.float32), weights])
        learned_at = weights.nonzero()[0]
        if len(learned_at):
            ids, weights = ids[: learned_at[-1] + 1], weights[: learned_at[-1] + 1]
        return Encoded(ids, weights, notes=laid.notes)

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
        f"the tokenizer has no chat template: `{name}` is used ({looks}); set "
        "data.chat_template to choose another"
    )


def _last_answer(item: Conversation | Document) -> str:
    if isinstance(item, Document):
        return item.segments[-1].text
    return [turn.content for turn in item.turns if turn.role == "assistant"][-1]


def _last_weight(document: Document) -> float:
    """Return the weight of the last learned segment, which the EOS gets; 0 if they are blank."""
    learned = [s.weight for s in document.segments if s.weight > 0 and s.text.strip()]
    return learned[-1] if learned else 0.0
