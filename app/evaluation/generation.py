"""Greedy answers to held-out prompts, and how many are right to the letter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.attention import generation_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from data_modules import Prompt


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    exact_match: bool = False
    """answer held-out prompts greedily and compare letter by letter, base against tuned"""
    max_rows: int = 200
    """held-out rows a data set that are answered"""
    max_new_tokens: int = 64
    """an answer longer than this many tokens counts as wrong"""
    batch_size: int = 64
    """prompts answered at once; more memory, faster"""


def exact_match(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, list[Prompt]],
    stop_ids: set[int],
    config: EvaluationConfig,
) -> dict[str, float]:
    """Share of each data set's prompts whose greedy answer equals the reference, spaces aside."""
    return {
        f"exact_match/{name}": _share_right(model, tokenizer, held_out, stop_ids, config)
        for name, held_out in prompts.items()
        if held_out
    }


def _share_right(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
) -> float:
    answers = answer_prompts(model, tokenizer, prompts, stop_ids, config)
    right = sum(
        answer is not None and answer.strip() == prompt.answer.strip()
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    return right / len(prompts)


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    stop_ids: set[int],
    config: EvaluationConfig,
) -> list[str | None]:
    """Answer each prompt greedily; None where none of `stop_ids` came within `max_new_tokens`."""
    import torch

    # Prompts of like length together: less padding. The answers go back to their places.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].input_ids))
    answers: list[str | None] = [None] * len(prompts)
    stops = sorted(stop_ids)
    was_training = model.training
    model.eval()
    with torch.no_grad(), generation_attention(model):
        for chosen in _batches(order, config.batch_size):
            ids = [prompts[i].input_ids for i in chosen]
            longest = max(len(row) for row in ids)
            padded = [[tokenizer.pad_token_id] * (longest - len(row)) + row for row in ids]
            mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
            generated = model.generate(
                input_ids=torch.tensor(padded, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=config.max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=stops,
                pad_token_id=tokenizer.pad_token_id,
            )[:, longest:]
            for i, row in zip(chosen, generated.tolist(), strict=True):
                end = next((n for n, token in enumerate(row) if token in stops), None)
                if end is not None:
                    answers[i] = tokenizer.decode(row[:end], skip_special_tokens=True)
    model.train(was_training)
    return answers


def _batches(order: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]
