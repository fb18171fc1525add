"""The recipe of the plain loops, as overrides and as plain PyTorch code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from data_modules import Batch, DataConfig, DatasetConfig, PackingConfig
from tests.batches import open_data
from tests.tiny import SAMPLES

LISTS = SAMPLES / "lists.json"
ALPACA_LISTS = DatasetConfig(path=str(LISTS), format="alpaca")
STEPS, ACCUMULATION, WARMUP, DECAY = 6, 2, 3, 0.1
LR = {"lora": 2e-4, "full": 2e-5}  # the defaults; at larger rates rounding errors exceed 1e-6


def words(base: Path, adapter: str, packing: str, sequence_len: int, micro: int) -> list[str]:
    """Return the overrides of the run under test."""
    return [
        f"model.path={base}",
        f"data.datasets=[{{path: {LISTS}, format: alpaca}}]",
        f"data.sequence_len={sequence_len}",
        f"adapter={adapter}",
        *(["adapter.dropout=0"] if adapter == "lora" else []),
        f"packing={packing}",
        f"optimizer.lr={LR[adapter]}",
        f"optimizer.weight_decay={DECAY}",
        f"trainer.max_steps={STEPS}",
        f"trainer.validate_every_steps={STEPS}",
        f"trainer.micro_batch_size={micro}",
        f"trainer.gradient_accumulation_steps={ACCUMULATION}",
        "trainer.precision=fp32",
        f"schedule.warmup_steps={WARMUP}",
    ]


def global_steps(
    base: Path, packing: str, sequence_len: int, micro: int, decoder_start: int | None = None
) -> list[list[Batch]]:
    """Return the micro-batches of every global step, as the data module yields them."""
    datamodule = open_data(
        DataConfig(datasets=[ALPACA_LISTS], sequence_len=sequence_len),
        base,
        packing=PackingConfig(method=packing),
        decoder_start=decoder_start,
        micro_batch_size=micro,
        accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
    )
    return list(datamodule.train_dataloader())


class PlainTraining:
    """Training with torch and peft only: `model` computes the loss, `step` updates the weights.

    AdamW decays matrices but not vectors, the gradient is clipped to norm 1, and the learning rate
    has a warm-up and a cosine decay.
    """

    def __init__(self, model: Any, adapter: str) -> None:
        if adapter == "lora":
            lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
            model = get_peft_model(model, lora)
        self.model = model.train()
        self.lr, self.steps_done = LR[adapter], 0
        self.trained = [p for p in model.parameters() if p.requires_grad]
        decayed = [p for p in self.trained if p.ndim >= 2]
        vectors = [p for p in self.trained if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr)

    def step(self) -> None:
        """Take an optimizer step with the accumulated gradients, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        done = self.steps_done
        share = (done - WARMUP) / (STEPS - WARMUP)
        rising = (done + 1) / WARMUP
        factor = rising if done < WARMUP else 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
