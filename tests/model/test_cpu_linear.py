"""oneDNN's products are those of PyTorch, taken in training where rows come in full tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.model import cpu
from app.model.activation_checkpointing import is_expensive
from tests.operators import Operators


@pytest.mark.parametrize("width", [64, 30])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_the_product_also_with_a_transposed_matrix(width: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(128, width), torch.randn(40, width)
    bias = torch.randn(40) if has_bias else None
    expected = torch.nn.functional.linear(
        rows.double(), weight.double(), None if bias is None else bias.double()
    )
    for matrix in (weight, weight.T.contiguous().T):
        assert torch.allclose(cpu.linear(rows, matrix, bias).double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "is_taken"),
    [
        (torch.zeros(64, 8), True),
        (torch.zeros(128, 8), True),
        (torch.zeros(65, 8), False),
        (torch.zeros(64, 8, dtype=torch.bfloat16), False),
        (torch.zeros(64, 8, device="meta"), False),
    ],
)
def test_it_is_taken_for_full_tiles_in_fp32_on_the_cpu(rows: Tensor, is_taken: bool) -> None:
    weight = torch.zeros(4, 8, dtype=rows.dtype, device=rows.device)
    with Operators() as operators:
        cpu.linear(rows, weight)
    assert ("mkldnn::_linear_pointwise" in operators.counts) is is_taken


@pytest.mark.parametrize(("features", "is_kept"), [(8, True), (4, True), (9, False)])
def test_selective_recompute_keeps_its_products_that_do_not_widen(
    features: int, is_kept: bool
) -> None:
    kept: list[bool] = []
    with Operators(lambda func, args, *_: kept.append(is_expensive(func, args))):
        cpu.linear(torch.zeros(64, 8), torch.zeros(features, 8))
    assert any(kept) is is_kept
