"""What a run ends with: the weights that were trained, of the step that was asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.config import load_config
from app.process.status import end_status
from app.status import read_status
from app.training.checkpoint.store import CheckpointStore
from app.training.metrics import Metrics
from tests.conftest import read_column
from tests.resumed import go_on
from tests.tiny import small_run, train_into

FULL = (
    "adapter=full",
    "optimizer.lr=2e-5",
    "data.val_set_size=20",
    "trainer.validate_every_steps=4",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "evaluation.exact_match=false",
    "logger=csv",
)


def figures(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "metrics.json").read_text())
    return found


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*/*model.safetensors")))


def said(run: Path) -> str:
    return (run / "train.log").read_text()


def checkpoint_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run / "checkpoints")
    (found,) = (saved for saved in store.checkpoints() if saved.step == step)
    return found.tensors("model")


def test_a_small_change_of_all_weights_is_rounded_only_within_noise_or_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_into(tmp_path / "run", *FULL)
    assert "rounding to bf16 changes val/loss" in said(run)
    assert "saved in fp32; output.dtype=bf16 would save half the bytes" in said(run)
    assert "model verified: reloaded logits match (max difference 0)" in said(run)
    validated = read_column(run, "val/loss")[4]
    assert figures(run)["tuned/val/loss"] == validated
    assert json.loads((run / "model" / "config.json").read_text())["dtype"] == "float32"
    trained, saved = checkpoint_at(run, 4), saved_weights(run)
    assert all(torch.equal(saved[name], tensor) for name, tensor in trained.items())

    (run / "metrics.json").unlink()
    go_on(run, "output.dtype=bf16")
    assert "model verified: reloaded as written in bf16, which moves the logits" in said(run)
    assert figures(run)["tuned/val/loss"] > validated
    assert {tensor.dtype for tensor in saved_weights(run).values()} == {torch.bfloat16}

    (run / "metrics.json").unlink()
    monkeypatch.setattr("app.assembly.finish._compare_losses", lambda *rows: (1e-3, -1e-3))
    go_on(run, "output.dtype=auto")
    assert ", within noise): saved in bf16" in said(run)
    assert {tensor.dtype for tensor in saved_weights(run).values()} == {torch.bfloat16}


def test_without_validation_rows_nothing_is_rounded(tmp_path: Path) -> None:
    words = [word for word in FULL if not word.startswith("data.val_set_size")]
    run = train_into(tmp_path / "run", *words, "data.val_set_size=0", "trainer.max_steps=1")
    assert "there are no validation rows to measure what rounding to bf16 costs" in said(run)
    assert {tensor.dtype for tensor in saved_weights(run).values()} == {torch.float32}


def test_a_run_that_ends_before_its_last_file_is_not_done_and_one_after_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as killed:

        def kill(*given: Any) -> None:
            assert "Base vs tuned" in (folder / "report.html").read_text()
            assert (folder / "adapter/README.md").exists()
            raise MemoryError

        killed.setattr("app.assembly.finish.record_result", kill)
        with pytest.raises(MemoryError):
            train_into(folder, "evaluation.exact_match=false", "trainer.max_steps=1")
    assert not (folder / "metrics.json").exists()
    go_on(folder)
    assert read_status(folder)["state"] == "finished"
    found = figures(folder)
    assert found["tuned/val/perplexity"] == pytest.approx(math.exp(found["tuned/val/loss"]))
    for state, after in (("evaluating", "finished"), ("failed", "failed")):
        end_status(folder, state, 4)
        go_on(folder)
        assert read_status(folder)["state"] == after


RATED = {0: 0.9, 1: 0.5, 2: 0.1, 3: 0.3, 4: 0.2, 5: 0.4}
EARLY = (
    "trainer.max_steps=8",
    "trainer.validate_every_steps=1",
    "trainer.early_stopping_patience=3",
    "trainer.checkpoint.every_steps=100",
    "trainer.checkpoint.keep_last=1",
    "evaluation.exact_match=false",
    "logger=csv",
)


@pytest.fixture
def rated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rate steps so that step 2 is the best, whatever they have learned."""

    def monitored_at(self: Metrics, step: int) -> float | None:
        return RATED[step] if self.validated_step == step else None

    monkeypatch.setattr(Metrics, "monitored_at", monitored_at)


def test_an_early_stop_ends_with_the_best_step_although_no_save_was_due(
    rated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a run that resumes, and says afterwards where it stopped."""
    run = train_into(tmp_path / "run", *EARLY)
    assert "result: step 2 of 5, the best by val/loss (0.1000)" in capsys.readouterr().out
    assert json.loads((run / "manifest.json").read_text())["result"] == {
        "step": 2,
        "last": 5,
        "monitor": "val/loss",
        "value": 0.1,
    }
    check_saved_step(run, 2)
    assert figures(run)["tuned/val/loss"] == pytest.approx(read_column(run, "val/loss")[2])
    train_into(run, *EARLY, f"resume={run}")
    assert "done at step 5 of 8, stopped early" in capsys.readouterr().out


def check_saved_step(run: Path, step: int) -> None:
    """Check that the saved adapter has the weights of `step`, and not those of another one."""
    saved = {name.split("model.", 2)[-1]: tensor for name, tensor in saved_weights(run).items()}
    trained = checkpoint_at(run, step)
    assert len(saved) == len(trained) > 0
    for tensor in trained.values():
        assert any(
            other.shape == tensor.shape and torch.equal(other, tensor) for other in saved.values()
        )


def test_the_last_step_is_the_result_if_asked_for(
    rated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_into(tmp_path / "run", *EARLY, "trainer.max_steps=3", "output.from=last")
    assert "result: step 3, the last" in capsys.readouterr().out
    check_saved_step(run, 3)


@pytest.mark.parametrize(
    ("words", "is_best"),
    [
        ((), False),
        (("trainer.early_stopping_patience=2",), True),
        (("trainer.checkpoint.keep_best=1",), True),
        (("trainer.checkpoint.monitor=val/loss/lists",), True),
        (("output.from=best",), True),
        (("trainer.checkpoint.keep_best=1", "output.from=last"), False),
    ],
)
def test_a_monitor_makes_the_best_step_the_result(words: tuple[str, ...], is_best: bool) -> None:
    config: Any = load_config("train", small_run(*words))
    assert config.ends_with_best == is_best
