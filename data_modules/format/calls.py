"""Read calls of tools, and the tools that may be called, in the forms that data has them.

Decides what a call is: a name and arguments that are a JSON object. Knows no roles and no order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_modules.format.fields import (
    RowError,
    check_json,
    check_text,
    is_blank,
    kind,
    misnamed,
    read_json,
    read_optional_string,
)
from data_modules.types import ToolCall, listed


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
