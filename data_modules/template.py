"""Turn a conversation or a document into token ids and the weight of each token.

Decides which tokens are learned: of an answer, what follows the generation prompt up to and with
the stop token. Never calls `{% generation %}`: templates are rendered with their real prefixes,
the text is tokenised once, and characters are mapped to tokens. Templates run in the sandbox of
`tokenizer.apply_chat_template` only.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_modules.types import (
    Conversation,
    DataError,
    Document,
    Origin,
    Prompt,
    Turn,
    shown,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import transformers

    Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]

CHUNK_ROWS = 256
# Stands for an answer in a render; private-use characters that no text and no template holds.
_MARK = "\ue0f1answer\ue0f2"
# Newlines are written as expressions: the sandbox drops a newline that follows a block.
PLAIN = (
    "{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:{{ '\n' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:{{ '\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}{{ '\n' }}{{ message['content'] }}<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
NAMED = {"plain": PLAIN, "chatml": CHATML}
TEMPLATE_NAMES = tuple(NAMED)
MAX_TEMPLATE_BYTES = 1 << 20
RENDER_SECONDS = 5.0
_SMALL_CHAT = (Turn("user", "a"), Turn("assistant", "b"))


@dataclass(frozen=True, slots=True)
class _Span:
    """Hold characters `start` to `end` of a text and their weight."""

    start: int
    end: int
    weight: float


class ChatTemplate:
    """Encode conversations through a chat template, and documents without one.

    The template chosen is written to `tokenizer.chat_template`, so that it is saved with the
    model. `note` says in words which one it is and why; `stop_token_ids` are the tokens that were
    found to end answers; `bos_token_id` is what every document begins with, if anything.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, text: str, note: str
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer has no tokenizer.json, so characters cannot be mapped to tokens; "
                "set model.tokenizer_path to a folder that has one"
            )
        tokenizer.chat_template = text
        self.text, self.note = text, note
        self.stop_token_ids: set[int] = set()
        self.num_lost_system_turns = 0
        self._tokenizer = tokenizer
        # TokenizersBackend's Rust tokenizer: its encodings answer char_to_token without building
        # a Python list of offsets, which costs more than the tokenising.
        self._backend: Any = tokenizer.backend_tokenizer
        self.bos_token_id = self._added_bos()
        self._specials = _special_texts(tokenizer)
        self._stop = re.compile(r"\s*(" + "|".join(map(re.escape, self._specials)) + ")")
        self._control = re.compile("|".join(map(re.escape, _control_texts(tokenizer))) or "(?!)")

    @classmethod
    def resolve(
        cls, tokenizer: transformers.PreTrainedTokenizerBase, name: str | None
    ) -> ChatTemplate:
        """Choose the template `name`: plain, chatml, a .jinja file, None = the tokenizer's own.

        A tokenizer without a template gets `plain`. Raises DataError for an unknown name, and for
        a template from a file that does not render in seconds.
        """
        own = tokenizer.chat_template
        if name is None and own:
            note = "the tokenizer's own chat template"
            template = cls(tokenizer, _default_of(own), note)
            template._check_renders(note)
            return template
        if name is None:
            _need_eos(tokenizer)
            return cls(
                tokenizer,
                PLAIN,
                "the tokenizer has no chat template: `plain` is used "
                "(### User: / ### Assistant: turns); set data.chat_template to choose another",
            )
        if name in NAMED:
            _check_named(tokenizer, name)
            return cls(tokenizer, NAMED[name], f"chat template `{name}`")
        file = Path(name).expanduser()
        if file.suffix != ".jinja" or not file.is_file():
            what = "no such file" if file.suffix == ".jinja" else "unknown chat template"
            raise DataError(
                f"data.chat_template={name}: {what}; use {', '.join(NAMED)}, a .jinja file, "
                "or null for the tokenizer's own"
            )
        template = cls(tokenizer, _read_template(file, name), f"chat template {name}")
        template._check_renders(f"data.chat_template={name}")
        return template

    @property
    def hash(self) -> str:
        """Return the sha256 of the template's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(
        self, items: Sequence[Conversation | Document], train_on_inputs: bool = False
    ) -> Iterator[Encoded]:
        """Yield ids (int32 [tokens]) and weights (float32 [tokens]) of each item, in order.

        Tokens after the last learned one are left out: nothing depends on them. Raises DataError
        naming file and line where an answer cannot be found in the rendered text, or has no stop
        token.
        """
        for first in range(0, len(items), CHUNK_ROWS):
            yield from self._encode_chunk(items[first : first + CHUNK_ROWS], train_on_inputs)

    def prompt(self, item: Conversation | Document) -> Prompt | None:
        """Return what comes before the last answer, and that answer; None where nothing does.

        Its tokens are those that training sees there: the whole item is tokenised and cut where
        the last answer begins. Only where the template's generation prompt is no beginning of the
        whole conversation, it is tokenised alone, as anybody who asks the model will do it.
        """
        if isinstance(item, Document):
            if len(item.segments) < 2:
                return None
            answer = item.segments[-1].text
            prompted = "".join(segment.text for segment in item.segments[:-1])
        else:
            asked = _answers(item)
            if not asked:
                return None
            answer = item.turns[asked[-1]].content
            prompted = self._render([item.turns[: asked[-1]]], True, [item.origin])[0]
        (text,), (spans,) = self._texts_and_spans([item])
        if text.startswith(prompted):
            encoding = self._tokenise([text])[0]
            ids = encoding.ids[: _token_at(encoding, spans[-1].start, spans[-1].end)]
        else:
            ids = self._tokenise([prompted])[0].ids
        ids = self._with_bos(ids)
        return Prompt(ids, answer, item.origin) if ids else None

    def control_token(self, item: Conversation | Document) -> str | None:
        """Return the first control token that stands in an item's own text, None without one."""
        if isinstance(item, Document):
            texts = ["".join(segment.text for segment in item.segments)]
        else:
            texts = [turn.content for turn in item.turns]
        found = next((match for text in texts if (match := self._control.search(text))), None)
        return found[0] if found else None

    def _check_renders(self, name: str) -> None:
        """Render a small chat; a template that never ends would hang the run without a word."""
        import jinja2

        problems: list[str] = []

        def render() -> None:
            try:
                self._apply([_messages(_SMALL_CHAT)], False)
            except jinja2.TemplateSyntaxError as error:
                problems.append(
                    f"{name} is no valid template: line {error.lineno}: {shown(str(error.message))}"
                    "; mend it, or set data.chat_template=plain"
                )
            except _render_errors():
                pass  # A row that it refuses is named when that row is encoded.

        # A daemon: it cannot be stopped, and must not keep the process that reports it.
        thread = threading.Thread(target=render, daemon=True)
        thread.start()
        thread.join(RENDER_SECONDS)
        if thread.is_alive():
            problems.append(
                f"{name} does not render a chat of two turns within {RENDER_SECONDS:g} s; look for "
                "a loop without end in it, or set data.chat_template=plain"
            )
        if problems:
            raise DataError(problems)

    def _encode_chunk(
        self, items: Sequence[Conversation | Document], train_on_inputs: bool
    ) -> Iterator[Encoded]:
        texts, spans = self._texts_and_spans(items)
        for item, encoding, item_spans in zip(items, self._tokenise(texts), spans, strict=True):
            yield self._weigh(item, encoding, item_spans, train_on_inputs)

    def _texts_and_spans(
        self, items: Sequence[Conversation | Document]
    ) -> tuple[list[str], list[list[_Span]]]:
        chats = [item for item in items if isinstance(item, Conversation)]
        origins = [chat.origin for chat in chats]
        full = iter(self._render([chat.turns for chat in chats], False, origins))
        heads = [(chat.turns[:index], chat.origin) for chat in chats for index in _answers(chat)]
        before = [turns for turns, _ in heads], [origin for _, origin in heads]
        prompted = iter(self._render(before[0], True, before[1]))
        unprompted = iter(self._render(before[0], False, before[1]))
        texts, spans = [], []
        for item in items:
            if isinstance(item, Document):
                texts.append("".join(segment.text for segment in item.segments))
                spans.append(_segment_spans(item))
                continue
            text = next(full)
            first = item.turns[0]
            if first.role == "system" and first.content.strip() not in text:
                self.num_lost_system_turns += 1
            prefixes = [(next(prompted), next(unprompted)) for _ in _answers(item)]
            texts.append(text)
            spans.append(self._answer_spans(item, text, prefixes))
        return texts, spans

    def _answer_spans(
        self, chat: Conversation, text: str, prefixes: list[tuple[str, str]]
    ) -> list[_Span]:
        """Find each answer in the rendered `text`, with its stop token."""
        spans: list[_Span] = []
        marked: list[int] = []
        for number, (index, (prompted, unprompted)) in enumerate(
            zip(_answers(chat), prefixes, strict=True)
        ):
            if text.startswith(prompted):
                start, exact = len(prompted), prompted != unprompted
            else:
                marked = marked or self._answer_starts(chat, text)
                start, exact = marked[number], True
            # Never beyond the next answer's prefix, where the same words may stand again.
            after = prefixes[number + 1][0] if number + 1 < len(prefixes) else text
            here = text[: len(after)] if text.startswith(after) else text
            spans.append(self._answer_span(chat.turns[index], here, start, exact, chat.origin))
        return spans

    def _answer_starts(self, chat: Conversation, text: str) -> list[int]:
        """Return where the answers begin, for templates whose prefix renders are no prefixes.

        The conversation is rendered once more with a mark in the place of each answer: `text` must
        be the pieces around the marks with the answers between them.
        """
        turns = [
            Turn(turn.role, _MARK) if turn.role == "assistant" else turn for turn in chat.turns
        ]
        pieces = self._render([turns], False, [chat.origin])[0].split(_MARK)
        starts = [len(pieces[0])]
        for index, piece in zip(_answers(chat), pieces[1:], strict=False):
            forms = _variants(chat.turns[index].content)
            form = next((f for f in forms if text.startswith(f + piece, starts[-1])), None)
            if form is None:
                raise DataError(self._lost_answer(chat.turns[index], text, starts[-1], chat.origin))
            starts.append(starts[-1] + len(form + piece))
        return starts

    def _answer_span(self, turn: Turn, text: str, start: int, exact: bool, origin: Origin) -> _Span:
        """Find one answer from `start` on, with its stop token.

        `exact`: all from `start` on is what the model has to say; else a header may come first,
        which is not learned.
        """
        for content in _variants(turn.content):
            found = text.find(content, start)
            while found >= 0:
                stop = self._stop.match(text, found + len(content))
                if stop:
                    header = text[start:found]
                    if not exact and header.strip():
                        start = found
                    weight = 1.0 if turn.weight is None else turn.weight
                    if not turn.content.strip():
                        weight = 0.0
                    self._note_stop(stop[1])
                    return _Span(start, stop.end(), weight)
                if not content:
                    break
                found = text.find(content, found + 1)
        raise DataError(self._lost_answer(turn, text, start, origin))

    def _lost_answer(self, turn: Turn, text: str, start: int, origin: Origin) -> str:
        fix = "set data.chat_template=plain, or give a .jinja file that does"
        answer = shown(turn.content)
        if any(content in text[start:] for content in _variants(turn.content)):
            return (
                f"{origin} the chat template writes no stop token after the answer `{answer}`, so "
                f"the model would never learn to stop; {fix}"
            )
        return f"{origin} the chat template does not write the answer `{answer}` as it is; {fix}"

    def _note_stop(self, text: str) -> None:
        self.stop_token_ids.add(self._specials[text])

    def _weigh(
        self,
        item: Conversation | Document,
        encoding: Any,
        spans: list[_Span],
        train_on_inputs: bool,
    ) -> Encoded:
        import numpy as np

        ids = encoding.ids
        weights = np.zeros(len(ids), dtype=np.float32)
        for span in spans:
            first = _token_at(encoding, span.start, span.end)
            if first is not None:
                weights[first : _token_after(encoding, span.end, len(ids))] = span.weight
        if isinstance(item, Document):
            eos = self._tokenizer.eos_token_id
            if eos is not None and (not ids or ids[-1] != eos):
                ids = [*ids, eos]
                weights = np.append(weights, np.float32(_last_weight(item)))
        num_ids = len(ids)
        ids = self._with_bos(ids)
        if len(ids) > num_ids:
            weights = np.concatenate([np.zeros(1, np.float32), weights])
        if train_on_inputs:
            weights[weights == 0] = 1.0
        learned_to = int(weights.nonzero()[0][-1]) + 1 if weights.any() else len(ids)
        return np.array(ids[:learned_to], dtype=np.int32), weights[:learned_to]

    def _render(
        self, chats: Sequence[Sequence[Turn]], add_generation_prompt: bool, origins: list[Origin]
    ) -> list[str]:
        if not chats:
            return []
        messages = [_messages(turns) for turns in chats]
        errors = _render_errors()
        try:
            return self._apply(messages, add_generation_prompt)
        except errors:
            # Once more one by one, to name the row.
            for chat, origin in zip(messages, origins, strict=True):
                try:
                    self._apply([chat], add_generation_prompt)
                except errors as error:
                    roles = ", ".join(message["role"] for message in chat)
                    raise DataError(
                        f"{origin} the chat template refuses this row (turns: {roles}): "
                        f"{shown(str(error))}; change the row, or set data.chat_template=plain"
                    ) from error
            raise

    def _apply(self, messages: list[list[dict[str, str]]], prompt: bool) -> list[str]:
        texts: list[str] = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        return texts

    def _tokenise(self, texts: list[str]) -> list[Any]:
        self._backend.no_truncation()
        self._backend.no_padding()
        encodings: list[Any] = self._backend.encode_batch(texts, add_special_tokens=False)
        return encodings

    def _added_bos(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        first = self._tokenizer("a")["input_ids"][:1]
        return bos if bos is not None and first == [bos] else None

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return list(ids)
        return [self.bos_token_id, *ids]


def _render_errors() -> tuple[type[Exception], ...]:
    """Return what a template can raise: Jinja's own errors, and those of Python's operators."""
    import jinja2

    return (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    )


def _read_template(file: Path, name: str) -> str:
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise DataError(
            f"data.chat_template={name}: {file.stat().st_size:,} bytes are no chat template; give "
            "a .jinja file"
        )
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.chat_template={name}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def _default_of(template: str | dict[str, str]) -> str:
    """Return the default of a tokenizer's template; some ship several by name."""
    if isinstance(template, str):
        return template
    if "default" in template:
        return template["default"]
    raise DataError(
        f"the tokenizer has the chat templates {', '.join(template)} but no default; save one of "
        "them as a file and set data.chat_template=FILE.jinja"
    )


def _need_eos(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer has no eos token, so `plain` cannot end an answer; set eos_token in its "
            "tokenizer_config.json"
        )


def _check_named(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    if name == "plain":
        _need_eos(tokenizer)
    known = tokenizer.get_added_vocab()
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in known]
    if name == "chatml" and missing:
        raise DataError(
            f"data.chat_template=chatml needs the tokens {' and '.join(missing)}, which this "
            "tokenizer does not have; use data.chat_template=plain"
        )


def _special_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    """Return what can end an answer, by text, longest first: special and other added tokens.

    Not every tokenizer marks its turn's end as special; some add runs of blanks, which end nothing.
    """
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    ids.update(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    texts = sorted((text for text in ids if text.strip()), key=len, reverse=True)
    return {text: ids[text] for text in texts}


def _control_texts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that the tokenizer reads as control tokens, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return sorted(filter(str.strip, texts), key=len, reverse=True)


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _answers(chat: Conversation) -> list[int]:
    return [index for index, turn in enumerate(chat.turns) if turn.role == "assistant"]


def _variants(content: str) -> list[str]:
    """Return the forms in which templates write an answer: as it is, stripped, without thinking."""
    thought = content.rsplit("</think>", 1)[-1].strip()
    return list(dict.fromkeys((content, content.strip(), thought)))


def _segment_spans(document: Document) -> list[_Span]:
    spans, start = [], 0
    for segment in document.segments:
        spans.append(_Span(start, start + len(segment.text), segment.weight))
        start += len(segment.text)
    return spans


def _last_weight(document: Document) -> float:
    """Return the weight of the last learned segment, which the EOS gets; 0 if they are blank."""
    learned = [s.weight for s in document.segments if s.weight > 0 and s.text.strip()]
    return learned[-1] if learned else 0.0


def _token_at(encoding: Any, start: int, end: int) -> int | None:
    """Return the first token that holds a character of [start, end); blanks may hold none."""
    for position in range(start, end):
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            return token
    return None


def _token_after(encoding: Any, end: int, num_tokens: int) -> int:
    """Return the index after the last token that holds a character before `end`."""
    for position in range(end - 1, -1, -1):
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            last = token
            # One character can be several byte tokens, all with its offsets.
            offsets = encoding.token_to_chars(token)
            while last + 1 < num_tokens and encoding.token_to_chars(last + 1) == offsets:
                last += 1
            return last + 1
    return num_tokens
