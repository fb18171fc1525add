"""The page of a sweep: markup is escaped, trials have links and the best ones their curves."""

from __future__ import annotations

import re
from pathlib import Path

from app.sweep.parameters import parse_parameters
from app.sweep.results import write_page
from app.sweep.trials import Trial

HOSTILE = '<img src=x onerror="document.title=1">'


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
    write_page(trials[::-1], folder, parse_parameters(parameters))
    return (folder / "sweep.html").read_text()


def test_the_page_links_its_trials_and_has_the_settings_of_the_best(tmp_path: Path) -> None:
    page = write_sweep(tmp_path / "sweep dir")
    assert re.findall('href="([^#]*?)"', page) == ["1/report.html"], "others have no page"
    (command,) = re.findall('<pre class="type">(.*?)</pre>', page)
    assert "app.train seed=1 adapter.r=1 " in command
    assert page.index(">trial 0 2<") < page.index(">trial 1 3<"), "the best first"
    assert page.count("<polyline") == 6 and ">loss is nan" in page and "nan</" not in page
    assert "<img" not in page and "http" not in page.replace("http-equiv", "")
