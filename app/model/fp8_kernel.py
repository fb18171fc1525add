"""Quantize rows to FP8 in one Triton kernel, which reads each value once from memory.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. PyTorch's operators read
each value twice, and write it in half precision in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 2**14
"""largest number of values that a program holds at a time"""
_WARPS = 8


@triton.jit
def _read(rows, factors, columns, width, HAS_FACTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    is_there = columns < width
    values = tl.load(rows + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        values *= tl.load(factors + columns, mask=is_there, other=0.0)
    return values


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    rows,
    factors,
    quantized,
    scales,
    row_stride,
    width,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * row_stride
    highest = SMALLEST
    for start in range(0, width, BLOCK):
        values = _read(rows, factors, start + tl.arange(0, BLOCK), width, HAS_FACTORS)
        highest = tl.maximum(highest, tl.max(tl.abs(values)))
    scale = highest / LARGEST
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):  # a row of 28 KiB is still in the cache
        columns = start + tl.arange(0, BLOCK)
        values = _read(rows, factors, columns, width, HAS_FACTORS) / scale
        tl.store(
            quantized + row * width + columns,
            values.to(tl.float8e4nv, fp_downcast_rounding="rtne"),
            mask=columns < width,
        )


def quantize_rows(
    rows: Tensor, factors: Tensor | None, *, largest: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, width] times `factors` [width] in e4m3, and the fp32 scales [n]."""
    num_rows, width = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    quantized = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    _kernel[(num_rows,)](
        rows,
        factors,
        quantized,
        scales,
        rows.stride(0),
        width,
        LARGEST=largest,
        SMALLEST=smallest,
        HAS_FACTORS=factors is not None,
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(width)),
        num_warps=_WARPS,
    )
    return quantized, scales
