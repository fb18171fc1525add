"""The page of a run, built from its files alone, also from hostile and damaged ones."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch

from app.assembly.training import LivePage
from app.config import changed_settings, compose, load_config
from app.report.__main__ import settings_in
from app.report.chart import (
    MAX_BUCKETS,
    MAX_STRIPS,
    Chart,
    Series,
    draw_svg,
    frame_of,
    round_numbers,
)
from app.report.run_page import (
    CURVES_FILE,
    PAGE_FILE,
    bottleneck_lines,
    choose_predictions,
    page_on_failure,
    read_run_files,
    render_comparison,
    render_run,
    speed_lines,
    write_page,
)
from app.run import Run
from common.errors import Interrupted
from tests.tiny import small_run

HOSTILE = '<img src=x onerror="document.title=1">'
NAMES = ("orders", HOSTILE)


def write_run(
    folder: Path, *, steps: int = 20, last_val: float = 1.0, finished: bool = True
) -> Path:
    """Write the files of a run whose data set, prompts and settings contain markup."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["step", "train/loss", "val/loss", "speed/tokens_per_second", "speed/data_wait"]
    columns += [f"{phase}/{what}/{name}" for phase in ("train", "val") for what in ("loss", "share")
                for name in NAMES]  # fmt: skip
    quoted = ['"' + name.replace('"', '""') + '"' for name in columns]
    lines = [",".join(quoted)]
    for step in range(steps + 1):
        row = dict.fromkeys(columns, "") | {"step": str(step)}
        if step:
            row |= {"train/loss": str(3 - step / 20), "speed/tokens_per_second": "1500"}
            row |= {f"train/loss/{NAMES[step % 2]}": str(3 - step / 20), "speed/data_wait": "0.01"}
            row |= {f"train/share/{name}": "0.5" for name in NAMES}
        if step % 10 == 0:
            loss = 2 - (2 - last_val) * step / steps
            row |= {"val/loss": str(loss)} | {f"val/loss/{name}": str(loss) for name in NAMES}
        lines.append(",".join(row[name] for name in columns))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text("model: {path: a/base}\nadapter: {name: lora, r: 16}\n")
    manifest = {
        "total_steps": steps, "versions": {"torch": "2.13"}, "started": "2026-11-23T07:00:00",
        "hardware": {"cores": 2, "system": HOSTILE}, "command": ["python", "-m", "app.train"],
        "global_batch": {"num_ranks": 1},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    audit = {"datasets": [{"name": NAMES[1], "rows": 9, "train": 8, "duplicates": 2, "empty": 0}],
             "warnings": [f"{HOSTILE} are duplicates"]}  # fmt: skip
    (folder / "audit.json").write_text(json.dumps(audit))
    mixture = {"name": NAMES[1], "rows": 9, "tokens": 900, "rows_seen": 9, "epochs": 1.0,
               "share_of_rows": 1.0, "share_of_tokens": 1.0}  # fmt: skip
    (folder / "mixture.json").write_text(json.dumps([mixture]))
    answers = [
        {"data_set": NAMES[i % 2], "source": f"/data/orders.json:{i}",
         "prompt": HOSTILE + "x" * 3000, "reference": "1",
         "base": "2", "metrics": {"exact_match": {"base": 0.0, "tuned": 1.0}},
         "tuned": HOSTILE + "\x1b[31m" + "word" * 60}
        for i in range(30)
    ]  # fmt: skip
    (folder / "predictions.jsonl").write_text("\n".join(map(json.dumps, answers)))
    if finished:
        metrics = {"base/val/loss": 2.0, "tuned/val/loss": last_val, "val/loss": last_val,
                   "base/exact_match/orders": 0.0, "tuned/exact_match/orders": 0.9,
                   "speed/train_seconds": 13.0, "speed/tokens_per_second": 1500.0,
                   "train/tokens": 20000.0}  # fmt: skip
        (folder / "metrics.json").write_text(json.dumps(metrics))
        table = [["data set", "measure", "base", "tuned", "change"],
                 ["orders", "exact match", "0.0 %", "90.0 %", "+90.0 %"]]  # fmt: skip
        verdict = {"verdict": "better on orders", "changes": [], "table": table}
        (folder / "verdict.json").write_text(json.dumps(verdict))
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
    assert write_page(run, settings) == run / PAGE_FILE
    page = Page((run / PAGE_FILE).read_text())
    check_self_contained(page)
    assert page.shown.count(HOSTILE) > 20 and "\x1b" not in page.shown
    assert (
        len(page.tags_of("svg")) == 4
    )  # loss, that of two data sets, tokens per second, data wait
    assert (run / CURVES_FILE).read_bytes().startswith(b"\x89PNG")
    for text in (
        "finished after step 20",
        "base base, lora, rank 16",
        "validation loss 2.0000 at the start, 1.0000 at the end",
        "20,000 tokens in 13 s: 1,500 tokens/s",
        "1.0 % of the training time was spent waiting for data",
        "warning: <img",
        "characters ...]",
        "base (exact match 0 %)",
        "verdict: better on orders",
    ):
        assert text in page.shown, text
    shown = (run / PAGE_FILE).read_text()
    assert re.search(r"<h3>share of time.*?>1 %</text>", shown, re.DOTALL)
    assert "matplotlib" not in sys.modules


def test_losses_of_data_sets_share_a_chart_with_values_to_hover_over(tmp_path: Path) -> None:
    run = read_run_files(write_run(tmp_path / "run"))
    page = render_run(run)
    figure = re.search(r"<h3>loss per data set</h3>(.*?)</figure>", page, re.DOTALL)
    names = {name.partition("/loss/")[2] for name in run.curves if "/loss/" in name}
    assert len(names) == 2 and figure is not None and figure[1].count("<polyline") == 4
    assert "orders, training</title>" in figure[1] and "orders, validation</title>" in figure[1]
    step, value = run.curves["val/loss/orders"][-1]
    assert f"<title>step {step:g}: {value:.4g}</title>" in figure[1]
    curves = {name: points for name, points in run.curves.items() if "/loss/" not in name}
    curves |= {f"{phase}/loss/orders": curves[f"{phase}/loss"] for phase in ("train", "val")}
    page = render_run(replace(run, curves=curves))
    assert "<h3>loss</h3>" in page and "loss per data set" not in page and "loss: " not in page


def test_a_chart_shows_the_values_of_all_lines_under_the_pointer() -> None:
    train = Series(name="training", points=[(float(step), 2.0) for step in range(1, 20_001)])
    val = Series(name="validation", points=[(0.0, 3.0), (20_000.0, 0.5)], is_sparse=True)
    chart = Chart(title="loss", series=[train, val])
    strips = chart.strips(20_000.0)
    assert len(strips) == MAX_STRIPS and strips[0][0] == -0.5 and strips[-1][1] == 20_000.5
    assert strips[-1][2] == "training: 2 at step 20,000\nvalidation: 0.5 at step 20,000"
    short = Chart(title="loss", series=[replace(train, points=train.points[:3])])
    assert [text for _, _, text in short.strips(3.0)] == [
        f"training: 2 at step {step}" for step in (1, 2, 3)
    ]
    assert str(draw_svg(chart)).count("<rect") == MAX_STRIPS


@pytest.mark.parametrize("content", ["", '{"datasets": 3}', "step,a\n1,x\n\x00", '{"a":' * 100_000])
def test_damaged_files_are_left_out(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run")
    for file in sorted(run.iterdir()):
        before = file.read_bytes()
        file.write_text(content)
        assert NAMES[0] in render_run(read_run_files(run)), file.name
        settings_in(run)
        file.write_bytes(before)


def test_a_failed_run_has_a_page_if_it_has_curves_and_if_one_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, empty = Interrupted(15, "step 7 is saved"), tmp_path / "empty"
    empty.mkdir()
    run = write_run(tmp_path / "run", finished=False)
    for folder in (empty, run):
        with pytest.raises(Interrupted), page_on_failure(folder, []):
            raise error
    assert not (empty / PAGE_FILE).exists()
    assert f"stopped after step 20 of 20: {error}" in (run / PAGE_FILE).read_text()
    monkeypatch.setattr("app.report.run_page.render_run", lambda *_: 1 / 0)
    assert write_page(run) is None
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
        write_page(*args, **options)

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
    page = (folder / PAGE_FILE).read_text()
    assert "not finished: step 20" in page and not (folder / CURVES_FILE).exists()
    assert '<meta http-equiv="refresh" content="60">' in page
    write_page(folder)
    assert 'http-equiv="refresh"' not in (folder / PAGE_FILE).read_text()


def test_a_long_run_is_written_within_a_second(tmp_path: Path) -> None:
    """Measured on two cores: 0.9 s for 20,000 steps, of which reading takes a third."""
    run = write_run(tmp_path / "run", steps=5000)
    started = time.process_time()
    page = render_run(read_run_files(run))
    assert time.process_time() - started < 1
    assert len(page) < 500_000


def test_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    runs = {
        name: read_run_files(write_run(tmp_path / name, last_val=loss))
        for name, loss in (("a", 1.0), ("b", 1.5))
    }
    same = ("adapter.r", "8", "16")
    settings = {"a": [same], "b": [same, ("optimizer.lr", "0.5", "null")]}
    text = Page(render_comparison(runs, settings)).shown
    assert "optimizer.lr" in text and "adapter.r" not in text
    assert re.search(r"tuned/val/loss\s*1\s*1.5", text)
    assert "a validation" in text and "b validation" in text


def test_settings_that_differ_from_their_defaults() -> None:
    config = load_config("train", small_run("adapter=full", "optimizer.lr=1e-3"))
    changed = {key: (value, default) for key, value, default in changed_settings(config)}
    assert changed["adapter"] == ("full", "lora")
    assert changed["optimizer.lr"] == ("0.001", "null")
    assert changed["trainer.max_steps"] == ("4", "null")
    assert "name: lists" in changed["data.datasets"][0]
    assert not [key for key in changed if key.startswith(("output", "seed", "adapter."))]
    words = ["model.path=a", "data=skills", "evaluation.max_rows=7"]
    of_evaluation = {key: value for key, value, _ in changed_settings(compose("evaluate", words))}
    assert of_evaluation["evaluation.max_rows"] == "7" and of_evaluation["model.path"] == "a"


def test_ten_predictions_from_all_data_sets_with_changed_answers_first() -> None:
    lines = [
        {"data_set": name, "number": i, "base": "1", "tuned": "2" if i > 20 else "1"}
        for name in "abc"
        for i in range(25)
    ]
    chosen = choose_predictions(iter(lines))
    assert [line["data_set"] for line in chosen] == list("abcabcabca")
    assert all(line["number"] > 20 for line in chosen)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"speed/data_wait": 0.4}, "Data was the bottleneck: a larger data.num_workers"),
        ({"speed/data_wait": 0.4, "machine/gpu_utilization": 0.97}, "97 % of the time: it was the"),
        ({"speed/data_wait": 0.01, "machine/gpu_utilization": 0.5}, "waited for kernel launches"),
        ({}, ""),
    ],
)
def test_the_bottleneck_is_named_as_far_as_it_was_measured(
    tmp_path: Path, metrics: dict[str, float], expected: str
) -> None:
    header, row = ",".join(["step", *metrics]), ",".join(["1", *map(str, metrics.values())])
    (tmp_path / "metrics.csv").write_text(f"{header}\n{row}\n")
    text = " ".join(bottleneck_lines(read_run_files(tmp_path)))
    assert expected in text and bool(text) == bool(expected)


