"""Overhead of the trainer: our loop compared with a plain one, on the same batches.

Both run the same forward, loss, clipping and AdamW on batches that are ready in memory; ours adds
Lightning and the metrics of every data set. They alternate in one process. Steps take about 100 ms
here: the overhead is a constant per step, not a share of it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure
from benchmarks.parts import build_data, builder, fit

ROUNDS, STEPS, WARM_UP = 5, 24, 4
ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "data_modules" / "samples"
BASE = SAMPLES / "tiny_base"


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
    from data_modules import DatasetConfig

    files = {"lists": "lists.json", "orders": "orders.jsonl", "people": "people.json"}
    datasets = [DatasetConfig(path=str(SAMPLES / f), name=n) for n, f in files.items()]
    module = build_data(BASE, datasets, 1024, seed=42, max_steps=STEPS)
    module.setup("fit")
    return module


def plain_step_seconds() -> list[float]:
    """Return the seconds of each step of a hand-written loop."""
    import torch

    from app.model.adapter import LoraConfig
    from app.model.attention.inputs import attention_inputs
    from app.model.head import token_losses

    model = builder(BASE, LoraConfig())()
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
    from app.training.trainer import (
        LoggerConfig,
        TrainerConfig,
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
    config = TrainerConfig(accelerator="cpu", gradient_accumulation_steps=1, precision="fp32")
    fit(
        builder(BASE, LoraConfig()),
        LoraConfig(),
        data,
        config,
        folder,
        env=resolve_environment(config),
        strategy=SingleDevice("cpu"),
        steps=STEPS,
        lr=1e-4,
        callbacks=[ProgressBar(), clock],
        loggers=loggers,
    )
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)][
        WARM_UP - 1 :
    ]
