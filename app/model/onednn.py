"""Products with a matrix in fp32 on the CPU: a training's by oneDNN, which is a tenth faster.

PyTorch takes oneDNN for half precision and another library for fp32. The operator is the one that
`torch.compile` takes for frozen models; nothing public reaches oneDNN's fp32 products.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
"""a row count that is no multiple of this comes once, and oneDNN makes a kernel for each"""


def is_faster(rows: Tensor) -> bool:
    """Say whether oneDNN is the faster way to multiply these rows by a matrix."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and len(rows) % ROWS == 0
        and torch.backends.mkldnn.is_available()
    )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows @ weight.T + bias; rows [positions, width], weight [features, width]."""
    if not is_faster(rows):
        return torch.nn.functional.linear(rows, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output
