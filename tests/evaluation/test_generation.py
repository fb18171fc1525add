"""Answers are greedy, end at the stop token, and do not depend on other prompts in the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    MptConfig,
    MptForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from app.evaluation.evaluator import Predictions
from app.evaluation.generation import (
    Answer,
    EvaluationConfig,
    GreedyDecoder,
    answer_batches,
    answer_prompts,
)
from app.model.attention import attention_implementation
from common.errors import Origin
from data_modules import Prompt
from tests.tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

STOP = 2


class Spelled:
    """A tokenizer of 26 letters: token 3 is a."""

    pad_token_id = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool, **_: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + token - 3) for token in ids)


class Numbered:
    """A tokenizer that decodes to token ids."""

    pad_token_id = 0

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(f"<{token}>" for token in ids)


def prompt(text: str, answer: str = "") -> Prompt:
    return Prompt([ord(letter) - ord("a") + 3 for letter in text], answer, Origin("file", 1))


def chain_model() -> Any:
    """A model that continues a to d and x to x, else with the stop token."""
    following = {"a": "b", "b": "c", "c": "d", "x": "x"}
    model = tiny_llama(hidden_size=64, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.zero_()
        for token in range(64):
            letter = following.get(chr(ord("a") + token - 3))
            next_token = STOP if letter is None else ord(letter) - ord("a") + 3
            model.lm_head.weight[next_token, token] = 1.0
    return model


def finished(answers: list[Answer]) -> list[str | None]:
    """The texts of finished answers, None for the others."""
    return [answer.text if answer.is_finished else None for answer in answers]


def test_an_answer_ends_before_any_stop_token_and_is_unfinished_without_one() -> None:
    def answers(*texts: str, most: int = 8, stops: set[int]) -> list[str | None]:
        config, prompts = EvaluationConfig(max_new_tokens=most), [prompt(text) for text in texts]
        return finished(answer_prompts(chain_model(), Spelled(), prompts, stops, config))

    assert answers("a", "b", "zzb", "z", stops={STOP}) == ["bcd", "cd", "cd", ""]
    assert answers("x", "a", "b", most=3, stops={STOP}) == [None, None, "cd"]
    assert answers("a", most=4, stops={STOP}) == ["bcd"]
    assert answers("a", "d", stops={STOP, *prompt("d").input_ids}) == ["bc", ""]


@pytest.mark.parametrize(("continues", "text"), [(True, " b c d"), (False, "b c d")])
def test_a_program_keeps_the_space_by_which_it_continues_its_prompt(
    continues: bool, text: str
) -> None:
    class Spaced(Spelled):
        def decode(self, ids: list[int], **how: Any) -> str:
            return " ".join(super().decode(ids, **how))  # none before the first, as SentencePiece

    config, prompts = EvaluationConfig(max_new_tokens=8), [prompt("a")]
    how = {"continues_text": continues}
    ((pair,),) = answer_batches(chain_model(), Spaced(), prompts, {STOP}, config, **how)
    assert pair == (0, Answer(text, is_finished=True))


@pytest.mark.parametrize("is_split", [True, False])
def test_answers_are_cut_off_when_their_time_is_over(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GreedyDecoder, "supports", lambda model: is_split)
    config = EvaluationConfig(max_new_tokens=32)
    batches = answer_batches(
        chain_model(), Spelled(), [prompt("x"), prompt("a")], {STOP}, config, seconds=0.0
    )
    answers = dict(pair for batch in batches for pair in batch)
    assert answers == {0: Answer("x", is_finished=False), 1: Answer("b", is_finished=False)}


def test_exact_match_is_the_share_of_correct_answers_per_data_set() -> None:
    prompts = {
        "mixed": [prompt("a", "bcd"), prompt("b", " cd\n"), prompt("a", "bc"), prompt("x", "x")],
        "capital": [prompt("c", "D")],
        "none held out": [],
    }
    config = EvaluationConfig(exact_match=True, max_new_tokens=8)
    predictions = Predictions(Spelled(), prompts, {STOP}, config)
    metrics = predictions.answer("tuned", chain_model())
    assert metrics == {"tuned/exact_match/mixed": 0.5, "tuned/exact_match/capital": 0.0}


def answers_of(model: Any, prompts: list[Prompt], size: int, *how: Any) -> list[Answer]:
    config = EvaluationConfig(max_new_tokens=12, batch_size=size)
    batches = answer_batches(model, Numbered(), prompts, {2, 5, 11}, config, None, *how)
    found = [pair for batch in batches for pair in batch]
    assert len(found) == len(prompts)
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(
    ("build", "stop_texts"), [(tiny_llama, ()), (tiny_gpt2, ("<7><9>", "<21>"))]
)
def test_batching_changes_no_answer(
    build: Any, stop_texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    model, stops = build().eval(), {2, 5, 11}
    prompts = [
        Prompt([chance.randrange(3, 64) for _ in range(chance.randint(1, 30))], "", Origin("a", n))
        for n in range(23)
    ]
    alone = [answer for one in prompts for answer in answers_of(model, [one], 1, stop_texts)]
    for one, answer in zip(prompts, alone, strict=True):  # one forward pass per token, no cache
        ids = list(one.input_ids)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            text = Numbered().decode(ids[len(one.input_ids) :])
            if ids[-1] in stops or any(stop in text for stop in stop_texts):
                break
        ends = ids[-1] in stops
        new = ids[len(one.input_ids) : -1 if ends else None]
        assert answer == Answer(Numbered().decode(new), ends)
    assert len({answer.text.count("<") for answer in alone}) > 2  # of different lengths
    for size in (2, 5, 64):
        assert answers_of(model, prompts, size, stop_texts) == alone
    monkeypatch.setattr(GreedyDecoder, "supports", lambda model: False)
    assert answers_of(model, prompts, 5, stop_texts) == alone  # by transformers' `generate`


LONGEST_TEXT = 32


def test_a_finished_row_uses_no_more_positions() -> None:
    model, chance, most = tiny_gpt2(n_positions=LONGEST_TEXT), random.Random(1), 12
    lengths = (LONGEST_TEXT - most, *range(9, 1, -1))
    prompts = [[chance.randrange(3, 64) for _ in range(length)] for length in lengths]

    def answers(size: int, is_done: Any) -> dict[int, list[int]]:
        decoder = GreedyDecoder(
            model=model, stop_ids=frozenset(), max_new_tokens=most, batch_size=size, is_done=is_done
        )
        with torch.no_grad():
            return dict(pair for batch in decoder.answers(prompts) for pair in batch)

    whole = answers(1, lambda tokens: False)
    assert len({tuple(tokens[:6]) for tokens in whole.values()}) == len(prompts)
    # Four finish early; the longest then finishes alone and waits for the four that replaced them.
    early = {number: whole[number][:6] for number in (1, 2, 3, 4)}
    assert answers(5, lambda tokens: tokens in early.values()) == whole | early


@pytest.mark.parametrize("is_split", [True, False])
def test_answers_end_where_the_context_does(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of learned positions would fail behind it, on a GPU with all that follows."""
    monkeypatch.setattr(GreedyDecoder, "supports", lambda model: is_split)
    model, chance = tiny_gpt2(n_positions=LONGEST_TEXT), random.Random(1)
    lengths = (3, LONGEST_TEXT, 18, LONGEST_TEXT - 1, 25, 20)
    prompts = [
        Prompt([chance.randrange(3, 64) for _ in range(length)], "", Origin("a", 1))
        for length in lengths
    ]
    config = EvaluationConfig(max_new_tokens=12, batch_size=4)
    batches = answer_batches(model, Numbered(), prompts, set(), config, context_len=LONGEST_TEXT)
    counts = {number: answer.text.count("<") for batch in batches for number, answer in batch}
    assert [counts[number] for number in range(len(lengths))] == [12, 1, 12, 1, 7, 12]


