"""Which weights of a layer tensor parallelism splits, and how. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import UserError

BY_ROWS, BY_COLUMNS, PARTIAL_GRADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""styles of transformers' tensor parallel plans, which name the split side of W in x W; torch
stores the transposed matrix"""


def layer_plan(model: Any) -> Mapping[str, str]:
    """Return the style in which each module of a layer is split, by its name in the layer."""
    text_config = model.config.get_text_config()
    full_plan = text_config.base_model_tp_plan or {}
    plan = {
        path: kind
        for name, kind in full_plan.items()
        for _, dot, path in [name.partition(".*.")]
        if dot
    }
    unknown = sorted(set(plan.values()) - {BY_ROWS, BY_COLUMNS, PARTIAL_GRADS})
    if not plan or unknown:
        why = f"uses the style {unknown[0]}" if unknown else "has no tensor parallel plan"
        raise UserError(
            f"strategy.tensor_parallel_size: transformers' {text_config.model_type} model {why}, "
            "which is not supported; type strategy=fsdp"
        )
    return plan


def split_dim(plan: Mapping[str, str], name: str) -> int | None:
    """Return the dimension along which a weight is split; None if it is replicated.

    `name`: the weight's name in its layer, with an adapter if it has one.
    """
    kind, part = next(
        ((kind, name[len(path) :]) for path, kind in plan.items() if name.startswith(f"{path}.")),
        (None, ""),
    )
    if kind == BY_ROWS:
        return None if ".lora_A." in part else 0
    is_whole = kind != BY_COLUMNS or ".lora_B." in part or part.endswith(".bias")
    return None if is_whole else 1
