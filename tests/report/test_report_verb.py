"""`loft report`: its arguments, the page of one run, and a comparison of several."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config.dispatch import run_plain_verb
from app.report.__main__ import ReportConfig, existing_run, report_runs
from common.errors import UserError
from tests.report.test_run_page import write_run


def run_report(*words: str) -> int:
    return run_plain_verb("report", ReportConfig, report_runs, words)


def test_pages_of_one_run_and_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", finished=False)
    assert run_report(f"run={one}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {one}"
    assert (one / "report.html").is_file()
    both = tmp_path / "both"
    assert run_report(f"run={one}", f"run={two}", f"output.dir={both}") == 0
    page = (both / "report.html").read_text()
    assert "one validation" in page and "two validation" in page
    assert run_report("--help") == 0 and "repeat for several" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs=a"], "unknown setting; did you mean run?"),
        (["run="], "run is empty"),
        (["run=/nope"], "run=/nope: no such folder"),
        (["run=."], "has neither metrics.csv nor metrics.json"),
        (["output.dir=a", "output.dir=b"], "output.dir is given twice: a and b"),
        (["run=hf_" + "a" * 34], "secrets do not go into settings"),
    ],
)
def test_invalid_arguments(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run_report(*words) == 2
    assert message in capsys.readouterr().err


def test_a_link_in_a_run_folder_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / "training_curves.png").symlink_to(precious)
    with pytest.raises(UserError, match=r"training_curves\.png"):
        existing_run(str(run))
    assert precious.read_text() == "mine"
