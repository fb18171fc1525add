"""Pages of plans and of runs, built from their files alone, also from hostile and damaged ones."""

from __future__ import annotations

import csv
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch

from app.assembly.training import LivePage
from app.config import changed_settings, load_config, save_config
from app.config.dispatch import run_plain_verb
from app.plan import MAX_ADVICE_ROWS, make_plan, plan_lines, render_plan
from app.report import run_page
from app.report.__main__ import ReportConfig, report_runs, settings_in
from app.report.chart import MAX_BUCKETS, Chart, Series, draw_svg, frame_of
from app.run import Run
from app.sweep.parameters import parse_parameters
from app.sweep.trials import Trial, write_sweep_page
from common.errors import Interrupted
from tests.tiny import small_run

HOSTILE = '<img src=x onerror="document.title=1">'
NAMES = ("orders", HOSTILE)


def write_run(
    folder: Path, *, steps: int = 20, last_val: float = 1.0, finished: bool = True
) -> Path:
    """Write the files of a run whose data set, prompts and settings contain markup."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(steps + 1):
        row: dict[str, float] = {"step": step}
        if step:
            row |= {"train/loss": 3 - step / 20, f"train/loss/{NAMES[step % 2]}": 3 - step / 20}
            row |= {"speed/tokens_per_second": 1500, "speed/data_wait": 0.01}
            row |= {f"train/share/{name}": 0.5 for name in NAMES}
        if step % 10 == 0:
            loss = 2 - (2 - last_val) * step / steps
            row |= {"val/loss": loss} | {f"val/loss/{name}": loss for name in NAMES}
        rows.append(row)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "config.yaml").write_text("model: {path: a/base}\nadapter: {name: lora, r: 16}\n")
    answers = [
        {"data_set": NAMES[i % 2], "source": f"/data/orders.json:{i}", "reference": "1",
         "prompt": HOSTILE + "x" * 3000, "base": "2", "tuned": HOSTILE + "\x1b[31m" + "word" * 60,
         "metrics": {"exact_match": {"base": 0.0, "tuned": 1.0}}}
        for i in range(30)
    ]  # fmt: skip
    (folder / "predictions.jsonl").write_text("\n".join(map(json.dumps, answers)))
    documents: dict[str, Any] = {
        "manifest": {
            "total_steps": steps, "versions": {"torch": "2.13"}, "started": "2026-11-23T07:00:00",
            "hardware": {"cores": 2, "system": HOSTILE}, "command": ["python", "-m", "app.train"],
            "global_batch": {"num_ranks": 1},
        },
        "audit": {
            "datasets": [{"name": NAMES[1], "rows": 9, "train": 8, "duplicates": 2, "empty": 0}],
            "warnings": [f"{HOSTILE} are duplicates"],
        },
        "mixture": [
            {"name": NAMES[1], "rows": 9, "tokens": 900, "rows_seen": 9, "epochs": 1.0,
             "share_of_rows": 1.0, "share_of_tokens": 1.0}
        ],
    }  # fmt: skip
    if finished:
        documents["metrics"] = {
            "base/val/loss": 2.0, "tuned/val/loss": last_val, "val/loss": last_val,
            "base/exact_match/orders": 0.0, "tuned/exact_match/orders": 0.9,
            "speed/train_seconds": 13.0, "speed/tokens_per_second": 1500.0, "train/tokens": 20000.0,
        }  # fmt: skip
        table = [["data set", "measure", "base", "tuned", "change"],
                 ["orders", "exact match", "0.0 %", "90.0 %", "+90.0 %"]]  # fmt: skip
        documents["verdict"] = {"verdict": "better on orders", "changes": [], "table": table}
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class Page(HTMLParser):
    """Parses a page: its tags and attributes in order, all text, and the text trained on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.trained, self.shown = "", ""
        self.feed(text)
        self.close()

    def tags_of(self, kind: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == kind]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.shown += data
        if self.open[-1:] == ["i"] and "t" in (self.tags[-1][1].get("class") or "").split():
            self.trained += data


