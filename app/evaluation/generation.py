"""Greedy answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.evaluation.decoding import GreedyDecoder
from app.evaluation.metrics import METRICS, Answer
from app.evaluation.tasks.questions import TaskConfig
from app.model.attention import generation_attention
from data_modules import setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.strategy.mixin import StrategyMixin
    from data_modules import Prompt


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    exact_match: bool = setting(False, shown=("train",))
    """answer held-out prompts greedily and compare letter by letter, base vs tuned"""
    metrics: list[str] = setting(default_factory=list, choices=METRICS, shown=("evaluate",))
    """what else answers to held-out prompts are measured by: numeric (the last number), f1 (words
    in common), rouge1, rouge2, rougeL, bleu, chrf; each from 0 to 1"""
    metric: str | None = setting(None)
    """a metric of one's own, FILE.py:function of answer and reference, which returns a number;
    needs evaluation.allow_code=true"""
    allow_code: bool = setting(False, resume="trust")
    """let code run: that of `metric`, and in a process with limits what a model answers to
    programming tasks"""
    max_rows: int = setting(200, ge=1, shown=("evaluate",))
    """held-out rows of each data set that are answered"""
    max_new_tokens: int = setting(64, ge=1, shown=("evaluate",))
    """tokens after which an answer is cut off; exact_match counts it as wrong"""
    tasks: list[TaskConfig] = setting(default_factory=list, shown=("evaluate",))
    """benchmarks, each from a local file: [{name: mmlu}], or of your own, [{name: mine, path: FILE,
    kind: multiple_choice}]; `evaluation=mmlu` is that task alone"""
    task_dir: str | None = setting(None, shown=("evaluate",))
    """folder of the files of named tasks, such as mmlu_test.jsonl; null = small samples of our own,
    whose scores mean nothing"""
    harness: list[str] = setting(default_factory=list)
    """tasks of lm-evaluation-harness, by its names, through the library itself (`pip install
    -e '.[harness]'`)"""
    harness_dir: str | None = setting(None)
    """folder of its task files (YAML), which may name local data; null = those that come with it"""
    batch_tokens: int | None = setting(None, ge=1)
    """tokens of a batch of likelihoods, more takes more memory; null = 8192 on a GPU, 2048 on a
    CPU, which more than its caches hold makes slower"""
    batch_size: int = setting(64, ge=1)
    """prompts answered at once; more memory, faster"""
    max_regression: float | None = setting(None, ge=0, shown=("evaluate",))
    """ends with exit code 4, after all is written, where the tuned model is worse than its base by
    more than this beyond chance: 0.02 = 2 points of accuracy, 0.02 nats of loss a token, 0.2 of a
    judge's 10 points; null = never"""

    @property
    def answers_prompts(self) -> bool:
        """Return whether held-out prompts are answered at all."""
        return self.exact_match or bool(self.metrics) or self.metric is not None


@dataclass(kw_only=True, slots=True)
class TrainEvaluationConfig(EvaluationConfig):
    """What a training asks its model, at its end and on its way."""

    every_steps: int | None = setting(None, ge=1)
    """optimizer steps between measurements of `tasks` and held-out prompts while the model trains,
    each at the next validation: curves val/METRIC/NAME beside the losses, answers in samples/;
    null = at the end alone"""
    during_rows: int = setting(50, ge=1)
    """rows of each task and data set that are asked while the model trains, the first"""


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: StrategyMixin | None = None,
) -> list[Answer]:
    """Answer each prompt as `answer_batches`; answers keep the given order."""
    batches = answer_batches(model, tokenizer, prompts, stop_ids, config, sharding)
    found = dict(pair for batch in batches for pair in batch)
    return [found[number] for number in range(len(prompts))]


def answer_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: StrategyMixin | None = None,
    stop_texts: Sequence[str] = (),
) -> Iterator[list[tuple[int, Answer]]]:
    """Answer each prompt greedily, up to the first of `stop_ids`; yield (number, answer) by batch.

    `sharding`: the strategy where each rank holds a part of the weights; all answer together.
    No more is generated of an answer that has one of `stop_texts`; they are not cut off.
    """
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad(), generation_attention(model):
        if sharding is None and GreedyDecoder.fits(model):
            decoder = GreedyDecoder(
                model=model,
                stops=frozenset(stop_ids),
                max_new_tokens=config.max_new_tokens,
                batch_size=config.batch_size,
                is_done=lambda tokens: _has_one_of(stop_texts, tokens, tokenizer),
            )
            found = decoder.answers([prompt.input_ids for prompt in prompts])
        else:
            found = _generated(model, tokenizer, prompts, stop_ids, config, sharding, stop_texts)
        for batch in found:
            answers = []
            for number, tokens in batch:
                end = next((n for n, token in enumerate(tokens) if token in stop_ids), None)
                text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
                answers.append((number, Answer(text, end is not None)))
            yield answers
    model.train(was_training)


