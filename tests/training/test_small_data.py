"""An epoch of little data has at least ten steps, in a run, a preview and a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.plan import plan
from app.preview import preview
from app.strategy.settings import StrategyConfig
from app.training.trainer import TrainerConfig, adapts_to_small_data
from data_modules import fit_accumulation
from tests.resumed import go_on
from tests.tiny import SAMPLES, small_run, train_into

AUTO = (
    "trainer.gradient_accumulation_steps=auto",
    "trainer.max_steps=null",
    f"data.datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}}]",
)


@pytest.mark.parametrize(
    ("packs", "at_once", "expected"),
    [(1000, 1, 8), (80, 1, 8), (79, 1, 7), (20, 1, 2), (9, 1, 1), (80, 4, 2), (1, 64, 1)],
)
def test_an_epoch_has_ten_steps_if_it_has_the_packs(
    packs: int, at_once: int, expected: int
) -> None:
    assert fit_accumulation(8, packs, at_once) == expected


def batch_of(run: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return manifest["global_batch"] | {"total_steps": manifest["total_steps"]}


@pytest.mark.slow
def test_a_run_lowers_its_global_batch_says_so_and_keeps_it_when_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_into(tmp_path / "run", *AUTO)
    batch = batch_of(run)
    assert batch["gradient_accumulation_steps"] < 8
    assert batch["total_steps"] >= 10
    said = f"global batch: {batch['packs']}, not 8"
    assert said in (run / "train.log").read_text()

    longer = f"trainer.max_steps={batch['total_steps'] + 1}"
    go_on(run, longer, "resume_allow=[epochs]")
    assert batch_of(run) == batch | {"total_steps": batch["total_steps"] + 1}

    words = [word for word in small_run(*AUTO) if not word.startswith("evaluation.")]
    capsys.readouterr()
    preview(load_config("preview", [*words, f"output.dir={tmp_path / 'preview'}"]))
    assert said in " ".join(capsys.readouterr().out.split())
    on_card = ["hardware=h100", f"output.dir={tmp_path / 'plan'}"]
    plan(load_config("plan", [*words, *on_card]))
    settings = json.loads((tmp_path / "plan" / "plan.json").read_text())["settings"]
    assert settings["accumulation"] * settings["micro_batch_size"] == batch["packs"]


@pytest.mark.parametrize(
    "typed", [{"global_batch_size": 8}, {"gradient_accumulation_steps": 8}, {"max_steps": 3}, {}]
)
def test_a_typed_batch_or_number_of_steps_stays(typed: dict[str, int]) -> None:
    assert adapts_to_small_data(TrainerConfig(**typed), StrategyConfig()) is not bool(typed)
