"""What a run that was refused leaves: nothing, where there is only its lock and its error."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.evaluation.comparison import print_comparison
from app.process.reporting import REASON_FILE
from app.process.status import STATUS_FILE
from app.run.folder import LOCK_FILE, OutputConfig, decide_run_dir, discard_unused


@pytest.mark.parametrize("more", ["", "metrics.csv"])
def test_a_folder_of_a_lock_and_an_error_alone_goes(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = decide_run_dir(OutputConfig(name="refused"))
    for name in filter(None, (LOCK_FILE, REASON_FILE, STATUS_FILE, more)):
        (folder / name).write_text("x")
    discard_unused()
    assert folder.exists() == bool(more)


def test_a_folder_that_was_typed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = decide_run_dir(OutputConfig(dir=str(tmp_path / "mine")))
    discard_unused()
    assert folder.exists()


def test_without_figures_there_are_words_and_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison({"speed/tokens_per_second": 1.0}, ["lists"])
    assert "not compared: no rows were held out" in capsys.readouterr().out
    print_comparison({"tuned/val/loss/lists": 1.0}, ["lists"])
    assert "base vs tuned" in capsys.readouterr().out
