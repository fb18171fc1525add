"""Nothing in a row of any format is ignored in silence, above all what it says of its training.

What no reader looks at is counted and named; a mask is followed or refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from common.errors import DataError, Origin
from data_modules.format import RowError, convert_row, guess_format, sort_unread
from data_modules.format.format import FORMATS
from data_modules.types import Conversation, Document, Item, Row, Tokens

ORIGIN = Origin("rows.jsonl", 7)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add", "tool_call_id": "1"},
    {"role": "assistant", "content": "a", "reasoning": "hm"},
]
SHAREGPT = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "a"},
]
TREE = {"role": "prompter", "text": "q", "replies": [{"role": "assistant", "text": "a"}]}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT, "tools": [{"name": "add"}]},
    "sharegpt": {"conversations": SHAREGPT, "system": "s"},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [["b", "c"]]},
    "pretokenized": {"input_ids": [5, 6], "labels": [5, 6]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "prompt_completion turns": {"prompt": CHAT[:2], "completion": CHAT[2:]},
    "oasst": {"prompt": TREE},
    "completion": {"text": "a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "preference turns": {"prompt": CHAT[:2], "chosen": CHAT[2:], "rejected": [CHAT[-1]]},
    "kto": {"instruction": "q", "output": "a", "label": True},
    "kto turns": {"prompt": CHAT[:2], "completion": CHAT[2:], "kto_tag": False},
    "classification": {"text": "a", "label": "b"},
    "classification turns": {"messages": CHAT, "label": 1},
    "completion segments": {"segments": [{"text": "a", "weight": 0.5}, {"text": "b"}]},
}
NAMES = (
    *("id", "source", "meta", "score", "label", "labels", "chosen", "rejected", "kto_tag", "text"),
    *("content", "value", "role", "from", "name", "images", "image", "tools", "functions"),
    *("tool_defs", "system", "input", "history", "prompt", "completion", "response", "output"),
    *("messages", "conversations", "conversation", "segments", "instruction", "input_ids"),
    *("attention_mask", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask"),
    *("weights", "weight", "loss_weight", "loss", "loss_scale", "train", "training"),
    *("train_detail", "position_ids", "seq_lengths", "cu_seqlens", "document_ids", "tool_calls"),
    *("function_call", "tool_call_id", "tool_call", "function", "arguments", "parameters"),
    *("reasoning", "reasoning_content", "thinking", "replies", "deleted", "review_result"),
    *("index", "strict", "cache_control", "annotations", "refusal"),
)
VALUES: tuple[Any, ...] = ("zz", 3, [{"zz": 1}], {"zz": 1}, False)


def convert(name: str, values: dict[str, Any]) -> tuple[list[Item], set[str]]:
    unread: set[str] = set()
    return convert_row(Row(values, ORIGIN), name.split()[0], {}, unread), unread


def objects_in(value: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object in a row with its name in reports."""
    if isinstance(value, list):
        for item in value:
            yield from objects_in(item, f"{where}[]")
    elif isinstance(value, dict):
        yield where, value
        for key in value.keys() - {"tools", "arguments"}:  # whole to the template
            yield from objects_in(value[key], f"{where}.{key}".lstrip("."))


@pytest.mark.parametrize("name", ROWS)
def test_every_key_is_read_or_refused_or_named(name: str) -> None:
    """Add each key with each value at each place: the row changes, is refused, or it is named."""
    before, unread = convert(name, copy.deepcopy(ROWS[name]))
    assert unread == set()
    silent, both, num = set(), set(), 0
    row = copy.deepcopy(ROWS[name])
    for where, holder in objects_in(row):
        for key in (key for key in NAMES if key not in holder):
            for value in VALUES:
                holder[key] = value
                num += 1
                try:
                    after, unread = convert(name, row)
                except RowError:
                    continue
                finally:
                    del holder[key]
                if after == before and not unread and value is not False:
                    silent.add((where, key, str(value)))
                if after != before and unread & {key, f"{where}.{key}"}:
                    both.add((where, key))
    assert num > 200
    assert (silent, both) == (set(), set())
    assert {name.split()[0] for name in ROWS} == set(FORMATS)


