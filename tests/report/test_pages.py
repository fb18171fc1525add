"""Pages of plans, sweeps and several runs, and what a browser makes of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.config.dispatch import run_plain_verb
from app.plan import MAX_ADVICE_ROWS, make_plan, plan_lines, render_plan
from app.report.__main__ import ReportConfig, existing_run, report_runs
from app.sweep.trials import write_sweep_page as write_sweep_page
from common.errors import UserError
from tests.report.test_run_page import write_run

PLANNED = ["+experiment=llama70b", "hardware=8xa100_80gb", "plan.tokens=1000000"]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return make_plan(load_config("plan", PLANNED))[0]


def test_a_page_has_all_alternatives_and_bars(facts: dict[str, Any]) -> None:
    page = render_plan(facts)
    num_parts = sum(bool(value) for value in facts["seconds"].values())
    assert page.count("<svg") == 1 + num_parts + len(facts["advice"])
    assert all(row["type"] in page for row in facts["advice"])
    assert len(facts["advice"]) > MAX_ADVICE_ROWS and "more on the page" not in page
    assert "<pre" not in page and "####" not in page
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="1"', page)]
    assert sum(facts["gpu_gib"].values()) == pytest.approx(sum(widths[: len(facts["gpu_gib"])]))


def test_the_first_line_says_why_the_planned_settings_are_not_the_fastest(
    facts: dict[str, Any],
) -> None:
    fastest = next(row for row in facts["advice"] if row["fits"])
    assert fastest["tokens_per_second"] > 1.01 * facts["tokens_per_second"]
    (first, *_), page = plan_lines(facts), render_plan(facts)
    assert first.endswith(f"faster: type {fastest['type']}") and first in page
    settings = facts["settings"]
    assert f"with quantization {settings['quantization']}" in first
    assert ", which a plan never changes" in first
    same = facts | {"tokens_per_second": fastest["tokens_per_second"]}
    assert "type" not in plan_lines(same)[0]
    too_large = facts | {"fits": False, "to_fit": ["quantization=nf4"]}
    assert plan_lines(too_large)[0] == "does not fit: type quantization=nf4"


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
        (["run="], "run is empty"),
        (["run=/nope"], "run=/nope: no such folder"),
        (["run=."], "has neither metrics.csv nor metrics.json"),
        (["output.dir=a", "output.dir=b"], "output.dir is given twice: a and b"),
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
