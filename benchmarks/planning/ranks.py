"""Peak bytes that two ranks of `app.train` allocate, compared with the plan.

The real strategies, trainer and module on two processes of a CPU; the peak is of those after the
first: its gradients are there then, and no validation has freed them.
`python -m benchmarks.planning.ranks` prints a line a case.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planning.tracked import BASES, Compared, on_a_cpu
from benchmarks.strategies import import_all, on_ranks

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
LENGTH = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    strategy: str
    adapter: str
    recompute: str
    precision: str
    micro_batch_size: int
    accumulation: int
    base: str = "llama"

    def __str__(self) -> str:
        return (
            f"{self.base} {self.adapter} {self.strategy} {self.recompute} {self.precision} "
            f"{self.micro_batch_size} x {LENGTH}, {self.accumulation} a step"
        )


def cases() -> Iterator[Case]:
    """Yield strategy x adapter x recompute, in other precisions and micro-batches in turn."""
    ways = itertools.product(STRATEGIES, ("lora", "full"), ("none", "full"))
    for number, way in enumerate(ways):
        micro, accumulation = ((1, 1), (2, 1), (1, 2))[number % 3]
        yield Case(*way, "fp32", micro, accumulation)
    for strategy, adapter in itertools.product(STRATEGIES, ("lora", "full")):
        yield Case(strategy, adapter, "none", "bf16", 1, 1)
    for strategy in STRATEGIES:
        yield Case(strategy, "lora", "full", "fp32", 2, 2, "wide")
        yield Case(strategy, "full", "none", "bf16-pure", 1, 1, "qwen2")


def words_of(case: Case, folder: Path) -> list[str]:
    """Return the overrides of a case; its base and rows are written to `folder`."""
    from data_modules.samples import __path__ as samples

    folder.mkdir()
    numbers = ", ".join(f"{key}: {str(value).lower()}" for key, value in BASES[case.base].items())
    documents = ([index % 256, *[1] * (LENGTH - 1)] for index in range(64))
    rows = (json.dumps({"input_ids": ids, "labels": ids}) for ids in documents)
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return [
        f"model.architecture={{{numbers}}}",
        "model.from_scratch=true",
        f"model.tokenizer_path={Path(samples[0]) / 'tiny_base'}",
        "model.stop_tokens=[]",
        f"data.datasets=[{{path: {folder / 'rows.jsonl'}, format: pretokenized}}]",
        f"data.sequence_len={LENGTH}",
        f"data.cache_dir={folder / 'cache'}",
        "data.val_set_size=0",
        "data.num_workers=0",
        f"output.dir={folder / 'run'}",
        f"adapter={case.adapter}",
        f"strategy={case.strategy}",
        f"recompute={case.recompute}",
        f"trainer.precision={case.precision}",
        f"trainer.micro_batch_size={case.micro_batch_size}",
        f"trainer.gradient_accumulation_steps={case.accumulation}",
        "trainer.max_steps=3",
        "trainer.validate_every_steps=3",
        "trainer.kernels=torch",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
    ]


class Trained(Exception):
    """Stop the command after the fit."""


def measure(words: list[str]) -> tuple[float, float]:
    """Return planned and measured bytes of this rank."""
    from unittest.mock import patch

    import lightning as L

    import app.assembly.auto
    from app.config import load_config
    from app.train import train
    from benchmarks.planning.live import LiveResized

    logging.disable(logging.INFO)
    planned: list[Any] = []
    live = LiveResized()

    class Reset(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                live.peak = 0

    check, fit = app.assembly.auto.check_plan, L.Trainer.fit

    def keep_plan(*words: Any) -> Any:
        planned.append(words[-1])
        return check(*words)

    def track(trainer: Any, module: Any, data: Any, **how: Any) -> None:
        trainer.callbacks.append(Reset())
        with live:
            fit(trainer, module, data, **how)
        raise Trained

    config: Any = load_config("train", words)
    with (
        patch.object(app.assembly.auto, "check_plan", keep_plan),
        patch.object(L.Trainer, "fit", track),
        contextlib.suppress(Trained),
    ):
        train(config)
    run = planned[0]
    lengths = [LENGTH] * run.micro_batch_size
    return on_a_cpu(replace(run, fuses_norm_and_gate=False), lengths), float(live.peak)


def compare(only: str = "") -> None:
    """Print every case whose name contains `only`, when it ends."""
    import_all()
    with tempfile.TemporaryDirectory() as parent:
        for number, case in enumerate(cases()):
            if not all(word in str(case).split() for word in only.split()):
                continue
            words = words_of(case, Path(parent) / str(number))
            with contextlib.redirect_stderr(io.StringIO()):
                found = on_ranks(measure, words)
            Compared(case, *max(found, key=lambda one: one[1])).show()


if __name__ == "__main__":
    compare(" ".join(sys.argv[1:]))
