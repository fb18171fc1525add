"""Cross-entropy and its gradient in one Triton kernel; the gradient overwrites the logits.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. Rows are read twice and
written once; PyTorch's operators pass over them seven times, in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2**15
"""largest number of logits that a program holds at a time"""
_WARPS = 32


@triton.jit
def _read(logits, columns, num_columns, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    is_there = columns < num_columns
    values = tl.load(logits + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        values = softcap * (2.0 * tl.sigmoid(2.0 * values / softcap) - 1.0)
    return tl.where(is_there, values, float("-inf"))


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    logits, labels, losses, row_stride, num_columns, softcap,
    HAS_SOFTCAP: tl.constexpr, WRITES_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    is_trained_on = label >= 0
    # Read before any thread overwrites it with a gradient: the reductions below are barriers.
    own = tl.load(logits + label, mask=is_trained_on, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        own = softcap * (2.0 * tl.sigmoid(2.0 * own / softcap) - 1.0)
    highest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        values = _read(logits, start + tl.arange(0, BLOCK), num_columns, softcap, HAS_SOFTCAP)
        higher = tl.maximum(highest, tl.max(values))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher))
        highest = higher
    tl.store(losses + row, tl.where(is_trained_on, tl.log(total) + highest - own, 0.0))
    if WRITES_GRADIENT:
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = _read(logits, columns, num_columns, softcap, HAS_SOFTCAP)
            grads = tl.exp(values - highest) / total - tl.where(columns == label, 1.0, 0.0)
            if HAS_SOFTCAP:
                grads *= 1.0 - (values / softcap) * (values / softcap)
            grads = tl.where(is_trained_on, grads, 0.0)
            tl.store(logits + columns, grads, mask=columns < num_columns)


def cross_entropy_(
    logits: Tensor, labels: Tensor, losses: Tensor, softcap: float | None, *, writes_gradient: bool
) -> None:
    """Write each row's loss in nats to `losses`, and overwrite `logits` by their gradient.

    logits [rows, vocabulary]; labels [rows], negative if masked (loss and gradient 0); losses
    [rows] in fp32. The gradient is that of the sum of the losses.
    """
    num_rows, num_columns = logits.shape
    _kernel[(num_rows,)](
        logits, labels, losses, logits.stride(0), num_columns, softcap or 1.0,
        HAS_SOFTCAP=softcap is not None, WRITES_GRADIENT=writes_gradient,
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(num_columns)), num_warps=_WARPS,
    )  # fmt: skip
