"""A step of AdamW with moments of 8 bits in one Triton kernel per weight.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. Weight, gradient and both
moments are read once; weight and moments are written once. bitsandbytes' kernel computes the same,
and finds each code by a search in its table; here decades of the table are compared, and codes
within one, which are equally spaced, are computed (arXiv 2110.02861, section 2).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_DECADES = 7
_ROWS, _WARPS = 4, 4
"""blocks of a program, and its warps"""


def _table(first: int) -> tuple[int, tuple[float, ...], tuple[float, ...], float]:
    """Describe bitsandbytes' dynamic map: `first` codes in its lowest decade, twice as many in each
    next one, then 1.

    Returns `first`, the values from which each decade's codes are the nearest, their number per
    unit, and the value from which 1 is nearer than they are.
    """
    numbers = [first << decade for decade in range(_DECADES)]
    ends = [10.0 ** (decade + 1 - _DECADES) for decade in range(_DECADES)]
    floors = [ends[0] * (0.05 + 0.225 / first)]
    floors += [end * (1 + 0.9 / number) for end, number in zip(ends, numbers[:-1], strict=False)]
    per_unit = [number / 0.9 / end for end, number in zip(ends, numbers, strict=True)]
    return first, tuple(floors), tuple(per_unit), 1 - 0.225 / numbers[-1]


_SIGNED, _UNSIGNED = _table(1), _table(2)


@triton.jit
def _magnitudes(shares, TABLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the index of the nearest magnitude in the table, of values between 0 and 1."""
    number = tl.zeros_like(shares)
    per_unit = tl.zeros_like(shares)
    for decade in tl.static_range(7):  # _DECADES
        is_above = shares >= TABLE[1][decade]
        number = tl.where(is_above, TABLE[0] * 1.0 * (1 << decade), number)
        per_unit = tl.where(is_above, TABLE[2][decade], per_unit)
    within = tl.floor(shares * per_unit - number / 9)
    within = tl.minimum(tl.maximum(within, 0.0), number - 1)
    index = tl.where(shares >= TABLE[3], 2.0 * number, number + within) - (TABLE[0] - 1)
    return tl.where(number > 0, index, 0.0)


@triton.jit
def _shares(values):  # type: ignore[no-untyped-def]
    """Return the highest magnitude of each row, and the values' shares of it."""
    highest = tl.max(tl.abs(values), axis=1)
    return highest, values * (1 / tl.where(highest > 0, highest, 1.0))[:, None]


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    weights,
    grads,
    codes1,
    codes2,
    highest1,
    highest2,
    table1,
    table2,
    divisor,
    length,
    num_blocks,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    decay,
    step_size,
    correction2,
    HAS_DIVISOR: tl.constexpr,
    SIGNED: tl.constexpr,
    UNSIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    is_there, has_row = places < length, rows < num_blocks
    grad = tl.load(grads + places, mask=is_there, other=0.0).to(tl.float32)
    if HAS_DIVISOR:
        grad *= 1 / tl.load(divisor)
    first = tl.load(table1 + tl.load(codes1 + places, mask=is_there, other=127).to(tl.int32))
    first *= tl.load(highest1 + rows, mask=has_row, other=0.0)[:, None]
    first = first * beta1 + rest1 * grad
    second = tl.load(table2 + tl.load(codes2 + places, mask=is_there, other=0).to(tl.int32))
    second *= tl.load(highest2 + rows, mask=has_row, other=0.0)[:, None]
    second = second * beta2 + rest2 * grad * grad
    weight = tl.load(weights + places, mask=is_there, other=0.0).to(tl.float32) * decay
    weight -= step_size * first / (tl.sqrt(second) * correction2 + eps)
    tl.store(weights + places, weight.to(weights.dtype.element_ty), mask=is_there)
    highest, shares = _shares(first)
    tl.store(highest1 + rows, highest, mask=has_row)
    index = _magnitudes(tl.abs(shares), SIGNED)
    code = tl.where(shares < 0, 127 - tl.minimum(index, 127.0), 127 + index)
    tl.store(codes1 + places, code.to(tl.int32).to(tl.uint8), mask=is_there)
    highest, shares = _shares(second)
    tl.store(highest2 + rows, highest, mask=has_row)
    code = _magnitudes(shares, UNSIGNED)
    tl.store(codes2 + places, code.to(tl.int32).to(tl.uint8), mask=is_there)


def step(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    divisor: Tensor | None,
) -> None:
    """Update a contiguous weight and its state, as bitsandbytes names and quantizes it.

    divisor: scalar by which the gradient is divided, or None. `state["step"]` counts this step.
    """
    (beta1, beta2), lr, number = group["betas"], group["lr"], state["step"]
    _kernel[(triton.cdiv(len(state["absmax1"]), _ROWS),)](
        weight,
        grad,
        *(state[name] for name in ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")),
        divisor,
        weight.numel(),
        len(state["absmax1"]),
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        group["eps"],
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**number),
        (1 - beta2**number) ** -0.5,
        HAS_DIVISOR=divisor is not None,
        SIGNED=_SIGNED,
        UNSIGNED=_UNSIGNED,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
