"""The loss is the exact sum over trained tokens, whole and by data set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.model.attention import attention_implementation
from app.model.head import check_head_loss, fuse_head, token_losses
from app.training.objective.objective import (
    DatasetSums,
    RowSums,
    Sft,
    batch_loss,
    losses_by_dataset,
    validate,
)
from data_modules import Batch
from tests.tiny import random_ids, tiny_gpt2, tiny_llama

IGNORED = -100


def make_batch(
    documents: list[list[int]], weights: list[list[float]], datasets: list[int]
) -> Batch:
    """One packed row; weights are those of a document's tokens as labels, the first one is 0."""
    ids = torch.tensor([token for document in documents for token in document])
    label_weights = [w for row in weights for w in (*row[1:], 0.0)]
    next_ids = [token for document in documents for token in (*document[1:], IGNORED)]
    labels = torch.tensor(next_ids)
    labels[torch.tensor(label_weights) == 0] = IGNORED
    columns = torch.nonzero(labels != IGNORED).flatten()
    lengths = [len(document) for document in documents]
    return Batch(
        input_ids=ids.unsqueeze(0),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        labels=labels.unsqueeze(0),
        loss_weights=torch.tensor(label_weights).unsqueeze(0),
        dataset_ids=torch.tensor(datasets).repeat_interleave(torch.tensor(lengths)).unsqueeze(0),
        trained_columns=columns if len(columns) else torch.zeros(1, dtype=torch.int64),
        document_lengths=[lengths],
        step_weight=max(1.0, sum(label_weights)),
        num_tokens=len(ids),
    )


@pytest.fixture
def model() -> Any:
    llama = tiny_llama()
    llama.set_attn_implementation(attention_implementation("sdpa"))
    return llama


@pytest.fixture
def batch() -> Batch:
    ids = random_ids(tokens=15)[0].tolist()
    return make_batch(
        [ids[:6], ids[6:11], ids[11:]],
        [[0, 0, 0, 1, 1, 1], [0, 0, 0.5, 2, 0], [0, 0, 1, 1]],
        [0, 2, 0],
    )


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


def test_a_token_loss_is_minus_its_log_probability_and_none_where_ignored() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, IGNORED, 6, 0, 3], [IGNORED, 2, 2, 5, IGNORED]])
    losses = token_losses(logits, labels)
    assert losses.shape == labels.shape
    logs = torch.log_softmax(logits.double(), dim=-1)
    for row in range(2):
        for column in range(5):
            label = int(labels[row, column])
            expected = 0.0 if label == IGNORED else -logs[row, column, label].item()
            assert losses[row, column].item() == pytest.approx(expected, rel=1e-6)


def test_token_losses_of_half_precision_logits_are_computed_in_fp32() -> None:
    logits = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([[1, 2, 3, 4]])
    losses = token_losses(logits, labels)
    assert losses.dtype is torch.float32
    assert torch.equal(losses, token_losses(logits.float(), labels))


def test_sums_are_exact_whatever_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(999, generator=generator) * 10
    weights = torch.tensor([0.0, 1.0, 0.5]).repeat(333)
    datasets = torch.randint(0, 2, (999,), generator=generator)
    sums = DatasetSums(3)
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
    backwards = DatasetSums(3)
    backwards.add(losses.flip(0), weights.flip(0), datasets.flip(0))
    assert torch.allclose(backwards.take(), taken, rtol=1e-13, atol=0)


def test_small_losses_are_not_lost_beside_large_sums() -> None:
    sums = DatasetSums(1)
    one = torch.ones(1)
    sums.add(one * 2**25, one, torch.zeros(1, dtype=torch.int64))
    for _ in range(4):
        sums.add(one, one, torch.zeros(1, dtype=torch.int64))
    assert sums.take()[0, 0].item() == 2**25 + 4  # fp32 would still say 2**25


def test_taken_sums_start_again_at_zero() -> None:
    sums = DatasetSums(1)
    with pytest.raises(RuntimeError, match="no batch was added"):
        sums.take()
    place = torch.zeros(2, dtype=torch.int64)
    sums.add(torch.ones(2), torch.ones(2), place)
    sums.take()
    sums.add(torch.ones(2) * 3, torch.ones(2), place)
    assert sums.take().flatten().tolist() == [6.0, 2.0, 2.0]


