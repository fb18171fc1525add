"""On a CPU, attention by matrix products and products of oneDNN are those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.model import cpu
from app.model.attention import attend
from app.model.attention.documents import DocumentSpan, group_documents


def parts(heads: int, key_heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3, heads, tokens, 8), (3, key_heads, tokens, 8), (3, key_heads, tokens, 8)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def whole(tensors: list[Tensor]) -> list[list[DocumentSpan]]:
    """Each row as one document."""
    return [[DocumentSpan(row, 0, tensors[0].shape[2])] for row in range(len(tensors[0]))]


def reference(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """PyTorch's attention in fp64, with repeated key heads."""
    times = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(times, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query.double(), key, value, is_causal=True, scale=scaling
    )


@pytest.mark.parametrize(
    ("tokens", "key_heads", "scaling"),
    [(1, 4, None), (2, 2, 1.0), (64, 1, None), (65, 4, 1.0), (65, 2, None), (150, 2, 1.0)],
)
def test_values_and_gradients_equal_causal_attention(
    tokens: int, key_heads: int, scaling: float | None
) -> None:
    tensors = parts(4, key_heads, tokens, torch.float32)
    weight = torch.randn(3, 4, tokens, 8)
    ours = cpu.attend_causally(*tensors, whole(tensors), scaling).transpose(1, 2)
    theirs = reference(*tensors, scaling)
    assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((ours * weight).sum(), tensors)
    expected = torch.autograd.grad((theirs * weight).sum(), tensors)
    for one, other in zip(grads, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like transformers' eager attention: scores in half precision, softmax in fp32."""
    key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    future = torch.full(scores.shape[2:], float("-inf")).triu(1)
    return torch.softmax(scores + future, dim=-1, dtype=torch.float32).to(query.dtype) @ value


@pytest.mark.parametrize("tokens", [60, 600])
def test_half_precision_rounds_as_eager_attention_does(tokens: int) -> None:
    tensors = parts(4, 2, tokens, torch.bfloat16)
    exact = [part.detach().float().requires_grad_() for part in tensors]
    truth = torch.autograd.grad(reference(*exact, None).square().sum(), exact)

    def error(output: Tensor) -> float:
        grads = torch.autograd.grad(output.float().square().sum(), tensors)
        pairs = zip(grads, truth, strict=True)
        return max(((one - other).norm() / other.norm()).item() for one, other in pairs)

    ours = cpu.attend_causally(*tensors, whole(tensors), None).transpose(1, 2)
    assert error(ours) < 1.5 * error(eager(*tensors))


@pytest.mark.parametrize(
    ("kept", "dtype"), [(0, torch.float32), (64, torch.bfloat16), (1024, torch.float32)]
)
def test_documents_of_a_row_are_kept_apart(
    kept: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MAX_SAVED_TOKENS", kept)
    tensors = parts(4, 2, 90, dtype)
    exact = [part.detach().double().requires_grad_() for part in tensors]
    lengths = [[3, 70, 17], [90], [1, 64, 25]]
    groups = group_documents(lengths, (3, 90), torch.device("cpu"))
    output, _ = attend.attend_by_document(torch.nn.Module(), *tensors, None, documents=groups)
    weight = torch.randn(output.shape)
    expected = torch.zeros(output.shape, dtype=torch.float64)
    for row, members in enumerate(lengths):
        start = 0
        for length in members:
            cut = [part[row : row + 1, :, start : start + length] for part in exact]
            expected[row, start : start + length] = reference(*cut, None)[0].transpose(0, 1)
            start += length
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    assert torch.allclose(output.double(), expected, **loose)
    grads = torch.autograd.grad((output * weight).sum(), tensors)
    truths = torch.autograd.grad((expected * weight).sum(), exact)
    for grad, truth in zip(grads, truths, strict=True):
        assert torch.allclose(grad.double(), truth, **loose)


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