def test_names_of_inner_keys_and_those_that_mean_something_first() -> None:
    counts = {"id": (9, "a:1"), "messages[].loss": (2, "a:2"), "rejected_response": (1, "a:3")}
    found = [name for name, _, _ in sort_unread(counts)]
    assert found == ["messages[].loss", "rejected_response", "id"]
    row = copy.deepcopy(ROWS["messages"])
    row |= {"id": 7, "images": [], "source": None, "label": ""}
    turns = row["messages"]
    turns[0]["name"] = turns[4]["id"] = "x"
    turns[1]["content"][1]["cache_control"] = {"type": "ephemeral"}
    turns[2]["tool_calls"][0]["index"] = 0
    turns[2]["tool_calls"][0]["function"]["parameters"] = {"b": 2}
    assert convert("messages", row)[1] == {
        "id",
        "messages[].name",
        "messages[].id",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].function.parameters",
    }
    turns = copy.deepcopy(SHAREGPT)
    turns[1]["value"] = json.dumps({"name": "add", "parameters": {"a": 1}, "result": 1})
    items, unread = convert("sharegpt", {"conversations": turns})
    assert unread == {"conversations[].value.result"}
    assert items == convert("sharegpt", {"conversations": SHAREGPT})[0]
    tree = {**TREE, "lang": "en", "replies": [{**TREE["replies"][0], "rank": 1}]}
    assert convert("oasst", {"prompt": tree})[1] == {"message.lang", "message.rank"}
    segments = [{"text": "a", "label": "code", "kind": 1}]
    assert convert("completion", {"segments": segments})[1] == {
        "segments[].label",
        "segments[].kind",
    }


def test_only_the_column_that_is_taken_of_several_names_is_read() -> None:
    row = {"instruction": "q", "output": "a", "response": "b", "completion": "c"}
    assert convert("alpaca", row)[1] == {"response", "completion"}
    assert convert("completion", {"segments": [{"text": "a"}], "text": "b"})[1] == {"text"}
    chat = ROWS["messages"]
    assert convert("messages", {**chat, "conversations": SHAREGPT})[1] == {"conversations"}
    tools = {"prompt": "q", "completion": "a", "tools": [{"name": "add"}], "system": "s"}
    assert convert("prompt_completion", tools)[1] == {"tools", "system"}


def test_mapped_columns_are_read_and_what_they_hide_is_not() -> None:
    values = {"q": "q", "meta": {"answers": ["a"]}, "instruction": "other", "output": "b", "id": 1}
    columns = {"instruction": "q", "response": "meta.answers.0"}
    unread: set[str] = set()
    convert_row(Row(values, ORIGIN), "alpaca", columns, unread)
    assert unread == {"instruction", "output", "id"}


TEXTS: list[tuple[str, Callable[[Any], dict[str, Any]], str]] = [
    ("alpaca", lambda text: {"instruction": text, "output": "a"}, "instruction"),
    ("alpaca", lambda text: {"instruction": "q", "input": text, "output": "a"}, "input"),
    ("alpaca", lambda text: {"instruction": "q", "response": text}, "response"),
    ("alpaca", lambda text: {"instruction": "q", "output": "a", "system": text}, "system"),
    (
        "alpaca",
        lambda text: {"instruction": "q", "output": "a", "history": [[text, "b"]]},
        r"history\[0\]\[0\]",
    ),
    ("prompt_completion", lambda text: {"prompt": text, "completion": "a"}, "prompt"),
    ("completion", lambda text: {"segments": [{"text": text}]}, r"segments\[0\].text"),
    ("messages", lambda text: {"messages": [{**ASK, "content": text}, SAY]}, r"\[0\].content"),
    ("messages", lambda text: {"messages": [ASK, {**SAY, "reasoning": text}]}, r"\[1\].reasoning"),
    ("oasst", lambda text: {"prompt": {**TREE, "text": text}}, "prompt.text"),
]


@pytest.mark.parametrize(("name", "row", "where"), TEXTS)
def test_only_text_is_read_as_text(
    name: str, row: Callable[[Any], dict[str, Any]], where: str
) -> None:
    for several in (["Oslo", "Oslo, Norway"], [{"text": "Oslo"}, {"text": "Oslo, Norway"}]):
        with pytest.raises(RowError, match=rf"{where} is a list of 2 (strings|values), not one te"):
            convert(name, row(several))
    for value in (42, 1.5, True, {"zz": "Oslo"}, [{"zz": "Oslo"}], [42], [["Oslo"]]):
        with pytest.raises(RowError, match=where):
            convert(name, row(value))
    parts = [{"type": "text", "text": "Os"}, {"type": "text", "text": "lo"}]
    assert convert(name, row(parts)) == convert(name, row(["Oslo"])) == convert(name, row("Oslo"))


def test_the_columns_of_a_table_are_named_as_such() -> None:
    with pytest.raises(
        RowError, match=r"^instruction, output are lists of 3 values each: the colu"
    ):
        convert("alpaca", {"instruction": ["p", "q", "r"], "output": ["a", "b", "c"]})
    chats = {"messages": [CHAT, CHAT], "id": [1, 2]}
    with pytest.raises(RowError, match=r"^messages, id are lists of 2 values each"):
        convert("messages", chats)


GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PAIRS: list[dict[str, Any]] = [
    {"prompt": "q", "chosen": "good", "rejected": "bad"},
    {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    {"chosen": "q good", "rejected": "q bad"},
    {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    {"conversations": [ASK], "chosen": GOOD, "rejected": BAD},
    {"messages": [ASK, GOOD], "rejected_response": "bad"},
    {"instruction": "q", "output": "good", "rejected": "bad"},
]


@pytest.mark.parametrize("values", PAIRS)
def test_preference_pairs_are_refused_with_settings_that_train_on_the_chosen(
    values: dict[str, Any],
) -> None:
    row = Row(values, ORIGIN)
    with pytest.raises(DataError, match=r"^rows.jsonl:7 columns .*preference pairs") as caught:
        guess_format([row], {})
    found = yaml.safe_load(str(caught.value).split("set ")[1].replace("...", "x"))
    items = convert_row(row, found["format"], found.get("columns", {}))
    texts = [
        text
        for item in items
        for text in (
            [turn.content for turn in item.turns]
            if isinstance(item, Conversation)
            else [s.text for s in item.segments]  # type: ignore[union-attr]
        )
    ]
    assert texts[-1].endswith("good") and not any("bad" in text for text in texts)
    if found.get("columns"):
        guess_format([row], found["columns"])


def test_answers_with_a_verdict_are_refused_and_their_weight_can_be_it() -> None:
    for values in (ROWS["messages"], ROWS["alpaca"], ROWS["prompt_completion"], ROWS["sharegpt"]):
        # As text, as in a csv file, too.
        for key, verdict in (("label", "False"), ("label", True), ("kto_tag", False)):
            row = Row({**values, key: verdict}, ORIGIN)
            with pytest.raises(
                DataError, match=rf"objective=kto.*'{key}' is true, set .*weight: {key}"
            ):
                guess_format([row], {})
            columns = {"weight": key}
            unread: set[str] = set()
            (item,) = convert_row(row, guess_format([row], columns), columns, unread)
            given = item.weight if isinstance(item, Conversation) else item.segments[-1].weight  # type: ignore[union-attr]
            assert given == (verdict is True)
            assert unread == set()


def test_texts_with_their_class_are_refused_unless_the_format_is_given() -> None:
    for column in ("text", "content"):
        for label in (1, "spam", 0.5, True):
            row = Row({column: "t", "label": label}, ORIGIN)
            with pytest.raises(DataError, match=rf"classification.*instruction: {column}, output"):
                guess_format([row], {})
    words = Row({"text": "t", "label": "spam"}, ORIGIN)
    (item,) = convert_row(words, "alpaca", {"instruction": "text", "output": "label"})
    assert isinstance(item, Conversation) and item.turns[-1].content == "spam"
    assert convert("completion", words.values)[1] == {"label"}


ADD = {"name": "add", "arguments": {"a": 1}}
KEYS = ("train", "training", "loss", "loss_scale", "weight")
FALSE: list[tuple[str, Any]] = [(key, False) for key in KEYS]


def items_of(name: str, values: dict[str, Any]) -> list[Item]:
    return convert_row(Row(values, ORIGIN), name.split()[0], {})


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
def test_a_key_of_a_turn_masks_it_or_is_refused(name: str) -> None:
    for key, value in [
        *FALSE,
        *((key, value) for key in (*KEYS, "loss_weight") for value in (0, 1)),
    ]:
        assert weights(items_of(name, turn_rows(**{key: value})[name])) == {float(value)}, key
    more = {"train": True, "weight": 0.5, "loss": None, "loss_scale": None, "train_detail": []}
    assert weights(items_of(name, turn_rows(**more)[name])) == {0.5}
    assert weights(items_of(name, turn_rows(loss=False, weight=2, train=True)[name])) == {0.0}
    for key, value, said in (
        ("loss", "false", "loss is 'false'; give true or false"),
        ("training", [1], "training is list; give true or false"),
        ("loss_scale", 0.5, "loss_scale is 0.5; only 0 and 1 are read here: .* as 'weight'"),
        ("loss_weight", -1, "loss_weight is -1; a weight is a number from 0 up"),
    ):
        with pytest.raises(RowError, match=said):
            items_of(name, turn_rows(**{key: value})[name])


@pytest.mark.parametrize("name", ROWS)
def test_a_column_masks_its_row(name: str) -> None:
    assert weights(items_of(name, ROWS[name])) == {1.0}
    for key, value in (*FALSE, ("loss", "False"), ("weight", "0")):
        assert weights(items_of(name, {**ROWS[name], key: value})) == {0.0}, key
    with pytest.raises(RowError, match=r"loss_scale is 0.5; only 0 and 1"):
        items_of(name, {**ROWS[name], "loss_scale": 0.5})
    # What was measured is no mask.
    assert items_of(name, {**ROWS[name], "loss": 0.73}) == items_of(name, ROWS[name])


TWO = [ASK, SAY, ASK, {**SAY, "content": "b"}]
TURNS = {
    "messages": {"messages": TWO},
    "sharegpt": {"conversations": TWO},
    "prompt_completion": {"prompt": TWO[:1], "completion": TWO[1:]},
}


@pytest.mark.parametrize("name", TURNS)
def test_a_column_may_list_a_value_for_each_turn(name: str) -> None:
    for key in ("loss_mask", "train", "training", "loss", "loss_scale"):
        (item,) = items_of(name, {**TURNS[name], key: [0, 0, 0, 1]})
        assert isinstance(item, Conversation)
        assert [turn.weight for turn in item.turns] == [0.0, 0.0, 0.0, 1.0]
        with pytest.raises(RowError, match=rf"{key} has 3 values and .* 4 turns; give one for ea"):
            items_of(name, {**TURNS[name], key: [0, 0, 1]})
        with pytest.raises(RowError, match=rf"{key}\[3\] is 0.5"):
            items_of(name, {**TURNS[name], key: [0, 0, 0, 0.5]})


@pytest.mark.parametrize("name", [name for name in ROWS if name != "pretokenized"])
def test_a_mask_of_tokens_beside_text_is_refused(name: str) -> None:
    for key in ("loss_mask", "completion_mask", "assistant_masks"):
        with pytest.raises(RowError, match=r"format: pretokenized|give one for each"):
            items_of(name, {**ROWS[name], key: [0, 0, 1, 1, 1, 1, 1]})
        assert items_of(name, {**ROWS[name], key: None}) == items_of(name, ROWS[name])
        # It belongs to the tokens that stand beside the text.
        if name not in TURNS and not name.endswith("turns"):
            items_of(name, {**ROWS[name], key: [0, 1], "input_ids": [1, 2]})


def test_masks_of_tokens() -> None:
    masks = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "weights")
    for key in (*masks, "loss_scale"):
        row = {"input_ids": [1, 2, 3], key: [0, 1, True], "attention_mask": [1, 1, 1]}
        assert items_of("pretokenized", row) == [Tokens((1, 2, 3), (0.0, 1.0, 1.0), ORIGIN)]
        row |= {"labels": [1, -100, 3], "weight": 0.5}
        assert items_of("pretokenized", row) == [Tokens((1, 2, 3), (0.0, 0.0, 0.5), ORIGIN)]
        with pytest.raises(RowError, match=f"{key} has 2 numbers and input_ids 3"):
            items_of("pretokenized", {**row, key: [0, 1]})


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
        items = items_of("pretokenized", row)
        return [(i.input_ids, i.weights) for i in items if isinstance(i, Tokens)]

    assert found(row) == split
    assert found({**row, **PACKED}) == split
    for left, right in ((0, 2), (2, 1)):
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
    (whole,) = items_of("pretokenized", {**row, key: None})
    assert isinstance(whole, Tokens) and whole.input_ids == tuple(ids)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"position_ids": [0, 1, 3, 4]}, r"position_ids\[2\] is 3; positions count from 0"),
        ({"seq_lengths": [2, 3]}, "seq_lengths tells documents of 5 tokens together, .* has 4"),
        ({"seq_lengths": [4, 0]}, "seq_lengths tells"),
        ({"position_ids": [0, 1, 0, 1], "seq_lengths": [4]}, r"\(2 and 1 of them\)"),
    ],
)
def test_documents_that_do_not_fit_the_tokens_are_refused(
    columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(RowError, match=said):
        items_of("pretokenized", {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], **columns})


