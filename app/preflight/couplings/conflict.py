"""The rows of the tables of settings that cannot be combined, and how they are read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from app.preflight.couplings.devices import Devices

When = Callable[[Any, Devices], object]
"""whether a row applies to settings `c` and the devices `d` that they request"""

OPTIONS = {
    "adapter": "name",
    "attention": "backend",
    "objective": "name",
    "quantization": "method",
    "strategy": "name",
}
"""group -> the setting with its option, of which {group} is what to type"""


class Conflict(NamedTuple):
    """A row: settings that cannot be combined.

    Its texts may contain the settings {c}, the devices {d}, what `when` {found} (of a list, each
    element in a conflict of its own), the groups of OPTIONS, {labels}, and what its group names.
    """

    when: When
    why: str
    instead: str
    """what to type instead"""
    is_of_machine: bool = False
    """whether the conflict depends on the machine"""


class Group(NamedTuple):
    """Rows that apply only `when` their subject is set.

    Their texts call it {name}, and what to type so that it is not {without}.
    """

    when: When
    name: str = ""
    without: str = ""
    rows: tuple[Conflict, ...] = ()


def find_conflicts(
    groups: Iterable[Group], config: Any, devices: Devices
) -> Iterator[tuple[Conflict, str]]:
    """Yield each row that applies, and what it says."""
    words: dict[str, Any] = {
        group: f"{group}={getattr(getattr(config, group), option)}"
        for group, option in OPTIONS.items()
        if group in config.__dataclass_fields__
    }
    words["labels"] = f"model.labels=[{', '.join(config.model.labels)}]"
    words |= {"c": config, "d": devices}
    for group in groups:
        for row in group.rows if group.when(config, devices) else ():
            found = row.when(config, devices)
            name = group.name.format(**words)
            for each in found if isinstance(found, list) else [found] * bool(found):
                text = f"{row.why}; type {row.instead}"
                yield row, text.format(**words, found=each, name=name, without=group.without)


def is_installed(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    # flash-attn-4 without flash-attn leaves a folder flash_attn that is not a package.
    return spec is not None and spec.origin is not None
