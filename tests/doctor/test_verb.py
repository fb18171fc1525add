"""The verb: an immediate first line, a table or JSON, exit code 3 if something would stop a run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import app.doctor.__main__ as verb
from app.doctor.facts import MachineFacts
from app.process.launch import read_launch
from tests.conftest import ROOT
from tests.doctor.test_rows import GOOD


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[MachineFacts]:
    """MachineFacts that the verb reads: the last of the list."""
    found = [GOOD]
    read_launch.cache_clear()
    monkeypatch.setattr(verb, "read_facts", lambda *args, **named: found[-1])
    return found


def test_nothing_heavy_is_imported_before_the_first_line() -> None:
    heavy = "{'torch', 'lightning', 'transformers', 'peft', 'datasets', 'numpy', 'pandas'}"
    code = f"import sys, app.doctor.__main__; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_good_machine(machine: list[MachineFacts], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run_doctor([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("loft ") and "nothing would stop a run; 0 warnings" in printed


def test_exit_code_3_if_a_run_would_be_stopped(
    machine: list[MachineFacts], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.append(replace(GOOD, suspects={"lightning": "2.6.2"}, shared_memory_gib=0.06))
    assert verb.run_doctor([]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "problem lightning" in printed and "1 of 2 findings would stop a run" in printed
    assert verb.run_doctor(["--json"]) == 3
    answer = capsys.readouterr()
    found: dict[str, Any] = json.loads(answer.out)
    assert answer.err.startswith("loft ") and not found["ok"] and found["bandwidth"] == []
    assert {"what": "Python", "status": "ok", "found": "3.11.7", "fix": ""} in found["rows"]
    assert found["versions"]["node1"]["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["seconds=soon"], "seconds=soon: expected a whole number"),
        (["output.dri=x"], "output.dir"),
        (["+experiment=llama9b"], "llama8b"),
    ],
)
def test_misspelled_overrides_are_refused(
    words: list[str], fragment: str, machine: list[MachineFacts], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.run_doctor(words) == 2
    assert fragment in capsys.readouterr().err
