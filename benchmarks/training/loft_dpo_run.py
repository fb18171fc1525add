"""Ours, DPO: the whole of `app.train`. `python -m benchmarks.training.loft_dpo_run TASK.json`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import lightning as L

from app import load_config, train
from benchmarks.training.clock import Clock
from benchmarks.training.task import SEQUENCE_LEN, TOKENS_A_STEP, Task


def main(task: Task) -> None:
    """Train and report."""
    clock = Clock(task.warm_up)

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            clock.tokens.append(sum(batch.num_tokens for batch in rest[2]))
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOFT_DATA_CACHE"] = f"{folder}/cache"
        settings = {
            "model.path": f"{task.folder}/base",
            "data.datasets": [{"path": f"{task.folder}/pairs.jsonl", "format": "preference"}],
            "data.sequence_len": SEQUENCE_LEN,
            "data.val_set_size": 0,
            "objective": "dpo",
            "adapter.r": 16,
            "adapter.alpha": 32,
            "adapter.dropout": 0,
            "optimizer.lr": task.lr,
            "schedule": "constant",
            "schedule.warmup_steps": 0,
            "trainer.accelerator": "cpu",
            "trainer.precision": task.precision,
            "trainer.gradient_accumulation_steps": TOKENS_A_STEP // SEQUENCE_LEN,
            "trainer.max_steps": task.steps,
            "trainer.log_every_steps": 1,
            "output.dir": f"{folder}/run",
        }
        with contextlib.redirect_stdout(sys.stderr):
            run = train(load_config("train", settings), [Watch()])
        clock.losses = [row["train/loss"] for row in run.rows if "train/loss" in row]
    clock.report()


if __name__ == "__main__":
    from app.process.environment import retain_freed_memory

    retain_freed_memory()  # as a run on a CPU does
    main(Task.read(sys.argv[1]))
