"""Trees of replies: which conversations they are, and that no answer is trained on twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_modules.format import EmptyAnswerError, RowError, convert_row
from data_modules.format.format import format_of
from data_modules.messages import Origin
from data_modules.types import Conversation, Row

ORIGIN = Origin("trees.jsonl", 1)


def convert(prompt: Any, **more: Any) -> list[Conversation]:
    """Convert one tree."""
    row = {"message_tree_id": "t", "tree_state": "ready", "prompt": prompt, **more}
    assert format_of(row) == "oasst"
    items = convert_row(Row(row, ORIGIN), "oasst", {})
    assert all(isinstance(item, Conversation) and item.origin == ORIGIN for item in items)
    return items  # type: ignore[return-value]


def ask(text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a prompter's message."""
    return {"role": "prompter", "text": text, "replies": list(replies), **more}


def say(text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an assistant's message."""
    return {"role": "assistant", "text": text, "replies": list(replies), **more}


def told(items: list[Conversation]) -> list[list[tuple[str, float | None]]]:
    """Return text and weight of each turn."""
    return [[(turn.content, turn.weight) for turn in item.turns] for item in items]


def test_each_path_is_a_conversation_and_each_turn_has_its_weight_once() -> None:
    tree = ask("q", say("a", ask("r", say("b"), say("c"))), say("d", ask("s")))
    assert told(convert(tree)) == [
        [("q", 0.0), ("a", None), ("r", None), ("b", None)],
        [("q", 0.0), ("a", 0.0), ("r", 0.0), ("c", None)],
        [("q", None), ("d", None)],
    ]
    assert {item.weight for item in convert(tree, weight=0.5)} == {0.5}


def test_a_shared_answer_is_trained_on_in_its_shortest_path() -> None:
    tree = ask("q", say("a", ask("r", say("long " * 9)), ask("s", say("b"), say("long"))))
    assert told(convert(tree)) == [
        [("q", 0.0), ("a", 0.0), ("r", None), ("long " * 9, None)],
        [("q", None), ("a", None), ("s", None), ("b", None)],
        [("q", 0.0), ("a", 0.0), ("s", 0.0), ("long", None)],
    ]


def test_what_is_deleted_or_refused_is_left_out_with_its_replies() -> None:
    gone = say("x", ask("y", say("z")), deleted=True)
    refused = say("x", review_result=False)
    open_ = say("a", review_result=None, deleted=False)
    assert told(convert(ask("q", gone, refused, open_))) == [[("q", None), ("a", None)]]


def test_a_tree_without_an_answer_is_its_prompt() -> None:
    assert told(convert(ask("q"))) == [[("q", None)]]
    assert told(convert(ask("q", say("a", deleted=True)))) == [[("q", None)]]
    assert told(convert(ask("q", say("a"), deleted=True))) == [[("q", 0.0)]]


def trees(answers: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Return trees in which prompter and assistant take turns."""
    left_out = st.sampled_from([{}, {}, {}, {"deleted": True}, {"review_result": False}])

    def grow(depth: int, answers: bool) -> st.SearchStrategy[dict[str, Any]]:
        replies = st.lists(grow(depth - 1, not answers), max_size=3) if depth else st.just([])
        write = say if answers else ask
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
    items = convert(tree)
    turns = [turn for item in items for turn in item.turns]
    learned = Counter(turn.content for turn in turns if turn.weight != 0)
    answers = {turn.content for turn in turns if turn.role == "assistant"}
    assert answers == kept["assistant"]
    assert all(learned[text] == 1 for text in answers)
    assert max(learned.values(), default=1) == 1
    # Whatever is too long is dropped: what could be learned then is.
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
        if learned:
            assert set(zip(["", *texts], texts, strict=False)) <= pairs


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ("text", "prompt is str text; a message is"),
        ({"role": "prompter", "txt": "q"}, r"prompt has no 'text'; found .*did you mean 'text'"),
        (ask("q", {"text": "a"}), r"prompt.replies\[0\] has no 'role'"),
        (ask("q", {"text": "a", "role": "ai"}), r"replies\[0\] has role 'ai'; use prompter or"),
        (ask("q", say("a", ask("r", say("\x00")))), r"s\[0\].replies\[0\].replies\[0\].text has a"),
        ({**ask("q"), "replies": 3}, "prompt.replies is int 3"),
        (say("a"), "an assistant turn comes before any user turn"),
    ],
)
def test_problems_of_a_tree(tree: Any, error: str) -> None:
    with pytest.raises(RowError, match=error):
        convert(tree)


def test_an_empty_answer_in_a_tree_is_reported() -> None:
    with pytest.raises(
        EmptyAnswerError, match=r"prompt.replies\[1\] is an empty.*drop_empty=true or"
    ):
        convert(ask("q", say("a"), say(" ")))
