"""Whether the matrices of a base can be cut over ranks, said before any weight is read."""

from __future__ import annotations

import math
from typing import Any

from app.preflight.base_model import BaseModel

WITHOUT_PLAN = ("bart", "bloom", "falcon", "gpt2", "phi3", "t5")
"""kinds of models that are known here, and that transformers gives no plan which we can follow"""


def check_tensor_parallel(together: int, base: BaseModel) -> list[str]:
    """List why `together` ranks cannot split the layers of this base."""
    numbers: dict[str, Any] = base.numbers or {}
    kind = numbers.get("model_type")
    if together == 1:
        return []
    if kind in WITHOUT_PLAN:
        return [
            f"strategy.tensor_parallel_size={together}: there is no plan by which the matrices of "
            f"a {kind} model are cut; type strategy=fsdp"
        ]
    heads = numbers.get("num_attention_heads")
    sides = {
        "attention heads": heads,
        "key heads": numbers.get("num_key_value_heads") or heads,
        "inner features": numbers.get("intermediate_size"),
    }
    known = {what: side for what, side in sides.items() if isinstance(side, int)}
    common = math.gcd(together, *known.values()) if known else 0
    fits = [str(n) for n in range(2, common + 1) if common % n == 0]
    instead = f"strategy.tensor_parallel_size={' or '.join(fits)}, or " if fits else ""
    return [
        f"strategy.tensor_parallel_size={together} does not divide the {side} {what} of "
        f"{base.name} ({side} / {together} leaves {side % together}); type {instead}strategy=fsdp"
        for what, side in known.items()
        if side % together
    ][:1]