def tiny_mpt() -> Any:
    return MptForCausalLM(MptConfig(vocab_size=64, d_model=16, n_heads=2, n_layers=1))


def tiny_xlnet() -> Any:
    return XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16))


@pytest.mark.parametrize(
    ("build", "is_supported"),
    [(tiny_llama, True), (tiny_xlnet, False), (tiny_mpt, False)],
)
def test_continuous_batching_needs_a_plain_key_value_cache(build: Any, is_supported: bool) -> None:
    assert GreedyDecoder.supports(build()) is is_supported


PAIR_STOPS = {2, *range(5, 64, 6)}
PAIR_PROMPTS = [
    Prompt(list(range(3 + n, 3 + n + length)), "", Origin("file", 1))
    for n, length in enumerate((1, 9, 4, 20, 2, 13, 7))
]


@pytest.fixture(params=[tiny_t5, tiny_bart])
def pair_model(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    # Untied head: with a tied one, random weights repeat the previous token.
    made.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
    made.set_attn_implementation(attention_implementation("sdpa"))
    return made


def answers_of_pairs(
    model: Any, prompts: list[Prompt] = PAIR_PROMPTS, stops: set[int] = PAIR_STOPS
) -> list[str | None]:
    config = EvaluationConfig(max_new_tokens=12, batch_size=4)
    return finished(answer_prompts(model, Numbered(), prompts, stops, config))


@torch.no_grad()
def by_hand(model: Any, prompt: Prompt) -> str | None:
    """Greedy decoding without cache, batch or padding."""
    source, ids = torch.tensor([prompt.input_ids]), [model.config.decoder_start_token_id]
    for _ in range(12):
        targets = torch.tensor([ids])
        logits = model(input_ids=source, decoder_input_ids=targets, use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token in PAIR_STOPS:
            return Numbered().decode(ids[1:])
        ids.append(token)
    return None


def test_answers_of_encoder_decoders_are_greedy_whatever_the_base_generates(
    pair_model: Any,
) -> None:
    expected = [by_hand(pair_model, prompt) for prompt in PAIR_PROMPTS]
    assert answers_of_pairs(pair_model) == expected and len(set(expected)) > 1
    own = pair_model.generation_config
    own.update(do_sample=True, temperature=5.0, num_beams=3, repetition_penalty=3.0)
    own.update(no_repeat_ngram_size=1, min_length=9, forced_eos_token_id=2)
    assert answers_of_pairs(pair_model) == expected
    assert pair_model.generation_config is own and own.num_beams == 3
    for training in (True, False):
        pair_model.train(training)
        answers_of_pairs(pair_model, PAIR_PROMPTS[:1])
        assert pair_model.training is training
        halves = (pair_model, pair_model.get_encoder(), pair_model.get_decoder())
        assert {half.config._attn_implementation for half in halves} == {"attention_by_document"}
    always_7 = torch.nn.functional.one_hot(torch.tensor(7), 64) * 1e4
    pair_model.lm_head.bias = torch.nn.Parameter(always_7)
    assert answers_of_pairs(pair_model, PAIR_PROMPTS[:2], {1, 2}) == [None, None]  # none is forced
    assert answers_of_pairs(pair_model, PAIR_PROMPTS[:2], {7}) == ["", ""]
