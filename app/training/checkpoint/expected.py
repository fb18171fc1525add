"""What a saved optimizer state must be for each weight: the optimizer itself is asked.

One of the same class and options takes a step on a weight without numbers (on `meta`): what it then
keeps has the names, shapes and dtypes that a checkpoint must have. Values are looked at as they are
read, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from app.training.checkpoint.documents import shown

State = Mapping[str, Any]
"""of a weight, by key: Tensor, or a number"""
BY_OPTIONS = {"fused": False, "foreach": False, "capturable": False, "train_mode": True}
"""options of a group that say how it steps; on `meta` it can do so in one way alone"""
STEP = "step"
NEVER_NEGATIVE = (
    *(STEP, "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"),
    *("state2", "qmap2", "absmax1", "absmax2"),  # of 8 bits, or of the small weights kept in fp32
)
"""counts, second moments of which a root is taken, and what these are scaled by"""


def expected_states(
    part: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what `part` keeps of a weight of `group` after a step: tensors on `meta`, numbers."""
    weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    weight.grad = torch.empty_like(weight)
    options = {key: value for key, value in BY_OPTIONS.items() if key in group}
    build: Any = type(part)
    twin = build([{**group, **options, "params": [weight]}])
    if build.__name__ == "AdamW8bit":  # its kernels know no `meta`
        twin.init_state(twin.param_groups[0], weight, 0, 0)
    else:
        twin.step()
    return dict(twin.state[weight])


def differences(expected: State, saved: State, name: str) -> Iterator[tuple[str, str]]:
    """Say where what was saved of weight `name` is not as expected, before its numbers are read.

    Yields the tensor's name in the file, and what is wrong with it.
    """
    for key in expected.keys() - saved.keys():
        yield f"{key}/{name}", "is missing"
    for key in saved.keys() - expected.keys():
        yield f"{key}/{name}", f"is not a state of the optimizer, which keeps {_listed(expected)}"
    for key in expected.keys() & saved.keys():
        wanted, found = described(expected[key]), described(saved[key])
        if wanted != found:
            yield f"{key}/{name}", f"is {found}; expected {wanted}"


def described(value: Any) -> str:
    """Word what a state is, without its numbers."""
    if isinstance(value, (int, float)):
        return "a whole number" if isinstance(value, int) else "a number"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _listed(expected: State) -> str:
    return ", ".join(sorted(expected)) or "nothing"


def bad_values(key: str, value: Any, step: float) -> str | None:
    """Say what is wrong with the numbers of a state, None if nothing; `step`: of the checkpoint."""
    if isinstance(value, Tensor) and (not value.numel() or not value.is_floating_point()):
        return None
    if isinstance(value, Tensor):
        # The least and the largest are NaN where one is, and need no room to be found.
        least, largest = (float(end) for end in value.aminmax())
    else:
        least = largest = float(value)
    if not (math.isfinite(least) and math.isfinite(largest)):
        return f"holds numbers that are not finite ({_not_finite(least, largest)})"
    if least < 0 and key in NEVER_NEGATIVE:
        return f"holds {least}; expected no number below 0"
    if key == STEP and (largest > step or largest != int(largest)):
        return f"is {shown(largest)}; expected a whole number up to {step}, the checkpoint's step"
    return None


def _not_finite(least: float, largest: float) -> str:
    """Word the one of two ends that is not finite."""
    return str(least if not math.isfinite(least) else largest)
