"""Settings of an evaluation, and greedy generation of answers to held-out prompts.

Where the cache of a model allows it, batching is continuous: `model.generate` keeps all rows of a
batch until the last answer ends; here finished answers give their rows to waiting prompts.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.evaluation.likelihood import has_growing_cache, padded
from app.evaluation.metrics import ANSWER_METRICS, Answer
from app.evaluation.tasks.questions import TaskConfig
from app.model.attention import generation_attention
from app.model.layers import eval_mode
from common.facts import setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.strategy.mixin import Placement
    from data_modules import Prompt

_MIN_FINISHED = 0.25
"""share of a batch's rows that must be finished before they are replaced: replacing copies the
cache"""
_MAX_BEFORE = 8
"""tokens of a text with which what continues it is decoded"""
_UNSUPPORTED_TYPES = frozenset({"cpmant", "mpt"})
"""model types whose cache cannot be split and joined by row: CPM-Ant prepends its own tokens to a
prompt, and MPT's ALiBi table ends at the longest row"""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    exact_match: bool = setting(False, shown=("train",))
    """answer held-out prompts greedily; report the share equal to the reference, base vs tuned"""
    metrics: list[str] = setting(default_factory=list, choices=ANSWER_METRICS, shown=("evaluate",))
    """further metrics of answers to held-out prompts: numeric (the number after ####, else
    the last), f1 (words in common), rouge1, rouge2, rougeL, bleu, chrf; each from 0 to 1, with
    words of any script"""
    metric: str | None = setting(None, grants="code")
    """custom metric, FILE.py:function: takes answer and reference, returns a number; needs
    evaluation.allow_code=true"""
    allow_code: bool = setting(False, resume="per_start", grants="code")
    """allow running the code of `metric`, and the programs that a model writes for code tasks, in a
    process with limits on time and memory"""
    max_rows: int = setting(200, ge=1, shown=("evaluate",))
    """maximum number of held-out rows to answer in each data set"""
    max_new_tokens: int = setting(64, ge=1, shown=("evaluate",))
    """maximum length of an answer in tokens; exact_match counts an answer cut off here as wrong"""
    tasks: list[TaskConfig] = setting(default_factory=list, shown=("evaluate",))
    """benchmarks to run, each read from a local file: [{name: mmlu}], or a custom task,
    [{name: mine, path: FILE, kind: multiple_choice}]; `evaluation=mmlu` runs that task alone"""
    task_dir: str | None = setting(None, shown=("evaluate",), grants="nothing")
    """folder with the files of named tasks, such as mmlu_test.jsonl; null = the small samples that
    ship with loft, whose scores mean nothing"""
    harness: list[str] = setting(default_factory=list, grants="nothing")
    """names of lm-evaluation-harness tasks, run by that library (the package lm-eval)"""
    harness_dir: str | None = setting(None, grants="code")
    """folder with lm-evaluation-harness task files (YAML), which may name local data; null = the
    tasks that ship with the library"""
    batch_tokens: int | None = setting(None, ge=1)
    """tokens per batch when likelihoods are computed; more memory if larger; null = 8192 on a GPU,
    2048 on a CPU, where larger batches outgrow the caches and are slower"""
    batch_size: int = setting(64, ge=1)
    """prompts answered at the same time; more memory, faster"""
    max_regression: float | None = setting(None, ge=0, shown=("evaluate",))
    """largest accepted regression: exit with code 4, after all results are written, if the tuned
    model is significantly worse than its base by more than this: 0.02 = 2 points of accuracy, 0.02
    nats of loss per token, 0.2 of a judge's 10 points; null = never"""

    @property
    def answers_prompts(self) -> bool:
        return self.exact_match or bool(self.metrics) or self.metric is not None