def check_self_contained(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "form")
        assert not [name for name in attributes if name.startswith("on")]
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = [a.get("content") for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert page.open == [], "every tag is closed"


def test_a_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    settings = [("model.path", HOSTILE, "null")]
    assert run_page.write_page(run, settings) == run / run_page.PAGE_FILE
    page = Page((run / run_page.PAGE_FILE).read_text())
    check_self_contained(page)
    assert page.shown.count(HOSTILE) > 20 and "\x1b" not in page.shown
    # Loss, that of two data sets, tokens per second, data wait.
    assert len(page.tags_of("svg")) == 4
    assert (run / run_page.CURVES_FILE).read_bytes().startswith(b"\x89PNG")
    for text in (
        "finished after step 20",
        "base base, lora, rank 16",
        "validation loss 2.0000 at the start, 1.0000 at the end",
        "20,000 tokens in 13 s: 1,500 tokens/s",
        "1.0 % of the training time was spent waiting for data",
        "base (exact match 0 %)",
        "verdict: better on orders",
    ):
        assert text in page.shown, text


@pytest.mark.parametrize("content", ["", '{"datasets": 3}', "step,a\n1,x\n\x00", '{"a":' * 100_000])
def test_damaged_files_are_left_out(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run")
    for file in sorted(run.iterdir()):
        before = file.read_bytes()
        file.write_text(content)
        assert NAMES[0] in run_page.render_run(run_page.read_run_files(run)), file.name
        settings_in(run)
        file.write_bytes(before)


def test_a_failed_run_has_a_page_if_it_has_curves_and_if_one_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, empty = Interrupted(15, "step 7 is saved"), tmp_path / "empty"
    empty.mkdir()
    run = write_run(tmp_path / "run", finished=False)
    for folder in (empty, run):
        with pytest.raises(Interrupted), run_page.page_on_failure(folder, []):
            raise error
    assert not (empty / run_page.PAGE_FILE).exists()
    assert f"stopped after step 20 of 20: {error}" in (run / run_page.PAGE_FILE).read_text()
    monkeypatch.setattr("app.report.run_page.render_run", lambda *_: 1 / 0)
    assert run_page.write_page(run) is None
    assert caplog.messages == ["report.html was not written: division by zero"]


def test_a_page_is_written_while_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now, costs = write_run(tmp_path / "run", finished=False), [0.0], [0.1, 5.0, 0.1]
    monkeypatch.setattr("app.assembly.training.time.monotonic", lambda: now[0])
    written: list[float] = []

    def write(*args: Any, **options: Any) -> None:
        written.append(now[0])
        now[0] += costs.pop(0)
        run_page.write_page(*args, **options)

    monkeypatch.setattr("app.assembly.training.write_page", write)
    config = load_config("train", small_run())
    live = LivePage(cast(Run, SimpleNamespace(folder=folder, typed_config=config)))
    first, other = (cast(L.Trainer, SimpleNamespace(is_global_zero=zero)) for zero in (True, False))
    live.on_train_start(first, None)
    states = random.getstate(), torch.get_rng_state()
    while now[0] < 650:
        now[0] += 1
        live.on_train_batch_end(other)
        live.on_train_batch_end(first)
    # A minute after the start, a minute later, and 1 % of the time after a page that took 5 s.
    assert [round(second) for second in written] == [60, 120, 625]
    assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
    page = (folder / run_page.PAGE_FILE).read_text()
    assert "not finished: step 20" in page and not (folder / run_page.CURVES_FILE).exists()
    assert '<meta http-equiv="refresh" content="60">' in page
    run_page.write_page(folder)
    assert 'http-equiv="refresh"' not in (folder / run_page.PAGE_FILE).read_text()


def test_settings_that_differ_from_their_defaults() -> None:
    config = load_config("train", small_run("adapter=full", "optimizer.lr=1e-3"))
    changed = {key: (value, default) for key, value, default in changed_settings(config)}
    assert changed["adapter"] == ("full", "lora")
    assert changed["optimizer.lr"] == ("0.001", "null")
    assert changed["trainer.max_steps"] == ("4", "null")
    assert "name: lists" in changed["data.datasets"][0]
    assert not [key for key in changed if key.startswith(("output", "seed", "adapter."))]


PLAN = {
    "speed/train_seconds": 90.0,
    "speed/tokens_per_second": 900.0,
    "speed/planned_tokens_per_second": 1200.0,
    "speed/planned_lowest": 1000.0,
    "speed/planned_highest": 1300.0,
}


def test_a_speed_is_compared_with_its_plan_and_the_largest_loss_named() -> None:
    lost = {"speed/lost/recompute": 0.2, "speed/lost/padding": 0.3}
    lines = "\n".join(run_page.speed_lines(PLAN | lost))
    for said in ("900 tokens/s measured, 1,200 planned (1,000 to 1,300)", "30 % of the positions"):
        assert said in lines
    assert run_page.speed_lines(PLAN | lost | {"speed/train_seconds": 10.0}) == [], (
        "still warming up"
    )
    assert (
        run_page.speed_lines({"speed/train_seconds": 90.0, "speed/tokens_per_second": 9.0} | lost)
        == []
    )


def test_a_chart_keeps_spikes_and_single_points() -> None:
    points = [(float(step), 2.0) for step in range(30_000)]
    points[12_345] = (12_345.0, 9.0)
    line = Series(name="a", points=points)
    assert len(line.drawn) <= 2 * MAX_BUCKETS and (12_345.0, 9.0) in line.drawn
    one = str(draw_svg(Chart(title=HOSTILE, series=[Series(name="b", points=[(1, 5.0)])])))
    assert "<circle" in one and "&lt;img" in one and "<img" not in one
    gone = Series(name="c", points=[(1, float("nan")), (2, float("inf"))])
    assert frame_of(Chart(title="c", series=[gone])) is None


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


def test_ten_predictions_from_all_data_sets_with_changed_answers_first() -> None:
    lines = [
        {"data_set": name, "number": i, "base": "1", "tuned": "2" if i > 20 else "1"}
        for name in "abc"
        for i in range(25)
    ]
    chosen = run_page._choose_predictions(iter(lines))
    assert [line["data_set"] for line in chosen] == list("abcabcabca")
    assert all(line["number"] > 20 for line in chosen)


def run_report(*words: str) -> int:
    return run_plain_verb("report", ReportConfig, report_runs, words)


def test_pages_of_one_run_and_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", last_val=1.5)
    for run, rank in ((one, 2), (two, 4)):
        save_config(load_config("train", small_run(f"adapter.r={rank}")), run / "config.yaml")
    assert run_report(f"run={one}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {one}"
    assert (one / "report.html").is_file()
    both = tmp_path / "both"
    assert run_report(f"run={one}", f"run={two}", f"output.dir={both}") == 0
    text = Page((both / "report.html").read_text()).shown
    assert "one validation" in text and "two validation" in text
    assert re.search(r"tuned/val/loss\s*1\s*1.5", text)
    assert re.search(r"adapter\.r\s*2\s*4", text) and "trainer.max_steps" not in text


def test_runs_that_cannot_be_shown_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, precious = write_run(tmp_path / "run"), tmp_path / "precious"
    (run / "training_curves.png").symlink_to(precious)
    (tmp_path / "empty").mkdir()
    for folder, said in (
        ("/nope", "run=/nope: no such folder"),
        (tmp_path / "empty", "has neither metrics.csv nor metrics.json"),
        (run, "training_curves.png is a link"),
    ):
        assert run_report(f"run={folder}") == 2
        assert said in capsys.readouterr().err
    assert not precious.exists()
