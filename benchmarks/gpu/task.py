"""The task of all parts: the model's shape, random documents, and their FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from benchmarks.training.task import MEDIAN_TOKENS, SPREAD

if TYPE_CHECKING:
    from app.config import TrainConfig
    from app.model.adapter import LoraConfig
    from data_modules import Batch

RANK = 16
SHORTEST_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Model and tokens, the same for every part and system."""

    shape: dict[str, Any]
    """values of a Llama's config.json"""
    device: str
    """cuda or cpu"""
    sequence_len: int = 4096
    tokens_per_step: int = 32_768
    """tokens of an optimizer step, over its micro-batches"""
    steps: int = 3
    """measured optimizer steps; one more is profiled"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One configuration."""

    adapter: str = "lora"
    """lora (on all linear layers) or full (every weight, bf16 throughout)"""
    quantization: str = "none"
    """of the base: none, nf4 (with double quantization) or fp8"""
    trains_in_fp8: bool = False
    """products of the inner layers in FP8, of adapter=full"""
    is_skewed: bool = False
    """documents of skewed lengths packed by multipack, instead of full sequences"""
    is_compiled: bool = False
    """torch.compile of each layer, without Liger's kernels"""
    optimizer: str = "adamw"
    """adamw, or adamw8bit"""
    shape: dict[str, Any] | None = None
    """values of another model's config.json than the task's; its FLOPs are not counted"""
    experiment: str | None = None
    """shipped experiment that provides adapter and recompute"""
    packs: int = 2
    """packs of `sequence_len` tokens per micro-batch"""
    warm_up: int = 1
    """warm-up steps, not measured"""
    first_round: int = 0
    """first round in which it runs"""
    seconds: float = 25.0
    """expected seconds; left out if the remaining budget is less"""


def batches_of(task: Task, part: Part) -> list[Batch]:
    """Return the micro-batches of warm-up, measured and profiled steps, as our packing makes them.

    Token ids are random and every token is trained. Skewed lengths are lognormal with the median
    and spread of the peers' benchmark, cut at `sequence_len`.
    """
    import numpy as np

    from common.errors import Origin
    from data_modules import BatchSpec, Example
    from data_modules.collator import Collator
    from data_modules.packing import StepPlan

    random = np.random.default_rng(0)
    packs = task.tokens_per_step // task.sequence_len
    num_steps = part.warm_up + task.steps + 1
    lengths = np.full(num_steps * packs, task.sequence_len)
    if part.is_skewed:
        # Many more than are trained on, so that the epoch's last, partial pack is not used.
        mean = MEDIAN_TOKENS * math.exp(SPREAD**2 / 2)
        count = math.ceil(20 * num_steps * task.tokens_per_step / min(mean, task.sequence_len / 2))
        drawn = np.exp(random.normal(np.log(MEDIAN_TOKENS), SPREAD, count))
        lengths = drawn.astype(int).clip(SHORTEST_TOKENS, task.sequence_len)
    plan = StepPlan(
        lengths,
        lengths - 1.0,
        lambda epoch: np.arange(len(lengths)),
        BatchSpec(
            micro_batch_size=part.packs,
            accumulation_steps=packs // part.packs,
            max_steps=num_steps,
        ),
        capacity=task.sequence_len,
        method="multipack",
        seed=0,
    )
    # All rows have one size for the compiler, as in the data module.
    row_len = part.packs * task.sequence_len if part.is_compiled else None
    collate = Collator(0, packed=True, row_len=row_len)

    def document(index: int) -> Example:
        length = int(lengths[index])
        ids = random.integers(0, task.shape["vocab_size"], length, dtype=np.int32)
        return Example(ids, np.ones(length, np.float32), 0, Origin("random", index))

    batches = []
    for step in range(num_steps):
        for micro_batch in plan.micro_batches(step, 0):
            documents = [[document(index) for index in pack] for pack in micro_batch.packs]
            batch = collate(documents, micro_batch.step_weight)
            batches.append(batch.pin_memory() if task.device == "cuda" else batch)
    return batches


def lora_of(part: Part) -> LoraConfig:
    """Return the adapter of a part: that of its experiment, or the default one."""
    from app.model.adapter import LoraConfig

    if part.experiment is None:
        return LoraConfig(r=RANK, alpha=2 * RANK)
    return cast("LoraConfig", _experiment(part).adapter)


def recomputes(part: Part, system: str) -> tuple[str, ...]:
    """Return the recompute mode of a part, and the fallbacks if memory does not suffice.

    transformers has none between nothing and everything.
    """
    first = "none" if part.experiment is None else _experiment(part).recompute.mode
    if first == "none" and system == "ours":
        return "none", "selective", "full"
    return (first,) if first == "full" else (first, "full")


def _experiment(part: Part) -> TrainConfig:
    from app.config import load_config

    return cast("TrainConfig", load_config("train", [f"+experiment={part.experiment}"]))


def flops_per_token(task: Task, part: Part, batches: Sequence[Batch]) -> float:
    """Return the FLOPs per token, forward and backward, without recomputation.

    Two for each weight of a matrix forward, two for the gradient of its input, two for its own
    where it trains; causal attention sees half of what is before it, and costs three times its
    forward. The embedding is looked up and costs nothing.
    """
    shape = task.shape
    width, inner, layers = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads = shape["num_attention_heads"]
    head_dim = width // heads
    shared = shape["num_key_value_heads"] * head_dim
    matrices = [(width, width), (width, shared), (width, shared), (width, width)]
    matrices += [(width, inner), (width, inner), (inner, width)]
    weights = layers * sum(rows * columns for rows, columns in matrices)
    weights += width * shape["vocab_size"]
    lengths = [n for batch in batches for row in batch.document_lengths for n in row]
    seen = sum(n * n for n in lengths) / sum(lengths)
    attention = 3 * 2 * layers * width * seen
    if part.adapter == "full":
        return 6 * weights + attention
    adapters = layers * RANK * sum(rows + columns for rows, columns in matrices)
    return 4 * weights + attention + 6 * adapters
