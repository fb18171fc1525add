"""The loss of an encoder-decoder model is the exact sum over its targets, by data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from app.model.attention import attention_implementation
from app.training.objective.objective import DatasetSums, Sft, batch_loss
from common.errors import Origin
from data_modules import Example
from data_modules.collator import Collator
from tests.tiny import random_ids, tiny_bart, tiny_t5


def make_example(
    number: int, source: int, target: int, weights: list[float], dataset: int
) -> Example:
    ids = random_ids(tokens=60)[0].numpy().astype(np.int32)
    return Example(
        ids[number : number + source],
        np.array(weights, np.float32),
        dataset,
        Origin("file", number + 1),
        ids[number + 20 : number + 20 + target],
    )


EXAMPLES = [
    make_example(0, 7, 3, [1, 1, 1], 0),
    make_example(1, 2, 5, [0, 0, 0.5, 2, 1], 2),
    make_example(2, 11, 1, [1], 0),
]


def by_hand(model: Any, example: Example) -> list[tuple[int, float, float]]:
    """Return (data set, loss, weight) of each trained target, with eager attention."""
    assert example.target_ids is not None
    targets = torch.from_numpy(example.target_ids).long()
    start = torch.tensor([model.config.decoder_start_token_id])
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(example.input_ids).long().unsqueeze(0),
            decoder_input_ids=torch.cat([start, targets[:-1]]).unsqueeze(0),
            use_cache=False,
        ).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    weights = example.weights.tolist()
    return [(example.dataset, loss, w) for loss, w in zip(losses, weights, strict=True) if w]


@pytest.mark.parametrize(
    ("make", "is_packed", "backend"),
    [
        (tiny_t5, True, "sdpa"),
        (tiny_t5, False, "sdpa"),
        (tiny_t5, False, "eager"),
        (tiny_bart, False, "sdpa"),
        (tiny_bart, False, "eager"),
    ],
)
def test_sums_are_those_of_documents_alone(
    make: Callable[..., Any], is_packed: bool, backend: str
) -> None:
    reference, model = make(attn_implementation="eager"), make()
    model.set_attn_implementation(attention_implementation(backend))
    start = model.config.decoder_start_token_id
    batch = Collator(0, is_packed, start)([[example] for example in EXAMPLES], 1.0)
    sums = DatasetSums(3)
    loss = batch_loss(Sft(), model, batch, backend, sums)
    expected = [found for example in EXAMPLES for found in by_hand(reference, example)]
    assert loss.item() == pytest.approx(sum(nats * w for _, nats, w in expected), rel=1e-5)
    taken = sums.take()
    for dataset in range(3):
        own = [(nats, w) for d, nats, w in expected if d == dataset]
        exact = [sum(nats * w for nats, w in own), sum(w for _, w in own), len(own)]
        assert taken[:, dataset].tolist() == pytest.approx(exact, rel=1e-5)
