"""Read the turns of a conversation: roles, parts, reasoning, tool calls and tool results.

Decides which turns are joined, which order of turns is valid, and which paths of a reply tree are
conversations. Does not depend on the format.

Consecutive turns of one role are joined by an empty line if the joined turn keeps the order of
reasoning, text and calls: texts are joined, a call is added to the text before it, and consecutive
calls become one turn. Tool results are never joined, and neither are turns of different weights
or those that are trained in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import Origin
from common.text import listed, shown
from data_modules.format import fields
from data_modules.format.fields import EmptyAnswerError, RowError, is_blank, type_of, typo_hint
from data_modules.types import Conversation, Ranges, ToolCall, Turn

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
}
CONTENT_FIELDS = ("content", "value", "text")
_CALL_ROLES = ("function_call", "tool_call")
_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
TOOL_COLUMNS = ("tools", "functions", "tool_defs")
"""columns that may hold the tools of a conversation"""
MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))
"""columns and keys of a turn that hold what is not text"""
_CALL_KEYS = ("type", "id", *fields.MASK_KEYS)
_REASONING_PARTS = ("reasoning", "thinking")
# Calls in the text of an answer, as written for Hermes, Mistral, Glaive and Llama.
_CALLS_IN_TEXT = ("<tool_call", "<function", "[TOOL_CALLS]", "<|python_tag|>")


def read_tools(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools in a column of TOOL_COLUMNS, each as {type, function}.

    The column may be a list or the JSON text of one.
    """
    given = [(name, values[name]) for name in TOOL_COLUMNS if values.get(name)]
    name, value = given[0] if given else ("tools", [])
    for other, same in given[1:]:
        if same != value:
            raise RowError(f"{name} and {other} hold different tools; keep one of the columns")
    if isinstance(value, str):
        value = [] if is_blank(value) else fields.parse_json(value, name) or []
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of tools or the JSON text of one")
    return tuple(_read_tool(tool, f"{name}[{index}]") for index, tool in enumerate(value))


def _read_tool(tool: Any, where: str) -> Mapping[str, Any]:
    if isinstance(tool, str):
        tool = fields.parse_json(tool, where)
    if not isinstance(tool, dict):
        raise RowError(f"{where} is {type_of(tool)}; a tool is {{name, description, parameters}}")
    if "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    elif "function" not in tool and "type" not in tool:
        raise RowError(f"{where} has no name; found {listed(tool)}{typo_hint('name', tool)}")
    fields.check_json(tool, where)
    return tool


def _read_call_part(part: dict[str, Any], where: str) -> ToolCall:
    """Return the call of a typed part: its own fields, or those under `tool_call` or `text`."""
    for key in ("tool_call", "text", "value"):
        if part.get(key) is not None:
            fields.note_unread(part, ("type", "id", key, *fields.MASK_KEYS), where)
            call = _read_call(part[key], f"{where}.{key}")
            call_id = call.id or fields.read_optional_string(part, "id", where)
            return ToolCall(call.name, call.arguments, call_id)
    return _read_call(part, where)


def _read_call_field(item: dict[str, Any], key: str, where: str) -> list[ToolCall]:
    """Return the calls in `tool_calls`, or in the older `function_call`."""
    value, where = item[key], f"{where}.{key}"
    if key == "function_call":
        return [_read_call(value, where)]
    if isinstance(value, str):
        value = fields.parse_json(value, where)
    if not isinstance(value, list):
        raise RowError(f"{where} is {type_of(value)}, not a list of calls")
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _read_call_text(value: Any, where: str) -> list[ToolCall]:
    """Return the calls of a turn of calls only: one call or a list of them, or its JSON text."""
    if isinstance(value, str):
        value = fields.parse_json(value, where)
    if not isinstance(value, list):
        return [_read_call(value, where)]
    if not value:
        raise RowError(f"{where} is an empty list; give at least one call")
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _read_call(value: Any, where: str) -> ToolCall:
    if isinstance(value, str):
        value = fields.parse_json(value, where)
    if not isinstance(value, dict):
        raise RowError(f"{where} is {type_of(value)}; a call is {{name, arguments}}")
    fields.check_whole(value, where)
    inner = value.get("function")
    if not isinstance(inner, dict):
        inner = value
    name = inner.get("name")
    if not isinstance(name, str) or is_blank(name):
        raise RowError(f"{where} has no tool name; found {listed(inner)}{typo_hint('name', inner)}")
    # Llama's calls have `parameters`.
    has_parameters = inner.get("arguments") is None and "parameters" in inner
    read = ("name", "parameters" if has_parameters else "arguments")
    if inner is not value:
        fields.note_unread(inner, read, f"{where}.function")
    fields.note_unread(value, (*(read if inner is value else ["function"]), *_CALL_KEYS), where)
    arguments = inner.get(read[1])
    if isinstance(arguments, str):
        arguments = (
            {} if is_blank(arguments) else fields.parse_json(arguments, f"{where}.arguments")
        )
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(
            f"{where}.arguments is {type_of(arguments)}, not an object of names and values"
        )
    fields.check_json(arguments, f"{where}.arguments")
    return ToolCall(
        fields.check_text(name, f"{where}.name"),
        arguments,
        fields.read_optional_string(value, "id", where),
    )


