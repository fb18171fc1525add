"""The source text and the test of every seeded bug exist."""

from __future__ import annotations

import ast
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.reliability import seeded_bugs
from tests.reliability.seeded_bugs import BUGS, Bug, inject


def test_there_are_at_least_forty_different_bugs() -> None:
    assert len({bug.name for bug in BUGS}) == len({(bug.right, bug.wrong) for bug in BUGS}) >= 40


@cache
def functions_in(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_can_be_injected_and_its_test_exists(bug: Bug, tmp_path: Path) -> None:
    (tmp_path / bug.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.file, tmp_path / bug.file)
    before = inject(bug, tmp_path)
    after = (tmp_path / bug.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    file, _, test = bug.test.partition("::")
    assert test.partition("[")[0] in functions_in(file)


def test_a_bug_whose_source_text_is_missing_is_reported(tmp_path: Path) -> None:
    bug = Bug(name="gone", file="file.py", right="x = 1\n", wrong="", test="")
    for text in ("", "x = 1\nx = 1\n"):
        (tmp_path / "file.py").write_text(text)
        with pytest.raises(ValueError, match=r"gone: its text occurs \d times in file\.py"):
            inject(bug, tmp_path)


def test_unknown_bug_names_run_no_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without test names, pytest would run every test."""
    monkeypatch.setattr(seeded_bugs, "run_tests", lambda *_: pytest.fail("tests are run"))
    assert seeded_bugs.main(["markr", "nothing"]) == 2
    message = capsys.readouterr().err
    assert (
        "no bug's name contains 'markr' or 'nothing'" in message
        and "the marker is written first" in message
    )
