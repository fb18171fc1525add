"""Positions, shifted labels and padding of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import Origin
from data_modules.collator import Collator, deal_columns
from data_modules.types import Example


def make_example(ids: list[int], weights: list[float], dataset: int = 0) -> Example:
    arrays = np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32)
    return Example(*arrays, dataset, Origin("rows.json", 1))


FIRST = make_example([1, 2, 3], [1, 0, 1])
SECOND = make_example([4, 5, 6, 7], [0.5, 0.5, 0, 1], dataset=1)


def test_packed_row() -> None:
    batch = Collator(99, packed=True)([[FIRST], [SECOND]], 3.5)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [[-100, 3, -100, 5, -100, 7, -100]]
    assert batch.loss_weights.tolist() == [[0, 1, 0, 0.5, 0, 1, 0]]
    assert batch.dataset_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert batch.trained_columns.tolist() == [1, 3, 5]
    assert batch.document_lengths == [[3, 4]]
    assert (batch.step_weight, batch.num_tokens) == (3.5, 7)
    assert {batch.labels.dtype, batch.trained_columns.dtype, batch.input_ids.dtype} == {torch.int64}
    assert batch.loss_weights.dtype == torch.float32
    assert FIRST.weights.tolist() == [1, 0, 1]  # not modified


def test_padded_rows() -> None:
    batch = Collator(99, packed=False)([[FIRST], [SECOND], []], 2.5)
    assert batch.input_ids.tolist() == [[1, 2, 3, 99], [4, 5, 6, 7], [99] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0] * 4]
    assert batch.labels.tolist() == [[-100, 3, -100, -100], [5, -100, 7, -100], [-100] * 4]
    assert batch.loss_weights.tolist() == [[0, 1, 0, 0], [0.5, 0, 1, 0], [0] * 4]
    assert batch.dataset_ids.tolist() == [[0] * 4, [1] * 4, [0] * 4]
    assert batch.trained_columns.tolist() == [0, 1, 2]
    assert batch.document_lengths == [[3], [4], []]
    assert batch.num_tokens == 7
    # An end token that is also the pad token is trained on.
    ended = make_example([1, 2, 99], [0, 1, 1])
    batch = Collator(99, packed=False)([[ended], [SECOND]], 1.0)
    assert batch.labels[0].tolist() == [2, 99, -100, -100]


def test_an_empty_micro_batch_has_one_column_and_no_label() -> None:
    for packed, rows in ((True, 1), (False, 2)):
        batch = Collator(99, packed=packed)([[], []], 1.0)
        assert batch.input_ids.tolist() == [[99]] * rows
        assert (batch.labels == -100).all() and batch.loss_weights.sum() == 0
        assert batch.trained_columns.tolist() == [0]
        assert batch.document_lengths == [[]] * rows
        assert batch.num_tokens == 0
    batch = Collator(0, True, decoder_start_token_id=9)([[]], 1.0)
    assert batch.labels.tolist() == [[-100]] and batch.num_tokens == 0
    assert batch.decoder is not None and batch.decoder.input_ids.tolist() == [[0]]


def test_lightning_moves_all_tensors_of_a_batch() -> None:
    from lightning.fabric.utilities.apply_func import move_data_to_device

    batch = Collator(0, packed=True)([[FIRST]], 1.5)
    batch = replace(batch, others=batch)
    moved = move_data_to_device(batch, torch.device("meta"))
    assert moved.others is not None and moved.others.labels.device.type == "meta"
    assert moved.input_ids.device.type == moved.trained_columns.device.type == "meta"
    assert moved.document_lengths == [[3]] and moved.step_weight == 1.5
    assert batch.input_ids.device.type == "cpu"


def pair(source: list[int], targets: list[int], weights: list[float], dataset: int = 0) -> Example:
    return Example(
        np.array(source, np.int32),
        np.array(weights, np.float32),
        dataset,
        Origin("d.json", 1),
        np.array(targets, np.int32),
    )


@pytest.mark.parametrize("packed", [True, False])
def test_decoder_inputs_are_labels_shifted_by_a_start_token(packed: bool) -> None:
    pairs = [pair([5, 6, 7], [8, 9], [1, 0.5]), pair([4], [3, 2, 1], [0, 1, 1], dataset=1)]
    batch = Collator(0, packed, decoder_start_token_id=99)([[one] for one in pairs], 4.0)
    decoder = batch.decoder
    assert decoder is not None
    if packed:
        assert batch.input_ids.tolist() == [[5, 6, 7, 4]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 0]]
        assert batch.labels.tolist() == [[8, 9, -100, 2, 1]]
        assert decoder.input_ids.tolist() == [[99, 8, 99, 3, 2]]
        assert decoder.position_ids.tolist() == [[0, 1, 0, 1, 2]]
        assert batch.document_lengths == [[3, 1]] and decoder.document_lengths == [[2, 3]]
        assert batch.loss_weights.tolist() == [[1, 0.5, 0, 1, 1]]
        assert batch.dataset_ids.tolist() == [[0, 0, 1, 1, 1]]
        assert batch.trained_columns.tolist() == [0, 1, 3, 4]
    else:
        assert batch.input_ids.tolist() == [[5, 6, 7], [4, 0, 0]]
        assert batch.labels.tolist() == [[8, 9, -100], [-100, 2, 1]]
        assert decoder.input_ids.tolist() == [[99, 8, 0], [99, 3, 2]]
        assert batch.document_lengths == [[3], [1]] and decoder.document_lengths == [[2], [3]]
    assert batch.num_tokens == 9 and batch.step_weight == 4.0
    moved = batch.to("meta").decoder
    assert moved is not None and moved.document_lengths == decoder.document_lengths
    assert moved.input_ids.device.type == moved.position_ids.device.type == "meta"


def test_a_causal_example_is_refused_as_a_pair() -> None:
    causal = Example(np.ones(2, np.int32), np.ones(2, np.float32), 0, Origin("d.json", 7))
    with pytest.raises(ValueError, match=r"d\.json:7 has no targets"):
        Collator(0, True, decoder_start_token_id=9)([[causal]], 1.0)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_each_rank_attends_to_as_many_tokens_of_a_long_document(size: int, length: int) -> None:
    dealt = deal_columns(2 * size * length, size)
    assert len({sum(column for chunk in chunks for column in chunk) for chunks in dealt}) == 1


def test_padding_to_a_multiple_adds_no_labels() -> None:
    batch = Collator(7, packed=True, row_multiple=8)([[FIRST, SECOND]], 1.0)
    plain = Collator(7, packed=True)([[FIRST, SECOND]], 1.0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 7]]
    assert batch.labels.tolist() == [[*plain.labels[0].tolist(), -100]]
    assert batch.loss_weights.tolist() == [[*plain.loss_weights[0].tolist(), 0]]
    assert torch.equal(batch.trained_columns, plain.trained_columns)
    assert (batch.num_tokens, batch.document_lengths) == (7, [[3, 4]])
