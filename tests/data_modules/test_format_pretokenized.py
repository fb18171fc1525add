"""Rows that are tokenized already."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_modules.format import MissingColumnError, RowError, convert_row
from data_modules.format.format import format_of
from data_modules.messages import Origin
from data_modules.types import Row, Tokens

ORIGIN = Origin("rows.parquet", 3)
FLAGS = st.lists(st.booleans(), min_size=1, max_size=20)


def convert(values: dict[str, Any], **columns: str) -> Tokens:
    """Convert a row of tokens."""
    (item,) = convert_row(Row(values, ORIGIN), "pretokenized", columns)
    assert isinstance(item, Tokens) and item.origin == ORIGIN
    return item


@given(FLAGS, st.floats(0, 10), st.integers(0, 5), st.integers(0, 5))
def test_masked_tokens_weigh_nothing_and_padding_is_cut(
    learned: list[bool], weight: float, left: int, right: int
) -> None:
    ids = list(range(5, 5 + len(learned)))
    labels = [i if flag else -100 for i, flag in zip(ids, learned, strict=True)]
    row = {
        "input_ids": [0] * left + ids + [0] * right,
        "labels": [-100] * left + labels + [1] * right,
        "attention_mask": [0] * left + [1] * len(ids) + [0] * right,
        "weight": weight,
    }
    assert format_of(row) == "pretokenized"
    item = convert(row)
    assert item.input_ids == tuple(ids)
    assert item.weights == tuple(weight * flag for flag in learned)


@given(FLAGS)
def test_a_loss_mask_says_the_same_as_labels(learned: list[bool]) -> None:
    ids = list(range(5, 5 + len(learned)))
    labels = [i if flag else -100 for i, flag in zip(ids, learned, strict=True)]
    from_labels = convert({"input_ids": ids, "labels": labels})
    assert convert({"input_ids": ids, "loss_mask": [int(flag) for flag in learned]}) == from_labels
    assert convert({"input_ids": ids, "loss_mask": learned}) == from_labels
    assert convert({"input_ids": ids, "labels": ids, "weights": learned}) == from_labels


def test_masks_and_weights_multiply() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weights": [1, 0.5, 2], "weight": 3}
    assert convert(row).weights == (0.0, 1.5, 6.0)


def test_all_is_trained_on_when_the_labels_are_the_ids() -> None:
    assert convert({"input_ids": [5, 6]}, input_ids="input_ids", labels="input_ids") == Tokens(
        (5, 6), (1.0, 1.0), ORIGIN
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "5 6"}, "input_ids is str 5 6, not a list"),
        ({"input_ids": [5, 6.0]}, r"input_ids\[1\] is float 6.0, not a whole number"),
        ({"input_ids": [5, True]}, r"input_ids\[1\] is bool True"),
        ({"input_ids": [5, None]}, r"input_ids\[1\] is null"),
        ({"input_ids": [5, -1]}, r"input_ids\[1\] is -1; an id is"),
        ({"input_ids": [2**31, 5]}, r"input_ids\[0\] is 2147483648"),
        ({"labels": [5]}, "labels has 1 numbers and input_ids 2"),
        ({"labels": [6, -100]}, r"labels\[0\] is 6 and input_ids\[0\] is 5; a label is its own"),
        ({"labels": [5, -1]}, r"labels\[1\] is -1 and"),
        ({"attention_mask": [0, 0]}, "hides every token"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "not one run of 1"),
        ({"attention_mask": [1, 2]}, "not one run of 1"),
        ({"attention_mask": [1]}, "attention_mask has 1 numbers"),
        ({"weights": [1, float("nan")]}, "weights is nan"),
        ({"loss_mask": [1, -1]}, "loss_mask is -1"),
        ({"loss_mask": 1}, "loss_mask is int 1, not a list"),
        ({"loss_mask": [1]}, "loss_mask has 1 numbers"),
    ],
)
def test_problems_of_tokens(values: dict[str, Any], told: str) -> None:
    row = {"input_ids": [5, 6], **values}
    row.setdefault("labels", row["input_ids"])
    with pytest.raises(RowError, match=told):
        convert(row)


def test_ids_alone_do_not_say_what_is_trained_on() -> None:
    with pytest.raises(MissingColumnError, match="missing 'labels'; found"):
        convert({"input_ids": [5, 6]})