PLAN = {
    "speed/train_seconds": 90.0,
    "speed/tokens_per_second": 900.0,
    "speed/planned_tokens_per_second": 1200.0,
    "speed/planned_lowest": 1000.0,
    "speed/planned_highest": 1300.0,
}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"recompute": 0.2, "padding": 0.3}, ["30 % of the positions", "packing=multipack"]),
        ({"kernels": 0.2, "data_wait": 0.1}, ["20 % of a step", "liger-kernel"]),
        ({"mixers": 0.6, "kernels": 0.2}, ["60 % of the time without", "document by document"]),
        ({"recompute": 0.04}, ["900 tokens/s measured, 1,200 planned (1,000 to 1,300)", "none of"]),
    ],
)
def test_a_speed_is_compared_with_its_plan_and_the_largest_loss_named(
    metrics: dict[str, float], expected: list[str]
) -> None:
    lost = {f"speed/lost/{cause}": share for cause, share in metrics.items()}
    lines = speed_lines(PLAN | lost)
    assert all(any(text in line for line in lines) for text in expected)
    assert speed_lines(PLAN | lost | {"speed/train_seconds": 10.0}) == [], "still warming up"
    assert speed_lines({"speed/train_seconds": 90.0, "speed/tokens_per_second": 9.0} | lost) == []


def test_a_chart_keeps_spikes_and_single_points() -> None:
    points = [(float(step), 2.0) for step in range(30_000)]
    points[12_345] = (12_345.0, 9.0)
    line = Series(name="a", points=points)
    assert len(line.drawn) <= 2 * MAX_BUCKETS and (12_345.0, 9.0) in line.drawn
    one = str(draw_svg(Chart(title=HOSTILE, series=[Series(name="b", points=[(1, 5.0)])])))
    assert "<circle" in one and "&lt;img" in one and "<img" not in one
    gone = Series(name="c", points=[(1, float("nan")), (2, float("inf"))])
    assert frame_of(Chart(title="c", series=[gone])) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 5, 10]),
        (1.73, 3.1, [2, 2.5, 3]),
        (5, 5, [5]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert round_numbers(low, high, 4) == pytest.approx(ticks)
