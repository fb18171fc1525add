"""The routers' own loss against plain transformers, document by document; the load of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.model.adapter import FullConfig
from app.model.attention import attention_implementation
from app.training.metrics import ExpertLoad
from app.training.objective.objective import (
    DatasetSums,
    RouterBalance,
    Sft,
    batch_loss,
    choose_router_aux_loss,
)
from common.errors import Origin, UserError
from data_modules import Batch, Example
from data_modules.collator import Collator
from tests.model.test_experts import tiny_mixture

LENGTHS = [[9, 5, 11], [7, 13]]
"""documents of two rows; the second one ends in padding"""
WIDTH, COEFFICIENT, ORIGIN = 25, 0.05, Origin("file", 1)


def documents() -> list[list[torch.Tensor]]:
    torch.manual_seed(3)
    return [[torch.randint(3, 64, (length,)) for length in row] for row in LENGTHS]


def batch_of(rows: list[list[torch.Tensor]], step_weight: float) -> Batch:
    """Return a batch of rows of documents, padded to the same width."""
    packs = [
        [
            Example(part.numpy().astype(np.int32), np.ones(len(part), np.float32), 0, ORIGIN)
            for part in parts
        ]
        for parts in rows
    ]
    return Collator(0, packed=False, row_len=WIDTH)(packs, step_weight)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_routers_loss_is_that_of_each_document(kind: str, accumulates: bool) -> None:
    model = tiny_mixture(kind).train()
    rows = documents()
    num_trained = sum(length - 1 for row in LENGTHS for length in row)
    expected = torch.tensor(0.0)
    for part in (part for row in rows for part in row):
        plain = model(part[None], labels=part[None], output_router_logits=True, use_cache=False)
        mean = plain.loss - model.router_aux_loss_coef * plain.aux_loss
        share = (len(part) - 1) / num_trained
        loss = share * (mean + COEFFICIENT * plain.aux_loss)
        loss.backward()
        expected += loss.detach()
    by_document = gradients(model)
    model.zero_grad()

    model.set_attn_implementation(attention_implementation("sdpa"))
    balance, total = RouterBalance(model, COEFFICIENT), torch.tensor(0.0)
    for micro in [[row] for row in rows] if accumulates else [rows]:
        batch = batch_of(micro, num_trained)
        with balance.recording():
            loss = batch_loss(Sft(), model, batch, "sdpa", DatasetSums(1)) + balance.loss(batch)
        loss = loss / batch.step_weight
        loss.backward()
        total += loss.detach()
    assert total.item() == pytest.approx(expected.item(), abs=1e-5)
    assert any("gate" in name and not name.endswith("_proj") for name in by_document)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, by_document[name], atol=1e-5, rtol=1e-3, msg=name)


def test_the_load_of_experts_counts_tokens_and_no_padding() -> None:
    model = tiny_mixture("qwen3_moe")
    load = ExpertLoad(model)
    batch = batch_of(documents(), 1.0)
    with load.counting(batch):
        batch_loss(Sft(), model, batch, "sdpa", DatasetSums(1))
    batch_loss(Sft(), model, batch, "sdpa", DatasetSums(1))  # not counted: a validation's
    counts = load.take()
    assert counts is not None and load.take() is None
    by_layer = counts.view(2, 4)
    assert by_layer.sum(1).tolist() == [2 * batch.num_tokens] * 2
    metrics = load.metrics(counts)
    assert list(metrics) == ["experts/load_max/0", "experts/load_max/1"]
    assert metrics["experts/load_max/1"] == pytest.approx(
        float(by_layer[1].max()) / (2 * batch.num_tokens / 4)
    )


def test_a_balancing_loss_of_a_model_without_experts_is_refused() -> None:
    from transformers import LlamaConfig

    assert choose_router_aux_loss(LlamaConfig(), FullConfig(), None) == 0.0
    assert choose_router_aux_loss(LlamaConfig(), FullConfig(), 0.0) == 0.0
    with pytest.raises(UserError, match=r"model.router_aux_loss=0.01 has no effect: llama models"):
        choose_router_aux_loss(LlamaConfig(), FullConfig(), 0.01)