@dataclass(kw_only=True, slots=True)
class TrainEvaluationConfig(EvaluationConfig):
    """Evaluation at the end of a training run and, optionally, during it."""

    every_steps: int | None = setting(None, ge=1)
    """optimizer steps between evaluations of `tasks` and held-out prompts during training, each run
    at the next validation: adds curves val/METRIC/NAME to the losses, and answers in samples/;
    null = only at the end"""
    during_rows: int = setting(50, ge=1)
    """maximum number of rows of each task and data set to evaluate during training (the first)"""
    show_answers: int = setting(3, ge=0)
    """held-out prompts whose answers by base and tuned are printed at the end of a run; also
    answered, for at most 20 s per model, if nothing else measures answers; 0 = none"""


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: Placement | None = None,
    temperature: float = 0.0,
) -> list[Answer]:
    """Answer each prompt as `answer_batches` does; return the answers in the order of `prompts`."""
    batches = answer_batches(
        model, tokenizer, prompts, stop_ids, config, sharding, temperature=temperature
    )
    answers = dict(pair for batch in batches for pair in batch)
    return [answers[number] for number in range(len(prompts))]


def answer_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: Placement | None = None,
    stop_texts: Sequence[str] = (),
    seconds: float = math.inf,
    temperature: float = 0.0,
    context_len: int | None = None,
    continues_text: bool = False,
) -> Iterator[list[tuple[int, Answer]]]:
    """Answer each prompt up to the first of `stop_ids`; yield batches of (index, answer).

    An answer is cut off where the model's context ends, None for a decoder without an end.
    `sharding`: the strategy that shards the weights, None if each rank holds the whole model; all
    ranks must then answer the same prompts. Generation also ends after one of `stop_texts`, which
    stays in the answer, and cuts off answers after `seconds`, which ranks do not agree on. With a
    `temperature` answers are sampled, from torch's generator; 0 is greedy. With `continues_text` an
    answer keeps the space by which it continues its prompt.
    """
    until = time.monotonic() + seconds
    with eval_mode(model), generation_attention(model):
        if sharding is None and not temperature and GreedyDecoder.supports(model):
            decoder = GreedyDecoder(
                model=model,
                stop_ids=frozenset(stop_ids),
                max_new_tokens=config.max_new_tokens,
                batch_size=config.batch_size,
                context_len=context_len,
                is_done=lambda tokens: (
                    time.monotonic() > until or _has_one_of(stop_texts, tokens, tokenizer)
                ),
            )
            generated = decoder.answers([prompt.input_ids for prompt in prompts])
        else:
            generated = _generate(
                *(model, tokenizer, prompts, stop_ids, config, sharding),
                *(stop_texts, seconds, temperature, context_len),
            )
        for batch in generated:
            answers = []
            for number, tokens in batch:
                end = next((n for n, token in enumerate(tokens) if token in stop_ids), None)
                after = prompts[number].input_ids if continues_text else ()
                text = decode_answer(tokenizer, tokens[:end], after)
                answers.append((number, Answer(text, end is not None)))
            yield answers


def decode_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], after: Sequence[int] = ()
) -> str:
    """Return the text of tokens, without special ones, with all spaces that they have.

    `after`: the tokens of a text that they continue. A tokenizer of SentencePiece's kind drops the
    space before its first token, and some drop those before punctuation, as in "[1 , 2]".
    """

    def decode(ids: Sequence[int]) -> str:
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **how))

    before = decode(after[-_MAX_BEFORE:]) if after else ""
    whole = decode([*after[-_MAX_BEFORE:], *tokens]) if before else ""
    return whole[len(before) :] if before and whole.startswith(before) else decode(tokens)


def first_stop(text: str, stop_texts: Sequence[str]) -> int | None:
    """Return where the first of `stop_texts` begins in a text, None if it has none."""
    return min((at for stop in stop_texts if (at := text.find(stop)) >= 0), default=None)


