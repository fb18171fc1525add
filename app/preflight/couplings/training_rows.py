"""Rows on how a step goes: compilation, batch, optimizer and learning rate."""

from __future__ import annotations

import dataclasses
from typing import Any

from app.preflight.couplings.situation import Coupling

TRAINING_ROWS = (
    Coupling(
        "trainer.compile recompute.mode",
        lambda s: s.config.trainer.compile and s.config.recompute.mode == "selective",
        lambda s: (
            "recompute=selective keeps single operations of a layer, and trainer.compile=true "
            "makes others of them"
        ),
        lambda s: "recompute=full, or trainer.compile=false",
    ),
    Coupling(
        "trainer.global_batch_size trainer.gradient_accumulation_steps",
        lambda s: (
            s.config.trainer.global_batch_size is not None
            and s.config.trainer.gradient_accumulation_steps
            != _default(s.config.trainer, "gradient_accumulation_steps")
        ),
        lambda s: (
            f"trainer.global_batch_size={s.config.trainer.global_batch_size} and trainer."
            f"gradient_accumulation_steps={s.config.trainer.gradient_accumulation_steps} "
            "decide the same thing"
        ),
        lambda s: "one of the two",
    ),
    Coupling(
        "schedule.warmup_steps trainer.max_steps",
        lambda s: (
            s.config.schedule.warmup_steps is not None
            and s.config.trainer.max_steps is not None
            and s.config.schedule.warmup_steps >= s.config.trainer.max_steps > 0
        ),
        lambda s: (
            f"schedule.warmup_steps={s.config.schedule.warmup_steps} leaves nothing of "
            f"trainer.max_steps={s.config.trainer.max_steps}"
        ),
        lambda s: f"schedule.warmup_steps={max(s.config.trainer.max_steps // 10, 0)}",
    ),
    Coupling(
        "optimizer.name adapter.lora_plus_ratio",
        lambda s: (
            s.config.optimizer.name == "muon" and s.config.adapter.lora_plus_ratio is not None
        ),
        lambda s: (
            f"adapter.lora_plus_ratio={s.config.adapter.lora_plus_ratio:g} sets the learning rate "
            "of every B, which optimizer=muon sets by the matrix's own size"
        ),
        lambda s: "optimizer=adamw, or adapter.lora_plus_ratio=null",
    ),
    Coupling(
        "optimizer.name adapter.name",
        lambda s: s.config.optimizer.name == "muon" and s.config.adapter.name == "ia3",
        lambda s: "optimizer=muon moves matrices, and adapter=ia3 trains vectors alone",
        lambda s: "optimizer=adamw",
    ),
    Coupling(
        "optimizer.name schedule.shape",
        lambda s: (
            s.config.optimizer.name == "schedule_free" and s.config.schedule.shape != "constant"
        ),
        lambda s: (
            "optimizer=schedule_free averages its weights instead of lowering the learning rate, "
            f"which schedule={s.config.schedule.shape} lowers"
        ),
        lambda s: "schedule=constant (its warm-up stays), or optimizer=adamw",
    ),
    Coupling(
        "optimizer.name trainer.precision",
        lambda s: (
            s.config.optimizer.name == "schedule_free" and s.config.trainer.precision == "bf16-pure"
        ),
        lambda s: (
            "optimizer=schedule_free adds to an average of all steps, and trainer.precision="
            "bf16-pure has too few digits for the share of one step among hundreds"
        ),
        lambda s: "trainer.precision=bf16, or optimizer=adamw",
    ),
    Coupling(
        "optimizer.name optimizer.beta1",
        lambda s: s.config.optimizer.name == "schedule_free" and s.config.optimizer.beta1 == 0,
        lambda s: (
            "optimizer.beta1=0 leaves optimizer=schedule_free no share of the averaged weights"
        ),
        lambda s: "optimizer.beta1=0.9",
    ),
    Coupling(
        "optimizer.lr_by_pattern",
        lambda s: not all(0 < each.ratio <= 1000 for each in s.config.optimizer.lr_by_pattern),
        lambda s: (
            "optimizer.lr_by_pattern: a ratio is above 0 and at most 1000, and not "
            + ", ".join(
                f"{each.ratio:g} ({each.pattern})"
                for each in s.config.optimizer.lr_by_pattern
                if not 0 < each.ratio <= 1000
            )
        ),
        lambda s: "ratio: 0.1 (adapter=freeze keeps weights as they are)",
    ),
    Coupling(
        "schedule.decay_ratio schedule.shape",
        lambda s: (
            s.config.schedule.decay_ratio != _default(s.config.schedule, "decay_ratio")
            and s.config.schedule.shape != "wsd"
        ),
        lambda s: f"schedule.decay_ratio means nothing for schedule={s.config.schedule.shape}",
        lambda s: "schedule=wsd beside it",
    ),
    Coupling(
        "schedule.start_lr_ratio schedule.shape",
        lambda s: (
            s.config.schedule.start_lr_ratio != _default(s.config.schedule, "start_lr_ratio")
            and s.config.schedule.shape != "one_cycle"
        ),
        lambda s: f"schedule.start_lr_ratio means nothing for schedule={s.config.schedule.shape}",
        lambda s: "schedule=one_cycle beside it",
    ),
    Coupling(
        "schedule.shape schedule.warmup_ratio schedule.warmup_steps schedule.decay_ratio",
        lambda s: (
            s.config.schedule.shape == "wsd"
            and s.config.schedule.warmup_steps is None
            and s.config.schedule.warmup_ratio + s.config.schedule.decay_ratio > 1
        ),
        lambda s: (
            f"schedule.warmup_ratio={s.config.schedule.warmup_ratio:g} and schedule.decay_ratio="
            f"{s.config.schedule.decay_ratio:g} are more than all steps"
        ),
        lambda s: f"schedule.decay_ratio={1 - s.config.schedule.warmup_ratio:g}",
    ),
)


def _default(part: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(part) if field.name == name)
