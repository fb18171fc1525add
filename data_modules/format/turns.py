"""Read the turns of a conversation: roles, parts, thinking, calls of tools and their results.

Decides which turns belong together and in which order they may stand, and which paths of a tree of
replies are conversations. Knows no format.

Turns of one role that follow each other are joined, by an empty line, where the joined turn says
the same in the same order (thinking, text, calls): so texts are joined, a call comes to the text
before it, and calls side by side become one turn. Results of tools are never joined, nor turns of
unlike weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_modules.format.fields import (
    LEAVE_OUT,
    EmptyAnswerError,
    RowError,
    check_json,
    check_text,
    is_blank,
    kind,
    misnamed,
    quoted,
    read_json,
    read_optional_string,
    read_part,
    read_text,
    read_text_part,
    read_weight,
)
from data_modules.messages import Origin, listed, shown
from data_modules.types import Conversation, ToolCall, Turn

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
}
_CONTENT_FIELDS = ("content", "value", "text")
_CALL_ROLES = ("function_call", "tool_call")
_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_REASONING_PARTS = ("reasoning", "thinking")
# Calls written into the text of an answer, as Hermes, Mistral, Glaive and Llama write them.
_CALLS_IN_TEXT = ("<tool_call", "<function", "[TOOL_CALLS]", "<|python_tag|>")


def read_tools(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of `tools` or `functions`, all in the form {type, function}.

    Each column may be a list or the JSON text of one.
    """
    name, value = next(
        ((name, values[name]) for name in ("tools", "functions") if values.get(name)), ("tools", [])
    )
    if isinstance(value, str):
        value = [] if is_blank(value) else read_json(value, name) or []
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, not a list of tools, nor the JSON text of one")
    return tuple(_read_tool(tool, f"{name}[{index}]") for index, tool in enumerate(value))


def _read_tool(tool: Any, where: str) -> Mapping[str, Any]:
    if isinstance(tool, str):
        tool = read_json(tool, where)
    if not isinstance(tool, dict):
        raise RowError(f"{where} is {kind(tool)}; a tool is {{name, description, parameters}}")
    if "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    elif "function" not in tool and "type" not in tool:
        raise RowError(f"{where} has no name; found {listed(tool)}{misnamed('name', tool)}")
    check_json(tool, where)
    return tool


def read_call_part(part: dict[str, Any], where: str) -> ToolCall:
    """Return the call of a typed part: its own fields, or what is under `tool_call` or `text`."""
    for key in ("tool_call", "text", "value"):
        if part.get(key) is not None:
            call = _read_call(part[key], f"{where}.{key}")
            own = call.id or read_optional_string(part, "id", where)
            return ToolCall(call.name, call.arguments, own)
    return _read_call(part, where)


def read_call_fields(item: dict[str, Any], where: str) -> list[ToolCall]:
    """Return the calls in `tool_calls`, or in `function_call`, its older form."""
    if value := item.get("tool_calls"):
        where = f"{where}.tool_calls"
        if isinstance(value, str):
            value = read_json(value, where)
        if not isinstance(value, list):
            raise RowError(f"{where} is {kind(value)}, not a list of calls")
        return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(value)]
    if value := item.get("function_call"):
        return [_read_call(value, f"{where}.function_call")]
    return []


