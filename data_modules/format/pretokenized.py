"""Read rows that are tokenized already: their ids, and what of them is trained on.

Decides the weight of each token. Knows no tokenizer: whether an id is one of its, it cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_modules.format.fields import RowError, kind, quoted, read_weight, row_weight
from data_modules.messages import Origin
from data_modules.types import Tokens

IGNORED = -100
"""the label of a token that is not trained on"""

_MAX_ID = 2**31 - 1


def read_tokens(values: Mapping[str, Any], origin: Origin) -> Tokens:
    """Return ids and weights; `labels`, `loss_mask` and `weights` multiply where several are given.

    Tokens that `attention_mask` hides are padding, at either end, and are cut off. Labels stand at
    the place of their token (not shifted), -100 where nothing is trained on.
    """
    ids = _integers(values["input_ids"], "input_ids")
    if not ids:
        raise RowError("input_ids is empty; give at least one token")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        place = next(i for i, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise RowError(
            f"input_ids[{place}] is {quoted(ids[place])}; an id is a number from 0 to {_MAX_ID}"
        )
    first, end = _visible(values, len(ids))
    weights = [row_weight(values)] * len(ids)
    if values.get("labels") is not None:
        weights = _label_weights(values["labels"], ids, weights, first, end)
    for name in ("loss_mask", "weights"):
        if values.get(name) is not None:
            factors = _numbers(values[name], name, len(ids))
            weights = [a * b for a, b in zip(weights, factors, strict=True)]
    return Tokens(tuple(ids[first:end]), tuple(weights[first:end]), origin)


def _visible(values: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return where the tokens begin and end that are not padding."""
    if values.get("attention_mask") is None:
        return 0, count
    mask = _integers(values["attention_mask"], "attention_mask")
    _check_length(mask, "attention_mask", count)
    if 1 not in mask:
        raise RowError("attention_mask hides every token; drop the row")
    first, end = mask.index(1), count - mask[::-1].index(1)
    if any(mask[:first]) or any(mask[end:]) or mask[first:end] != [1] * (end - first):
        raise RowError(
            "attention_mask is not one run of 1 with 0 at its ends; give one document a row, for "
            "documents are packed here"
        )
    return first, end


def _label_weights(
    value: Any, ids: list[int], weights: list[float], first: int, end: int
) -> list[float]:
    labels = _integers(value, "labels")
    _check_length(labels, "labels", len(ids))
    if labels == ids:
        return weights
    labelled = [
        0.0 if label == IGNORED else weight if label == token else -1.0
        for label, token, weight in zip(labels, ids, weights, strict=True)
    ]
    if -1.0 in labelled[first:end]:
        place = labelled.index(-1.0, first)
        raise RowError(
            f"labels[{place}] is {labels[place]} and input_ids[{place}] is {ids[place]}; a label "
            f"is its own token, not the next one, or {IGNORED}"
        )
    return labelled


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, not a list of numbers")
    if not set(map(type, value)) <= {int}:
        place = next(i for i, number in enumerate(value) if type(number) is not int)
        raise RowError(f"{name}[{place}] is {kind(value[place])}, not a whole number")
    return value


def _numbers(value: Any, name: str, count: int) -> list[float]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, not a list of numbers")
    _check_length(value, name, count)
    return [read_weight(number, name) for number in value]


def _check_length(value: list[Any], name: str, count: int) -> None:
    if len(value) != count:
        raise RowError(
            f"{name} has {len(value):,} numbers and input_ids {count:,}; give one a token"
        )
