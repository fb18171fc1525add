"""Conversion of rows: texts, turns, trees and tokens; what of them is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import Counter
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.config import load_config
from data_modules.format import EmptyAnswerError, MissingColumnError, RowError
from data_modules.format.fields import read_path
from data_modules.format.format import FORMATS, format_of
from data_modules.format.meaning import suggest_settings
from data_modules.types import Conversation, Document, Tokens, ToolCall, Turn
from tests.data_modules.conftest import ORIGIN, items_of

ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}


def convert(values: dict[str, Any], name: str | None = None, **columns: str) -> Any:
    (item,) = items_of(values, name, **columns)
    return item


def turns(item: Any) -> list[tuple[str, str]]:
    assert isinstance(item, Conversation) and item.origin == ORIGIN
    return [(turn.role, turn.content) for turn in item.turns]


def segments(item: Any) -> list[tuple[str, float]]:
    assert isinstance(item, Document) and item.origin == ORIGIN
    return [(segment.text, segment.weight) for segment in item.segments]


def test_alpaca() -> None:
    row = {"instruction": "do it", "output": "done"}
    for empty in ("", None, "  "):
        assert turns(convert({**row, "input": empty})) == turns(convert(row))
    assert turns(convert({**row, "input": "1 2", "system": "be brief"})) == [
        ("system", "be brief"),
        ("user", "do it\n\n1 2"),
        ("assistant", "done"),
    ]
    assert turns(convert({"instruction": "", "input": "1 2", "output": "a"}))[0] == ("user", "1 2")


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_turns_in_openai_and_sharegpt_form(column: str) -> None:
    fields = [("system", "s"), ("user", "q"), ("assistant", "a")]
    roles = [{"role": role, "content": content} for role, content in fields]
    assert turns(convert({column: roles})) == fields
    dialect = {"system": "system", "user": "human", "assistant": "gpt"}
    froms = [{"from": dialect[role], "value": content} for role, content in fields]
    assert turns(convert({column: froms})) == fields
    assert turns(convert({column: froms[1:], "system": "s"})) == fields
    assert turns(convert({column: froms, "system": "s"})) == fields
    assert turns(convert({column: froms, "system": "t"}))[0] == ("system", "t\n\ns")


def test_turns_of_one_role_and_weight_are_joined() -> None:
    joined = {"messages": [ASK, {**ASK, "content": ""}, {**ASK, "content": "r"}, SAY, SAY]}
    assert turns(convert(joined)) == [("user", "q\n\nr"), ("assistant", "a\n\na")]
    item = convert({"messages": [ASK, {**SAY, "weight": 0}, SAY]})
    assert turns(item) == [("user", "q"), ("assistant", "a"), ("assistant", "a")]


def test_history_of_alpaca_comes_before_the_question() -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"], ["e", "f"]]}
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert turns(convert(row)) == list(zip(roles, "sabefcd", strict=True))
    assert len(turns(convert({"instruction": "c", "output": "d", "history": []}))) == 2


def test_weight_of_a_row_multiplies() -> None:
    assert convert({"messages": [ASK, SAY], "weight": 0.5}).weight == 0.5
    assert convert({"conversations": [ASK, SAY], "weight": None}).weight == 1.0
    assert convert({"instruction": "i", "output": "o", "weight": 0}).weight == 0.0
    assert convert({"instruction": "i", "output": "o", "weight": "0.25"}).weight == 0.25
    assert convert({"instruction": "i", "output": "o", "weight": ""}).weight == 1.0
    row = {"segments": [{"text": "a", "weight": 0.5}, {"text": "b"}], "weight": 3}
    assert segments(convert(row)) == [("a", 1.5), ("b", 3.0)]
    row = {"prompt": "p", "completion": "c", "score": 2}
    assert segments(convert(row, weight="score")) == [("p", 0.0), ("c", 2.0)]


def test_prompt_and_completion_as_turns() -> None:
    row = {"prompt": [ASK, SAY, ASK], "completion": [{**SAY, "content": "b"}], "tools": []}
    item = convert(row)
    assert turns(item) == [("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "b")]
    assert [turn.weight for turn in item.turns] == [None, 0.0, None, None]
    with pytest.raises(RowError, match="prompt is str q and completion list; give turns in both"):
        convert({"prompt": "q", "completion": [SAY]})


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [ASK, {**SAY, "content": " \n"}]},
        {"messages": [ASK, {"role": "assistant", "content": "", "reasoning": "hm"}]},
        {"instruction": "i", "output": ""},
        {"instruction": "i", "output": "o", "history": [["q", " "]]},
    ],
)
def test_an_empty_answer_has_its_own_error(values: dict[str, Any]) -> None:
    with pytest.raises(EmptyAnswerError, match=r"data\.drop_empty=true or .*=quarantine$"):
        convert(values)
    row = {"messages": [ASK, {**SAY, "content": "", "train": False}, ASK, SAY]}
    assert turns(convert(row))[1] == ("assistant", "")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["prompt", "text"], "completion"),
        (["input_ids", "attention_mask", "labels", "text"], "pretokenized"),
        (["messages", "input_ids", "labels"], "messages"),
        (["input_ids"], None),
        (["message_tree_id", "tree_state", "prompt"], "oasst"),
        (["message_id", "parent_id", "text", "role", "message_tree_id"], None),
    ],
)
def test_guess(columns: list[str], name: str | None) -> None:
    assert format_of(columns) == name


def test_columns_map_a_field_to_its_column() -> None:
    item = convert(
        {"q": "do it", "a": "done", "output": "not this"}, "alpaca", instruction="q", output="a"
    )
    assert turns(item) == [("user", "do it"), ("assistant", "done")]
    with pytest.raises(MissingColumnError, match=r"missing 'questoin'.*'question'"):
        convert({"question": "q", "output": "a"}, "alpaca", instruction="questoin")


def test_missing_column_error_keeps_the_columns_of_its_row_when_pickled() -> None:
    with pytest.raises(MissingColumnError) as caught:
        convert({"instruction": "i", "reply": "a"}, "alpaca")
    # Copies are made like pickles: from the arguments and the attributes.
    for error in (caught.value, copy.copy(caught.value)):
        assert error.columns == ("instruction", "reply")
        assert str(error).startswith("missing 'output'; found ['instruction', 'reply']")


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"instruction": "i", "respons": "a"}, "alpaca", "did you mean 'response' instead of"),
        ({"messages": [{"rol": "user", "content": "q"}]}, None, r"no role.*; did you mean 'role'"),
        *(
            ({"messages": [ASK, {**SAY, "weight": weight}]}, None, r"\[1\].weight is .* from 0 up")
            for weight in (10**400, 3.5e38, math.nan, -1, "1", [1])
        ),
        ({"instruction": "i", "output": "o", "weight": "3 kg"}, None, "'3 kg', not a number"),
        ({"instruction": "i", "output": "o", "weight": "nan"}, None, "^weight is nan; a weight"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, None, r"history\[0\] is list"),
        ({"text": "a\ud800b"}, None, "an unpaired surrogate.* at character 2"),
        *(
            ({"messages": [ASK, SAY], "tools": tools}, None, expected)
            for tools, expected in (
                ("[{", r"tools is not JSON: Expecting property name .* at character 3 of '\[\{'"),
                (3, "tools is int 3, not a list"),
                ([{"nam": "add"}], r"tools\[0\] has no name; found \['nam'\]; .*mean 'name'"),
            )
        ),
        ({"messages": [ASK, SAY], "tools": "[" * 200_000}, None, "cannot be read as JSON"),
        ({"messages": [ASK, SAY], "tools": "9" * 5000}, None, "JSON: Exceeds the limit"),
        *(
            ({"messages": [ASK, SAY], "tools": [{"name": "f", "x": bad}]}, None, "written as JSON")
            for bad in (math.nan, b"x", "\ud800")
        ),
    ],
)
def test_problems_of_a_row(values: dict[str, Any], name: str | None, expected: str) -> None:
    with pytest.raises(RowError, match=expected):
        convert(values, name)


SHORT = ("", "user", "gpt", "tool", "tool_call", "function_call", "text", "thinking")
WORDS = st.sampled_from((*SHORT, "[]", "{}", "\x00"))
TURN_NAMES = (
    *("role", "from", "content", "value", "type", "text", "name", "arguments", "tool_calls"),
    *("function", "weight", "train", "reasoning", "replies", "deleted", "id", "tool_call_id"),
    *("loss", "loss_scale", "train_detail", "parameters", "images", "label", "review_result"),
)
NAMES = st.sampled_from(TURN_NAMES)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-101, 3) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(list(FORMATS)), st.data())
def test_any_row_is_converted_or_raises_row_error(name: str, data: st.DataObject) -> None:
    """Any other error would end a run without naming the row."""
    form = FORMATS[name]
    turns = st.lists(st.dictionaries(NAMES, ANYTHING), max_size=4)
    fields = {names[0]: turns | ANYTHING for names in form.required}
    columns = ("weight", "loss", "loss_scale", "loss_mask", "images", "label", "id")
    more = {name: ANYTHING for name in (*form.optional, *columns) if name not in fields}
    values = data.draw(st.fixed_dictionaries(fields, optional=more))
    unread: set[str] = set()
    try:
        items = items_of(values, name, unread)
    except RowError as error:
        assert str(error)
    else:
        assert items and all(item.origin == ORIGIN for item in items)
        assert all(found in values or "." in found for found in unread)
    suggested = yaml.safe_load("{" + suggest_settings(values) + "}").get("columns", {})
    assert all(read_path(values, path, "") for path in suggested.values())


@pytest.mark.parametrize(
    "name",
    [
        *("my turns", "chat (en)", "a, b", "a: b", "t{1}", "turns[0]", " lead", "true", '"q"'),
        *("it's", "yes", "off", "~", "12:30", "\u95ee\u9898", "a\nb", "a\tb"),
    ],
)
def test_a_suggestion_names_any_column_as_it_is_typed(name: str) -> None:
    for value in ("only this text", [{"role": "user", "content": "a"}]):
        said = f"[{{path: sample:lists, {suggest_settings({name: value})}}}]"
        read = [yaml.safe_load(said)[0]["columns"]]
        if name.isprintable():  # Hydra leaves the escape of a line break as it is
            (typed,) = load_config("train", [f"data.datasets={said}"]).data.datasets
            read.append(typed.columns)
        for columns in read:
            assert [*columns.values()] == [name]


FLAGS = st.lists(st.booleans(), min_size=1, max_size=20)


def to_ids(values: dict[str, Any], **columns: str) -> Tokens:
    (item,) = items_of(values, "pretokenized", **columns)
    assert isinstance(item, Tokens) and item.origin == ORIGIN
    return item


@given(FLAGS, st.floats(0, 10), st.integers(0, 5), st.integers(0, 5))
def test_masked_tokens_have_weight_0_and_padding_is_removed(
    is_trained: list[bool], weight: float, left: int, right: int
) -> None:
    ids = list(range(5, 5 + len(is_trained)))
    labels = [i if flag else -100 for i, flag in zip(ids, is_trained, strict=True)]
    row = {
        "input_ids": [0] * left + ids + [0] * right,
        "labels": [-100] * left + labels + [1] * right,
        "attention_mask": [0] * left + [1] * len(ids) + [0] * right,
        "weight": weight,
    }
    assert format_of(row) == "pretokenized"
    item = to_ids(row)
    assert item.input_ids == tuple(ids)
    assert item.weights == tuple(weight * flag for flag in is_trained)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"input_ids": [5, True]}, r"input_ids\[1\] is bool True, not a whole number"),
        ({"input_ids": [2**31, 5]}, r"input_ids\[0\] is 2147483648"),
        ({"labels": [5]}, "labels has 1 numbers and input_ids 2"),
        ({"labels": [6, -100]}, r"labels\[0\] is 6 and input_ids\[0\] is 5; labels must equal"),
        ({"attention_mask": [0, 0]}, "masks every token"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "not one run of 1"),
        ({"weights": [1, float("nan")]}, "weights is nan"),
    ],
)
def test_problems_of_tokens(values: dict[str, Any], expected: str) -> None:
    row = {"input_ids": [5, 6], **values}
    row.setdefault("labels", row["input_ids"])
    with pytest.raises(RowError, match=expected):
        to_ids(row)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mata.q", "missing 'mata'; found ['meta', 'list', 'meta.q']; did you mean 'meta'?"),
        ("meta.qestion", "'meta' has ['question', 'empty']; did you mean 'question'?"),
        ("list.-1", "missing 'list.-1'; 'list' is a list of 2: give a number, counted from 0"),
        ("meta.empty.x", "missing 'meta.empty.x'; 'meta.empty' is null, which has no fields"),
    ],
)
def test_problems_of_a_path(path: str, expected: str) -> None:
    values = {"meta": {"question": "q", "empty": None}, "list": [{"a": 1}, 7], "meta.q": 3}
    assert read_path(values, "meta.q", "") == 3  # a column of that name comes first
    assert (read_path(values, "meta.question", ""), read_path(values, "list.0.a", "")) == ("q", 1)
    with pytest.raises(MissingColumnError) as caught:
        read_path(values, path, "columns.output")
    assert expected in str(caught.value) and str(caught.value).endswith("(columns.output)")


CALL = {"name": "add", "arguments": {"a": 1}}
ADD = ToolCall("add", {"a": 1})
RESULT = {"role": "tool", "content": "2"}


def chat_of(*turns: Any, **more: Any) -> Conversation:
    column = "conversations" if any("from" in turn for turn in turns) else "messages"
    (item,) = items_of({column: list(turns), **more})
    assert isinstance(item, Conversation)
    return item


def say(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def answer(*turns: Any) -> Turn:
    return chat_of(ASK, *turns).turns[1]


def call(number: str | None = None, arguments: Any = None) -> dict[str, Any]:
    arguments = '{"a": 1}' if arguments is None else arguments
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_parts_of_text_and_of_reasoning() -> None:
    for key in ("text", "value", None):
        for kind in ("text", "input_text", "output_text"):
            parts = [{"type": kind, key or kind: "a"}, {"type": None, "text": "b"}]
            assert answer(say(parts)) == Turn("assistant", "ab")
        for kind in ("reasoning", "thinking"):
            parts = [{"type": kind, key or kind: "hm"}, {"type": kind, "text": "m"}, "a"]
            assert answer(say(parts)) == Turn("assistant", "a", reasoning="hmm")
    for field in ("reasoning", "reasoning_content", "thinking"):
        assert answer(say(**{field: "hm"})) == Turn("assistant", "a", reasoning="hm")
        assert answer(say(**{field: None})) == answer(say(**{field: ""})) == Turn("assistant", "a")
        twice = say([{"type": "reasoning", "text": "hm"}, "a"], **{field: "hm"})
        assert answer(twice).reasoning == "hm"


def test_parts_with_a_call() -> None:
    for part in (
        CALL,
        {"tool_call": CALL},
        {"text": json.dumps(CALL)},
        {"value": {"function": CALL}},
        {"tool_call": {**CALL, "id": "1"}, "id": None},
    ):
        turn = answer(say(["a", {"type": "tool_call", "id": "1", **part}]))
        assert turn == Turn("assistant", "a", tool_calls=(ToolCall("add", {"a": 1}, "1"),))


@pytest.mark.parametrize(("content", "arguments"), [(None, '{"a": 1}'), ("", {"a": 1})])
def test_calls_and_results_in_openai_form(content: str | None, arguments: Any) -> None:
    made = say(content, tool_calls=[call("x", arguments), call("y", arguments)])
    results = [
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        {"role": "tool", "tool_call_id": "y", "name": "add", "content": "3"},
    ]
    item = chat_of(ASK, made, *results, say("b"))
    calls = (ToolCall("add", {"a": 1}, "x"), ToolCall("add", {"a": 1}, "y"))
    assert item.turns == (
        Turn("user", "q"),
        Turn("assistant", "", tool_calls=calls),
        Turn("tool", "2", tool_call_id="x"),
        Turn("tool", "3", name="add", tool_call_id="y"),
        Turn("assistant", "b"),
    )


@pytest.mark.parametrize(
    "made",
    [
        {"role": "assistant", "tool_calls": [call()]},
        say(None, tool_calls=[CALL]),
        say(None, tool_calls=json.dumps([CALL])),
        say(None, function_call=CALL),
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"from": "function_call", "value": json.dumps({**CALL, "arguments": '{"a": 1}'})},
    ],
)
def test_other_forms_of_a_call(made: dict[str, Any]) -> None:
    item = chat_of(ASK, made, {"from": "observation", "value": "2"})
    assert item.turns[1:] == (Turn("assistant", "", tool_calls=(ADD,)), Turn("tool", "2"))


def test_a_call_without_arguments_or_without_an_id() -> None:
    for arguments in ({}, "{}", None, "", " \n"):
        made = say(None, tool_calls=[{"name": "now", "arguments": arguments}, {"name": "now"}])
        assert [call.arguments for call in answer(made).tool_calls] == [{}, {}]
    made = say(None, tool_calls=[CALL])
    assert chat_of(ASK, made, {**RESULT, "tool_call_id": "x"}).turns[2].tool_call_id == "x"
    assert chat_of(ASK, say(None, tool_calls=[call("x")]), RESULT).turns[2].tool_call_id is None
    written = say(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    assert chat_of(ASK, written, RESULT, say()).turns[2] == Turn("tool", "2")


PIECES = {
    "x": say("x"),
    "t": say("", reasoning="t"),
    "tx": say("x", reasoning="t"),
    "c": say(None, tool_calls=[CALL]),
}


@given(st.lists(st.sampled_from(list(PIECES))))
def test_joining_keeps_every_part_in_its_order(pieces: list[str]) -> None:
    pieces = [*pieces, "x"]
    turns = chat_of(ASK, *(PIECES[piece] for piece in pieces)).turns[1:]
    joined = [f"{turn.reasoning or ''}{turn.content}{'c' * len(turn.tool_calls)}" for turn in turns]
    assert "".join(joined).replace("\n", "") == "".join(pieces)
    ranks = [sorted(text.replace("\n", ""), key="txc".index) for text in joined]
    assert all(
        last[-1] in "xc" and "txc".index(last[-1]) > "txc".index(next_[0])
        for last, next_ in itertools.pairwise(ranks)
    )


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_are_converted_to_one_form(column: str) -> None:
    bare = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": bare}
    for tools in ([bare], [whole], json.dumps([bare]), [json.dumps(whole)]):
        assert chat_of(ASK, say(), **{column: tools}).tools == (whole,)
    for tools in (None, [], "", "[]", " ", "null"):
        assert chat_of(ASK, say(), **{column: tools}).tools == ()


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([ASK, say(None, tool_calls=[])], r"messages\[1\].content is null, not text"),
        ([ASK, say(None, tool_calls=[{"nam": "x"}])], r"has no tool name; .*did you mean 'name'"),
        (
            [ASK, say(None, tool_calls=[call("x", "a=1")])],
            r"tool_calls\[0\].arguments is not JSON: Expecting value at character 1 of 'a=1'",
        ),
        ([{**ASK, "tool_calls": [CALL]}, say()], r"messages\[0\] is a user turn with a tool call"),
        ([ASK, say(None, tool_calls=[CALL]), RESULT, say(), RESULT], r"messages\[4\] is the res"),
        (
            [ASK, say(None, tool_calls=[call("x")]), RESULT, {**RESULT, "tool_call_id": "y"}],
            r"messages\[3\].tool_call_id is 'y'; the calls before it are x",
        ),
        ([ASK, say(["a", {"type": "thinking", "text": "hm"}])], r"\[1\] is thinking after text"),
        ([ASK, say([{"type": "tool_call", **CALL}, "a"])], r"content\[1\] is text after a call"),
        (
            [ASK, say([{"type": "thinking", "text": "hm"}, "a"], reasoning="oh")],
            "has reasoning twice, in its parts and in reasoning",
        ),
    ],
)
def test_problems_of_turns(turns: list[Any], expected: str) -> None:
    with pytest.raises(RowError, match=expected):
        chat_of(*turns)


def paths_of(prompt: Any, **more: Any) -> list[Conversation]:
    row = {"message_tree_id": "t", "tree_state": "ready", "prompt": prompt, **more}
    assert format_of(row) == "oasst"
    items = items_of(row, "oasst")
    assert all(isinstance(item, Conversation) and item.origin == ORIGIN for item in items)
    return items  # type: ignore[return-value]


def asks(text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "prompter", "text": text, "replies": list(replies), **more}


def says(text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "text": text, "replies": list(replies), **more}


def texts_and_weights(items: list[Conversation]) -> list[list[tuple[str, float | None]]]:
    return [[(turn.content, turn.weight) for turn in item.turns] for item in items]


def test_each_path_is_a_conversation_and_each_turn_has_its_weight_once() -> None:
    tree = asks("q", says("a", asks("r", says("b"), says("c"))), says("d", asks("s")))
    assert texts_and_weights(paths_of(tree)) == [
        [("q", 0.0), ("a", None), ("r", None), ("b", None)],
        [("q", 0.0), ("a", 0.0), ("r", 0.0), ("c", None)],
        [("q", None), ("d", None)],
    ]
    assert {item.weight for item in paths_of(tree, weight=0.5)} == {0.5}


def test_a_tree_without_an_answer_is_its_prompt() -> None:
    assert texts_and_weights(paths_of(asks("q"))) == [[("q", None)]]
    assert texts_and_weights(paths_of(asks("q", says("a", deleted=True)))) == [[("q", None)]]
    assert texts_and_weights(paths_of(asks("q", says("a"), deleted=True))) == [[("q", 0.0)]]


def trees(answers: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Return trees in which prompter and assistant take turns."""
    left_out = st.sampled_from([{}, {}, {}, {"deleted": True}, {"review_result": False}])

    def grow(depth: int, answers: bool) -> st.SearchStrategy[dict[str, Any]]:
        replies = st.lists(grow(depth - 1, not answers), max_size=3) if depth else st.just([])
        write = says if answers else asks
        return st.builds(lambda replies, more: write("", *replies, **more), replies, left_out)

    return grow(4, answers)


