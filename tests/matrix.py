"""Combinations of settings, of which the fast suite runs only a selection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def matrix(*axes: Sequence[Any], fast: Callable[..., bool]) -> list[Any]:
    """Return all combinations of one value per axis; those that are not `fast` are marked slow."""
    return [
        pytest.param(*values, marks=() if fast(*values) else pytest.mark.slow)
        for values in itertools.product(*axes)
    ]
