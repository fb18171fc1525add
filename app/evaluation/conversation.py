"""Answer conversations, token by token: what a chat in the terminal and a server share.

A conversation becomes the tokens of training's template, and ends at training's stop tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import override_generation_config
from app.model.attention import generation_attention
from app.process.errors import UserError
from data_modules import Conversation, Origin, Turn, setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from data_modules import ChatTemplate


@dataclass(kw_only=True, slots=True)
class ConversationConfig:
    system: str | None = setting(None, shown=True)
    """what a conversation begins with, before the first question"""
    max_new_tokens: int = setting(512, ge=1, shown=True)
    """tokens of an answer at most"""
    temperature: float = setting(0.0, ge=0, le=10, shown=True)
    """0 = always the likeliest token; more is more varied"""
    top_p: float = setting(1.0, gt=0, le=1)
    """above temperature 0: draw from the likeliest tokens that together have this probability"""


SAMPLES = (
    ("What is 2 + 2?",),
    ("  Write\na haiku.\n", "One\ntwo", "Now the other."),
    ("Ωmega?", "Yes.", "And after it?", "Nothing.", "Thanks!"),
)
"""conversations by which a template is checked: question, answer, question, ..."""


def check_served_tokens(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List where `tokenizer`, as others load it, gives other tokens than training and chat.

    Each sample conversation is rendered by the training path, by the chat, and by the tokenizer's
    own `apply_chat_template`; a sample that training refuses is left out.
    """
    problems = []
    for texts in SAMPLES:
        turns = [
            Turn("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)
        ]
        row = Conversation((*turns, Turn("assistant", "An answer.")), Origin("sample", 1))
        trained = template.prompt(row)
        if trained is None:
            continue
        chatted = template.prompt_ids(turns)
        text = tokenizer.apply_chat_template(
            template.messages(turns), add_generation_prompt=True, tokenize=False
        )
        served = tokenizer(text, add_special_tokens=template.is_encoder_decoder)["input_ids"]
        for who, ids in (("chat", chatted), ("the exported tokenizer", served)):
            if ids != trained.input_ids:
                place = next(
                    (
                        number
                        for number, pair in enumerate(zip(ids, trained.input_ids, strict=False))
                        if pair[0] != pair[1]
                    ),
                    min(len(ids), len(trained.input_ids)),
                )
                problems.append(
                    f"{who} renders a conversation of {len(turns)} turns as other tokens than "
                    f"training, from token {place + 1} on: {tokenizer.decode(ids[place:])!r} and "
                    f"not {tokenizer.decode(trained.input_ids[place:])!r}"
                )
    return problems


@dataclass(slots=True)
class Reply:
    """What is known of one answer so far."""

    prompt_ids: list[int]
    """what the model reads"""
    num_tokens: int = 0
    """generated, with the stop token"""
    is_finished: bool = False
    """whether a stop token or a stop text has come"""


class Responder:
    """Answer conversations with one model, one at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        stop_ids: set[int],
        *,
        context_len: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.template = model, template
        self._tokenizer, self._stops = tokenizer, sorted(stop_ids)
        self._context_len, self._autocast = context_len, autocast
        special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self.control_texts = tuple(sorted(filter(str.strip, special)))

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens that the model reads of a conversation; UserError where too many."""
        ids = self.template.prompt_ids(turns)
        if self._context_len is not None and len(ids) >= self._context_len:
            raise UserError(
                f"this conversation has {len(ids):,} tokens, the model's context is "
                f"{self._context_len:,}: begin a new one"
            )
        return ids

    def stream(self, turns: Sequence[Turn], config: ConversationConfig) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece; closing the iterator stops it.

        Together they are the tokens up to the first stop token, decoded without special tokens.
        """
        return self.answer(Reply(self.prompt_ids(turns)), config)

    def answer(
        self,
        reply: Reply,
        config: ConversationConfig,
        *,
        stop_texts: Sequence[str] = (),
        seed: int | None = None,
    ) -> Generator[str, None, None]:
        """Yield what follows `reply.prompt_ids`, a piece a token, and count it in `reply`.

        It ends before the first of `stop_texts`, too. `seed` repeats what a temperature draws.
        """
        limit = config.max_new_tokens
        if self._context_len is not None and not self._is_pair:
            limit = min(limit, self._context_len - len(reply.prompt_ids))
        shown, text, tokens = "", "", []
        for token in self._tokens(reply.prompt_ids, limit, config, seed):
            reply.num_tokens += 1
            reply.is_finished = token in self._stops
            if reply.is_finished:
                break
            tokens.append(token)
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            ends = [at for stop in stop_texts if (at := text.find(stop)) >= 0]
            reply.is_finished = bool(ends)
            if reply.is_finished:
                text = text[: min(ends)]
                break
            sure = text[: len(text) - _held_back(text, stop_texts)]
            # The last character may be half a one, whose other bytes are still to come.
            if sure.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield sure[len(shown) :]
                shown = sure
        if rest := text.removeprefix(shown):
            yield rest

    @property
    def _is_pair(self) -> bool:
        config: Any = self.model.config
        return bool(config.is_encoder_decoder)

    def _tokens(
        self, ids: list[int], limit: int, config: ConversationConfig, seed: int | None
    ) -> Iterator[int]:
        """Yield the tokens that the model goes on with; it works in a thread of its own."""
        found: queue.Queue[int | BaseException | None] = queue.Queue()
        stopped = threading.Event()
        worker = threading.Thread(
            target=self._generate, args=(ids, limit, config, seed, found, stopped), daemon=True
        )
        worker.start()
        try:
            while (token := found.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            stopped.set()
            worker.join()

    def _generate(
        self,
        ids: list[int],
        limit: int,
        config: ConversationConfig,
        seed: int | None,
        found: queue.Queue[int | BaseException | None],
        stopped: threading.Event,
    ) -> None:
        import torch

        model: Any = self.model
        if seed is not None:
            torch.manual_seed(seed)
        how = {"temperature": config.temperature, "top_p": config.top_p}
        pad = self._tokenizer.pad_token_id
        try:
            # Both contexts of torch hold for one thread only.
            with (
                torch.no_grad(),
                self._autocast(),
                generation_attention(model),
                override_generation_config(model, self._stops, pad, limit, **how),
            ):
                row = torch.tensor([ids], device=model.device)
                model.generate(
                    input_ids=row,
                    attention_mask=torch.ones_like(row),
                    streamer=_Streamer(found, num_skipped=1 if self._is_pair else len(ids)),
                    stopping_criteria=[lambda rows, _: torch.full((len(rows),), stopped.is_set())],
                )
            found.put(None)
        except Exception as error:  # noqa: BLE001  the thread that waits raises it
            found.put(error)


def _held_back(text: str, stop_texts: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin a stop text."""
    return max(
        (
            length
            for stop in stop_texts
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ),
        default=0,
    )


class _Streamer:
    """Put every token that `generate` gives away into a queue, without those of the prompt."""

    def __init__(self, found: queue.Queue[int | BaseException | None], num_skipped: int) -> None:
        self._found, self._left = found, num_skipped

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt's tokens at first, then each new one."""
        for token in tokens.flatten().tolist():
            if self._left:
                self._left -= 1
            else:
                self._found.put(token)

    def end(self) -> None:
        """Do nothing: the end of `generate` is the end."""
