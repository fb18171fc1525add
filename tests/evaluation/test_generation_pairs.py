"""Greedy answers of encoder-decoder models do not depend on other prompts in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.evaluation.generation import EvaluationConfig, answer_prompts
from app.model.attention import attention_implementation
from common.errors import Origin
from data_modules import Prompt
from tests.tiny import tiny_bart, tiny_t5

STOPS = {2, *range(5, 64, 6)}
CONFIG = EvaluationConfig(max_new_tokens=12, batch_size=4)
PROMPTS = [
    Prompt(list(range(3 + n, 3 + n + length)), "", Origin("file", 1))
    for n, length in enumerate((1, 9, 4, 20, 2, 13, 7))
]


class Numbers:
    """A tokenizer that decodes to token ids."""

    pad_token_id = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(params=[tiny_t5, tiny_bart])
def model(request: pytest.FixtureRequest) -> Any:
    make: Callable[..., Any] = request.param
    made = make()
    # Untied head: with a tied one, random weights repeat the previous token.
    made.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
    made.set_attn_implementation(attention_implementation("sdpa"))
    return made


def answers(model: Any, prompts: list[Prompt], stops: set[int] = STOPS) -> list[str | None]:
    tokenizer: Any = Numbers()
    found = answer_prompts(model, tokenizer, prompts, stops, CONFIG)
    return [answer.text if answer.is_finished else None for answer in found]


@torch.no_grad()
def by_hand(model: Any, prompt: Prompt) -> str | None:
    """Greedy decoding without cache, batch or padding."""
    start = model.config.decoder_start_token_id
    source, ids = torch.tensor([prompt.input_ids]), [start]
    for _ in range(CONFIG.max_new_tokens):
        targets = torch.tensor([ids])
        logits = model(input_ids=source, decoder_input_ids=targets, use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token in STOPS:
            return " ".join(map(str, ids[1:]))
        ids.append(token)
    return None


def test_answers_are_greedy_for_each_prompt(model: Any) -> None:
    expected = [by_hand(model, prompt) for prompt in PROMPTS]
    assert answers(model, PROMPTS) == expected
    assert len(set(expected)) > 1


def test_the_generation_config_of_a_base_is_ignored(model: Any) -> None:
    expected = answers(model, PROMPTS)
    own = model.generation_config
    own.update(do_sample=True, temperature=5.0, num_beams=3, repetition_penalty=3.0)
    own.update(no_repeat_ngram_size=1, min_length=9, forced_eos_token_id=2)
    assert answers(model, PROMPTS) == expected
    assert model.generation_config is own and own.num_beams == 3


def test_no_eos_is_forced(model: Any) -> None:
    model.generation_config.forced_eos_token_id = 2
    never = 1
    model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(7), 64) * 1e4)
    assert answers(model, PROMPTS[:2], {never, 2}) == [None, None]
    assert answers(model, PROMPTS[:2], {7}) == ["", ""]


def test_generating_does_not_change_the_model(model: Any) -> None:
    for training in (True, False):
        model.train(training)
        answers(model, PROMPTS[:1])
        assert model.training is training
        halves = (model, model.get_encoder(), model.get_decoder())
        assert {half.config._attn_implementation for half in halves} == {"attention_by_document"}
