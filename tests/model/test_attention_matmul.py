"""Attention by matrix products is causal attention, in its value and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.model.attention import attend, matmul


def parts(heads: int, key_heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3, heads, tokens, 8), (3, key_heads, tokens, 8), (3, key_heads, tokens, 8)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def reference(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The same in fp64, key heads repeated."""
    times = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(times, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query.double(), key, value, is_causal=True, scale=scaling
    )


@pytest.mark.parametrize("scaling", [None, 1.0])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_values_and_gradients_are_those_of_causal_attention(
    tokens: int, heads: int, key_heads: int, scaling: float | None
) -> None:
    tensors = parts(heads, key_heads, tokens, torch.float32)
    weight = torch.randn(3, heads, tokens, 8)
    ours = matmul.attend_causally(*tensors, scaling)
    theirs = reference(*tensors, scaling)
    assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((ours * weight).sum(), tensors)
    expected = torch.autograd.grad((theirs * weight).sum(), tensors)
    for one, other in zip(grads, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers' own attention: scores in half precision, their softmax in fp32."""
    key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    future = torch.full(scores.shape[2:], float("-inf")).triu(1)
    return torch.softmax(scores + future, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def test_in_half_precision_it_rounds_about_as_eager_attention_does() -> None:
    tensors = parts(4, 2, 60, torch.bfloat16)
    exact = [part.detach().float().requires_grad_() for part in tensors]
    truth = torch.autograd.grad(reference(*exact, None).square().sum(), exact)

    def error(output: Tensor) -> float:
        grads = torch.autograd.grad(output.float().square().sum(), tensors)
        pairs = zip(grads, truth, strict=True)
        return max(((one - other).norm() / other.norm()).item() for one, other in pairs)

    assert error(matmul.attend_causally(*tensors, None)) < 1.5 * error(eager(*tensors))


@pytest.mark.parametrize(
    ("dtype", "tokens", "expected"),
    [(torch.bfloat16, 8, True), (torch.float32, 8, False), (torch.bfloat16, 513, False)],
)
def test_it_is_taken_for_short_documents_in_half_precision_on_the_cpu(
    dtype: torch.dtype, tokens: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    write = matmul.attend_causally
    monkeypatch.setattr(matmul, "attend_causally", lambda *given: taken.append(1) or write(*given))
    query, key, value = parts(4, 2, tokens, dtype)
    layer = torch.nn.Module()
    output, _ = attend.attend_by_document(layer, query, key, value, None)
    assert bool(taken) is expected
    truth = reference(query, key, value, None).transpose(1, 2)
    assert torch.allclose(output.double(), truth, atol=2e-2)
