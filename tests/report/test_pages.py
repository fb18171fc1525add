"""Pages of plans, sweeps and several runs, and what a browser makes of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.config.dispatch import run_plain_verb
from app.plan import ASSUMED, MAX_ROWS, advice_lines, make_plan, plan_lines, render_plan
from app.report.__main__ import ReportConfig, existing_run, report_runs
from app.report.run_page import PAGE_FILE, read_run_files, render_comparison, write_page
from app.sweep.parameters import parse_parameters
from app.sweep.trials import Trial
from app.sweep.trials import write_page as write_sweep_page
from common.errors import UserError
from tests.report.test_run_page import HOSTILE, write_run
from tests.serving.browser import OUTSIDE, browsing, needs_browser

PLANNED = ["+experiment=llama70b", "hardware=8xa100_80gb", "plan.tokens=1000000"]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return make_plan(load_config("plan", PLANNED))[0]


def test_a_page_has_all_alternatives_and_bars(facts: dict[str, Any]) -> None:
    page = render_plan(facts)
    num_parts = sum(bool(value) for value in facts["seconds"].values())
    assert page.count("<svg") == 1 + num_parts + len(facts["advice"])
    assert all(row["type"] in page for row in facts["advice"])
    assert len(facts["advice"]) > MAX_ROWS and "more on the page" not in page
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


def test_assumed_rates_are_called_so(facts: dict[str, Any]) -> None:
    lines, page = [*plan_lines(facts), *advice_lines(facts)], render_plan(facts)
    assert not any(row["is_assumed"] for row in facts["advice"])  # an A100 has no FP8 products
    assert not any(ASSUMED in each for each in (*lines, page))
    fastest = facts["advice"][0] | {"is_assumed": True, "type": "quantization=fp8"}
    assert fastest["fits"]
    proposed = facts | {"advice": [fastest, *facts["advice"][1:]]}
    assert plan_lines(proposed)[0].endswith(f"type quantization=fp8 ({ASSUMED})")
    assert f"  quantization=fp8: {ASSUMED}" in advice_lines(proposed)
    assert page.count(ASSUMED) == 0 and render_plan(proposed).count(ASSUMED) == 2


def write_sweep(folder: Path) -> str:
    """Write a sweep of eight trials with curves, the last of which failed; return its page."""
    parameters = ["seed=1", "adapter.r=1,2,3,4,5,6,7,8", f"model.path='{HOSTILE}',b"]
    trials = []
    for number in range(8):
        (folder / str(number)).mkdir(parents=True)
        losses = ["2,12.0", f"4,{2 + number}", "6,nan"][: 1 + 2 * (number != 3)]
        curve = "\n".join(["step,val/loss", *losses])
        (folder / str(number) / "metrics.csv").write_text(f"{curve}\n")
        overrides = ["seed=1", f"adapter.r={number + 1}", f"model.path={HOSTILE * 3}"]
        error = "loss is nan " * 15 if number == 7 else None
        loss = None if error else 2.0 + number
        trials.append(
            Trial(number=number, overrides=overrides, folder=str(folder / str(number)), seconds=1.0,
                  exit_code=4 if error else 0, error=error, objective=loss)
        )  # fmt: skip
    (folder / "1/report.html").touch()
    write_sweep_page(trials[::-1], folder, parse_parameters(parameters))
    return (folder / "sweep.html").read_text()


def test_the_page_links_its_trials_and_has_the_settings_of_the_best(tmp_path: Path) -> None:
    page = write_sweep(tmp_path / "sweep dir")
    assert re.findall('href="([^#]*?)"', page) == ["1/report.html"], "others have no page"
    (command,) = re.findall('<pre class="type">(.*?)</pre>', page)
    assert "app.train seed=1 adapter.r=1 " in command
    assert page.index(">trial 0 2<") < page.index(">trial 1 3<"), "the best first"
    assert page.count("<polyline") == 6 and ">loss is nan" in page and "nan</" not in page
    assert "<img" not in page and "http" not in page.replace("http-equiv", "")


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


DOTS = "return [...document.querySelectorAll('polyline')].every(one => one.points.length > 1)"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_cut(width: int, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / (name * 40)) for name in ("a", "b")]
    write_page(runs[0], [("data.datasets", f"[{{path: {HOSTILE * 5}}}]", "[]")])
    both, plan, sweep = tmp_path / "both.html", tmp_path / "plan.html", tmp_path / ("a" * 90)
    files = {run.name: read_run_files(run) for run in runs}
    both.write_text(render_comparison(files, {run.name: [] for run in runs}))
    plan.write_text(render_plan(make_plan(load_config("plan", PLANNED))[0]))
    write_sweep(sweep)
    pages = {runs[0] / PAGE_FILE: 8, both: 8, sweep / "sweep.html": 6, plan: 0}
    with browsing(tmp_path / "profile", width) as browser:
        for page, num_charts in pages.items():
            browser.open(page.as_uri())
            browser.run("document.querySelectorAll('summary').forEach(one => one.click())")
            found: dict[str, Any] = browser.run(OUTSIDE)
            assert found.pop("charts") >= num_charts, page
            assert found == {"outside": [], "cut": 0, "wide": False, "images": 0}, page
            assert browser.run(DOTS) and browser.console_messages() == []
