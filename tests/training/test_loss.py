"""The loss is the exact sum over trained tokens: whole, by data set, over ranks of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from app.model.attention import attention_implementation
from app.training.objective import objective
from common.errors import Origin
from data_modules import Batch, Example, SequenceSlice, deal_columns
from data_modules.collator import Collator
from tests.tiny import random_ids, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

IGNORED = -100


def make_batch(
    documents: list[list[int]], weights: list[list[float]], datasets: list[int]
) -> Batch:
    """One packed row; weights are those of a document's tokens as labels, the first one is 0."""
    rows = [
        Example(np.array(ids, np.int32), np.array(own, np.float32), dataset, Origin("file", 1))
        for ids, own, dataset in zip(documents, weights, datasets, strict=True)
    ]
    return Collator(0, packed=True)([rows], max(1.0, sum(map(sum, weights))))


@pytest.fixture
def model() -> Any:
    llama = tiny_llama()
    llama.set_attn_implementation(attention_implementation("sdpa"))
    return llama


def three_documents(ids: list[int]) -> Batch:
    """Return a row of three documents, of two data sets, with tokens of several weights."""
    return make_batch(
        [ids[:6], ids[6:11], ids[11:]],
        [[0, 0, 0, 1, 1, 1], [0, 0, 0.5, 2, 0], [0, 0, 1, 1]],
        [0, 2, 0],
    )


@pytest.fixture
def batch() -> Batch:
    return three_documents(random_ids(tokens=15)[0].tolist())


def by_hand(model: Any, batch: Batch) -> list[tuple[int, float, float]]:
    """(data set, loss, weight) of each trained token, document by document through transformers."""
    found, start = [], 0
    for length in batch.document_lengths[0]:
        document = batch.input_ids[:, start : start + length]
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=document).logits[0].double(), dim=-1)
        for i in range(length - 1):
            weight = batch.loss_weights[0, start + i].item()
            if weight:
                loss = -logs[i, document[0, i + 1]].item()
                found.append((int(batch.dataset_ids[0, start]), loss, weight))
        start += length
    return found


def test_sums_are_exact_whatever_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(999, generator=generator) * 10
    weights = torch.tensor([0.0, 1.0, 0.5]).repeat(333)
    datasets = torch.randint(0, 2, (999,), generator=generator)
    sums = objective.DatasetSums(3)
    for start in range(0, 999, 100):
        part = slice(start, start + 100)
        sums.add(losses[part], weights[part], datasets[part])
    taken = sums.take()
    assert taken.dtype is torch.float64
    for index in range(3):
        chosen = datasets == index
        exact = [
            (losses * weights)[chosen].double().sum().item(),
            weights[chosen].double().sum().item(),
            (weights[chosen] > 0).sum().item(),
        ]
        assert taken[:, index].tolist() == pytest.approx(exact, rel=1e-12)
    backwards = objective.DatasetSums(3)
    backwards.add(losses.flip(0), weights.flip(0), datasets.flip(0))
    assert torch.allclose(backwards.take(), taken, rtol=1e-13, atol=0)


def test_losses_by_dataset_are_token_means_with_shares() -> None:
    sums = torch.tensor([[6.0, 0.0, 8.0], [3.0, 0.0, 2.0], [3.0, 0.0, 1.0]])
    assert objective.losses_by_dataset(sums, ["a", "b", "c"], "val") == {
        "val/loss": 14 / 5,
        "val/loss/a": 2.0,
        "val/tokens/a": 3.0,
        "val/share/a": 0.75,
        "val/tokens/b": 0.0,
        "val/share/b": 0.0,
        "val/loss/c": 4.0,
        "val/tokens/c": 1.0,
        "val/share/c": 0.25,
    }


def test_sums_without_a_trained_token_have_no_loss() -> None:
    metrics = objective.losses_by_dataset(torch.zeros(3, 1), ["a"], "train")
    assert metrics == {"train/tokens/a": 0.0, "train/share/a": 0.0}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_loss_of_a_pack_is_that_of_its_documents_alone(
    positions: str, model: Any, batch: Batch
) -> None:
    if positions == "learned":  # where a document starts shows in these, in rotary ones hardly
        model = tiny_gpt2(attn_implementation=attention_implementation("sdpa"))
    sums = objective.DatasetSums(3)
    loss = objective.batch_loss(objective.Sft(), model, batch, "sdpa", sums)
    tokens = by_hand(model, batch)
    assert len(tokens) == 7
    assert loss.item() == pytest.approx(sum(x * w for _, x, w in tokens), rel=1e-6)
    taken = sums.take()
    for index in range(3):
        own = [(x, w) for dataset, x, w in tokens if dataset == index]
        expected = [sum(x * w for x, w in own), sum(w for _, w in own), len(own)]
        assert taken[:, index].tolist() == pytest.approx(expected, rel=1e-6)


