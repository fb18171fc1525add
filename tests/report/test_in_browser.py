"""The pages of runs, sweeps and plans in a browser: nothing is cut, no error, nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.plan import make_plan
from app.report.plan import render_plan
from app.report.run_files import read_run_files
from app.report.run_page import PAGE_FILE, render_comparison, write_page
from tests.report.test_plan_page import PLANNED
from tests.report.test_run_page import HOSTILE, write_run
from tests.report.test_sweep_page import write_sweep
from tests.serving.browser import OUTSIDE, browsing, needs_browser

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