@pytest.mark.parametrize(
    "name", [n for n in ROWS if n.split()[0] not in ("pretokenized", "completion")]
)
def test_rows_with_pictures_or_sound_are_refused(name: str) -> None:
    for column in ("image", "images", "video", "audios"):
        for value in (["0.png"], {"bytes": b"x", "path": None}):
            with pytest.raises(RowError, match=rf"^{column} is .*: not supported; only text is"):
                items_of(name, {**ROWS[name], column: value})
        for value in (None, [], "", "https://0.png"):
            assert items_of(name, {**ROWS[name], column: value}) == items_of(name, ROWS[name])


def test_a_picture_of_a_turn_or_one_that_the_text_has_a_mark_for_is_refused() -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a"}]
    for name, row, said in (
        (
            "messages",
            {"messages": [{**ASK, "images": ["x"]}, SAY]},
            r"messages\[0\].images is list",
        ),
        ("sharegpt", {"conversations": turns, "image": "0.png"}, "image is str 0.png"),
        ("completion", {"text": "see <image>", "image": "0.png"}, "image is str 0.png"),
    ):
        with pytest.raises(RowError, match=f"{said}: not supported"):
            items_of(name, row)
    # A corpus may keep the picture of each of its texts.
    assert items_of("completion", {"text": "a", "image": {"bytes": b"x"}})
