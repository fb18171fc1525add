"""A classifier reaches the accuracy of a plain transformers Trainer on the same steps."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from app.config import load_config
from app.python import train
from data_modules import Batch
from tests.conftest import ROOT
from tests.tiny import TINY_BASE

QUESTIONS = ROOT.parent / "shared" / "data" / "eval" / "mmlu_test.jsonl"
SUBJECTS = ["abstract_algebra", "high_school_geography", "us_foreign_policy"]
STEPS, ROWS, LR = 60, 8, 5e-4

pytestmark = pytest.mark.slow


def examples_of(batch: Batch) -> list[dict[str, Any]]:
    """Return the texts of a batch, each in a row of its own, with their classes."""
    assert batch.unit_labels is not None
    return [
        {"input_ids": row[:length].tolist(), "labels": int(label)}
        for row, (length,), label in zip(
            batch.input_ids, batch.document_lengths, batch.unit_labels, strict=True
        )
    ]


def test_a_plain_trainer_reaches_the_same_accuracy_in_the_same_steps(tmp_path: Path) -> None:
    if not QUESTIONS.exists():
        pytest.skip("../shared/data is absent")
    rows = [row for row in map(json.loads, QUESTIONS.open()) if row["subject"] in SUBJECTS]
    texts = [{"text": row["question"][:160], "label": row["subject"]} for row in rows]
    others = texts[1::3] + texts[2::3]
    whole_batches = others[: len(others) // ROWS * ROWS]  # so that no batch ends with the epoch
    for name, part in (("held_out", texts[::3]), ("rows", whole_batches)):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    weights: dict[str, torch.Tensor] = {}
    trained: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            weights.update((n, w.detach().clone()) for n, w in module.model.named_parameters())

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            trained.extend(itertools.chain.from_iterable(map(examples_of, rest[1])))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            for batch in trainer.datamodule.val_dataloader():
                held_out.extend(examples_of(batch))

    os.environ.pop("LOFT_RUN_DIR", None)
    words = [
        *("objective=classify", f"model.labels=[{','.join(SUBJECTS)}]", f"model.path={TINY_BASE}"),
        *(f"data.datasets=[{{path: {tmp_path / 'rows.json'}}}]", "data.val_set_size=0"),
        *(f"data.val_datasets=[{{path: {tmp_path / 'held_out.json'}}}]", "data.sequence_len=256"),
        *("adapter=full", "packing=none", f"optimizer.lr={LR}", "trainer.precision=fp32"),
        *("schedule=constant", "schedule.warmup_steps=0", "output.from=last", "output.dtype=fp32"),
        *(f"trainer.micro_batch_size={ROWS}", "trainer.gradient_accumulation_steps=1"),
        *(f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu", "logger=csv"),
        f"output.dir={tmp_path / 'run'}",
    ]
    run = train(load_config("train", words), [Watch()])
    plain = AutoModelForSequenceClassification.from_pretrained(
        TINY_BASE, dtype=torch.float32, num_labels=len(SUBJECTS)
    )
    plain.load_state_dict(weights, strict=False)
    arguments = TrainingArguments(
        str(tmp_path / "plain"),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    trainer = Trainer(plain, arguments, train_dataset=trained, processing_class=tokenizer)
    trainer.train()
    found = trainer.predict(held_out)
    expected = float(np.mean(found.predictions.argmax(1) == found.label_ids))
    ours = run.metrics["tuned/val/accuracy"]
    assert len(trained) == STEPS * ROWS
    assert ours == pytest.approx(expected, abs=0.01)
    assert ours > max(np.bincount(found.label_ids)) / len(held_out) + 0.1
