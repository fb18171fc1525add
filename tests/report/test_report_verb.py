"""`loft report`: its words, one run's page again, and several side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config.plain import run_plain_verb
from app.process.errors import UserError
from app.report.__main__ import ReportConfig, existing_run, report_runs
from tests.report.test_run_page import write_run


def ask(*words: str) -> int:
    return run_plain_verb("report", ReportConfig, report_runs, words)


def test_one_run_again_and_two_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", finished=False)
    assert ask(f"run={one}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {one}"
    assert (one / "report.html").is_file()
    both = tmp_path / "both"
    assert ask(f"run={one}", f"run={two}", f"output.dir={both}") == 0
    page = (both / "report.html").read_text()
    assert "one validation" in page and "two validation" in page
    assert ask("--help") == 0 and "typed once for each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs=a"], "unknown word; did you mean run?"),
        (["run="], "run is empty"),
        (["run=/nope"], "run=/nope: no such folder"),
        (["run=."], "neither metrics.csv nor metrics.json is there"),
        (["output.dir=a", "output.dir=b"], "output.dir is typed twice: a and b"),
        (["run=hf_" + "a" * 34], "secrets do not go into settings"),
    ],
)
def test_words_that_mean_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert ask(*words) == 2
    assert said in capsys.readouterr().err


def test_a_link_in_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / "training_curves.png").symlink_to(precious)
    with pytest.raises(UserError, match=r"training_curves\.png"):
        existing_run(str(run))
    assert precious.read_text() == "mine"
