"""Ours, with the parts of `app.train`. `python -m benchmarks.training.loft_run TASK.json`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.parts import build_data, builder, fit
from benchmarks.training.clock import Clock
from benchmarks.training.task import SEQUENCE_LEN, TOKENS_A_STEP, Task


def main(task: Task) -> None:
    """Train and report."""
    from app.process.environment import configure_libraries

    configure_libraries(offline=True)
    import lightning as L

    from app.model.adapter import FullConfig, LoraConfig
    from app.strategy.ddp import SingleDevice
    from app.training.trainer import TrainerConfig, resolve_environment
    from data_modules import DatasetConfig

    L.seed_everything(0, verbose=False)
    clock = Clock(task.warm_up)
    config = TrainerConfig(
        accelerator="cpu",
        gradient_accumulation_steps=TOKENS_A_STEP // SEQUENCE_LEN,
        precision=task.precision,
        log_every_steps=1,
    )
    env = resolve_environment(config)
    base = Path(task.folder, "base")
    row_file = DatasetConfig(path=f"{task.folder}/rows.jsonl", format="pretokenized", name="rows")
    data = build_data(
        base,
        [row_file],
        SEQUENCE_LEN,
        accumulation_steps=env.accumulation,
        max_steps=task.steps,
        row_multiple=env.row_multiple,
    )
    data.setup("fit")

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            clock.tokens.append(sum(batch.num_tokens for batch in rest[2]))
            clock.step()

    class Losses:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if "train/loss" in metrics:
                clock.losses.append(metrics["train/loss"])

    adapter = LoraConfig(dropout=0.0) if task.adapter == "lora" else FullConfig()
    with tempfile.TemporaryDirectory() as folder:
        fit(
            builder(base, adapter, task.precision),
            adapter,
            data,
            config,
            Path(folder),
            env=env,
            strategy=SingleDevice("cpu"),
            steps=task.steps,
            lr=task.lr,
            callbacks=[Watch()],
            losses=[Losses()],
        )
    clock.report()


if __name__ == "__main__":
    from app.process.environment import retain_freed_memory

    retain_freed_memory()  # as a run on a CPU does
    main(Task.read(sys.argv[1]))
