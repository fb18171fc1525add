"""Turns: their parts, which turns are joined, and the conversations of a tree."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Origin
from data_modules.format import EmptyAnswerError, RowError, convert_row
from data_modules.format.format import format_of
from data_modules.types import Conversation, Row, ToolCall, Turn

ORIGIN = Origin("rows.jsonl", 7)
ASK = {"role": "user", "content": "q"}
CALL = {"name": "add", "arguments": {"a": 1}}
ADD = ToolCall("add", {"a": 1})
RESULT = {"role": "tool", "content": "2"}


def convert(*turns: Any, **more: Any) -> Conversation:
    column = "conversations" if any("from" in turn for turn in turns) else "messages"
    row = {column: list(turns), **more}
    name = format_of(row)
    assert name is not None
    (item,) = convert_row(Row(row, ORIGIN), name, {})
    assert isinstance(item, Conversation)
    return item


def say(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def answer(*turns: Any) -> Turn:
    return convert(ASK, *turns).turns[1]


def call(number: str | None = None, arguments: Any = None) -> dict[str, Any]:
    arguments = '{"a": 1}' if arguments is None else arguments
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize("key", ["text", "value", None])
def test_text_parts(kind: str, key: str | None) -> None:
    assert answer(say([{"type": kind, key or kind: "a"}, {"type": None, "text": "b"}])) == Turn(
        "assistant", "ab"
    )


@pytest.mark.parametrize("kind", ["reasoning", "thinking"])
@pytest.mark.parametrize("key", ["text", "value", None])
def test_reasoning_parts(kind: str, key: str | None) -> None:
    parts = [{"type": kind, key or kind: "hm"}, {"type": kind, "text": "m"}, "a"]
    assert answer(say(parts)) == Turn("assistant", "a", reasoning="hmm")


@pytest.mark.parametrize(
    "part",
    [
        CALL,
        {"tool_call": CALL},
        {"text": json.dumps(CALL)},
        {"value": {"function": CALL}},
        {"function": CALL},
        {"tool_call": {**CALL, "id": "1"}, "id": None},
    ],
)
def test_tool_call_parts(part: dict[str, Any]) -> None:
    turn = answer(say(["a", {"type": "tool_call", "id": "1", **part}]))
    assert turn == Turn("assistant", "a", tool_calls=(ToolCall("add", {"a": 1}, "1"),))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_next_to_the_content(field: str) -> None:
    assert answer(say(**{field: "hm"})) == Turn("assistant", "a", reasoning="hm")
    assert answer(say(**{field: None})) == answer(say(**{field: ""})) == Turn("assistant", "a")
    twice = say([{"type": "reasoning", "text": "hm"}, "a"], **{field: "hm"})
    assert answer(twice).reasoning == "hm"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("content", [None, ""])
def test_calls_and_results_in_openai_form(arguments: Any, content: str | None) -> None:
    made = say(content, tool_calls=[call("x", arguments), call("y", arguments)])
    results = [
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        {"role": "tool", "tool_call_id": "y", "name": "add", "content": "3"},
    ]
    item = convert(ASK, made, *results, say("b"))
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
    item = convert(ASK, made, {"from": "observation", "value": "2"})
    assert item.turns[1:] == (Turn("assistant", "", tool_calls=(ADD,)), Turn("tool", "2"))


@pytest.mark.parametrize("arguments", [{}, "{}", None, "", " \n"])
def test_a_call_without_arguments(arguments: Any) -> None:
    made = say(None, tool_calls=[{"name": "now", "arguments": arguments}, {"name": "now"}])
    assert [call.arguments for call in answer(made).tool_calls] == [{}, {}]


def test_a_call_is_added_to_the_text_before_it_and_calls_are_joined() -> None:
    calls = {"from": "function_call", "value": json.dumps(CALL)}
    gpt = {"from": "gpt", "value": "a"}
    seen = {"from": "observation", "value": "2"}
    item = convert({"from": "human", "value": "q"}, gpt, calls, calls, seen, seen, gpt)
    assert item.turns[1:] == (
        Turn("assistant", "a", tool_calls=(ADD, ADD)),
        Turn("tool", "2"),
        Turn("tool", "2"),
        Turn("assistant", "a"),
    )


def test_text_after_a_call_and_reasoning_after_text_are_not_joined() -> None:
    made = say("a", tool_calls=[CALL])
    assert len(convert(ASK, made, say("b")).turns) == 3
    assert len(convert(ASK, say(), say("b", reasoning="hm")).turns) == 3
    thought = convert(ASK, say("", reasoning="h"), say("b", reasoning="m"), say("c"))
    assert thought.turns[1:] == (Turn("assistant", "b\n\nc", reasoning="h\n\nm"),)


PIECES = {
    "x": say("x"),
    "t": say("", reasoning="t"),
    "tx": say("x", reasoning="t"),
    "c": say(None, tool_calls=[CALL]),
}


@given(st.lists(st.sampled_from(list(PIECES))))
def test_joining_keeps_every_part_in_its_order(pieces: list[str]) -> None:
    pieces = [*pieces, "x"]
    turns = convert(ASK, *(PIECES[piece] for piece in pieces)).turns[1:]
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
        assert convert(ASK, say(), **{column: tools}).tools == (whole,)
    for tools in (None, [], "", "[]", " ", "null"):
        assert convert(ASK, say(), **{column: tools}).tools == ()


def test_a_call_in_the_text_of_an_answer_may_have_a_result() -> None:
    written = say(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    assert convert(ASK, written, RESULT, say()).turns[2] == Turn("tool", "2")


def test_the_result_of_a_call_without_id_needs_none() -> None:
    made = say(None, tool_calls=[CALL])
    assert convert(ASK, made, {**RESULT, "tool_call_id": "x"}).turns[2].tool_call_id == "x"
    assert convert(ASK, say(None, tool_calls=[call("x")]), RESULT).turns[2].tool_call_id is None


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([ASK, say(None, tool_calls=[])], r"messages\[1\].content is null, not text"),
        ([ASK, say(3, tool_calls=[CALL])], r"messages\[1\].content is int 3"),
        ([ASK, say(None, tool_calls=CALL)], r"\[1\].tool_calls is dict, not a list"),
        ([ASK, say(None, tool_calls=["x"])], r"tool_calls\[0\] is not JSON: Exp.* at character 1"),
        ([ASK, say(None, tool_calls=[{"nam": "x"}])], r"has no tool name; .*did you mean 'name'"),
        (
            [ASK, say(None, tool_calls=[call("x", "a=1")])],
            r"tool_calls\[0\].arguments is not JSON: Expecting value at character 1 of 'a=1'",
        ),
        ([ASK, say(None, tool_calls=[call("x", '{"a": NaN}')])], "cannot be written as JSON"),
        ([ASK, say(None, tool_calls=[{**call(), "id": 1}])], r"tool_calls\[0\].id is int 1; give"),
        ([{**ASK, "tool_calls": [CALL]}, say()], r"messages\[0\] is a user turn with a tool call"),
        ([ASK, {"from": "function_call", "value": "add"}], r"\[1\].value is not JSON"),
        ([ASK, {"from": "function_call", "value": "[]"}], r"\[1\].value is an empty list"),
        ([ASK, RESULT, say()], r"messages\[1\] is the result"),
        ([ASK, say(None, tool_calls=[CALL]), RESULT, say(), RESULT], r"messages\[4\] is the res"),
        (
            [ASK, say(None, tool_calls=[call("x")]), RESULT, {**RESULT, "tool_call_id": "y"}],
            r"messages\[3\].tool_call_id is 'y'; the calls before it are x",
        ),
        ([ASK, say([{"type": "text"}])], r"content\[0\] has no text; give a string under 'text'"),
        ([ASK, say([{"type": "text", "text": 3}])], r"content\[0\] has int 3 instead of text"),
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
        convert(*turns)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("[{", r"tools is not JSON: Expecting property name .* at character 3 of '\[\{'"),
        (3, "tools is int 3, not a list"),
        ([3], r"tools\[0\] is int 3; a tool is"),
        ([{"nam": "add"}], r"tools\[0\] has no name; found \['nam'\]; .*did you mean 'name'"),
        ([{"name": "add", "x": float("inf")}], r"tools\[0\] cannot be written as JSON"),
    ],
)
def test_problems_of_tools(tools: Any, expected: str) -> None:
    with pytest.raises(RowError, match=expected):
        convert(ASK, say(), tools=tools)


TREE_ORIGIN = Origin("trees.jsonl", 1)


def paths_of(prompt: Any, **more: Any) -> list[Conversation]:
    row = {"message_tree_id": "t", "tree_state": "ready", "prompt": prompt, **more}
    assert format_of(row) == "oasst"
    items = convert_row(Row(row, TREE_ORIGIN), "oasst", {})
    assert all(isinstance(item, Conversation) and item.origin == TREE_ORIGIN for item in items)
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
    # Whatever is too long is dropped: what could be num_trained then is.
    for limit in {sum(len(turn.content) for turn in item.turns) for item in items}:
        short = [
            turn
            for item in items
            if sum(len(turn.content) for turn in item.turns) <= limit
            for turn in item.turns
            if turn.role == "assistant"
        ]
        assert {turn.content for turn in short} == {
            turn.content for turn in short if turn.weight != 0
        }
    for item in items:
        texts = [turn.content for turn in item.turns]
        assert item.turns[-1].role == "assistant" or not answers
        if num_trained:
            assert set(zip(["", *texts], texts, strict=False)) <= pairs


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ("text", "prompt is str text; a message is"),
        ({"role": "prompter", "txt": "q"}, r"prompt has no 'text'; found .*did you mean 'text'"),
        (asks("q", {"text": "a"}), r"prompt.replies\[0\] has no 'role'"),
        (asks("q", {"text": "a", "role": "ai"}), r"replies\[0\] has role 'ai'; use prompter or"),
        (
            asks("q", says("a", asks("r", says("\x00")))),
            r"\[0\].replies\[0\].replies\[0\].text has",
        ),
        ({**asks("q"), "replies": 3}, "prompt.replies is int 3"),
        (says("a"), "an assistant turn comes before any user turn"),
    ],
)
def test_problems_of_a_tree(tree: Any, error: str) -> None:
    with pytest.raises(RowError, match=error):
        paths_of(tree)


def test_an_empty_answer_in_a_tree_is_reported() -> None:
    with pytest.raises(
        EmptyAnswerError, match=r"prompt.replies\[1\] is an empty.*drop_empty=true or"
    ):
        paths_of(asks("q", says("a"), says(" ")))
