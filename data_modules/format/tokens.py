"""Read rows that are tokenized already: ids, what is trained on, padding, and packed documents.

Never changes an id: a row that holds several documents becomes one item for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from common.errors import Origin
from data_modules.format.fields import (
    TOKEN_MASKS,
    RowError,
    quote,
    read_weight,
    row_weight,
    type_of,
)
from data_modules.types import Item, Tokens

_IGNORED = -100
"""label of a token that is not trained on"""
MASKS = ("labels", "weights", *TOKEN_MASKS)
"""columns with a number for each token; all that a row has are multiplied"""
PACKED = ("position_ids", "seq_lengths", "cu_seqlens")
"""columns that say where the documents of a row begin"""
DOCUMENT_IDS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids")
"""columns with the number of each token's document"""
_MAX_ID = 2**31 - 1


def read_tokens(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    """Return the ids and weights of each document; the weights of all masks are multiplied.

    Tokens masked by `attention_mask` are padding at either end, which is removed. Labels are not
    shifted: each has the position of its own token, -100 for tokens that are not trained on.
    """
    ids = _integers(values["input_ids"], "input_ids")
    if not ids:
        raise RowError("input_ids is empty; give at least one token")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        place = next(i for i, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise RowError(
            f"input_ids[{place}] is {quote(ids[place])}; an id is a number from 0 to {_MAX_ID}"
        )
    first, end = _find_padding(values, len(ids))
    weights = [row_weight(values)] * len(ids)
    if values.get("labels") is not None:
        weights = _label_weights(values["labels"], ids, weights, first, end)
    for name in MASKS[1:]:
        is_of_row = name == "loss_scale" and not isinstance(values.get(name), list)
        if values.get(name) is not None and not is_of_row:
            factors = _numbers(values[name], name, len(ids))
            weights = [a * b for a, b in zip(weights, factors, strict=True)]
    bounds = [*_find_documents(values, len(ids), first, end), end]
    return [
        Tokens(tuple(ids[start:stop]), tuple(weights[start:stop]), origin)
        for start, stop in itertools.pairwise(bounds)
    ]


def _find_documents(values: Mapping[str, Any], count: int, first: int, end: int) -> list[int]:
    """Return where the documents between `first` and `end` begin.

    Raises RowError if two columns disagree, or one does not fit the tokens.
    """
    found: dict[str, list[int]] = {}
    if values.get("position_ids") is not None:
        positions = _integers(values["position_ids"], "position_ids")
        _check_length(positions, "position_ids", count)
        found["position_ids"] = _restarts(positions, first, end)
    if values.get("seq_lengths") is not None:
        lengths = _integers(values["seq_lengths"], "seq_lengths")
        found["seq_lengths"] = _starts(lengths, "seq_lengths", count, first, end)
    if values.get("cu_seqlens") is not None:
        ends = _integers(values["cu_seqlens"], "cu_seqlens")
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        found["cu_seqlens"] = _starts(lengths, "cu_seqlens", count, first, end)
    for name in DOCUMENT_IDS:
        if values.get(name) is not None:
            numbers = _integers(values[name], name)
            _check_length(numbers, name, count)
            found[name] = [
                i for i in range(first, end) if i == first or numbers[i] != numbers[i - 1]
            ]
    for (one, starts), (other, others) in itertools.pairwise(found.items()):
        if starts != others:
            raise RowError(
                f"{one} and {other} tell different documents apart ({len(starts):,} and "
                f"{len(others):,} of them); keep the right one"
            )
    return next(iter(found.values()), [first])


def _restarts(positions: list[int], first: int, end: int) -> list[int]:
    """Return the places of position 0; raise RowError if others do not count on by 1."""
    for i in range(first, end):
        before = positions[i - 1] if i > first else -1
        if positions[i] not in (0, before + 1):
            raise RowError(
                f"position_ids[{i}] is {quote(positions[i])}; positions count from 0 in each "
                "document of a row; drop the column if the row is one document"
            )
    return [i for i in range(first, end) if positions[i] == 0]


def _starts(lengths: list[int], name: str, count: int, first: int, end: int) -> list[int]:
    """Return where documents of these lengths begin, with or without the row's padding."""
    total = sum(lengths)
    if total not in (count, end - first) or min(lengths, default=0) < 1:
        raise RowError(
            f"{name} tells documents of {total:,} tokens together, input_ids has {count:,}; give "
            "the number of tokens of each document"
        )
    offset = first if total == end - first else 0
    starts = itertools.accumulate(lengths[:-1], initial=offset)
    return sorted({max(first, start) for start in starts if start < end})


def _find_padding(values: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return the end of the padding before the tokens, and the start of that after them."""
    if values.get("attention_mask") is None:
        return 0, count
    mask = _integers(values["attention_mask"], "attention_mask")
    _check_length(mask, "attention_mask", count)
    if 1 not in mask:
        raise RowError("attention_mask masks every token; drop the row")
    first, end = mask.index(1), count - mask[::-1].index(1)
    if any(mask[:first]) or any(mask[end:]) or mask[first:end] != [1] * (end - first):
        raise RowError(
            "attention_mask is not one run of 1 with 0 at its ends; give one document per row: "
            "loft packs documents itself"
        )
    return first, end


def _label_weights(
    value: Any, ids: list[int], weights: list[float], first: int, end: int
) -> list[float]:
    labels = _integers(value, "labels")
    _check_length(labels, "labels", len(ids))
    if labels == ids:
        return weights
    label_weights = [
        0.0 if label == _IGNORED else weight if label == token else -1.0
        for label, token, weight in zip(labels, ids, weights, strict=True)
    ]
    if -1.0 in label_weights[first:end]:
        place = label_weights.index(-1.0, first)
        raise RowError(
            f"labels[{place}] is {labels[place]} and input_ids[{place}] is {ids[place]}; labels "
            f"must equal input_ids (they are not shifted) or be {_IGNORED}"
        )
    return label_weights


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of numbers")
    if not set(map(type, value)) <= {int}:
        place = next(i for i, number in enumerate(value) if type(number) is not int)
        raise RowError(f"{name}[{place}] is {type_of(value[place])}, not a whole number")
    return value


def _numbers(value: Any, name: str, count: int) -> list[float]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of numbers")
    _check_length(value, name, count)
    return [read_weight(number, name) for number in value]


def _check_length(value: list[Any], name: str, count: int) -> None:
    if len(value) != count:
        raise RowError(
            f"{name} has {len(value):,} numbers and input_ids {count:,}; give one per token"
        )