def _has_one_of(
    texts: Sequence[str], tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> bool:
    if not texts:
        return False
    # A text has at most as many tokens as bytes, and may end inside the last token.
    tail = max(len(text.encode()) for text in texts) + 1
    recent = tokenizer.decode(list(tokens[-tail:]), clean_up_tokenization_spaces=False)
    return any(text in recent for text in texts)


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: Placement | None,
    stop_texts: Sequence[str],
    seconds: float,
    temperature: float,
    context_len: int | None,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield batches of (index, generated tokens) from `model.generate`, for any architecture."""
    import torch
    from transformers import StoppingCriteriaList

    def limit(index: int) -> int:
        return _limit(len(prompts[index].input_ids), config.max_new_tokens, context_len)

    # Prompts of similar length share a batch, for less padding, if their answers may be equally
    # long: `generate` keeps advancing the positions of finished rows.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].input_ids))
    batches = [
        batch
        for _, same in itertools.groupby(order, limit)
        for batch in _batched(list(same), config.batch_size)
    ]
    device = model.device if sharding is None else sharding.root_device
    is_encoder_decoder, pad = model.config.is_encoder_decoder, tokenizer.pad_token_id
    for chosen in batches:
        with override_generation_config(
            model, sorted(stop_ids), pad, limit(chosen[0]), temperature=temperature
        ):
            # A decoder continues at the end of a row; an encoder counts positions from its start.
            ids, mask = padded(
                [prompts[i].input_ids for i in chosen], on_the_left=not is_encoder_decoder
            )
            # Generated tokens follow the decoder's start token, or the prompt.
            start = 1 if is_encoder_decoder else ids.shape[1]

            def contain_stop(ids: torch.Tensor, *_: Any, start: int = start) -> torch.Tensor:
                done = [_has_one_of(stop_texts, row, tokenizer) for row in ids[:, start:].tolist()]
                return torch.tensor(done, device=ids.device)

            # `generate` bypasses the hooks that gather the weights of encoders and adapted models.
            with nullcontext() if sharding is None else sharding.gathered(model):
                generated = model.generate(
                    input_ids=ids.masked_fill(mask == 0, pad).to(device),
                    attention_mask=mask.to(device),
                    stopping_criteria=StoppingCriteriaList([contain_stop] if stop_texts else []),
                    max_time=None if seconds == math.inf else seconds,
                    # Ranks may choose different tokens when two logits are almost equal. A rank
                    # that has finished keeps stepping: the others need its shard of the weights.
                    synced_gpus=sharding is not None,
                )
            yield list(zip(chosen, generated[:, start:].tolist(), strict=True))


@contextmanager
def override_generation_config(
    model: torch.nn.Module,
    stops: list[int],
    pad_token_id: int,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> Iterator[None]:
    """Make `model.generate` ignore the model's own generation config; temperature 0 is greedy.

    The config of a base model may sample, use beam search, penalise repetition, or force an EOS.
    """
    from transformers import GenerationConfig, GenerationMixin

    # An adapter wraps the model that generates.
    generator: Any = next(part for part in model.modules() if isinstance(part, GenerationMixin))
    own, model_config = generator.generation_config, generator.config
    start = own.decoder_start_token_id
    if model_config.is_encoder_decoder and start is None:
        start = model_config.decoder_start_token_id
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    generator.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        **sampling,
        eos_token_id=stops,
        pad_token_id=pad_token_id,
        decoder_start_token_id=start,
        forced_bos_token_id=own.forced_bos_token_id,
    )
    try:
        yield
    finally:
        generator.generation_config = own


def _limit(prompt_len: int, max_new_tokens: int, context_len: int | None) -> int:
    """Return how many tokens an answer may have; some models fail beyond their context."""
    room = max_new_tokens if context_len is None else context_len - prompt_len
    return max(1, min(max_new_tokens, room))


def _batched(items: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


@dataclass(slots=True)
class _Row:
    index: int
    """index of the prompt"""
    limit: int
    """maximum number of tokens"""
    tokens: list[int]
    is_finished: bool = False


@dataclass(slots=True)
class _Batch:
    """Rows that are decoded together; the cache holds all their tokens but the last."""

    rows: list[_Row]
    cache: Any
    mask: Tensor
    """[rows, cached positions]; shorter rows are padded on the left"""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and the columns that are then padding in every row."""
        import torch

        index = torch.tensor(rows, device=self.mask.device)
        self.rows = [self.rows[row] for row in rows]
        self.mask = self.mask[index]
        first = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, first:]
            layer.values = layer.values[index, :, first:]

    def join(self, other: _Batch) -> None:
        import torch
        from torch.nn.functional import pad

        longest = max(self.mask.shape[1], other.mask.shape[1])
        gaps = [longest - batch.mask.shape[1] for batch in (self, other)]

        def concatenate(own: Tensor, others: Tensor, num_trailing: int) -> Tensor:
            """Concatenate rows, left-padded in the dimension before the last `num_trailing`."""
            padded_parts = [
                pad(part, (0, 0) * num_trailing + (gap, 0))
                for part, gap in zip((own, others), gaps, strict=True)
            ]
            return torch.cat(padded_parts)

        self.rows += other.rows
        self.mask = concatenate(self.mask, other.mask, 0)
        for layer, other_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = concatenate(layer.keys, other_layer.keys, 1)
            layer.values = concatenate(layer.values, other_layer.values, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyDecoder:
    """Greedy decoder for models whose key-value cache can be split and joined by row."""

    model: Any
    stop_ids: frozenset[int]
    """token ids that end an answer"""
    max_new_tokens: int
    batch_size: int
    context_len: int | None = None
    """where answers are cut off at the latest, None for a model without an end"""
    is_done: Callable[[list[int]], bool] = lambda tokens: False
    """returns whether an answer of these tokens is complete without a stop token"""

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether rows can be removed from and added to the cache of `model`."""
        config = model.config.get_text_config(decoder=True)
        return (
            "past_key_values" in _forward_parameters(model)  # else forward ignores the cache
            and config.model_type not in _UNSUPPORTED_TYPES
            and has_growing_cache(model)
        )

    def answers(self, prompts: Sequence[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield (index of a prompt, tokens of its answer) as they finish, longest prompts first."""
        waiting = deque(sorted(range(len(prompts)), key=lambda n: -len(prompts[n])))
        batch: _Batch | None = None
        while waiting or batch:
            num_free = self.batch_size - (len(batch.rows) if batch else 0)
            if chosen := [waiting.popleft() for _ in range(min(num_free, len(waiting)))]:
                prefilled = self._prefill(chosen, [prompts[index] for index in chosen])
                if batch is None:
                    batch = prefilled
                else:
                    batch.join(prefilled)
            assert batch is not None
            while sum(row.is_finished for row in batch.rows) < _MIN_FINISHED * len(batch.rows):
                self._step(batch)
            yield [(row.index, row.tokens) for row in batch.rows if row.is_finished]
            unfinished = [number for number, row in enumerate(batch.rows) if not row.is_finished]
            if unfinished:
                batch.keep(unfinished)
            else:
                batch = None

    def _prefill(self, indices: Sequence[int], prompts: Sequence[list[int]]) -> _Batch:
        from transformers import DynamicCache

        ids, mask = (part.to(self.model.device) for part in padded(prompts, on_the_left=True))
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        rows = [
            _Row(index, _limit(len(prompt), self.max_new_tokens, self.context_len), [])
            for index, prompt in zip(indices, prompts, strict=True)
        ]
        batch = _Batch(rows, cache, mask)
        self._forward(batch, ids, (mask.cumsum(-1) - 1).clamp(min=0))
        return batch

    def _step(self, batch: _Batch) -> None:
        """Append one token to each unfinished row.

        Finished rows are computed at position 0: their next position may exceed the model's limit.
        """
        import torch

        ids = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=batch.mask.device)
        positions = batch.mask.sum(-1, keepdim=True)
        batch.mask = torch.cat([batch.mask, torch.ones_like(positions)], dim=1)
        finished = torch.tensor([[row.is_finished] for row in batch.rows], device=positions.device)
        self._forward(batch, ids, positions.masked_fill(finished, 0))

    def _forward(self, batch: _Batch, ids: Tensor, positions: Tensor) -> None:
        inputs = {"input_ids": ids, "attention_mask": batch.mask, "position_ids": positions}
        inputs |= {"past_key_values": batch.cache, "use_cache": True, "logits_to_keep": 1}
        accepted = _forward_parameters(self.model)
        inputs = {name: value for name, value in inputs.items() if name in accepted}
        logits = self.model(**inputs).logits
        for row, token in zip(batch.rows, logits[:, -1].argmax(-1).tolist(), strict=True):
            if not row.is_finished:
                row.tokens.append(token)
                row.is_finished = (
                    token in self.stop_ids
                    or len(row.tokens) == row.limit
                    or self.is_done(row.tokens)
                )


def _forward_parameters(model: Any) -> Collection[str]:
    from transformers import PreTrainedModel

    inner = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
    return inspect.signature(inner.forward).parameters
