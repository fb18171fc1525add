"""Answers are greedy, end at the stop token, and do not depend on other prompts in the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    CpmAntConfig,
    CpmAntForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
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
from common.errors import Origin
from data_modules import Prompt
from tests.tiny import tiny_gpt2, tiny_llama

STOP, PAD = 2, 0
Prompts = dict[str, list[Prompt]]


class Spelled:
    """A tokenizer of 26 letters: token 3 is a."""

    pad_token_id = PAD

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + token - 3) for token in ids)


def prompt(text: str, answer: str = "") -> Prompt:
    return Prompt([ord(letter) - ord("a") + 3 for letter in text], answer, Origin("file", 1))


def chain_model(following: dict[str, str]) -> Any:
    """A model that continues each letter as in `following`, else with the stop token."""
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


CHAIN = {"a": "b", "b": "c", "c": "d", "x": "x"}


def finished(answers: list[Answer]) -> list[str | None]:
    """The texts of finished answers, None for the others."""
    return [answer.text if answer.is_finished else None for answer in answers]


def chain_answers(*texts: str, max_new_tokens: int = 8) -> list[str | None]:
    config = EvaluationConfig(max_new_tokens=max_new_tokens)
    prompts = [prompt(text) for text in texts]
    return finished(answer_prompts(chain_model(CHAIN), Spelled(), prompts, {STOP}, config))


def test_an_answer_ends_before_the_stop_token() -> None:
    assert chain_answers("a", "b", "zzb", "z") == ["bcd", "cd", "cd", ""]


def test_an_unfinished_answer_never_matches() -> None:
    assert chain_answers("x", "a") == [None, "bcd"]
    assert chain_answers("a", "b", max_new_tokens=3) == [None, "cd"]
    assert chain_answers("a", max_new_tokens=4) == ["bcd"]


def test_any_stop_token_ends_an_answer() -> None:
    model, tokenizer = chain_model(CHAIN), Spelled()
    config = EvaluationConfig(max_new_tokens=8)
    letter_d = prompt("d").input_ids[0]
    asked = [prompt("a"), prompt("d")]
    answers = answer_prompts(model, tokenizer, asked, {STOP, letter_d}, config)
    assert finished(answers) == ["bc", ""]


def test_answers_keep_the_order_of_their_prompts() -> None:
    texts = ["zzza", "c", "zb", "zzzzzb", "a"]
    for size in (1, 2, 5):
        answers = answer_prompts(
            chain_model(CHAIN),
            Spelled(),
            [prompt(text) for text in texts],
            {STOP},
            EvaluationConfig(max_new_tokens=8, batch_size=size),
        )
        assert finished(answers) == ["bcd", "d", "cd", "cd", "bcd"]


@pytest.mark.parametrize("is_split", [True, False])
def test_answers_are_cut_off_when_their_time_is_over(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GreedyDecoder, "supports", lambda model: is_split)
    config = EvaluationConfig(max_new_tokens=32)
    batches = answer_batches(
        chain_model(CHAIN), Spelled(), [prompt("x"), prompt("a")], {STOP}, config, seconds=0.0
    )
    answers = dict(pair for batch in batches for pair in batch)
    assert answers == {0: Answer("x", is_finished=False), 1: Answer("b", is_finished=False)}


def test_exact_match_is_the_share_of_correct_answers_per_data_set() -> None:
    prompts = {
        "mixed": [prompt("a", "bcd"), prompt("b", " cd\n"), prompt("a", "bc"), prompt("x", "x")],
        "right": [prompt("c", "d")],
        "capital": [prompt("c", "D")],
        "none held out": [],
    }
    config = EvaluationConfig(exact_match=True, max_new_tokens=8)
    predictions = Predictions(Spelled(), prompts, {STOP}, config)
    assert predictions.answer("tuned", chain_model(CHAIN)) == {
        "tuned/exact_match/mixed": 0.5,
        "tuned/exact_match/right": 1.0,
        "tuned/exact_match/capital": 0.0,
    }


class Numbered:
    """A tokenizer that decodes to token ids."""

    pad_token_id = PAD

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in ids)


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


def test_finished_answers_are_yielded_before_the_last_one_ends() -> None:
    prompts = [prompt(text) for text in "xxxaaaaaa"]
    how = EvaluationConfig(max_new_tokens=40, batch_size=4)
    batches = list(answer_batches(chain_model(CHAIN), Spelled(), prompts, {STOP}, how))
    assert [number for number, _ in batches[0]] == [3]  # and the next prompt takes its place
    assert {number for number, _ in batches[-1]} <= {0, 1, 2}


LONGEST_TEXT = 32


def short_gpt2() -> Any:
    return tiny_gpt2(n_positions=LONGEST_TEXT)


def short_opt() -> Any:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST_TEXT,
        init_std=0.5,
    )
    return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("build", [short_gpt2, short_opt])
def test_a_finished_row_uses_no_more_positions(build: Any) -> None:
    model, chance, most = build(), random.Random(1), 12
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


def tiny_cpmant() -> Any:
    shape = {"hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 16}
    return CpmAntForCausalLM(CpmAntConfig(vocab_size=64, num_hidden_layers=1, **shape))


def tiny_mpt() -> Any:
    return MptForCausalLM(MptConfig(vocab_size=64, d_model=16, n_heads=2, n_layers=1))


def tiny_xlnet() -> Any:
    return XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16))


@pytest.mark.parametrize(
    ("build", "is_supported"),
    [(tiny_llama, True), (tiny_xlnet, False), (tiny_cpmant, False), (tiny_mpt, False)],
)
def test_continuous_batching_needs_a_plain_key_value_cache(build: Any, is_supported: bool) -> None:
    assert GreedyDecoder.supports(build()) is is_supported
