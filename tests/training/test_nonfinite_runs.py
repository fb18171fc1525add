"""Whole runs with nonfinite steps: how they end, what they save, and how they resume."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import run_verb
from app.train import train
from app.training.checkpoint.saving import CheckpointSaver
from app.training.checkpoint.store import CheckpointStore
from tests.reliability.shell import Shell
from tests.runs import check_same_run
from tests.tiny import SAMPLES, small_run

pytestmark = pytest.mark.slow

RUN = (
    "trainer.max_steps=6",
    "trainer.validate_every_steps=5",
    "trainer.checkpoint.every_steps=2",
    "trainer.checkpoint.keep_last=9",
    "trainer.log_every_steps=4",
    "evaluation.exact_match=false",
    "adapter.dropout=0.1",
    "logger=csv",
)
STREAM = ("data.streaming=true", "data.mixture.weights=rows")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the verb in this process; return its exit code and stderr."""

    def run(folder: Path, *words: str) -> tuple[int, str]:
        for name in ("LOFT_RUN_DIR", "LOFT_RESUME_STEP"):
            os.environ.pop(name, None)
        code = run_verb("train", train, words=[*small_run(*RUN, *words), f"output.dir={folder}"])
        return code, capsys.readouterr().err

    return run


def saved_steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(folder / "checkpoints").checkpoints()]


def losses(folder: Path) -> dict[int, str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {int(r["step"]): r["train/loss"] for r in csv.DictReader(file) if r["train/loss"]}


def test_a_run_stops_naming_the_rows_and_resumes_as_if_uninterrupted(
    tmp_path: Path, run: Any
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert run(whole)[0] == 0
    words = ("resume=auto", "faults=[nan@3,grad_inf@5]")
    code, output = run(folder, *words)
    assert code == 4
    assert "error (training stopped): step 3: loss nan (of " in output
    named = re.findall(rf"{re.escape(str(SAMPLES))}/\w+\.jsonl?:(\d+)", output)
    assert named and all(int(line) >= 1 for line in named)
    assert saved_steps(folder) == [2] and losses(folder)[3] == "nan"
    assert not (folder / "adapter").exists() and not (folder / "metrics.json").exists()
    code, output = run(folder, *words)
    assert code == 4
    assert re.search(r"step 5: loss [\d.]+, gradient norm (inf|nan); rows ", output)
    assert saved_steps(folder) == [2, 4]
    assert run(folder, *words)[0] == 0
    check_same_run(folder, whole)


def test_skipped_steps_are_counted_across_a_resume_of_a_run(tmp_path: Path, run: Any) -> None:
    words = ("trainer.max_skipped_steps=2", "faults=[inf@1,grad_nan@5]", "resume=auto")
    whole, folder = tmp_path / "whole", tmp_path / "run"
    code, output = run(whole, *words)
    assert code == 0, output
    assert json.loads((whole / "metrics.json").read_text())["train/skipped_steps"] == 2.0
    assert losses(whole)[1] == "inf"
    for file in whole.glob("checkpoints/*/*.json"):
        text = file.read_text()
        assert not re.search(r"NaN|Infinity", text), file
    with pytest.MonkeyPatch.context() as patch:
        save = CheckpointSaver.save

        def save_then_die(saver: CheckpointSaver, trainer: Any, module: Any) -> None:
            save(saver, trainer, module)
            if trainer.global_step == 4:
                raise OSError("killed")

        patch.setattr(CheckpointSaver, "save", save_then_die)
        assert run(folder, *words)[0] == 3
    assert saved_steps(folder) == [2, 4]
    assert run(folder, *words)[0] == 0
    check_same_run(folder, whole)
    assert run(tmp_path / "less", *words[1:], "trainer.max_skipped_steps=1")[0] == 4


def test_nonfinite_moments_are_not_saved(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_step = CheckpointSaver._finish_step

    def spoil(saver: CheckpointSaver, trainer: Any, module: Any) -> None:
        if trainer.global_step == 4:
            with torch.no_grad():
                next(reversed(module.checkpoint_tensors()[1].values())).fill_(torch.inf)
        finish_step(saver, trainer, module)

    monkeypatch.setattr(CheckpointSaver, "_finish_step", spoil)
    code, output = run(tmp_path / "run")
    assert code == 4
    assert "step 4: " in output and "has non-finite values" in output
    assert saved_steps(tmp_path / "run") == [2]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


def test_a_stream_names_its_data_set(tmp_path: Path, run: Any) -> None:
    code, output = run(tmp_path / "run", *STREAM, "faults=[nan@3]")
    assert code == 4, output
    assert (
        "step 3: loss nan (of " in output and "the rows of a stream have no line numbers" in output
    )


def test_a_nonfinite_value_on_one_rank_stops_both_with_one_message(
    shell: Shell, tmp_path: Path
) -> None:
    words = [*small_run(*RUN, "trainer.devices=2"), "faults=[nan:1@3]"]
    output = shell.train_into(tmp_path / "run", *words, code=4)
    assert output.count("error (training stopped): ") == 1
    _, _, message = output.partition("error (training stopped): ")
    assert message.startswith("step 3: loss nan (of ") and f"{SAMPLES}" in message
    assert saved_steps(tmp_path / "run") == [2]
