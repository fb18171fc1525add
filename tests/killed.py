"""Ends work in this process at its Nth change of a folder, as a kill does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_on_change: Callable[[str, str], None] | None = None
_CHANGES = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """Raised in place of a signal that no process survives."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _on_change is None or event not in _CHANGES or not isinstance(arguments[0], str | Path):
        return
    if event != "open" or arguments[2] & _WRITES:
        _on_change(event, str(arguments[0]))


sys.addaudithook(_audit)


def killed_at(number: int, folder: Path, work: Callable[[], object]) -> str | None:
    """Call `work`; raise Killed before its `number`th change in `folder`, and at each later one.

    Returns the change, or None if there were fewer: then `work` has ended by itself.
    """
    global _on_change
    changes: list[str] = []

    def count(event: str, path: str) -> None:
        if str(folder) in path:
            changes.append(f"{event} {os.path.relpath(path, folder)}")
            if len(changes) >= number:
                raise Killed

    _on_change = count
    try:
        work()
    except Killed:
        return changes[number - 1]
    finally:
        _on_change = None
    return None