def read_call_text(value: Any, where: str) -> list[ToolCall]:
    """Return the calls of a turn that is nothing but calls: JSON text of one or of a list."""
    if isinstance(value, str):
        value = read_json(value, where)
    if not isinstance(value, list):
        return [_read_call(value, where)]
    if not value:
        raise RowError(f"{where} is an empty list; give at least one call")
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _read_call(value: Any, where: str) -> ToolCall:
    if isinstance(value, str):
        value = read_json(value, where)
    if not isinstance(value, dict):
        raise RowError(f"{where} is {kind(value)}; a call is {{name, arguments}}")
    inner = value.get("function")
    if not isinstance(inner, dict):
        inner = value
    name = inner.get("name")
    if not isinstance(name, str) or is_blank(name):
        raise RowError(f"{where} names no tool; found {listed(inner)}{misnamed('name', inner)}")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = read_json(arguments, f"{where}.arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"{where}.arguments is {kind(arguments)}, not an object of names and values")
    check_json(arguments, f"{where}.arguments")
    return ToolCall(
        check_text(name, f"{where}.name"), arguments, read_optional_string(value, "id", where)
    )


def read_turns(items: Any, name: str) -> list[Turn]:
    """Return the turns in column `name`, one for each, as they stand there."""
    if not isinstance(items, list):
        raise RowError(f"{name} is {kind(items)}, not a list of turns")
    if not items:
        raise RowError(f"{name} is empty; give at least a user and an assistant turn")
    return [_read_turn(item, f"{name}[{index}]") for index, item in enumerate(items)]


def arrange(turns: list[Turn], name: str, system: str = "") -> tuple[Turn, ...]:
    """Return the turns in order, neighbours of one role joined, `system` before them.

    Raises RowError for an order that no template takes.
    """
    _check_order(turns, name)
    if system and not (turns[0].role == "system" and turns[0].content == system):
        turns = [Turn("system", system), *turns]
    joined = turns[:1]
    for turn in turns[1:]:
        last = joined[-1]
        if last.role == turn.role and _belong_together(last, turn):
            joined[-1] = _join(last, turn)
        else:
            joined.append(turn)
    for turn in joined:
        if turn.reasoning and is_blank(turn.content) and not turn.tool_calls and turn.weight != 0:
            raise EmptyAnswerError(
                f"{name}: a turn thinks ('{shown(turn.reasoning)}') and says nothing; drop the "
                f"row, {LEAVE_OUT}"
            )
    return tuple(joined)


def _read_turn(item: Any, where: str) -> Turn:
    if not isinstance(item, dict):
        raise RowError(f"{where} is {type(item).__name__}; a turn is {{role, content}}")
    name = item.get("role")
    if name is None:
        name = item.get("from")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(_unknown_role(item, name, where))
    field = None
    for known in _CONTENT_FIELDS:
        if known in item:
            field = known
            break
    value = None if field is None else item[field]
    if len(item) == 2 and isinstance(value, str) and name not in _CALL_ROLES:
        turn = Turn(role, check_text(value, f"{where}.{field}"))
    else:
        turn = _read_full_turn(item, str(name), field, where)
    if turn.role == "assistant" and is_blank(turn.content):
        _check_empty(turn, where)
    return turn


def _unknown_role(item: dict[str, Any], name: Any, where: str) -> str:
    if name is None:
        return f"{where} has no role; found {listed(item)}{misnamed('role', item)}"
    return f"{where} has role {quoted(name)}; known roles are {', '.join(ROLES)}"


def _check_empty(turn: Turn, where: str) -> None:
    if not turn.tool_calls and not turn.reasoning and turn.weight != 0:
        raise EmptyAnswerError(
            f"{where} is an empty answer: there is nothing to train on; drop the row, or set "
            f"'train: false' on the turn, {LEAVE_OUT}"
        )


def _read_full_turn(item: dict[str, Any], name: str, field: str | None, where: str) -> Turn:
    role = ROLES[name]
    value = None if field is None else item[field]
    calls = read_call_fields(item, where)
    content, thought = "", ""
    if name in _CALL_ROLES and not calls:
        calls = read_call_text(value, f"{where}.{field or 'content'}")
    elif isinstance(value, list):
        content, thought, more = _read_parts(value, f"{where}.{field}")
        calls += more
    elif value is not None or not calls:
        if field is None:
            raise RowError(
                f"{where} has no content; found {listed(item)}{misnamed('content', item)}"
            )
        content = read_text(value, f"{where}.{field}")
    thought = _read_reasoning(item, thought, where)
    if role != "assistant" and (calls or thought):
        raise RowError(
            f"{where} is a turn of {role} with {'a call' if calls else 'thinking'}; only an "
            "assistant turn calls tools and thinks"
        )
    return Turn(
        role,
        content,
        weight=_turn_weight(item, where),
        reasoning=None if is_blank(thought) else thought,
        tool_calls=tuple(calls),
        name=read_optional_string(item, "name", where) if role == "tool" else None,
        tool_call_id=read_optional_string(item, "tool_call_id", where) if role == "tool" else None,
    )


def _read_reasoning(item: dict[str, Any], thought: str, where: str) -> str:
    for field in _REASONING_FIELDS:
        if item.get(field):
            found = read_text(item[field], f"{where}.{field}")
            if thought and thought != found:
                raise RowError(f"{where} thinks twice, in its parts and in {field}; keep one")
            return found
    return thought


def _read_parts(parts: list[Any], where: str) -> tuple[str, str, list[ToolCall]]:
    """Return text, thinking and calls of a list of typed parts."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        name = part.get("type") if isinstance(part, dict) else None
        if name == "tool_call":
            calls.append(read_call_part(part, place))
        elif name in _REASONING_PARTS:
            if texts or calls:
                raise RowError(f"{place} is {name} after text or a call; put it first")
            thoughts.append(read_part(part, str(name), place))
        else:
            text = read_text_part(part, place)
            if calls and text:
                raise RowError(f"{place} is text after a call; put it before the call")
            texts.append(text)
    return "".join(texts), "".join(thoughts), calls


def _turn_weight(item: dict[str, Any], where: str) -> float | None:
    weight = item.get("weight")
    train = item.get("train")
    if weight is not None:
        weight = read_weight(weight, f"{where}.weight")
    if train is None:
        return weight
    if train not in (0, 1):
        raise RowError(f"{where}.train is {quoted(train)}; give true or false")
    if not train:
        return 0.0
    return 1.0 if weight is None else weight


def _first_part(turn: Turn) -> int:
    if turn.reasoning:
        return 0
    return 2 if turn.tool_calls and not turn.content else 1


def _last_part(turn: Turn) -> int:
    if turn.tool_calls:
        return 2
    return 0 if turn.reasoning and not turn.content else 1


def _belong_together(last: Turn, turn: Turn) -> bool:
    if turn.role == "tool" or last.weight != turn.weight:
        return False
    return _last_part(last) <= _first_part(turn)


def _join(last: Turn, turn: Turn) -> Turn:
    return Turn(
        turn.role,
        _joined(last.content, turn.content),
        turn.weight,
        _joined(last.reasoning, turn.reasoning) or None,
        last.tool_calls + turn.tool_calls,
    )


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def _check_order(turns: Sequence[Turn], name: str) -> None:
    before = {"system"}
    calls: set[str | None] = set()
    for index, turn in enumerate(turns):
        role = turn.role
        if role == "system":
            if before != {"system"}:
                raise RowError(f"{name}: a system turn comes after others; put it first")
        elif role == "assistant" and "user" not in before:
            raise RowError(
                f"{name}: an assistant turn comes before any user turn; put a user turn first"
            )
        elif role == "tool":
            if not index or turns[index - 1].role != "tool":
                calls = _calls_before(turns, index)
            _check_result(turn, calls, f"{name}[{index}]")
        before.add(role)


def _calls_before(turns: Sequence[Turn], index: int) -> set[str | None]:
    """Return the ids of the calls in the answer before turn `index`, None for those without."""
    calls: set[str | None] = set()
    while index and turns[index - 1].role == "assistant":
        index -= 1
        calls.update(call.id for call in turns[index].tool_calls)
        if any(mark in turns[index].content for mark in _CALLS_IN_TEXT):
            calls.add(None)
    return calls


def _check_result(turn: Turn, calls: set[str | None], where: str) -> None:
    if not calls:
        raise RowError(
            f"{where} is the result of a tool that no turn before it calls; give the call as "
            "tool_calls of the assistant turn before"
        )
    if turn.tool_call_id is not None and not calls & {turn.tool_call_id, None}:
        known = ", ".join(sorted(call for call in calls if call is not None))
        raise RowError(
            f"{where}.tool_call_id is '{shown(turn.tool_call_id)}'; the calls before it are "
            f"{shown(known)}"
        )


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
