"""What rows, turns and tokens say of their own training is followed or refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Origin
from data_modules.format import FORMATS, RowError, convert_row
from data_modules.types import Conversation, Document, Item, Row, Tokens

ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}
CALL = {"name": "add", "arguments": {"a": 1}}
IDS = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASK, SAY]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "pretokenized": IDS,
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "prompt_completion turns": {"prompt": [ASK], "completion": [SAY]},
    "oasst": {"prompt": {"role": "prompter", "text": "q", "replies": [{**SAY, "text": "a"}]}},
    "completion": {"text": "a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "kto": {"prompt": "q", "completion": "a", "label": True},
    "kto turns": {"messages": [ASK, SAY], "label": False},
    "classification": {"text": "a", "label": "b"},
    "preference turns": {"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": "b"}]},
}
FALSE = [(key, False) for key in ("train", "training", "loss", "loss_scale", "weight")]
ZERO = [(key, 0) for key in ("train", "training", "loss", "loss_scale", "weight", "loss_weight")]
TRUE = [(key, value) for key, _ in FALSE for value in (True, 1, 1.0)]


def convert(name: str, values: dict[str, Any]) -> list[Item]:
    return convert_row(Row(values, Origin("rows.jsonl", 7)), name.split()[0], {})


def weights(items: list[Item]) -> set[float]:
    found: set[float] = set()
    for item in items:
        if isinstance(item, Tokens):
            found |= set(item.weights)
        elif isinstance(item, Document):
            found.add(item.segments[-1].weight)
        else:
            answers = [turn for turn in item.turns if turn.role == "assistant"]
            found |= {item.weight * (1.0 if a.weight is None else a.weight) for a in answers}
    return found


def turn_rows(**keys: Any) -> dict[str, dict[str, Any]]:
    """Return a row of each format with turns or segments, whose answer has these keys."""
    answer = {"role": "assistant", "content": "a", **keys}
    segments = [{"text": "q", "weight": 0}, {"text": "a", **keys}]
    message = {"role": "assistant", "text": "a", **keys}
    return {
        "messages": {"messages": [ASK, answer]},
        "sharegpt": {"conversation": [ASK, answer]},
        "prompt_completion": {"prompt": [ASK], "completion": [answer]},
        "completion": {"segments": segments},
        "oasst": {"prompt": {"role": "prompter", "text": "q", "replies": [message]}},
    }


@pytest.mark.parametrize("name", turn_rows())
@pytest.mark.parametrize(("key", "value"), FALSE + ZERO + TRUE)
def test_a_key_of_a_turn_masks_it(name: str, key: str, value: Any) -> None:
    assert weights(convert(name, turn_rows(**{key: value})[name])) == {float(value)}


@pytest.mark.parametrize("name", turn_rows())
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss": "false"}, r"loss is 'false'; give true or false"),
        ({"training": [1]}, "training is list; give true or false"),
        ({"loss": 0.5}, "loss is 0.5; give true or false"),
        ({"loss_scale": 0.5}, "loss_scale is 0.5; only 0 and 1 are read here: .* as 'weight'"),
        ({"loss_scale": "1"}, "loss_scale is '1'; only 0 and 1"),
        ({"loss_weight": -1}, "loss_weight is -1; a weight is a number from 0 up"),
    ],
)
def test_a_key_that_cannot_be_followed_is_refused(
    name: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(RowError, match=said):
        convert(name, turn_rows(**keys)[name])


def test_keys_of_a_turn_are_multiplied_and_null_is_none() -> None:
    row = turn_rows(train=True, weight=0.5, loss=None, loss_scale=None, train_detail=[])
    assert weights(convert("messages", row["messages"])) == {0.5}
    row = turn_rows(loss=False, weight=2, training=True)
    assert weights(convert("messages", row["messages"])) == {0.0}
    segments = [{"text": "a", "label": True}, {"text": "b", "label": False}]
    (item,) = convert("completion", {"segments": segments})
    assert isinstance(item, Document) and [s.weight for s in item.segments] == [1.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "text", "text": "a", "KEY": 0}, {"type": "text", "text": "b"}]},
        {"content": None, "tool_calls": [{**CALL, "KEY": 0}]},
        {"content": [{"type": "tool_call", **CALL, "KEY": 0}]},
    ],
)
@pytest.mark.parametrize("key", ["train", "training", "loss", "loss_scale", "weight"])
def test_a_part_of_a_turn_cannot_be_masked_alone(answer: dict[str, Any], key: str) -> None:
    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key if k == "KEY" else k: renamed(v) for k, v in value.items()}
        return [renamed(item) for item in value] if isinstance(value, list) else value

    with pytest.raises(RowError, match=rf"\]\.{key} is 0; only a whole turn can be masked"):
        convert("messages", {"messages": [ASK, {"role": "assistant", **renamed(answer)}]})


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("key", "value"), [*FALSE, ("loss", "False"), ("weight", "0")])
def test_a_column_masks_its_row(name: str, key: str, value: Any) -> None:
    assert weights(convert(name, ROWS[name])) == {1.0}
    assert weights(convert(name, {**ROWS[name], key: value})) == {0.0}


@pytest.mark.parametrize("name", ROWS)
def test_a_fraction_as_loss_scale_of_a_row_is_refused_and_a_measured_loss_is_not(name: str) -> None:
    with pytest.raises(RowError, match=r"loss_scale is 0.5; only 0 and 1"):
        convert(name, {**ROWS[name], "loss_scale": 0.5})
    assert convert(name, {**ROWS[name], "loss": 0.73}) == convert(name, ROWS[name])


TWO = [ASK, SAY, ASK, {**SAY, "content": "b"}]
TURNS = {
    "messages": {"messages": TWO},
    "sharegpt": {"conversations": TWO},
    "prompt_completion": {"prompt": TWO[:1], "completion": TWO[1:]},
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("key", ["loss_mask", "train", "training", "loss", "loss_scale"])
def test_a_column_may_list_a_value_for_each_turn(name: str, key: str) -> None:
    (item,) = convert(name, {**TURNS[name], key: [0, 0, 0, 1]})
    assert isinstance(item, Conversation)
    assert [turn.weight for turn in item.turns] == [0.0, 0.0, 0.0, 1.0]
    with pytest.raises(RowError, match=rf"{key} has 3 values and .* 4 turns; give one for each"):
        convert(name, {**TURNS[name], key: [0, 0, 1]})
    with pytest.raises(RowError, match=rf"{key}\[3\] is 0.5"):
        convert(name, {**TURNS[name], key: [0, 0, 0, 0.5]})


@pytest.mark.parametrize("name", [name for name in ROWS if name != "pretokenized"])
@pytest.mark.parametrize("key", ["loss_mask", "completion_mask", "assistant_masks"])
def test_a_mask_of_tokens_beside_text_is_refused(name: str, key: str) -> None:
    said = "format: pretokenized|give one for each"
    with pytest.raises(RowError, match=said):
        convert(name, {**ROWS[name], key: [0, 0, 1, 1, 1]})
    assert convert(name, {**ROWS[name], key: None}) == convert(name, ROWS[name])
    # It belongs to the tokens that stand beside the text.
    if name not in TURNS:
        convert(name, {**ROWS[name], key: [0, 1], "input_ids": [1, 2]})


MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "weights")


@pytest.mark.parametrize("key", (*MASKS, "loss_scale"))
def test_masks_of_tokens(key: str) -> None:
    row = {"input_ids": [1, 2, 3], key: [0, 1, True], "attention_mask": [1, 1, 1]}
    (item,) = convert("pretokenized", row)
    assert isinstance(item, Tokens) and item.weights == (0.0, 1.0, 1.0)
    (item,) = convert("pretokenized", {**row, "labels": [1, -100, 3], "weight": 0.5})
    assert isinstance(item, Tokens) and item.weights == (0.0, 0.0, 0.5)
    with pytest.raises(RowError, match=f"{key} has 2 numbers and input_ids 3"):
        convert("pretokenized", {**row, key: [0, 1]})


PACKED = {
    "position_ids": [0, 1, 2, 0, 1],
    "seq_lengths": [3, 2],
    "cu_seqlens": [0, 3, 5],
    "document_ids": [7, 7, 7, 8, 8],
    "segment_ids": [1, 1, 1, 2, 2],
}


@pytest.mark.parametrize("key", PACKED)
def test_a_packed_row_is_split_into_its_documents(key: str) -> None:
    ids, labels = [11, 12, 13, 21, 22], [-100, 12, 13, -100, 22]
    row = {"input_ids": ids, "labels": labels, key: PACKED[key]}
    split = [((11, 12, 13), (0, 1, 1)), ((21, 22), (0, 1))]

    def found(row: dict[str, Any]) -> list[Any]:
        items = convert("pretokenized", row)
        return [(i.input_ids, i.weights) for i in items if isinstance(i, Tokens)]

    assert found(row) == split
    assert found({**row, **PACKED}) == split
    for left, right in ((0, 2), (2, 0), (1, 1)):
        value = PACKED[key]
        if len(value) == 5 and key != "seq_lengths":
            value = [value[0]] * left + value + [value[-1]] * right
        padded = {
            "input_ids": [0] * left + ids + [0] * right,
            "labels": [-100] * left + labels + [-100] * right,
            "attention_mask": [0] * left + [1] * 5 + [0] * right,
            key: value,
        }
        assert found(padded) == split, (left, right)
    (whole,) = convert("pretokenized", {**row, key: None})
    assert isinstance(whole, Tokens) and whole.input_ids == tuple(ids)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"position_ids": [0, 1, 3, 4]}, r"position_ids\[2\] is 3; positions count from 0"),
        ({"position_ids": [1, 2, 3, 4]}, r"position_ids\[0\] is 1; positions count from 0"),
        ({"position_ids": [0, 1]}, "position_ids has 2 numbers and input_ids 4"),
        ({"position_ids": [[0], [1]]}, r"position_ids\[0\] is list, not a whole number"),
        ({"seq_lengths": [2, 3]}, "seq_lengths tells documents of 5 tokens together, .* has 4"),
        ({"seq_lengths": [4, 0]}, "seq_lengths tells"),
        ({"seq_lengths": 4}, "seq_lengths is int 4, not a list"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens tells documents of 3"),
        (
            {"position_ids": [0, 1, 0, 1], "seq_lengths": [3, 1]},
            "position_ids and seq_lengths tell different documents apart",
        ),
        (
            {"position_ids": [0, 1, 0, 1], "seq_lengths": [4]},
            r"tell different documents apart \(2 and 1 of them\)",
        ),
    ],
)
def test_documents_that_do_not_fit_the_tokens_are_refused(
    columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(RowError, match=said):
        convert("pretokenized", {**IDS, **columns})


CHATS = [name for name in ROWS if name not in ("pretokenized", "completion")]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_rows_with_pictures_or_sound_are_refused(name: str, kind: str) -> None:
    for column in (kind, f"{kind}s"):
        for value in (["0.png"], {"bytes": b"x", "path": None}):
            with pytest.raises(RowError, match=rf"^{column} is .*: not supported; only text is"):
                convert(name, {**ROWS[name], column: value})
        for value in (None, [], "", "https://0.png"):
            assert convert(name, {**ROWS[name], column: value}) == convert(name, ROWS[name])
    with pytest.raises(RowError, match=rf"messages\[0\].{kind}s is list: not supported"):
        convert("messages", {"messages": [{**ASK, f"{kind}s": ["x"]}, SAY]})


def test_a_mark_in_the_text_makes_the_name_of_a_picture_an_image() -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a"}]
    with pytest.raises(RowError, match=r"image is str 0.png: not supported"):
        convert("sharegpt", {"conversations": turns, "image": "0.png"})
    with pytest.raises(RowError, match=r"image is str 0.png: not supported"):
        convert("completion", {"text": "see <image>", "image": "0.png"})
    # A corpus may keep the picture of each of its texts.
    assert convert("completion", {"text": "a", "image": {"bytes": b"x"}})


def test_every_format_is_swept() -> None:
    assert {name.split()[0] for name in ROWS} == set(FORMATS)
