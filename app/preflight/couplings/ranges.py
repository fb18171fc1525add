"""The values that each number may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from app.strategy.settings import HOMES


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """One row: the values that a number may have; null is always left to whoever resolves it."""

    key: str
    holds: Callable[[Any], bool]
    text: str


def _at_least_one(value: Any) -> bool:
    return bool(value >= 1)


def _share(value: Any) -> bool:
    return bool(0 <= value < 1)


RANGES = (
    Range("supervise.max_restarts", lambda v: v >= 0, "0 or more"),
    Range("supervise.hang_minutes", lambda v: 0 < v < math.inf, "above 0 (10 is usual), or null"),
    Range("recompute.every", _at_least_one, "1 or more (2 recomputes every other layer)"),
    Range("adapter.r", _at_least_one, "1 or more (8 to 64 is usual)"),
    Range("adapter.alpha", lambda v: 0 < v < math.inf, "above 0 (the rank or twice it is usual)"),
    Range("adapter.dropout", _share, "0 or more, below 1"),
    Range(
        "adapter.neftune_alpha", lambda v: 0 < v < math.inf, "above 0 (5 to 15 is usual), or null"
    ),
    Range(
        "adapter.lora_plus_ratio", lambda v: 0 < v <= 1000, "above 0, at most 1000 (16 is usual)"
    ),
    Range("adapter.lora_plus_weight_decay", lambda v: 0 <= v <= 10, "from 0 to 10"),
    Range(
        "optimizer.lr", lambda v: 0 < v <= 10, "above 0, at most 10 (2e-4 for LoRA, 2e-5 for full)"
    ),
    Range("optimizer.weight_decay", lambda v: 0 <= v <= 10, "from 0 to 10 (0 to 0.1 is usual)"),
    Range("optimizer.base_batch_size", _at_least_one, "1 or more"),
    Range("optimizer.beta1", _share, "0 or more, below 1"),
    Range("optimizer.beta2", _share, "0 or more, below 1"),
    Range("optimizer.eps", lambda v: 0 < v < 1, "above 0, below 1"),
    Range("optimizer.momentum", _share, "0 or more, below 1"),
    Range("optimizer.matrix_lr_ratio", lambda v: 0 < v <= 1000, "above 0, at most 1000"),
    Range("optimizer.beta2_decay", lambda v: -1 <= v < 0, "from -1, below 0 (-0.8 is usual)"),
    Range("optimizer.clip_threshold", lambda v: 0 < v < math.inf, "above 0 (1.0 is usual)"),
    Range("schedule.warmup_ratio", _share, "0 or more, below 1"),
    Range("schedule.warmup_steps", lambda v: v >= 0, "0 or more"),
    Range("schedule.min_lr_ratio", lambda v: 0 <= v <= 1, "from 0 to 1"),
    Range("schedule.start_lr_ratio", lambda v: 0 < v <= 1, "above 0, at most 1"),
    Range("schedule.decay_ratio", lambda v: 0 < v <= 1, "above 0, at most 1 (0.1 to 0.2 is usual)"),
    Range("trainer.micro_batch_size", _at_least_one, "1 or more"),
    Range("trainer.gradient_accumulation_steps", _at_least_one, "1 or more"),
    Range("trainer.global_batch_size", _at_least_one, "1 or more"),
    Range("trainer.num_epochs", _at_least_one, "1 or more"),
    Range("trainer.max_steps", _at_least_one, "1 or more"),
    Range("trainer.max_grad_norm", lambda v: 0 < v < math.inf, "above 0 (1.0 is usual)"),
    Range("trainer.max_skipped_steps", lambda v: v >= 0, "0 or more"),
    Range(
        "trainer.devices",
        lambda v: v == "auto" or (isinstance(v, int) and not isinstance(v, bool) and v >= 1),
        "auto, or a number of ranks from 1 up",
    ),
    Range("trainer.num_nodes", _at_least_one, "1 or more"),
    Range("trainer.validate_every_steps", _at_least_one, "1 or more"),
    Range("trainer.log_every_steps", _at_least_one, "1 or more"),
    Range("trainer.checkpoint.every_steps", _at_least_one, "1 or more, or null for ten times"),
    Range("trainer.checkpoint.keep_last", _at_least_one, "1 or more"),
    Range("trainer.checkpoint.keep_best", lambda v: v >= 0, "0 or more"),
    Range("evaluation.max_rows", _at_least_one, "1 or more"),
    Range("evaluation.max_new_tokens", _at_least_one, "1 or more"),
    Range("evaluation.batch_size", _at_least_one, "1 or more"),
    Range("preview.rows", _at_least_one, "1 or more"),
    Range("preview.packs", _at_least_one, "1 or more"),
    Range("preview.max_rows", lambda v: v >= 10, "10 or more, or null for all"),
    Range("preview.tokens", lambda v: v >= 2, "2 or more"),
    Range("strategy.stage", lambda v: v in (1, 2, 3), "1, 2 or 3"),
    Range(
        "strategy.offload_parameters",
        lambda v: isinstance(v, bool) or v in HOMES,  # FSDP has one place besides the device
        "none or cpu",
    ),
    Range("strategy.powersgd_rank", _at_least_one, "1 or more (1 to 32 is usual)"),
    Range("strategy.replicas", _at_least_one, "1 or more, or null for one a node"),
    Range("strategy.tensor_parallel_size", _at_least_one, "1 or more, or null for all of a node"),
    Range("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295"),
)
