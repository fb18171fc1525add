"""Percentages are written in one style everywhere: 12.3 %."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from common.text import counted, formatted, percent

ROOT = Path(__file__).parents[2]
TYPED = re.compile(r"\[:\d+%\]")
"""a slice of a split, which is typed so"""
ATTACHED = re.compile(r"\d%(?!\w)|\{[^{}]*:[^{}]*%\}")
SPEC = re.compile(r"\.\d%")
"""of a number that `formatted` shows"""


def attached_in(file: Path) -> list[str]:
    """Return the texts and format specs of a module that have % at once after a number."""
    tree = ast.parse(file.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            found += ["%"] * ("%" in ast.unparse(node.format_spec))
        elif isinstance(node, ast.JoinedStr):
            found += [
                after.value
                for before, after in pairwise(node.values)
                if isinstance(before, ast.FormattedValue) and isinstance(after, ast.Constant)
                if str(after.value).startswith("%")
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = TYPED.sub("", node.value)
            found += [text] if ATTACHED.search(text) and not SPEC.fullmatch(text) else []
    return found


@pytest.mark.parametrize("folder", ["app", "common", "data_modules", "tools", "benchmarks"])
def test_no_percentage_is_written_otherwise(folder: str) -> None:
    writers = {ROOT / "data_modules/source/locating.py", ROOT / "common/text.py"}
    for file in {*(ROOT / folder).rglob("*.py")} - writers:
        assert attached_in(file) == [], file


def test_percentages() -> None:
    assert (percent(0.1234), percent(1, 0), percent(0.5, 2)) == ("12.3 %", "100 %", "50.00 %")
    assert (percent(0.015, 0, sign="+"), percent(-0.3, sign="+")) == ("+2 %", "-30.0 %")
    assert (formatted(0.1234, "+.1%"), formatted(0.1234, ".2f")) == ("+12.3 %", "0.12")


def test_a_noun_has_the_number_before_it() -> None:
    assert [counted(number, "row") for number in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
