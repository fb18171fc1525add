"""Combinations of settings, of which the fast suite runs those that decide something new."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def matrix(*axes: Sequence[Any], fast: Callable[..., bool]) -> list[Any]:
    """All combinations of one value of each axis; those that are not `fast` are marked slow."""
    return [
        pytest.param(*values, marks=() if fast(*values) else pytest.mark.slow)
        for values in itertools.product(*axes)
    ]
