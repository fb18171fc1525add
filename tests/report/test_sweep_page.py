"""The page of a sweep in a real browser, wide and narrow: nothing is cut, markup is escaped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from app.report.sweep_page import TrialView, render_sweep_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = """<script>
const outside = [...document.querySelectorAll("h1, h2, p, td, svg text, polyline")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && (box.left < 0 || box.right > innerWidth);
}).map(one => one.textContent);
const dots = [...document.querySelectorAll("polyline")].every(one => one.points.length > 1);
const wide = document.documentElement.scrollWidth > innerWidth;
document.title = JSON.stringify({outside, dots, wide, width: innerWidth});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
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
    for html in (page, re.sub("<meta http-equiv[^>]*>", "", page) + MEASURE):
        file.write_text(html)
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        process = subprocess.run(
            [*command, f"--window-size={width},900", f"--user-data-dir={tmp_path}", file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert "<img" not in process.stdout and process.stdout.count("<polyline") == 7 + 8
    title = re.search("<title>(.*)</title>", process.stdout)
    assert title is not None
    found: dict[str, Any] = json.loads(unescape(title[1]))
    assert found == {
        "outside": [],
        "dots": True,
        "wide": False,
        "width": max(width, 500),  # the minimum width of a headless window
    }
