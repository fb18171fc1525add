"""Ours, with the parts of `app.train`. `python -m benchmarks.training.loft_run TASK.json`."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.training.clock import Clock
from benchmarks.training.task import SEQUENCE_LEN, TOKENS_A_STEP, Task


def main(task: Task) -> None:
    """Train and report."""
    from app.process.environment import configure_libraries

    configure_libraries(offline=True)
    import lightning as L
    from transformers import AutoTokenizer

    from app.model.adapter import FullConfig, LoraConfig
    from app.model.base import ModelConfig
    from app.model.build import build_model
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig
    from app.strategy.ddp import SingleDevice
    from app.training.metrics import Metrics
    from app.training.module import FinetuneModule
    from app.training.objective.objective import Sft
    from app.training.optimizers import AdamWConfig, ScheduleConfig, build_optimizer
    from app.training.trainer import TrainerConfig, build_lightning_trainer, resolve_environment
    from data_modules import (
        BatchSpec,
        DataConfig,
        DatasetConfig,
        DataSpec,
        FinetuneDataModule,
        ModelSpec,
        PackingConfig,
    )

    L.seed_everything(0, verbose=False)
    clock = Clock(task.warm_up)
    config = TrainerConfig(
        accelerator="cpu",
        gradient_accumulation_steps=TOKENS_A_STEP // SEQUENCE_LEN,
        precision=task.precision,
        log_every_steps=1,
    )
    env = resolve_environment(config)
    row_file = DatasetConfig(path=f"{task.folder}/rows.jsonl", format="pretokenized", name="rows")
    data = FinetuneDataModule(
        DataSpec(
            config=DataConfig(datasets=[row_file], sequence_len=SEQUENCE_LEN, val_set_size=0),
            packing=PackingConfig(),
            tokenizer=AutoTokenizer.from_pretrained(f"{task.folder}/base"),
            model=ModelSpec(context_len=SEQUENCE_LEN),
            batching=BatchSpec(
                accumulation_steps=env.accumulation,
                max_steps=task.steps,
                row_multiple=env.row_multiple,
            ),
            seed=0,
        )
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

    metrics = Metrics(data.dataset_names, [Losses()], config.log_every_steps)
    adapter = LoraConfig(dropout=0.0) if task.adapter == "lora" else FullConfig()
    parts = (QuantizationConfig(), "sdpa", adapter, RecomputeConfig(), task.precision)
    module = FinetuneModule(
        partial(build_model, ModelConfig(path=f"{task.folder}/base"), *parts),
        backend="sdpa",
        objective=Sft(),
        build_optimizer=partial(
            build_optimizer, config=AdamWConfig(), adapter=adapter, lr=task.lr, fused=True
        ),
        schedule=ScheduleConfig(shape="constant", warmup_steps=0),
        total_steps=task.steps,
        is_packed=True,
        metrics=metrics,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_lightning_trainer(
            config,
            env=env,
            strategy=SingleDevice("cpu"),
            total_steps=task.steps,
            loggers=[],
            callbacks=[Watch()],
            folder=Path(folder),
        )
        trainer.fit(module, datamodule=data)
    clock.report()


if __name__ == "__main__":
    from app.process.environment import retain_freed_memory

    retain_freed_memory()  # as a run on a CPU does
    main(Task.read(sys.argv[1]))
