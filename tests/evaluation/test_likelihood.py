"""Likelihoods do not depend on batching, padding and shared prefixes."""

from __future__ import annotations

import random
from typing import Any

import peft
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from app.evaluation.likelihood import (
    Likelihood,
    Request,
    can_share_prefixes,
    encode_after_first,
    encode_pair,
    encode_text,
    plan_groups,
    rolling_requests,
    score,
    score_groups,
)
from tests.tiny import TINY_BASE, tiny_gpt2, tiny_llama, tiny_t5

CHOICES = random.Random(3)


def ids(length: int) -> list[int]:
    return [CHOICES.randrange(3, 64) for _ in range(length)]


def questions(few_shot: list[int], count: int = 5) -> list[Request]:
    """Contexts of several lengths, each with four continuations of one to six tokens."""
    contexts = [few_shot + ids(10 + 3 * n) for n in range(count)]
    return [Request(context, ids(1 + n * 5 // 3)) for context in contexts for n in range(4)]


def one_at_a_time(model: Any, requests: list[Request], max_len: int = 128) -> list[Likelihood]:
    found = []
    for context, continuation in requests:
        row = torch.tensor([[*context, *continuation][-(max_len + 1) :]])
        with torch.no_grad():
            logits = model(input_ids=row[:, :-1], use_cache=False).logits.log_softmax(-1)[0]
        targets = torch.tensor(continuation)
        ends = logits[-len(continuation) :]
        total = ends.gather(1, targets.unsqueeze(1)).sum()
        is_greedy = bool((ends.argmax(-1) == targets).all())
        found.append(Likelihood(float(total), len(continuation), is_greedy))
    return found


def scored(model: Any, requests: list[Request], **how: Any) -> list[Likelihood]:
    limits = {"max_len": 128, "batch_tokens": 256} | how
    found = dict(pair for batch in score(model, requests, **limits) for pair in batch)
    assert sorted(found) == list(range(len(requests)))  # each once
    return [found[number] for number in range(len(requests))]


def assert_same(found: list[Likelihood], expected: list[Likelihood]) -> None:
    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one.logprob for one in found] == pytest.approx(
        [one.logprob for one in expected], rel=1e-5
    )


@pytest.mark.parametrize(
    ("build", "few_shot", "batch_tokens"),
    [(tiny_llama, 0, 200), (tiny_llama, 50, 5000), (tiny_gpt2, 50, 200), (tiny_gpt2, 0, 1)],
)
def test_batched_likelihoods_equal_those_of_single_rows(
    build: Any, few_shot: int, batch_tokens: int
) -> None:
    model = build()
    requests = questions(ids(few_shot))
    requests += [Request(ids(3), ids(2)), Request(requests[0].context, requests[0].continuation)]
    assert can_share_prefixes(model)
    found = scored(model, requests, batch_tokens=batch_tokens)
    assert_same(found, one_at_a_time(model, requests))


@pytest.mark.parametrize(
    "settings", [{"trainable_token_indices": [5]}, {"target_modules": ["embed_tokens"]}]
)
def test_an_adapter_may_change_the_embedding(settings: dict[str, Any]) -> None:
    adapter = peft.LoraConfig(**{"target_modules": ["q_proj"], **settings})
    model = peft.get_peft_model(tiny_llama(), adapter).eval()
    requests = questions([])
    assert_same(scored(model, requests), one_at_a_time(model, requests))


def test_greedy_continuations_are_recognized() -> None:
    model = tiny_llama()
    context = ids(8)
    with torch.no_grad():
        last = int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax())
    greedy, other = scored(model, [Request(context, [last]), Request(context, [63 - last])])
    assert greedy.is_greedy and not other.is_greedy


def test_a_long_context_is_truncated_on_the_left() -> None:
    model = tiny_llama()
    requests = [Request(ids(150), ids(4)), Request(ids(127), ids(1)), Request(ids(128), ids(3))]
    assert_same(scored(model, requests), one_at_a_time(model, requests))


def test_shared_prefixes_are_computed_once() -> None:
    zero_shot, few_shot = questions([], 6), questions(ids(60), 6)
    whole = sum(len(context) + len(end) - 1 for context, end in zero_shot)
    groups = plan_groups(zero_shot, 128, shares_prefixes=True)
    assert len(groups) == 6  # one per question
    assert sum(group.num_tokens for group in groups) < whole / 2.5
    (group,) = plan_groups(few_shot, 128, shares_prefixes=True)
    assert group.num_shared >= 60
    letters = [Request(context, [n]) for context in (ids(9), ids(9)) for n in (5, 6, 7)]
    assert [len(group.rows) for group in plan_groups(letters, 128, shares_prefixes=True)] == [1, 1]


def test_encoder_decoder_likelihoods() -> None:
    model = tiny_t5()
    requests = [Request(ids(9 + n), ids(1 + n % 3)) for n in range(5)]
    expected = []
    for context, continuation in requests:
        with torch.no_grad():
            read = torch.tensor([[0, *continuation[:-1]]])
            logits = model(input_ids=torch.tensor([context]), decoder_input_ids=read).logits
        targets = torch.tensor([continuation])
        total = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).sum()
        is_greedy = bool((logits.argmax(-1) == targets).all())
        expected.append(Likelihood(float(total), len(continuation), is_greedy))
    assert_same(scored(model, requests), expected)