def test_losses_by_dataset_are_token_means_with_shares() -> None:
    sums = torch.tensor([[6.0, 0.0, 8.0], [3.0, 0.0, 2.0], [3.0, 0.0, 1.0]])
    assert losses_by_dataset(sums, ["a", "b", "c"], "val") == {
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
    metrics = losses_by_dataset(torch.zeros(3, 1), ["a"], "train")
    assert metrics == {"train/tokens/a": 0.0, "train/share/a": 0.0}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_loss_of_a_pack_is_that_of_its_documents_alone(
    positions: str, model: Any, batch: Batch
) -> None:
    if positions == "learned":  # where a document starts shows in these, in rotary ones hardly
        model = tiny_gpt2(attn_implementation=attention_implementation("sdpa"))
    sums = DatasetSums(3)
    loss = batch_loss(Sft(), model, batch, "sdpa", sums)
    tokens = by_hand(model, batch)
    assert len(tokens) == 7
    assert loss.item() == pytest.approx(sum(x * w for _, x, w in tokens), rel=1e-6)
    taken = sums.take()
    for index in range(3):
        own = [(x, w) for dataset, x, w in tokens if dataset == index]
        expected = [sum(x * w for x, w in own), sum(w for _, w in own), len(own)]
        assert taken[:, index].tolist() == pytest.approx(expected, rel=1e-6)


def test_documents_of_a_batch_have_sums_of_their_own(model: Any, batch: Batch) -> None:
    documents = RowSums()
    batch_loss(Sft(), model, batch, "sdpa", DatasetSums(3), documents)
    tokens = [(x * w, w) for _, x, w in by_hand(model, batch)]
    expected = [
        [sum(part) for part in zip(*own, strict=True)]
        for own in (tokens[:3], tokens[3:5], tokens[5:])
    ]
    taken = documents.take([4, 0, 2], 5)  # those at 1 and 3 are another rank's
    assert taken[:, [1, 3]].tolist() == [[0, 0], [0, 0]]
    # The logits are fp32, rounded otherwise where documents are computed alone.
    assert taken[:, [4, 0, 2]].T.tolist() == [pytest.approx(one, rel=1e-6) for one in expected]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_head_on_trained_columns_alone_gives_the_gradients_of_all_columns(
    model: Any, batch: Batch, backend: str
) -> None:
    model.set_attn_implementation(attention_implementation(backend))
    found = []
    for columns in (batch.trained_columns, torch.arange(batch.input_ids.shape[1])):
        batch.trained_columns = columns
        model.zero_grad()
        batch_loss(Sft(), model, batch, backend, DatasetSums(3)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, expected in found[1].items():
        assert torch.allclose(found[0][name], expected, rtol=1e-4, atol=1e-6), name


def test_weights_scale_a_tokens_loss_and_its_gradient(model: Any) -> None:
    ids = random_ids(tokens=6)[0].tolist()
    gradients = []
    for weight in (1.0, 0.5):
        model.zero_grad()
        one = make_batch([ids], [[0, 0, 0, 0, 0, weight]], [0])
        loss = batch_loss(Sft(), model, one, "sdpa", DatasetSums(1))
        loss.backward()
        gradients.append((loss.item(), model.lm_head.weight.grad.clone()))
    assert gradients[1][0] == pytest.approx(0.5 * gradients[0][0], rel=1e-6)
    assert torch.allclose(gradients[1][1], 0.5 * gradients[0][1])


def test_a_batch_without_labels_has_a_loss_of_zero_and_gradients_of_zero(model: Any) -> None:
    ids = random_ids(tokens=4)[0].tolist()
    for document in (ids, ids[:1]):  # prompts alone; the one padding token of an empty pack
        sums = DatasetSums(2)
        model.zero_grad()
        empty = make_batch([document], [[0.0] * len(document)], [0])
        loss = batch_loss(Sft(), model, empty, "sdpa", sums)
        loss.backward()
        assert loss.item() == 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
        assert not sums.take().any()


def test_a_model_that_gave_its_loss_once_gives_logits_again(model: Any, batch: Batch) -> None:
    expected = model(input_ids=batch.input_ids).logits
    fuse_head(model)
    batch_loss(Sft(), model, batch, "sdpa", DatasetSums(3))
    assert torch.equal(model(input_ids=batch.input_ids).logits, expected)
    with pytest.raises(RuntimeError, match="did not call its head"):
        model.get_output_embeddings().pop_loss()


def test_a_head_that_computes_in_its_own_way_is_left_alone(model: Any) -> None:
    class Shifted(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) + 1

    model.lm_head.__class__ = Shifted
    fuse_head(model)
    assert type(model.get_output_embeddings()) is Shifted


@pytest.mark.parametrize("is_training", [True, False])
def test_proving_a_head_leaves_dropout_as_it_was(model: Any, is_training: bool) -> None:
    fuse_head(model)
    model.train(is_training)
    check_head_loss(model, "sdpa")
    assert {module.training for module in model.modules()} == {is_training}


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
    metrics = validate(Sft(), model, [batch, batch], "sdpa", ["a", "b", "c"])
    assert kept_for_backward == [False, False]
    model.eval()
    tokens = by_hand(model, batch)
    mean = sum(x * w for _, x, w in tokens) / sum(w for _, _, w in tokens)
    assert metrics["val/loss"] == pytest.approx(mean, rel=1e-6)
    assert [metrics[f"val/tokens/{name}"] for name in "abc"] == [10.0, 0.0, 4.0]