def test_documents_of_a_batch_have_sums_of_their_own(model: Any, batch: Batch) -> None:
    documents = objective.RowSums()
    objective.batch_loss(objective.Sft(), model, batch, "sdpa", objective.DatasetSums(3), documents)
    tokens = [(x * w, w) for _, x, w in by_hand(model, batch)]
    expected = [
        [sum(part) for part in zip(*own, strict=True)]
        for own in (tokens[:3], tokens[3:5], tokens[5:])
    ]
    taken = documents.take([4, 0, 2], 5)  # those at 1 and 3 are another rank's
    assert taken[:, [1, 3]].tolist() == [[0, 0], [0, 0]]
    # The logits are fp32, rounded otherwise where documents are computed alone.
    assert taken[:, [4, 0, 2]].T.tolist() == [pytest.approx(one, rel=1e-6) for one in expected]


def test_a_batch_without_labels_has_a_loss_of_zero_and_gradients_of_zero(model: Any) -> None:
    ids = random_ids(tokens=4)[0].tolist()
    for document in (ids, ids[:1]):  # prompts alone; the one padding token of an empty pack
        sums = objective.DatasetSums(2)
        model.zero_grad()
        empty = make_batch([document], [[0.0] * len(document)], [0])
        loss = objective.batch_loss(objective.Sft(), model, empty, "sdpa", sums)
        loss.backward()
        assert loss.item() == 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
        assert not sums.take().any()


def test_validation_sums_all_batches_without_dropout_or_gradients(model: Any, batch: Batch) -> None:
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    kept_for_backward: list[bool] = []

    def keep(_: object, __: object, inputs: dict[str, Any], output: Any) -> None:
        if inputs["input_ids"] is batch.input_ids:  # not a probe of the attention
            kept_for_backward.append(output[0].requires_grad)

    model.register_forward_hook(keep, with_kwargs=True)
    metrics = objective.validate(objective.Sft(), model, [batch, batch], "sdpa", ["a", "b", "c"])
    assert kept_for_backward == [False, False]
    model.eval()
    tokens = by_hand(model, batch)
    mean = sum(x * w for _, x, w in tokens) / sum(w for _, _, w in tokens)
    assert metrics["val/loss"] == pytest.approx(mean, rel=1e-6)
    assert [metrics[f"val/tokens/{name}"] for name in "abc"] == [10.0, 0.0, 4.0]


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


def targets_by_hand(model: Any, example: Example) -> list[tuple[int, float, float]]:
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
    sums = objective.DatasetSums(3)
    loss = objective.batch_loss(objective.Sft(), model, batch, backend, sums)
    expected = [found for example in EXAMPLES for found in targets_by_hand(reference, example)]
    assert loss.item() == pytest.approx(sum(nats * w for _, nats, w in expected), rel=1e-5)
    taken = sums.take()
    for dataset in range(3):
        own = [(nats, w) for d, nats, w in expected if d == dataset]
        exact = [sum(nats * w for nats, w in own), sum(w for _, w in own), len(own)]
        assert taken[:, dataset].tolist() == pytest.approx(exact, rel=1e-5)


LENGTHS = (5, 9, 3)


def padded_batch() -> Batch:
    """A row of three documents, and padding up to 24 tokens."""
    documents = [
        Example(
            input_ids=np.arange(3, 3 + length, dtype=np.int32),
            weights=np.arange(length, dtype=np.float32) % 3,
            dataset=number % 2,
            origin=Origin("rows.jsonl", number + 1),
        )
        for number, length in enumerate(LENGTHS)
    ]
    return Collator(0, packed=True, row_multiple=8)([documents], 1.0)


def counted(parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the sums by data set and by document, and the tokens, of the ranks' parts."""
    sums, by_row = objective.DatasetSums(2), torch.zeros(2, len(LENGTHS), dtype=torch.double)
    tokens = real = 0
    for part in parts:
        columns = part.trained_columns
        losses = part.position_ids[:, columns].flatten() + 0.5  # differs by token
        weights = part.loss_weights[:, columns].flatten()
        sums.add(losses, weights, part.dataset_ids[:, columns].flatten())
        numbers, count = objective.document_numbers(part)
        rows = objective.RowSums()
        rows.add(losses, weights, numbers[:, columns].flatten(), count)
        by_row += rows.take(range(count), count)
        tokens += part.num_tokens
        real += int(objective.is_token(part).sum())
    return sums.take(), by_row, tokens, real


@pytest.mark.parametrize("size", [1, 2, 4, 6, 12])
def test_the_parts_of_rows_add_up(size: int) -> None:
    whole = padded_batch()
    dealt = deal_columns(whole.input_ids.shape[1], size)
    parts = [whole.part(SequenceSlice(chunks)) for chunks in dealt]
    for found, expected in zip(counted(parts), counted([whole]), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    columns = torch.tensor([column for chunks in dealt for each in chunks for column in each])
    assert torch.cat([part.input_ids for part in parts], 1).equal(whole.input_ids[:, columns])
    assert all(part.document_lengths == whole.document_lengths for part in parts)
