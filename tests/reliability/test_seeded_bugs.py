"""The source text and the test of every seeded bug exist."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

from tests.conftest import ROOT
from tests.reliability.seeded_bugs import BUGS


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_each_bug_can_be_injected_and_its_test_exists() -> None:
    assert len({bug.name for bug in BUGS}) == len({(bug.right, bug.wrong) for bug in BUGS}) >= 100
    found = Counter({bug.name: text_of(bug.file).count(bug.right) for bug in BUGS})
    assert {name for name, count in found.items() if count != 1} == set()
    for bug in BUGS:
        ast.parse(text_of(bug.file).replace(bug.right, bug.wrong), bug.name)
        file, _, test = bug.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in text_of(file), bug.test
