"""A row of the table of settings that cannot be combined."""

from __future__ import annotations

import dataclasses
import importlib.util


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that cannot be combined."""

    why: str
    instead: str
    """what to type instead"""
    is_of_machine: bool = False
    """whether the conflict depends on the machine"""


def is_installed(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    # flash-attn-4 without flash-attn leaves a folder flash_attn that is not a package.
    return spec is not None and spec.origin is not None
