"""Read trees of replies, as OpenAssistant publishes them: one conversation for each last answer.

Decides which paths of a tree are conversations, and that no answer is trained on twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from data_modules.format.fields import (
    LEAVE_OUT,
    EmptyAnswerError,
    RowError,
    is_blank,
    kind,
    misnamed,
    quoted,
    read_text,
)
from data_modules.format.turns import ROLES, arrange
from data_modules.messages import Origin, listed
from data_modules.types import Conversation, Turn


@dataclass(slots=True)
class _Node:
    turn: Turn
    parent: int
    where: str
    leads_to_answer: bool
    goes_on: bool = False


def read_tree(prompt: Any, origin: Origin, weight: float) -> list[Conversation]:
    """Return every path from the root to an answer that no further answer follows.

    Each turn has its weight in the shortest path that holds it, in characters, and weight 0 in the
    others: where any of them is short enough to be kept, that one is. Replies that are deleted or
    were refused in review are left out, with all that follows them. A tree without an answer gives
    its prompt alone, in which there is nothing to train on.
    """
    nodes = _flatten(prompt)
    for node in reversed(nodes):
        if node.leads_to_answer and node.parent >= 0:
            nodes[node.parent].leads_to_answer = nodes[node.parent].goes_on = True
    ends = [i for i, node in enumerate(nodes) if node.leads_to_answer and not node.goes_on] or [0]
    paths = [_path(nodes, end) for end in ends]
    return [
        Conversation(arrange(turns, "prompt"), origin, weight=weight)
        for turns in _weighed(nodes, paths)
    ]


def _weighed(nodes: list[_Node], paths: list[list[int]]) -> list[list[Turn]]:
    """Return the turns of each path, with their weight in one of the paths that share them."""
    lengths = [sum(len(nodes[i].turn.content) for i in path) for path in paths]
    seen: set[int] = set()
    turns: dict[int, list[Turn]] = {}
    # The shortest first: what is too long for it is too long for the others that hold it.
    for number in sorted(range(len(paths)), key=lengths.__getitem__):
        turns[number] = [
            replace(nodes[i].turn, weight=0.0) if i in seen else nodes[i].turn
            for i in paths[number]
        ]
        seen.update(paths[number])
    return [turns[number] for number in range(len(paths))]


def _path(nodes: list[_Node], end: int) -> list[int]:
    path = []
    while end >= 0:
        path.append(end)
        end = nodes[end].parent
    return path[::-1]


def _flatten(prompt: Any) -> list[_Node]:
    """Return the nodes of the tree, parents before their replies, in the order of the file."""
    nodes: list[_Node] = []
    todo: list[tuple[Any, int, str]] = [(prompt, -1, "prompt")]
    while todo:
        value, parent, where = todo.pop()
        if not isinstance(value, dict):
            raise RowError(f"{where} is {kind(value)}; a message is {{role, text, replies}}")
        left_out = bool(value.get("deleted")) or value.get("review_result") is False
        if left_out and parent >= 0:
            continue
        turn = _read_message(value, where)
        if left_out:
            return [_Node(replace(turn, weight=0.0), -1, where, leads_to_answer=False)]
        nodes.append(_Node(turn, parent, where, leads_to_answer=turn.role == "assistant"))
        replies = value.get("replies") or []
        if not isinstance(replies, list):
            raise RowError(f"{where}.replies is {kind(replies)}, not a list of messages")
        here = len(nodes) - 1
        todo += [
            (reply, here, f"{where}.replies[{i}]")
            for i, reply in reversed(list(enumerate(replies)))
        ]
    return nodes


def _read_message(value: dict[str, Any], where: str) -> Turn:
    for field in ("role", "text"):
        if field not in value:
            raise RowError(
                f"{where} has no '{field}'; found {listed(value)}{misnamed(field, value)}"
            )
    name = value["role"]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role not in ("user", "assistant"):
        raise RowError(f"{where} has role {quoted(name)}; use prompter or assistant")
    text = read_text(value["text"], f"{where}.text")
    if role == "assistant" and is_blank(text):
        raise EmptyAnswerError(
            f"{where} is an empty answer: there is nothing to train on; mark it deleted, "
            f"{LEAVE_OUT}"
        )
    return Turn(role, text)
