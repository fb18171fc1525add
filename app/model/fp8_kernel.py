"""Quantize rows, or columns, to FP8 in one Triton kernel each.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. PyTorch's operators write
each value in half precision in between, and transpose columns first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 2**14
"""largest number of values that a program holds at a time"""
_WARPS = 8
_TILE = 256, 32
"""rows and columns that a program of the columns' kernel holds at a time"""


@triton.jit
def _read(rows, factors, columns, width, HAS_FACTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    is_there = columns < width
    values = tl.load(rows + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        values *= tl.load(factors + columns, mask=is_there, other=0.0)
    return values


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    parts, factors, quantized, scales, strides, widths,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    highest = SMALLEST
    total = 0
    for part in tl.static_range(len(parts)):
        rows, width = parts[part] + row * strides[part], widths[part]
        total += width
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = _read(rows, factors[part], columns, width, HAS_FACTORS)
            highest = tl.maximum(highest, tl.max(tl.abs(values)))
    scale = highest / LARGEST
    tl.store(scales + row, scale)
    quantized += row * total
    for part in tl.static_range(len(parts)):
        rows, width = parts[part] + row * strides[part], widths[part]
        for start in range(0, width, BLOCK):  # a row of 56 KiB is still in the cache
            columns = start + tl.arange(0, BLOCK)
            values = _read(rows, factors[part], columns, width, HAS_FACTORS) / scale
            tl.store(
                quantized + columns,
                values.to(tl.float8e4nv, fp_downcast_rounding="rtne"),
                mask=columns < width,
            )
        quantized += width


def quantize_rows(
    parts: Sequence[Tensor], factors: Sequence[Tensor], *, largest: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """Return `parts` [n, width], side by side, in e4m3, and the fp32 scales [n].

    factors: one [width] for each part, or none.
    """
    rows = tuple(part if part.stride(1) == 1 else part.contiguous() for part in parts)
    widths = tuple(part.shape[1] for part in rows)
    num_rows, device = len(rows[0]), rows[0].device
    quantized = torch.empty(num_rows, sum(widths), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    _kernel[(num_rows,)](
        rows, tuple(factors) or rows, quantized, scales,
        tuple(part.stride(0) for part in rows), widths,
        LARGEST=largest, SMALLEST=smallest, HAS_FACTORS=bool(factors),
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(max(widths))), num_warps=_WARPS,
    )  # fmt: skip
    return quantized, scales


@triton.jit
def _read_tile(tensor, rows, columns, stride, num_rows, width):  # type: ignore[no-untyped-def]
    is_there = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(tensor + places, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def _column_kernel(  # type: ignore[no-untyped-def]
    tensor, quantized, scales, stride, num_rows, width, length,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    highest = tl.full([COLUMNS], SMALLEST, tl.float32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        values = _read_tile(tensor, rows, columns, stride, num_rows, width)
        highest = tl.maximum(highest, tl.max(tl.abs(values), axis=0))
    scale = highest / LARGEST
    tl.store(scales + columns, scale, mask=columns < width)
    for start in range(0, length, ROWS):
        rows = start + tl.arange(0, ROWS)
        values = _read_tile(tensor, rows, columns, stride, num_rows, width) / scale[None, :]
        tl.store(
            quantized + columns.to(tl.int64)[:, None] * length + rows[None, :],
            tl.trans(values).to(tl.float8e4nv, fp_downcast_rounding="rtne"),
            mask=(columns < width)[:, None] & (rows < length)[None, :],
        )


def quantize_columns(
    tensor: Tensor, length: int, *, largest: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """Return the transpose of `tensor` [n, width] in e4m3, and the fp32 scales [width].

    Its rows are filled up with zeros to `length`.
    """
    tensor = tensor if tensor.stride(1) == 1 else tensor.contiguous()
    num_rows, width = tensor.shape
    quantized = torch.empty(width, length, dtype=torch.float8_e4m3fn, device=tensor.device)
    scales = torch.empty(width, dtype=torch.float32, device=tensor.device)
    _column_kernel[(triton.cdiv(width, _TILE[1]),)](
        tensor, quantized, scales, tensor.stride(0), num_rows, width, length,
        LARGEST=largest, SMALLEST=smallest, ROWS=_TILE[0], COLUMNS=_TILE[1], num_warps=_WARPS,
    )  # fmt: skip
    return quantized, scales
