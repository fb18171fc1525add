"""Evaluation during training adds curves and does not change the training."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest

from app.assembly import training as during
from app.process.signals import DataStalled, MeasurementInterrupted
from app.training.checkpoint.store import CheckpointStore
from app.training.metrics import is_measured_at
from common.errors import UserError
from tests.reliability.shell import Shell
from tests.runs import check_same_run
from tests.tiny import SAMPLES, small_run, train_into

MEASURED = (
    "evaluation.tasks=[{name: boolq, few_shot: 0}]",
    "evaluation.exact_match=true",
    "evaluation.every_steps=2",
    "evaluation.during_rows=3",
    "evaluation.max_new_tokens=4",
    "trainer.validate_every_steps=1",
)


def curves(run: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and not name.startswith(("speed/", "machine/", "memory/")):
                    found.setdefault(name, []).append((row["step"], value))
    return found


@pytest.mark.slow
def test_evaluation_does_not_change_the_training_and_a_resumed_run_measures_the_same(
    tmp_path: Path,
) -> None:
    words = ("trainer.validate_every_steps=1", "adapter.dropout=0.1", "logger=csv")
    plain = curves(train_into(tmp_path / "plain", *words))
    assert not (tmp_path / "plain" / "predictions.jsonl").exists()  # show_answers=0
    saved = ("trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep_last=9")
    monitored = ("trainer.checkpoint.monitor=val/accuracy/boolq", "trainer.checkpoint.keep_best=1")
    run = train_into(tmp_path / "measured", *words, *MEASURED, *saved, *monitored)
    measured = curves(run)

    assert {name: measured[name] for name in plain} == plain  # bit-equal losses

    added = measured.keys() - plain.keys()
    assert {"val/accuracy/boolq", "val/loss/boolq", "val/exact_match/lists"} <= added
    for name in added:
        assert [step for step, _ in measured[name]] == ["0", "2", "4"], name

    lines = (run / "samples" / "step-2.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    assert [line["data_set"] for line in asked].count("boolq") == 3
    assert all("val" in line for line in asked)

    by_step = {one.step: one.metric for one in CheckpointStore(run / "checkpoints").checkpoints()}
    accuracy = dict(measured["val/accuracy/boolq"])
    assert by_step[4] == -float(accuracy["4"])  # the store minimizes
    assert by_step.get(3) is None

    resumed = shutil.copytree(run, tmp_path / "resumed")
    train_into(
        resumed, *words, *MEASURED, *saved, *monitored, f"resume={resumed}/checkpoints/step-1"
    )
    check_same_run(resumed, run)
    for name in ("samples/step-2.jsonl", "samples/step-4.jsonl"):
        assert (resumed / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.slow
def test_two_ranks_measure_the_same_as_one(tmp_path: Path, shell: Shell) -> None:
    more = ("evaluation.metrics=[f1]", "evaluation.during_rows=5")
    words = small_run("trainer.gradient_accumulation_steps=1", *MEASURED[:3], *MEASURED[4:], *more)
    one, two = tmp_path / "one", tmp_path / "two"
    train_into(one, *MEASURED[:3], *MEASURED[4:], *more)
    shell.train_into(two, *words, "trainer.devices=2", "trainer.accelerator=cpu")
    alone, together = curves(one), curves(two)
    added = [name for name in alone if name.startswith("val/")]
    assert {"val/accuracy/boolq", "val/f1/lists", "val/exact_match/orders"} <= set(added)
    for name in added:
        assert [step for step, _ in together[name]] == [step for step, _ in alone[name]], name
        values = [[float(value) for _, value in run[name]] for run in (alone, together)]
        assert values[1] == pytest.approx(values[0], rel=1e-5), name
    for step in (0, 2, 4):
        files = ((run / "samples" / f"step-{step}.jsonl").open() for run in (one, two))
        for lines in zip(*(map(json.loads, file) for file in files), strict=True):
            asked = [
                [line[key] for key in ("data_set", "source", "prompt", "val")] for line in lines
            ]
            assert asked[0] == asked[1]


Measure = Callable[[Any, dict[str, bool], Any], dict[str, float]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    def measure_as(work: Any, rank: dict[str, bool], poll: Any) -> dict[str, float]:
        """Measure four rows with `work` as one of two ranks; a signal is what `poll` returns."""
        evaluator: Any = SimpleNamespace(metric_names=lambda variant: [])
        evaluator.measure_answers = lambda *_: {"rows": len(evaluator.runner.run("a", [], 4, work))}
        trainer = SimpleNamespace(
            world_size=2,
            global_rank=int(not rank["is_first"]),
            is_global_zero=False,
            precision_plugin=SimpleNamespace(forward_context=nullcontext),
        )
        strategy = SimpleNamespace(shards_weights=rank["is_sharded"])
        module: Any = SimpleNamespace(trainer=trainer, strategy=strategy, model=None)
        measured = during.TrainingEvaluation(
            evaluator, tmp_path, every_steps=2, interval=2, last=4, poll=poll
        )
        return measured.measure(module, 2)

    return measure_as


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "other"])
@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "whole"])
def test_a_signal_ends_a_measurement_on_all_ranks(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, is_sharded: bool, is_first: bool
) -> None:
    """Ranks that hold whole models end theirs by themselves, sharded ones after the same batch."""
    done: list[int] = []
    seen: list[str] = []
    stalls = is_first and not is_sharded

    def work(rows: list[int]) -> Iterator[list[tuple[int, int]]]:
        for number, row in enumerate(rows):
            if stalls and done:
                raise DataStalled(SIGTERM, "")
            done.append(row)
            yield [(number, row)]

    def poll() -> int | None:
        seen.append("poll")
        return SIGTERM if len(done) == (2 if is_sharded or not is_first else 1) else None

    monkeypatch.setattr(during, "all_gather", lambda own: seen.append("gather") or [own])
    monkeypatch.setattr(during.signals, "suspend_deadline", lambda: seen.append("suspend"))
    with pytest.raises(MeasurementInterrupted, match="will be repeated"):
        measure(work, {"is_first": is_first, "is_sharded": is_sharded}, poll)
    expected = ["gather", "suspend", "poll"] if stalls else ["gather", "poll"]
    assert seen == (["poll"] * 3 if is_sharded else expected)


def test_evaluations_run_at_the_next_validation() -> None:
    validated = range(0, 41, 4)
    assert [step for step in validated if is_measured_at(step, 10, 4)] == [0, 12, 20, 32, 40]
    assert [step for step in validated if is_measured_at(step, 3, 4)] == list(validated)


def test_a_monitor_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean val/accuracy/boolq\?"):
        train_into(tmp_path / "run", *MEASURED, "trainer.checkpoint.monitor=val/accuracy/boolqq")
    with pytest.raises(UserError, match=r"evaluation\.every_steps=N measures"):
        train_into(tmp_path / "other", "trainer.checkpoint.monitor=val/accuracy/boolq")
    row = {"instruction": "Which number is the biggest?", "input": "1 4", "output": "4"}
    (tmp_path / "few.json").write_text(json.dumps([row, row]))
    data = f"[{{path: {SAMPLES / 'lists_test.json'}}}, {{path: {tmp_path / 'few.json'}}}]"
    words = (f"data.datasets={data}", "data.val_set_size=0.05")
    with pytest.raises(UserError, match="no row of few is held out"):
        train_into(tmp_path / "few", *words, "trainer.checkpoint.monitor=val/loss/few")


@pytest.mark.slow
def test_early_stopping(tmp_path: Path) -> None:
    words = [
        "trainer.max_steps=6",
        "trainer.validate_every_steps=1",
        "optimizer.lr=1e-12",
        "trainer.checkpoint.every_steps=5",
        "trainer.precision=fp32",
        *MEASURED[3:5],
        "evaluation.exact_match=true",
        "evaluation.every_steps=1",
        "trainer.checkpoint.monitor=val/exact_match/lists",
    ]
    patient = "trainer.early_stopping_patience="
    run = train_into(tmp_path / "run", *words, f"{patient}2")
    # The first evaluation is the best; two without improvement end the run.
    kept = curves(run)
    assert kept["train/loss"][-1][0] == "2"
    # The first step was the best of the saved ones; equal steps after it are not saved again.
    assert [one.step for one in CheckpointStore(run / "checkpoints").checkpoints()] == [1, 2]

    # Killed after its last checkpoint, the run does not train further when resumed.
    (run / "metrics.json").unlink()
    train_into(run, *words, f"{patient}2", "resume=must")
    assert curves(run) == kept

    # A run that stopped early continues only with more patience.
    train_into(run, *words, f"{patient}1", "resume=must")
    assert curves(run) == kept
    train_into(run, *words, f"{patient}null", "resume=must")
    assert curves(run)["train/loss"][-1][0] == "6"
    assert curves(run)["train/loss"][:2] == kept["train/loss"]