def read_turns(items: Any, name: str) -> list[Turn]:
    """Return the turns in the column `name`, without joining any."""
    if not isinstance(items, list):
        raise RowError(f"{name} is {type_of(items)}, not a list of turns")
    if not items:
        raise RowError(f"{name} is empty; give at least a user and an assistant turn")
    return [_read_turn(item, f"{name}[{index}]") for index, item in enumerate(items)]


def check_no_media(
    values: Mapping[str, Any], where: str = "", *, text: str = "", needs_mark: bool = False
) -> None:
    """Raise RowError for images, video or audio, which are not read.

    The name or address of one is only an error if `text` has a mark for it, as in <image>; with
    `needs_mark` so is the thing itself.
    """
    for name in MEDIA & values.keys():
        value = values[name]
        is_marked = f"<{name.removesuffix('s')}>" in text
        is_given = value not in (None, "", [], {})
        if is_given and (is_marked or not (needs_mark or isinstance(value, str))):
            raise RowError(
                f"{where}{name} is {type_of(value)}: not supported; only text is trained on: "
                "leave such rows out (data.on_bad_row=quarantine), or remove the column and its "
                "marks in the text"
            )


def normalize_turns(turns: list[Turn], name: str, system: str = "") -> tuple[Turn, ...]:
    """Return the turns with `system` before them, and consecutive turns of one role joined.

    Raises RowError for an order of turns that no template supports.
    """
    _check_order(turns, name)
    if system and not (turns[0].role == "system" and turns[0].content == system):
        turns = [Turn("system", system), *turns]
    joined = turns[:1]
    for turn in turns[1:]:
        last = joined[-1]
        if last.role == turn.role and _can_join(last, turn):
            joined[-1] = Turn(
                turn.role,
                _joined(last.content, turn.content),
                turn.weight,
                _joined(last.reasoning, turn.reasoning) or None,
                last.tool_calls + turn.tool_calls,
            )
        else:
            joined.append(turn)
    for turn in joined:
        if turn.reasoning and is_blank(turn.content) and not turn.tool_calls and turn.weight != 0:
            raise EmptyAnswerError(
                f"{name}: an assistant turn has reasoning ('{shown(turn.reasoning)}') but no "
                f"answer; drop the row, {fields.SKIP_EMPTY}"
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
        if name is None:
            raise RowError(f"{where} has no role; found {listed(item)}{typo_hint('role', item)}")
        raise RowError(f"{where} has role {fields.quote(name)}; known roles are {', '.join(ROLES)}")
    field = None
    for content_field in CONTENT_FIELDS:
        if content_field in item:
            field = content_field
            break
    value = None if field is None else item[field]
    if len(item) == 2 and isinstance(value, str) and name not in _CALL_ROLES:
        turn = Turn(role, fields.check_text(value, f"{where}.{field}"))
    else:
        turn = _read_full_turn(item, str(name), field, where)
    is_empty = turn.role == "assistant" and is_blank(turn.content)
    if is_empty and not turn.tool_calls and not turn.reasoning and turn.weight != 0:
        raise EmptyAnswerError(
            f"{where} is an empty answer: there is nothing to train on; drop the row, or set "
            f"'train: false' on the turn, {fields.SKIP_EMPTY}"
        )
    return turn


def _read_full_turn(item: dict[str, Any], name: str, field: str | None, where: str) -> Turn:
    role = ROLES[name]
    check_no_media(item, f"{where}.")
    value = None if field is None else item[field]
    called = next((key for key in ("tool_calls", "function_call") if item.get(key)), "")
    calls = _read_call_field(item, called, where) if called else []
    content, reasoning = "", ""
    if name in _CALL_ROLES and not calls:
        calls = _read_call_text(value, f"{where}.{field or 'content'}")
    elif isinstance(value, list):
        content, reasoning, part_calls = _read_parts(value, f"{where}.{field}")
        calls += part_calls
    elif value is not None or not calls:
        if field is None:
            raise RowError(
                f"{where} has no content; found {listed(item)}{typo_hint('content', item)}"
            )
        content = fields.parse_text(value, f"{where}.{field}")
    thought = next((key for key in _REASONING_FIELDS if item.get(key)), "")
    if thought:
        found = fields.parse_text(item[thought], f"{where}.{thought}")
        if reasoning and reasoning != found:
            raise RowError(f"{where} has reasoning twice, in its parts and in {thought}; keep one")
        reasoning = found
    if role != "assistant" and (calls or reasoning):
        raise RowError(
            f"{where} is a {role} turn with {'a tool call' if calls else 'reasoning'}; only an "
            "assistant turn may have tool calls or reasoning"
        )
    weight, trained = _read_mask(item, role, value, where, calls)
    answered = ("name", "tool_call_id") if role == "tool" else ()
    speaker = "role" if item.get("role") is not None else "from"
    fields.note_unread(
        item, (speaker, field or "", called, thought, *answered, *fields.MASK_KEYS), where
    )
    return Turn(
        role,
        content,
        weight=weight,
        reasoning=None if is_blank(reasoning) else reasoning,
        tool_calls=tuple(calls),
        name=fields.read_optional_string(item, "name", where) if answered else None,
        tool_call_id=fields.read_optional_string(item, "tool_call_id", where) if answered else None,
        trained=trained,
    )


def _read_mask(
    item: dict[str, Any], role: str, text: Any, where: str, calls: Sequence[ToolCall] = ()
) -> tuple[float | None, Ranges | None]:
    """Return the weight that a turn gives itself, and the characters that it trains on."""
    weight = fields.turn_weight(item, where)
    if role != "assistant" or calls:
        fields.check_no_details(item, where, "one with a tool call" if calls else f"a {role} turn")
        return weight, None
    trained = fields.read_details(item, text, where)
    if trained is None:
        return weight, None
    return (1.0 if weight is None else weight) if trained else 0.0, trained


def _read_parts(parts: list[Any], where: str) -> tuple[str, str, list[ToolCall]]:
    texts: list[str] = []
    reasonings: list[str] = []
    calls: list[ToolCall] = []
    fields.check_parts(parts, where)
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        name = None
        if isinstance(part, dict):
            name = part.get("type")
            fields.check_whole(part, place)
        if name == "tool_call":
            calls.append(_read_call_part(part, place))
        elif name in _REASONING_PARTS:
            if texts or calls:
                raise RowError(f"{place} is {name} after text or a call; put it first")
            reasonings.append(fields.read_part(part, str(name), place))
        else:
            text = fields.read_text_part(part, place)
            if calls and text:
                raise RowError(f"{place} is text after a call; put it before the call")
            texts.append(text)
    return "".join(texts), "".join(reasonings), calls


def _can_join(last: Turn, turn: Turn) -> bool:
    if turn.role == "tool" or last.weight != turn.weight:
        return False
    if last.trained is not None or turn.trained is not None:
        return False
    # The last part of one and the first of the other: 0 reasoning, 1 text, 2 calls.
    end = 2 if last.tool_calls else 0 if last.reasoning and not last.content else 1
    start = 0 if turn.reasoning else 2 if turn.tool_calls and not turn.content else 1
    return end <= start


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def _check_order(turns: Sequence[Turn], name: str) -> None:
    earlier_roles = {"system"}
    calls: set[str | None] = set()
    for index, turn in enumerate(turns):
        role = turn.role
        if role == "system":
            if earlier_roles != {"system"}:
                raise RowError(f"{name}: a system turn comes after others; put it first")
        elif role == "assistant" and "user" not in earlier_roles:
            raise RowError(
                f"{name}: an assistant turn comes before any user turn; put a user turn first"
            )
        elif role == "tool":
            if not index or turns[index - 1].role != "tool":
                calls = _call_ids_before(turns, index)
            _check_tool_result(turn, calls, f"{name}[{index}]")
        earlier_roles.add(role)


def _call_ids_before(turns: Sequence[Turn], index: int) -> set[str | None]:
    """Return the ids of the calls in the answer before turn `index`, None for calls without id."""
    calls: set[str | None] = set()
    while index and turns[index - 1].role == "assistant":
        index -= 1
        calls.update(call.id for call in turns[index].tool_calls)
        if any(mark in turns[index].content for mark in _CALLS_IN_TEXT):
            calls.add(None)
    return calls


def _check_tool_result(turn: Turn, calls: set[str | None], where: str) -> None:
    if not calls:
        raise RowError(
            f"{where} is the result of a tool that no turn before it calls; give the call in "
            "tool_calls of the assistant turn before it"
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
    is_continued: bool = False


def read_tree(prompt: Any, origin: Origin, weight: float) -> list[Conversation]:
    """Return every path from the root to an answer without further answers below it.

    A turn has its weight only in the shortest path (in characters) that contains it, and weight 0
    in the others: if any of these paths is short enough to be kept, the shortest one is. Replies
    that are deleted or failed review are left out, with everything below them. A tree without an
    answer gives its prompt alone, which has nothing to train on.
    """
    nodes = _flatten(prompt)
    for node in reversed(nodes):
        if node.leads_to_answer and node.parent >= 0:
            nodes[node.parent].leads_to_answer = nodes[node.parent].is_continued = True
    ends = [
        i for i, node in enumerate(nodes) if node.leads_to_answer and not node.is_continued
    ] or [0]
    paths: list[list[int]] = []
    for end in ends:
        path = [end]
        while (parent := nodes[path[-1]].parent) >= 0:
            path.append(parent)
        paths.append(path[::-1])
    turns_of: dict[int, list[Turn]] = {}
    seen: set[int] = set()
    # The shortest first: if it is too long to be kept, so are the others.
    for path in sorted(paths, key=lambda path: sum(len(nodes[i].turn.content) for i in path)):
        turns_of[path[-1]] = [
            replace(nodes[i].turn, weight=0.0) if i in seen else nodes[i].turn for i in path
        ]
        seen.update(path)
    return [
        Conversation(normalize_turns(turns_of[end], "prompt"), origin, weight=weight)
        for end in ends
    ]


def _flatten(prompt: Any) -> list[_Node]:
    """Return the nodes of the tree, parents before their replies, in the order of the file."""
    nodes: list[_Node] = []
    todo: list[tuple[Any, int, str]] = [(prompt, -1, "prompt")]
    while todo:
        value, parent, where = todo.pop()
        if not isinstance(value, dict):
            raise RowError(f"{where} is {type_of(value)}; a message is {{role, text, replies}}")
        is_excluded = bool(value.get("deleted")) or value.get("review_result") is False
        if is_excluded and parent >= 0:
            continue
        turn = _read_message(value, where)
        if is_excluded:
            return [_Node(replace(turn, weight=0.0), -1, where, leads_to_answer=False)]
        nodes.append(_Node(turn, parent, where, leads_to_answer=turn.role == "assistant"))
        replies = value.get("replies") or []
        if not isinstance(replies, list):
            raise RowError(f"{where}.replies is {type_of(replies)}, not a list of messages")
        parent = len(nodes) - 1
        todo += [
            (reply, parent, f"{where}.replies[{i}]")
            for i, reply in reversed(list(enumerate(replies)))
        ]
    return nodes


def _read_message(value: dict[str, Any], where: str) -> Turn:
    for field in ("role", "text"):
        if field not in value:
            raise RowError(
                f"{where} has no '{field}'; found {listed(value)}{typo_hint(field, value)}"
            )
    name = value["role"]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role not in ("user", "assistant"):
        raise RowError(f"{where} has role {fields.quote(name)}; use prompter or assistant")
    text = fields.parse_text(value["text"], f"{where}.text")
    if role == "assistant" and is_blank(text):
        raise EmptyAnswerError(
            f"{where} is an empty answer: there is nothing to train on; mark it deleted, "
            f"{fields.SKIP_EMPTY}"
        )
    weight, trained = _read_mask(value, role, value["text"], where)
    review = ("review_result",) if isinstance(value.get("review_result"), bool) else ()
    fields.note_unread(
        value, ("role", "text", "replies", "deleted", *review, *fields.MASK_KEYS), "message"
    )
    return Turn(role, text, weight, trained=trained)