def test_rolling_requests_predict_each_token_once() -> None:
    text = list(range(10, 21))
    assert rolling_requests(text, 1, 4) == [
        Request([1], [10, 11, 12, 13]),
        Request([13], [14, 15, 16, 17]),
        Request([16, 17], [18, 19, 20]),
    ]
    assert rolling_requests(text[:3], 1, 4) == [Request([1], [10, 11, 12])]
    assert rolling_requests([], 1, 4) == []


def test_a_text_without_tokens_has_no_likelihoods() -> None:
    groups = [[Request(ids(4), ids(2))], [], [Request(ids(4), ids(2))]]
    batches = score_groups(tiny_llama(), groups, max_len=128, batch_tokens=256)
    found = dict(pair for batch in batches for pair in batch)
    assert [len(found[number]) for number in range(3)] == [1, 0, 1]


def test_spaces_belong_to_the_continuation_and_an_empty_context_is_bos() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    context, continuation = encode_pair(tokenizer, "the sea ", "is calm")
    assert tokenizer.decode(context + continuation) == "the sea is calm"
    assert tokenizer.decode(context) == "the sea"
    alone = encode_pair(tokenizer, "", "calm")
    assert alone.context == [tokenizer.bos_token_id or tokenizer.eos_token_id]
    assert tokenizer.decode(alone.continuation) == "calm"


def test_tokens_around_every_text_are_no_part_of_what_is_measured() -> None:
    plain, tokenizer = (AutoTokenizer.from_pretrained(TINY_BASE) for _ in range(2))
    first, last, text = plain.pad_token, plain.eos_token, "the sea is calm"
    tokenizer.bos_token, own = first, plain.encode(text)
    ids = [(token, plain.convert_tokens_to_ids(token)) for token in (first, last)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=ids
    )
    start, end = (index for _, index in ids)
    assert tokenizer.encode(text) == [start, *own, end]
    assert encode_text(tokenizer, text, is_encoder_decoder=True) == [start, *own, end]
    assert encode_text(tokenizer, text) == [start, *own]
    assert encode_after_first(tokenizer, text) == own
    assert encode_text(tokenizer, "") == [start] and encode_after_first(tokenizer, "") == []
    assert encode_pair(tokenizer, "", text) == ([start], own)
    context, continuation = encode_pair(plain, "the sea ", "is calm")
    assert encode_pair(tokenizer, "the sea ", "is calm") == ([start, *context], continuation)
