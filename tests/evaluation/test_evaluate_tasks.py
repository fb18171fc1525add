"""`python -m app.evaluate` on tasks, without other data."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from app.config import load_config
from app.config.dispatch import check_before_start
from app.evaluate import evaluate, evaluate_in_ranks
from app.evaluation.significance import paired_bootstrap
from common.errors import UserError
from common.text import percent
from tests.conftest import ROOT
from tests.reliability.shell import Shell
from tests.tiny import TINY_BASE

SHARED = ROOT.parent / "shared" / "data"
ALL = "[{name: arc}, {name: mmlu, few_shot: 1}, {name: lambada}, {name: winogrande}]"


def run_evaluation(folder: Path, *words: str) -> dict[str, float]:
    os.environ.pop("LOFT_RUN_DIR", None)
    config = load_config("evaluate", ["trainer.precision=fp32", f"output.dir={folder}", *words])
    check_before_start(config)
    metrics = evaluate(config)
    os.environ.pop("LOFT_RUN_DIR", None)
    return metrics


def test_tasks_without_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run_evaluation(tmp_path, f"model.path={TINY_BASE}", f"evaluation.tasks={ALL}")
    assert {f"base/accuracy/{name}" for name in ("arc", "mmlu", "lambada", "winogrande")} <= set(
        metrics
    )
    # A subject and its category.
    assert {"base/accuracy/mmlu/sociology", "base/accuracy/mmlu/social_sciences"} <= set(metrics)
    assert metrics == json.loads((tmp_path / "metrics.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").open()]
    assert len(lines) == 6 + 16 + 4 + 4
    right = [line["metrics"]["accuracy"]["base"] for line in lines if line["data_set"] == "arc"]
    assert sum(right) / 6 == metrics["base/accuracy/arc"]
    said = capsys.readouterr().out
    assert "base-arc: 6 rows in" in said and "arc (" in said  # a sample
    (line,) = [line for line in said.splitlines() if " mmlu/stem " in line and "length" in line]
    assert percent(metrics["base/accuracy_norm/mmlu/stem"]) in line
    assert not (tmp_path / "partial").exists()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of the shipped base."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(TINY_BASE)
    random = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("tuned")
    get_peft_model(base, random).save_pretrained(folder)
    return folder


def test_groups_of_a_task_have_intervals(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"model.path={TINY_BASE}", f"adapter_path={tuned}")
    metrics = run_evaluation(
        tmp_path / "out", *words, "evaluation.tasks=[{name: mmlu, few_shot: 0}]"
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").open()]
    for group in ("stem", "elementary_mathematics"):  # a category, and a subject of it
        key = f"change/accuracy/mmlu/{group}"
        assert metrics[f"{key}/low"] <= metrics[key] <= metrics[f"{key}/high"]
    one = [
        line["metrics"]["accuracy"] for line in lines if line["group"] == "elementary_mathematics"
    ]
    expected = sum(scores["tuned"] - scores["base"] for scores in one) / len(one)
    assert metrics["change/accuracy/mmlu/elementary_mathematics"] == pytest.approx(expected)
    said = capsys.readouterr().out
    assert "groups of tasks: " in said
    # The interval of the whole task is not widened by those of its groups.
    wide = metrics["change/loss/mmlu/high"] - metrics["change/loss/mmlu/low"]
    rows = [line["metrics"]["loss"] for line in lines]
    tokens = np.array([line["tokens"] for line in lines], dtype=float)
    apart = np.array([row["tuned"] - row["base"] for row in rows])
    low, high = paired_bootstrap(apart, tokens, 1 - 0.05 / 3)  # of accuracy, by length, and loss
    assert wide == pytest.approx(high - low)


def test_a_killed_evaluation_resumes_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.evaluation import likelihood

    words = (f"model.path={TINY_BASE}", "evaluation.tasks=[{name: arc}, {name: lambada}]")
    whole = run_evaluation(tmp_path / "whole", *words)
    real, calls = likelihood.score, []

    def dies(model: object, requests: list[object], **how: object) -> object:
        calls.append(len(requests))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, requests, **how)

    monkeypatch.setattr(likelihood, "score", dies)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(tmp_path / "again", *words)
    assert run_evaluation(tmp_path / "again", *words) == whole
    assert calls == [24, 4, 4]  # ARC was not run again


def test_an_evaluation_without_data_is_refused(tmp_path: Path) -> None:
    words = (f"model.path={TINY_BASE}", "evaluation.exact_match=true")
    with pytest.raises(UserError, match=r"no data: .*evaluation=mmlu \(arc, gsm8k"):
        run_evaluation(tmp_path, *words)


@pytest.mark.slow
def test_two_ranks_give_the_same_metrics_as_one(shell: Shell, tmp_path: Path) -> None:
    tasks = "evaluation.tasks=[{name: arc}, {name: gsm8k, few_shot: 1}]"
    data = ROOT / "data_modules" / "samples" / "lists_test.json"
    words = [
        f"model.path={TINY_BASE}",
        f"data.datasets=[{{path: {data}}}]",
        "data.val_set_size=40",
        "evaluation.exact_match=true",
        "evaluation.metrics=[f1]",
        "evaluation.max_new_tokens=16",
        "trainer.precision=fp32",
        "trainer.accelerator=cpu",
        tasks,
    ]
    found = [run_evaluation(tmp_path / "1", *words)]
    shell.train_into(tmp_path / "2", *words, "trainer.devices=2", module="app.evaluate")
    found.append(json.loads((tmp_path / "2" / "metrics.json").read_text()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    lines = [list(map(json.loads, (tmp_path / n / "predictions.jsonl").open())) for n in "12"]
    for one, other in zip(*lines, strict=True):
        assert one | {"metrics": 0} == other | {"metrics": 0}


def test_a_failed_evaluation_is_continued_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.evaluate.run_shares", lambda *_: 3)  # as if its ranks had failed
    folder = f"output.dir={tmp_path}/it's mine"
    words = ["evaluation.tasks=[{name: arc}]", "trainer.accelerator=cpu", "trainer.devices=2"]
    with pytest.raises(SystemExit, match="3"):
        evaluate_in_ranks(load_config("evaluate", [f"model.path={TINY_BASE}", folder, *words]))
    said = capsys.readouterr().err
    assert shlex.split(said.partition(": type the same command with ")[2]) == [folder]


# lm-eval 0.4.13, HFLM in fp32, `acc`, `acc_norm` and the sums of log-likelihoods of the right
# answers, on the first 200 rows of each file without examples; LAMBADA's perplexity.
HARNESS = {
    "mmlu": (0.285, 0.285, -724.3836495876312),
    "arc": (0.28, 0.225, -10136.26174545288),
    "lambada": (0.025, None, -3106.873059153557),
}


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared test data")
def test_accuracy_and_loss_equal_lm_evaluation_harness(tmp_path: Path) -> None:
    listed = ", ".join(f"{{name: {name}, few_shot: 0, max_rows: 200}}" for name in HARNESS)
    metrics = run_evaluation(
        tmp_path,
        f"model.path={SHARED / 'models' / 'stories260K'}",
        f"evaluation.tasks=[{listed}]",
        f"evaluation.task_dir={SHARED / 'eval'}",
    )
    tokens = dict.fromkeys(HARNESS, 0)
    sums = dict.fromkeys(HARNESS, 0.0)
    for line in map(json.loads, (tmp_path / "predictions.jsonl").open()):
        sums[line["data_set"]] -= line["metrics"]["loss"]["base"] * line["tokens"]
        tokens[line["data_set"]] += line["tokens"]
    for name, (accuracy, by_length, logprob) in HARNESS.items():
        assert metrics[f"base/accuracy/{name}"] == accuracy
        assert metrics.get(f"base/accuracy_norm/{name}") == by_length
        assert sums[name] == pytest.approx(logprob, rel=1e-6)
        assert metrics[f"base/loss/{name}"] == pytest.approx(-logprob / tokens[name], rel=1e-6)
    assert metrics["base/perplexity/lambada"] == pytest.approx(5578136.375947928, rel=1e-6)