@given(trees(answers=False), st.lists(st.integers(0, 30), min_size=1))
def test_every_answer_is_trained_on_exactly_once(tree: dict[str, Any], sizes: list[int]) -> None:
    kept: dict[str, set[str]] = {"user": set(), "assistant": set()}
    pairs = set()
    todo = [(tree, "", not tree.get("deleted") and tree.get("review_result", True))]
    count = 0
    while todo:
        node, parent, stays = todo.pop()
        count += 1
        node["text"] = f"text {count}" + "x" * sizes[count % len(sizes)]
        if stays:
            kept["assistant" if node["role"] == "assistant" else "user"].add(node["text"])
            pairs.add((parent, node["text"]))
        for reply in node["replies"]:
            fine = not reply.get("deleted") and reply.get("review_result", True)
            todo.append((reply, node["text"], stays and fine))
    items = paths_of(tree)
    turns = [turn for item in items for turn in item.turns]
    num_trained = Counter(turn.content for turn in turns if turn.weight != 0)
    answers = {turn.content for turn in turns if turn.role == "assistant"}
    assert answers == kept["assistant"]
    assert all(num_trained[text] == 1 for text in answers)
    assert max(num_trained.values(), default=1) == 1
    for item in items:
        texts = [turn.content for turn in item.turns]
        assert item.turns[-1].role == "assistant" or not answers
        if num_trained:
            assert set(zip(["", *texts], texts, strict=False)) <= pairs


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"role": "prompter", "txt": "q"}, r"prompt has no 'text'; found .*did you mean 'text'"),
        (asks("q", {"text": "a", "role": "ai"}), r"replies\[0\] has role 'ai'; use prompter or"),
        (
            asks("q", says("a", asks("r", says("\x00")))),
            r"\[0\].replies\[0\].replies\[0\].text has",
        ),
        (says("a"), "an assistant turn comes before any user turn"),
        (asks("q", says("a"), says(" ")), r"replies\[1\] is an empty.*drop_empty=true or"),
    ],
)
def test_problems_of_a_tree(tree: Any, error: str) -> None:
    with pytest.raises(EmptyAnswerError if "empty" in error else RowError, match=error):
        paths_of(tree)
