"""The page of a sweep: nothing is cut or crossed, markup is escaped, trials have links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.sweep.parameters import parse_parameters
from app.sweep.results import (
    HEIGHT,
    MARGIN,
    TrialView,
    parallel_coordinates,
    render_sweep_page,
    write_page,
)
from app.sweep.trials import Trial
from tests.report.test_run_page import OUTSIDE
from tests.serving.browser import browsing, needs_browser

CROSSED = """
return [...document.querySelectorAll("svg text")].filter(one => {
  one.scrollIntoView();
  const box = one.getBoundingClientRect();
  return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) != one;
}).map(one => one.textContent);
"""
"""labels over which something else is drawn"""


def test_labels_stand_outside_of_the_lines() -> None:
    trials = [
        TrialView(number=n, values={"a": word, "b": str(n)}, curve={}, objective=n, outcome="")
        for n, word in enumerate(("x", "y", "z"))
    ]
    axes, _ = parallel_coordinates(trials, "val/loss")
    for axis in axes:
        for x, y, _ in axis["ticks"]:
            assert y < MARGIN or y > HEIGHT - MARGIN or x > axis["x"]
    assert {text: y for _, y, text in axes[0]["ticks"]}["y"] == pytest.approx(HEIGHT / 2, abs=9)


def test_the_page_links_its_trials_and_has_the_settings_of_the_best(tmp_path: Path) -> None:
    (tmp_path / "sweep dir/1").mkdir(parents=True)
    (tmp_path / "sweep dir/1/report.html").touch()
    trials = [
        Trial(number=number, overrides=["seed=1", f"adapter.r={2 ** number}"], seconds=1.0,
              folder=str(tmp_path / f"sweep dir/{number}"), exit_code=0, error=None,
              objective=3.0 - number)
        for number in range(2)
    ]  # fmt: skip
    write_page(trials, tmp_path / "sweep dir", parse_parameters(["seed=1", "adapter.r=1,2"]))
    page = (tmp_path / "sweep dir/sweep.html").read_text()
    assert re.findall('href="(.*?)"', page) == ["1/report.html"], "trial 0 has no page"
    (command,) = re.findall('<pre class="type">(.*?)</pre>', page)
    assert command.endswith("app.train seed=1 adapter.r=2")


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_cut_and_markup_is_escaped(width: int, tmp_path: Path) -> None:
    hostile = '<img src=x onerror="document.title=1">'
    keys = ("trainer.gradient_accumulation_steps", "optimizer.lr", "adapter.r", "model.path")
    trials = [
        TrialView(
            number=number,
            values=dict(zip(keys, ("8", f"{10.0**-number}", "16", hostile * 3), strict=True)),
            curve={step: 12.0 / (number * step + 1) for step in range(6, 7 + number, 6)},
            objective=None if number == 7 else 2.0 + number,
            outcome="error: " + "loss is nan " * 15 if number == 7 else f"val/loss {number}",
        )
        for number in range(8)
    ]
    page = render_sweep_page("outputs/train/" + "a" * 90, trials, "val/loss")
    file = tmp_path / "sweep.html"
    file.write_text(page)
    with browsing(tmp_path / "profile", width) as browser:
        browser.open(file.as_uri())
        found: dict[str, Any] = browser.run(OUTSIDE)
        assert found == {"outside": [], "cut": 0, "wide": False, "charts": 7 + 8, "images": 0}
        assert browser.run(CROSSED) == []
        dots = "[...document.querySelectorAll('polyline')].every(one => one.points.length > 1)"
        assert browser.run(f"return {dots}")
        assert browser.console_messages() == []
