"""The gate of an MLP with the products of LoRA around it, in one Triton kernel for each pass.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. Each product with an A or B
would read, or add to, a tensor of the MLP's width once more; here its tiles are at hand. The
results that are sums over tiles are written by tile, and summed up afterwards: atomic additions
would round differently each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.model import fp8

MAX_RANK = 64
MULTIPLE = 256
"""of the MLP's width"""
_SMALLEST_RANK = 16
"""smallest side of a product by tensor cores; a smaller rank is filled up with zeros"""
_ROWS, _COLUMNS, _WARPS = 64, 64, 4
"""tile of the forward kernel"""
_CHUNK = 2048
"""columns of a program of the forward kernel"""
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_STAGES = 16, 8, tl.constexpr(3)
_SUMS = 4096
"""values of a gradient of A or B that a program of the backward kernel holds; with more, or more
rows, registers would spill on sm_90"""
_BACKWARD_CHUNK = 1024
"""rows of a program of the backward kernel"""


@triton.jit
def _activate(gate, IS_GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    # SiLU, or the tanh approximation of GELU, and its slope.
    if IS_GELU:
        inner = 0.7978845608028654 * gate * (1 + 0.044715 * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        steep = 0.7978845608028654 * (1 + 0.134145 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * steep
    sigmoid = tl.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _read(tensor, rows, columns, stride, are_there):  # type: ignore[no-untyped-def]
    return tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=are_there, other=0.0)


@triton.jit
def _write(values, tensor, rows, columns, stride, are_there):  # type: ignore[no-untyped-def]
    values = values.to(tensor.dtype.element_ty)
    tl.store(tensor + rows[:, None] * stride + columns[None, :], values, mask=are_there)


@triton.jit
def _add_product(tensor, left, right):  # type: ignore[no-untyped-def]
    return tl.dot(left, right, tensor.to(tl.float32), input_precision="ieee")


@triton.jit
def _product(wide, narrow):  # type: ignore[no-untyped-def]
    # With the wide tile on the right: on the left, each warp would hold whole rows of it.
    zeros = tl.zeros([narrow.shape[1], wide.shape[0]], tl.float32)
    return tl.trans(_add_product(zeros, tl.trans(narrow), tl.trans(wide)))


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    gate, up, low, b_gate, b_up, a_down, gated, low_down, num_rows, width, rank,
    IS_GELU: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, chunk = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    rows, columns, ranks = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, RANK)
    are_there, in_rank = (rows < num_rows - first)[:, None], (ranks < rank)[None, :]
    low += first * 2 * rank
    low_gate = _read(low, rows, ranks, 2 * rank, are_there & in_rank)
    low_up = _read(low + rank, rows, ranks, 2 * rank, are_there & in_rank)
    sums = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(chunk * CHUNK, min(width, (chunk + 1) * CHUNK), COLUMNS):
        values = _read(gate + first * width + start, rows, columns, width, are_there)
        others = _read(up + first * width + start, rows, columns, width, are_there)
        of_gate = _read(b_gate + start * rank, columns, ranks, rank, in_rank)
        of_up = _read(b_up + start * rank, columns, ranks, rank, in_rank)
        of_down = _read(a_down + start, ranks, columns, width, (ranks < rank)[:, None])
        active, _ = _activate(_add_product(values, low_gate, tl.trans(of_gate)), IS_GELU)
        products = active * _add_product(others, low_up, tl.trans(of_up))
        products = products.to(gated.dtype.element_ty)
        _write(products, gated + first * width + start, rows, columns, width, are_there)
        sums = _add_product(sums, products, tl.trans(of_down))
    low_down += (chunk * num_rows + first) * rank
    _write(sums, low_down, rows, ranks, rank, are_there & in_rank)


def forward(
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    *,
    is_gelu: bool,
) -> tuple[Tensor, Tensor]:
    """Return f(gate + low_gate B_gate^T) * (up + low_up B_up^T), and its product with A_down^T.

    All are contiguous: gate, up [n, width]; low [n, 2 rank], that of the gate first; B
    [width, rank]; A_down [rank, width]. The product is fp32 [n, rank].
    """
    (num_rows, width), rank = gate.shape, b_gate.shape[1]
    num_chunks = triton.cdiv(width, _CHUNK)
    gated = torch.empty_like(gate)
    low_down = torch.empty(num_chunks, num_rows, rank, dtype=torch.float32, device=gate.device)
    _forward_kernel[(triton.cdiv(num_rows, _ROWS), num_chunks)](
        gate, up, low, b_gate, b_up, a_down, gated, low_down, num_rows, width, rank,
        IS_GELU=is_gelu, RANK=_filled(rank),
        ROWS=_ROWS, COLUMNS=_COLUMNS, CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip
    return gated, low_down.sum(0)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    gate, up, grad, rows, columns, width, are_there,
    low_gate, low_up, low_down, of_gate, of_up, of_down, IS_GELU: tl.constexpr,
):  # fmt: skip
    # The gate's output, and the gradients of both its inputs, of one tile.
    kind = gate.dtype.element_ty
    values = _read(gate, rows, columns, width, are_there)
    others = _read(up, rows, columns, width, are_there)
    outer = _read(grad, rows, columns, width, are_there)
    others = _add_product(others, low_up, tl.trans(of_up))
    outer = _add_product(outer, low_down, of_down)
    values = _add_product(values, low_gate, tl.trans(of_gate))
    active, slope = _activate(values, IS_GELU)
    grad_gate, grad_up = (outer * others * slope).to(kind), (outer * active).to(kind)
    return (active * others).to(kind), grad_gate, grad_up


@triton.jit
def _largest_of_rows(grad_gate, grad_up, factors, columns):  # type: ignore[no-untyped-def]
    # The largest magnitude in each row of both gradients times their factors.
    of_gate = tl.abs(grad_gate * tl.load(factors[0] + columns)[None, :])
    of_up = tl.abs(grad_up * tl.load(factors[1] + columns)[None, :])
    return tl.maximum(tl.max(of_gate, axis=1), tl.max(of_up, axis=1))


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad, gate, up, low, grad_low_down, b_gate, b_up, a_down, factors, maxima,
    grad_low, grad_b_gate, grad_b_up, grad_a_down, num_rows, width, rank,
    IS_GELU: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * CHUNK
    rows, columns, ranks = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, RANK)
    in_rank, rank_is_there = (ranks < rank)[None, :], (ranks < rank)[:, None]
    of_gate = _read(b_gate + tile * COLUMNS * rank, columns, ranks, rank, in_rank)
    of_up = _read(b_up + tile * COLUMNS * rank, columns, ranks, rank, in_rank)
    of_down = _read(a_down + tile * COLUMNS, ranks, columns, width, rank_is_there)
    sum_gate = tl.zeros([RANK, COLUMNS], tl.float32)
    sum_up, sum_down = sum_gate, sum_gate
    grad_low += tile.to(tl.int64) * num_rows * 2 * rank
    for start in tl.range(0, min(num_rows - first, CHUNK), ROWS, num_stages=_BACKWARD_STAGES):
        row = first + start
        are_there = (rows < num_rows - row)[:, None]
        at, low_at = row * width + tile * COLUMNS, row * rank
        low_gate = _read(low + 2 * low_at, rows, ranks, 2 * rank, are_there & in_rank)
        low_up = _read(low + 2 * low_at + rank, rows, ranks, 2 * rank, are_there & in_rank)
        low_down = _read(grad_low_down + low_at, rows, ranks, rank, are_there & in_rank)
        gated, grad_gate, grad_up = _differentiate(
            gate + at, up + at, grad + at, rows, columns, width, are_there,
            low_gate, low_up, low_down, of_gate, of_up, of_down, IS_GELU,
        )  # fmt: skip
        if maxima is not None:
            highest = _largest_of_rows(grad_gate, grad_up, factors, tile * COLUMNS + columns)
            tl.store(maxima + tile * num_rows + row + rows, highest, mask=rows < num_rows - row)
        else:
            _write(grad_gate, gate + at, rows, columns, width, are_there)
            _write(grad_up, up + at, rows, columns, width, are_there)
        sum_down = _add_product(sum_down, tl.trans(low_down), gated)
        sum_gate = _add_product(sum_gate, tl.trans(low_gate), grad_gate)
        sum_up = _add_product(sum_up, tl.trans(low_up), grad_up)
        part, are_there = grad_low + 2 * low_at, are_there & in_rank
        _write(_product(grad_gate, of_gate), part, rows, ranks, 2 * rank, are_there)
        _write(_product(grad_up, of_up), part + rank, rows, ranks, 2 * rank, are_there)
    at = first // CHUNK * rank * width + tile * COLUMNS
    _write(sum_gate, grad_b_gate + at, ranks, columns, width, rank_is_there)
    _write(sum_up, grad_b_up + at, ranks, columns, width, rank_is_there)
    _write(sum_down, grad_a_down + at, ranks, columns, width, rank_is_there)


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    grad, gate, up, low, grad_low_down, b_gate, b_up, a_down, factors, scales, quantized,
    num_rows, width, rank,
    IS_GELU: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, chunk = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    rows, columns, ranks = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, RANK)
    are_there, in_rank = (rows < num_rows - first)[:, None], (ranks < rank)[None, :]
    low += first * 2 * rank
    low_gate = _read(low, rows, ranks, 2 * rank, are_there & in_rank)
    low_up = _read(low + rank, rows, ranks, 2 * rank, are_there & in_rank)
    low_down = _read(grad_low_down + first * rank, rows, ranks, rank, are_there & in_rank)
    scale = tl.load(scales + first + rows, mask=rows < num_rows - first, other=1.0)[:, None]
    for start in range(chunk * CHUNK, min(width, (chunk + 1) * CHUNK), COLUMNS):
        at = first * width + start
        of_gate = _read(b_gate + start * rank, columns, ranks, rank, in_rank)
        of_up = _read(b_up + start * rank, columns, ranks, rank, in_rank)
        of_down = _read(a_down + start, ranks, columns, width, (ranks < rank)[:, None])
        _, grad_gate, grad_up = _differentiate(
            gate + at, up + at, grad + at, rows, columns, width, are_there,
            low_gate, low_up, low_down, of_gate, of_up, of_down, IS_GELU,
        )  # fmt: skip
        part = quantized + 2 * first * width + start
        values = grad_gate * tl.load(factors[0] + start + columns)[None, :] / scale
        others = grad_up * tl.load(factors[1] + start + columns)[None, :] / scale
        _write(values, part, rows, columns, 2 * width, are_there)
        _write(others, part + width, rows, columns, 2 * width, are_there)


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    grad_low_down: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    factors: Sequence[Tensor] = (),
    *,
    is_gelu: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of low, B and A_down; overwrite gate and up by those of both sums.

    Arguments as in `forward`. grad [n, width] is the output's, to which grad_low_down A_down is
    added; grad_low_down [n, rank]. Results: [n, 2 rank], and transposed for B: [rank, width].
    With `factors`, fp32 [width] each, gate and up stay, and their gradients times factors are
    returned last, as `fp8.quantize_rows` does it: computed again when the largest value of each
    row is known, which moves fewer bytes than writing and reading them.
    """
    (num_rows, width), rank = gate.shape, b_gate.shape[1]
    filled = _filled(rank)
    columns = _SUMS // filled
    num_tiles, num_chunks = width // columns, triton.cdiv(num_rows, _BACKWARD_CHUNK)
    grad_low = torch.empty(num_tiles, num_rows, 2 * rank, dtype=gate.dtype, device=gate.device)
    sums = torch.empty(3, num_chunks, rank, width, dtype=torch.float32, device=gate.device)
    maxima = sums.new_empty(num_tiles, num_rows) if factors else None
    given = grad, gate, up, low, grad_low_down, b_gate, b_up, a_down, tuple(factors)
    _backward_kernel[(num_tiles, num_chunks)](
        *given, maxima, grad_low, *sums, num_rows, width, rank,
        IS_GELU=is_gelu, RANK=filled,
        ROWS=_BACKWARD_ROWS, COLUMNS=columns, CHUNK=_BACKWARD_CHUNK, num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    results = grad_low.sum(0), *sums.sum(1)
    return results if maxima is None else (*results, *_quantize(given, maxima, is_gelu=is_gelu))


def _quantize(given: Sequence[Any], maxima: Tensor, *, is_gelu: bool) -> tuple[Tensor, Tensor]:
    # Compute the gradients of gate and up again, side by side in e4m3 with a scale for each row.
    gate, b_gate = given[1], given[5]
    (num_rows, width), rank = gate.shape, b_gate.shape[1]
    scales = maxima.amax(0).clamp_min_(fp8.SMALLEST) / fp8.LARGEST
    quantized = torch.empty(num_rows, 2 * width, dtype=torch.float8_e4m3fn, device=gate.device)
    _quantize_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _CHUNK))](
        *given, scales, quantized, num_rows, width, rank,
        IS_GELU=is_gelu, RANK=_filled(rank),
        ROWS=_ROWS, COLUMNS=_COLUMNS, CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip
    return quantized, scales


def _filled(rank: int) -> int:
    return max(_SMALLEST_RANK, triton.next_power_of_2(rank))