def _has_one_of(
    texts: Sequence[str], tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Tell whether one of some texts ends with the last of `tokens`."""
    if not texts:
        return False
    # A text may have as many tokens as bytes, and end within the last one.
    tail = max(len(text.encode()) for text in texts) + 1
    recent = tokenizer.decode(tokens[-tail:])
    return any(text in recent for text in texts)


def _generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    sharding: StrategyMixin | None,
    stop_texts: Sequence[str],
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield (number, tokens) by batch, through transformers' own loop: for every architecture."""
    import torch
    from transformers import StoppingCriteriaList

    # Prompts of similar length share a batch, for less padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].input_ids))
    device = model.device if sharding is None else sharding.root_device
    pairs, pad = model.config.is_encoder_decoder, tokenizer.pad_token_id
    with override_generation_config(model, sorted(stop_ids), pad, config.max_new_tokens):
        for chosen in _batches(order, config.batch_size):
            ids = [prompts[i].input_ids for i in chosen]
            padded, mask = _pad(ids, pad, on_the_right=pairs)
            start = 1 if pairs else len(padded[0])  # the start token of a decoder, or the prompt
            until = [_StopTexts(tokenizer, stop_texts, start)] if stop_texts else []
            # `generate` calls encoders and adapted models past the hooks that gather weights.
            with nullcontext() if sharding is None else sharding.gathered(model):
                generated = model.generate(
                    input_ids=torch.tensor(padded, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                    stopping_criteria=StoppingCriteriaList(until),
                    # Ranks may diverge where two logits are all but equal; one that has finished
                    # keeps stepping for the others, which need its part of the weights.
                    synced_gpus=sharding is not None,
                )
            yield list(zip(chosen, generated[:, start:].tolist(), strict=True))


class _StopTexts:
    """Ends each answer that has one of some texts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], start: int
    ) -> None:
        self._tokenizer, self._texts, self._start = tokenizer, texts, start
        self._done: torch.Tensor | None = None

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        import torch

        if self._done is None:
            self._done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for row, done in enumerate(self._done.tolist()):
            if not done:
                tokens = ids[row, self._start :].tolist()
                self._done[row] = _has_one_of(self._texts, tokens, self._tokenizer)
        return self._done


def _batches(order: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _pad(ids: list[list[int]], pad: int, *, on_the_right: bool) -> tuple[list[list[int]], ...]:
    """Pad rows to one length; return them with their attention masks.

    A decoder continues at the end of its row; an encoder counts positions from the start.
    """
    longest = max(len(row) for row in ids)
    gaps = [longest - len(row) for row in ids]
    if on_the_right:
        padded = [row + [pad] * gap for row, gap in zip(ids, gaps, strict=True)]
        return padded, [[1] * (longest - gap) + [0] * gap for gap in gaps]
    padded = [[pad] * gap + row for row, gap in zip(ids, gaps, strict=True)]
    return padded, [[0] * gap + [1] * (longest - gap) for gap in gaps]


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
    """Make `model.generate` decode so, whatever the model's generation config says; 0 is greedy.

    A base's own may sample, use beams, penalise repetition, or force an EOS.
    """
    from transformers import GenerationConfig, GenerationMixin

    # With an adapter, the base inside generates.
    generator: Any = next(part for part in model.modules() if isinstance(part, GenerationMixin))
    own, numbers = generator.generation_config, generator.config
    start = own.decoder_start_token_id
    if numbers.is_encoder_decoder and start is None:
        start = numbers.decoder_start_token_id
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        how |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    generator.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        **how,
        eos_token_id=stops,
        pad_token_id=pad_token_id,
        decoder_start_token_id=start,
        forced_bos_token_id=own.forced_bos_token_id,
    )
    try:
        yield
    finally:
        generator.generation_config = own
