"""Every verb opens a kept step of a run as it opens the run's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.assembly.base import with_checkpoint
from app.config import load_config
from app.run.find import check_selected, select_checkpoint
from app.training.checkpoint.store import CheckpointStore
from app.training.trainer import resolve_single_device
from common.errors import UserError
from tests.conftest import read_column
from tests.tiny import train_into

RUN = (
    "trainer.max_steps=3",
    "trainer.validate_every_steps=1",
    "trainer.checkpoint.every_steps=1",
    "trainer.checkpoint.keep_last=3",
    "evaluation.exact_match=false",
    "adapter.dropout=0",
    "logger=csv",
)
KINDS = {"full": ("adapter=full", "optimizer.lr=1e-4"), "pissa": ("adapter.init=pissa",)}


def evaluate_into(folder: Path, *words: str) -> dict[str, float]:
    from app.evaluate import evaluate

    config: Any = load_config("evaluate", [*words, f"output.dir={folder}"])
    return evaluate(config)


@pytest.mark.parametrize("kind", ["full", pytest.param("pissa", marks=pytest.mark.slow)])
def test_a_kept_step_is_evaluated_as_it_was_validated(kind: str, tmp_path: Path) -> None:
    words = [word for word in RUN if kind == "pissa" or "dropout" not in word]
    run = train_into(tmp_path / "run", *words, *KINDS[kind])
    validated = read_column(run, "val/loss")
    (run / "metrics.json").unlink()  # as of a run that is not finished
    steps = {"step-2": 2, "best": min((1, 2, 3), key=validated.get)}
    for wanted, step in steps.items():
        found = evaluate_into(tmp_path / wanted, f"run={run}", f"checkpoint={wanted}")
        assert found["tuned/val/loss"] == pytest.approx(validated[step], abs=2e-5), wanted
        assert next((tmp_path / wanted).glob("*-step-*")).name.endswith(f"-step-{step}")


@pytest.mark.slow
def test_a_step_of_schedule_free_adamw_is_opened_with_its_average(tmp_path: Path) -> None:
    """Whether a validation followed it or not."""
    words = ("optimizer=schedule_free", "schedule=constant", "optimizer.lr=3e-3", *RUN)
    saved = {}
    for name, every in (("validated", 1), ("not", 3)):
        run = train_into(tmp_path / name, *words, f"trainer.validate_every_steps={every}")
        config: Any = load_config(
            "chat", [f"run={run}", "checkpoint=step-2", "trainer.precision=fp32"]
        )
        env = resolve_single_device("auto", "fp32")
        opened = with_checkpoint(config, env, tmp_path / f"{name}-out")
        folder = Path(opened.adapter_path)
        saved[name] = load_file(folder / "adapter_model.safetensors")
    for name, tensor in saved["validated"].items():
        assert torch.allclose(tensor, saved["not"][name], atol=1e-6), name


def store_of(run: Path, metrics: dict[int, float | None]) -> CheckpointStore:
    store = CheckpointStore(run / "checkpoints", keep_last=9)
    for step, metric in metrics.items():
        store.begin(step)
        store.add_document(step, "training", {})
        store.commit(step, metric=metric)
    return store


def test_a_checkpoint_is_selected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.find.check_documents", lambda checkpoint: None)
    store_of(tmp_path, {2: 0.5, 5: 0.7, 9: None})
    for wanted, step in {"best": 2, "newest": 9, "step-5": 5}.items():
        assert select_checkpoint(tmp_path, wanted).step == step
    (tmp_path / "checkpoints" / "step-2" / "training.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        select_checkpoint(tmp_path, "step-2")
    for wanted in ("nwest", "step-x", "step-2/.."):
        assert "expected final, best" in check_selected(wanted, "run", None)[0]
    assert "type run=FOLDER" in check_selected("best", None, None)[0]


@pytest.mark.parametrize(
    ("metrics", "wanted", "said"),
    [
        ({2: None}, "best", "no undamaged checkpoint is ranked by a metric; the run has step-2"),
        ({}, "newest", "there is no valid checkpoint"),
        ({2: 0.1, 4: 0.2}, "step-3", "the run has step-2, step-4"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(
    metrics: dict[int, float | None], wanted: str, said: str, tmp_path: Path
) -> None:
    store_of(tmp_path, metrics)
    with pytest.raises(UserError, match=f"checkpoint={wanted}: {said}"):
        select_checkpoint(tmp_path, wanted)
