"""Overhead of the trainer: our loop compared with a plain one, on the same batches.

Both run the same forward, loss, clipping and AdamW on batches that are ready in memory; ours adds
Lightning and the metrics of every data set. They alternate in one process. Steps take about 100 ms
here: the overhead is a constant per step, not a share of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure

ROUNDS, STEPS, WARM_UP = 5, 24, 4
ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "data_modules" / "samples"


def measure() -> list[Figure]:
    """Measure the overhead of our loop relative to a step, and the time of a plain step."""
    from app.process.environment import configure_libraries, retain_freed_memory

    retain_freed_memory()  # as the verbs do
    configure_libraries(offline=True)
    plain, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            plain += plain_step_seconds()
            ours += our_step_seconds(Path(folder) / str(number))
    overhead = median(ours) / median(plain) - 1.0
    print(
        f"a step: plain {median(plain) * 1e3:.1f} ms, ours {median(ours) * 1e3:.1f} ms "
        f"({len(plain)} steps each, alternating in {ROUNDS} rounds)"
    )
    return [Figure(figure="loop/overhead", value=overhead, bar=0.03)]


def datamodule() -> Any:
    """The shipped mixture in packs of about 100 ms per step."""
    from transformers import AutoTokenizer

    from data_modules import (
        BatchSpec,
        DataConfig,
        DatasetConfig,
        DataSpec,
        FinetuneDataModule,
        ModelSpec,
        PackingConfig,
    )

    files = {"lists": "lists.json", "orders": "orders.jsonl", "people": "people.json"}
    module = FinetuneDataModule(
        DataSpec(
            config=DataConfig(
                datasets=[DatasetConfig(path=str(SAMPLES / f), name=n) for n, f in files.items()],
                sequence_len=1024,
                val_set_size=0,
            ),
            packing=PackingConfig(),
            tokenizer=AutoTokenizer.from_pretrained(SAMPLES / "tiny_base"),
            model=ModelSpec(context_len=1024),
            batching=BatchSpec(max_steps=STEPS),
            seed=42,
        )
    )
    module.setup("fit")
    return module


def builder() -> Callable[[], Any]:
    """Return the model builder, the same for both loops."""
    from app.model.adapter import LoraConfig
    from app.model.base import ModelConfig
    from app.model.build import build_model
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig

    config = ModelConfig(path=str(SAMPLES / "tiny_base"))
    parts = (QuantizationConfig(), "sdpa", LoraConfig(), RecomputeConfig(), "fp32")
    return partial(build_model, config, *parts)


def plain_step_seconds() -> list[float]:
    """Return the seconds of each step of a hand-written loop."""
    import torch

    from app.model.attention.inputs import attention_inputs
    from app.model.head import token_losses

    model = builder()()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    seconds = []
    for (batch,) in list(datamodule().train_dataloader()):
        started = time.perf_counter()
        ids = batch.input_ids
        inputs = attention_inputs(model, "sdpa", batch.document_lengths, ids)
        columns = batch.trained_columns
        logits = model(
            input_ids=ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=columns,
            **inputs,
        ).logits
        losses = token_losses(logits, batch.labels[:, columns])
        loss = (losses * batch.loss_weights[:, columns]).sum() / batch.step_weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def our_step_seconds(folder: Path) -> list[float]:
    """Return the seconds from the end of one step to the end of the next, under our trainer."""
    import lightning as L

    from app.model.adapter import LoraConfig
    from app.strategy.ddp import SingleDevice
    from app.training.callbacks import ProgressBar
    from app.training.metrics import Metrics
    from app.training.module import FinetuneModule
    from app.training.objective.objective import Sft
    from app.training.optimizers import AdamWConfig, ScheduleConfig, build_optimizer
    from app.training.trainer import (
        LoggerConfig,
        TrainerConfig,
        build_lightning_trainer,
        build_loggers,
        resolve_environment,
    )

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    folder.mkdir()
    data, clock = datamodule(), Clock()
    loggers = build_loggers(LoggerConfig(name="csv"), folder, data.dataset_names)
    metrics = Metrics(data.dataset_names, loggers, every_steps=10)
    module = FinetuneModule(
        builder(),
        backend="sdpa",
        objective=Sft(),
        build_optimizer=partial(
            build_optimizer, config=AdamWConfig(), adapter=LoraConfig(), lr=1e-4, fused=True
        ),
        schedule=ScheduleConfig(shape="constant"),
        total_steps=STEPS,
        is_packed=True,
        metrics=metrics,
    )
    config = TrainerConfig(accelerator="cpu", gradient_accumulation_steps=1, precision="fp32")
    trainer = build_lightning_trainer(
        config,
        env=resolve_environment(config),
        strategy=SingleDevice("cpu"),
        total_steps=STEPS,
        loggers=loggers,
        callbacks=[ProgressBar(), clock],
        folder=folder,
    )
    trainer.fit(module, datamodule=data)
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)][
        WARM_UP - 1 :
    ]
