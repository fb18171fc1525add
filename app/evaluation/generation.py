"""Greedy answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from app.model.attention import generation_attention
from app.process.progress import track
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
    max_rows: int = setting(200, ge=1, shown=("evaluate",))
    """held-out rows of each data set that are answered"""
    max_new_tokens: int = setting(64, ge=1, shown=("evaluate",))
    """an answer longer than this many tokens counts as wrong"""
    batch_size: int = setting(64, ge=1)
    """prompts answered at once; more memory, faster"""


class Answer(NamedTuple):
    """The answer of a model: its text up to the stop token."""

    text: str
    is_finished: bool
    """whether a stop token came within `max_new_tokens`"""


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
    shards: StrategyMixin | None = None,
) -> list[Answer]:
    """Answer each prompt greedily, up to the first of `stop_ids`.

    `shards`: the strategy where each rank holds a part of the weights; all answer together.
    """
    import torch

    # Prompts of similar length share a batch, for less padding; answers keep the given order.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].input_ids))
    answers = [Answer("", False)] * len(prompts)
    stops = sorted(stop_ids)
    was_training = model.training
    model.eval()
    device = model.device if shards is None else shards.root_device
    pad = tokenizer.pad_token_id
    pairs = model.config.is_encoder_decoder
    with (
        torch.no_grad(),
        generation_attention(model),
        decoding(model, stops, pad, config.max_new_tokens),
    ):
        batches = _batches(order, config.batch_size)
        for chosen in track(batches, "answers", len(prompts), len):
            ids = [prompts[i].input_ids for i in chosen]
            padded, mask = _pad(ids, pad, on_the_right=pairs)
            # `generate` calls encoders and adapted models past the hooks that gather weights.
            with nullcontext() if shards is None else shards.gathered(model):
                generated = model.generate(
                    input_ids=torch.tensor(padded, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                    # Ranks may diverge where two logits are all but equal; one that has finished
                    # keeps stepping for the others, which need its part of the weights.
                    synced_gpus=shards is not None,
                )
            # After the prompt, or after the start token of a decoder.
            new = generated[:, 1 if pairs else len(padded[0]) :].tolist()
            for i, row in zip(chosen, new, strict=True):
                end = next((n for n, token in enumerate(row) if token in stops), None)
                text = tokenizer.decode(row[:end], skip_special_tokens=True)
                answers[i] = Answer(text, end is not None)
    model.train(was_training)
    return answers


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
def decoding(
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
