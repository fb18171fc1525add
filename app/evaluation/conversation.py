"""Answer conversations token by token, for chat in the terminal and for the server.

A conversation is rendered by the chat template of training, and an answer ends at the stop tokens
of training.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from app.evaluation.generation import decode_answer, first_stop, override_generation_config
from app.evaluation.likelihood import encode_text
from app.model.attention import generation_attention
from common.errors import Origin, UserError
from common.facts import setting
from data_modules import Conversation, Turn

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from data_modules import ChatTemplate


@dataclass(kw_only=True, slots=True)
class ConversationConfig:
    system: str | None = setting(None, shown=True, grants="nothing")
    """system prompt at the start of each conversation"""
    max_new_tokens: int = setting(512, ge=1, shown=True)
    """maximum length of an answer in tokens"""
    temperature: float = setting(0.0, ge=0, le=10, shown=True)
    """sampling temperature: 0 = greedy, always the likeliest token; higher is more varied"""
    top_p: float = setting(1.0, gt=0, le=1)
    """nucleus sampling, if the temperature is above 0: sample from the likeliest tokens whose
    probabilities add up to this"""


_SAMPLE_CONVERSATIONS = (
    ("What is 2 + 2?",),
    ("  Write\na haiku.\n", "One\ntwo", "Now the other."),
    ("Ωmega?", "Yes.", "And after it?", "Nothing.", "Thanks!"),
)
"""conversations that a template is checked with: question, answer, question, ..."""


def check_served_tokens(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the differences between the tokens of training, of chat, and of an exported tokenizer.

    Each sample conversation is rendered by the training path, by chat, and by `apply_chat_template`
    of `tokenizer`; a sample that training rejects is skipped.
    """
    problems = []
    for texts in _SAMPLE_CONVERSATIONS:
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
        for renderer, ids in (("chat", chatted), ("the exported tokenizer", served)):
            if ids != trained.input_ids:
                pairs = zip(ids, trained.input_ids, strict=False)
                start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                problems.append(
                    f"{renderer} renders a conversation of {len(turns)} turns as other tokens than "
                    f"training, from token {start + 1} on: {tokenizer.decode(ids[start:])!r} "
                    f"instead of {tokenizer.decode(trained.input_ids[start:])!r}"
                )
    return problems


@dataclass(slots=True)
class Reply:
    """The state of one answer while it is generated."""

    prompt_ids: list[int]
    """input tokens of the model"""
    num_tokens: int = 0
    """number of tokens generated so far, including the stop token"""
    is_finished: bool = False
    """whether a stop token or a stop text was generated"""
    continues_text: bool = False
    """whether the answer goes on with the text of the prompt, from its last character"""


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

    def prompt_ids(self, prompt: Sequence[Turn] | str | Sequence[int]) -> list[int]:
        """Return the input tokens of a conversation, or of a text or tokens to continue.

        Raises UserError if they exceed the context, or are not tokens of this model.
        """
        if isinstance(prompt, str):
            is_pair = self._is_encoder_decoder
            ids = encode_text(self._tokenizer, prompt, is_encoder_decoder=is_pair)
        elif isinstance(prompt[0], Turn):
            ids = self.template.prompt_ids(cast("Sequence[Turn]", prompt))
        else:
            ids = list(cast("Sequence[int]", prompt))
            if wrong := [token for token in ids if not 0 <= token < len(self._tokenizer)]:
                raise UserError(
                    f"{wrong[0]} is not a token: ids are 0 to {len(self._tokenizer) - 1:,}"
                )
        if self._context_len is not None and len(ids) >= self._context_len:
            raise UserError(
                f"this prompt has {len(ids):,} tokens, and the model's context is "
                f"{self._context_len:,}: send less, or start a new conversation"
            )
        return ids

    def stream(self, turns: Sequence[Turn], config: ConversationConfig) -> Iterator[str]:
        """Yield the text of an answer piece by piece; closing the iterator stops generation.

        The pieces join to the tokens before the first stop token, decoded without special tokens.
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
        """Yield the text that follows `reply.prompt_ids`, one piece per token; update `reply`.

        The answer also ends before the first of `stop_texts`. `seed` makes sampling reproducible.
        """
        limit = config.max_new_tokens
        if self._context_len is not None and not self._is_encoder_decoder:
            limit = min(limit, self._context_len - len(reply.prompt_ids))
        shown, text, tokens = "", "", []
        continues = reply.continues_text and not self._is_encoder_decoder
        after = reply.prompt_ids if continues else ()
        for token in self._tokens(reply.prompt_ids, limit, config, seed):
            reply.num_tokens += 1
            reply.is_finished = token in self._stops
            if reply.is_finished:
                break
            tokens.append(token)
            text = decode_answer(self._tokenizer, tokens, after)
            end = first_stop(text, stop_texts)
            reply.is_finished = end is not None
            if reply.is_finished:
                text = text[:end]
                break
            final = text[: len(text) - _length_of_stop_start(text, stop_texts)]
            # The last character may be incomplete: its other bytes are in the next token.
            if final.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield final[len(shown) :]
                shown = final
        if rest := text.removeprefix(shown):
            yield rest

    @property
    def _is_encoder_decoder(self) -> bool:
        config: Any = self.model.config
        return bool(config.is_encoder_decoder)

    def _tokens(
        self, ids: list[int], limit: int, config: ConversationConfig, seed: int | None
    ) -> Iterator[int]:
        generated: queue.Queue[int | BaseException | None] = queue.Queue()
        stopped = threading.Event()
        worker = threading.Thread(
            target=self._generate, args=(ids, limit, config, seed, generated, stopped), daemon=True
        )
        worker.start()
        try:
            while (token := generated.get()) is not None:
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
        generated: queue.Queue[int | BaseException | None],
        stopped: threading.Event,
    ) -> None:
        import torch

        model: Any = self.model
        if seed is not None:
            torch.manual_seed(seed)
        sampling = {"temperature": config.temperature, "top_p": config.top_p}
        pad = self._tokenizer.pad_token_id
        num_skipped = 1 if self._is_encoder_decoder else len(ids)
        try:
            # no_grad and autocast apply to the current thread only.
            with (
                torch.no_grad(),
                self._autocast(),
                generation_attention(model),
                override_generation_config(model, self._stops, pad, limit, **sampling),
            ):
                row = torch.tensor([ids], device=model.device)
                model.generate(
                    input_ids=row,
                    attention_mask=torch.ones_like(row),
                    streamer=_Streamer(generated, num_skipped),
                    stopping_criteria=[lambda rows, _: torch.full((len(rows),), stopped.is_set())],
                )
            generated.put(None)
        except Exception as error:  # noqa: BLE001  raised again in the thread that waits
            generated.put(error)


def _length_of_stop_start(text: str, stop_texts: Sequence[str]) -> int:
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
    """Streamer of `generate`: put each token into a queue, except the first `num_skipped`."""

    def __init__(
        self, generated: queue.Queue[int | BaseException | None], num_skipped: int
    ) -> None:
        self._generated, self._num_skipped = generated, num_skipped

    def put(self, tokens: torch.Tensor) -> None:
        """Receive the tokens of the prompt in the first call, then each new token."""
        for token in tokens.flatten().tolist():
            if self._num_skipped:
                self._num_skipped -= 1
            else:
                self._generated.put(token)

    def end(self) -> None:
        """Do nothing: `_generate` marks the end, or the error, in the queue."""
