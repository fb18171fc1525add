"""Attention sinks, folded into what a kernel returns, equal the models' own eager attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from app.model.adapter import FullConfig
from app.model.base import ModelConfig
from tests.model.test_attention_varlen import PACKED, PADDED, run, varlen_2_13
from tests.model.test_experts import MIXTURES, SIZES
from tests.tiny import built

WINDOW = 8
CPU = torch.device("cpu")
NUMBERS = {
    **SIZES, **MIXTURES["gpt_oss"], "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
    "initializer_range": 0.2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
MIMO = NUMBERS | {
    "model_type": "mimo_v2_flash", "head_dim": 16, "v_head_dim": 8,
    "mlp_layer_types": ["dense", "dense"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
}  # fmt: skip
"""a layer without sinks, and narrower values"""


def masked_scores(
    parts: tuple[torch.Tensor, ...], ends: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of all tokens [heads, queries, keys], and keys and values of all heads."""
    query, key, value = parts
    assert options["cum_seq_k"] is ends and options["max_q"] == options["max_k"]
    assert options["dropout_p"] == 0 and options["max_q"] == ends.diff().max()
    left, right = options["window_size_left"], options["window_size_right"]
    assert options["is_causal"] == (left == -1) and right == 0
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    place = torch.arange(len(query))
    document = torch.bucketize(place, ends[1:], right=True)
    distance = place.unsqueeze(1) - place
    visible = (document.unsqueeze(1) == document) & (distance >= 0)
    visible &= distance <= (left if left >= 0 else len(query))
    scores = torch.einsum("qhd,khd->hqk", query, key) * options["scale"]
    return scores.masked_fill(~visible, -torch.inf), key, value


def forward(
    query: Any, key: Any, value: Any, ends: Any, *rest: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_forward`: output [tokens, heads, head_dim], log-sum-exp."""
    options = options_of(rest, named)
    scores, _, value = masked_scores((query, key, value), ends, options)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)
    return output, scores.logsumexp(-1), *state


def backward(
    gradient: Any, query: Any, key: Any, value: Any, output: Any, *rest: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_backward`, by the formulas of FlashAttention 2 (arXiv 2307.08691)."""
    log_sum, ends, *rest = rest
    heads, options = key.shape[1], options_of(rest, named)
    scores, keys, values = masked_scores((query, key, value), ends, options)
    probs = (scores - log_sum.unsqueeze(-1)).exp()
    delta = (gradient * output).sum(-1).T.unsqueeze(-1)
    of_scores = probs * (torch.einsum("qhd,khd->hqk", gradient, values) - delta)
    of_query = torch.einsum("hqk,khd->qhd", of_scores, keys) * options["scale"]
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query) * options["scale"]
    of_value = torch.einsum("hqk,qhd->khd", probs, gradient)
    shared = (part.unflatten(1, (heads, -1)).sum(2) for part in (of_key, of_value))
    return of_query, *shared


def options_of(rest: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The operators' arguments after the first boundaries, which the dispatcher gives by place."""
    names = ("cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
    return dict(zip(names, rest, strict=False)) | named


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the GPU's operators kernels for the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_2_13)
    yield
    library._destroy()


def model_of(
    recompute: str = "none", backend: str = "sdpa", numbers: dict[str, Any] = NUMBERS
) -> Any:
    config = ModelConfig(from_scratch=True, architecture=numbers)
    model = built(config, adapter=FullConfig(), recompute=recompute, backend=backend)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    return model.train()


@pytest.mark.parametrize("lengths", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("numbers", [NUMBERS, MIMO], ids=["gpt_oss", "mimo"])
def test_logits_and_gradients_equal_eager_attention(
    numbers: dict[str, Any], backend: str, lengths: list[list[int]], flash: None
) -> None:
    model = model_of(numbers=numbers)
    ours, eager = run(model, backend, lengths), run(model, "eager", lengths)
    assert (ours[0] - eager[0]).norm() <= 2e-6 * eager[0].norm()
    for (name, _), gradient, expected in zip(
        model.named_parameters(), ours[1], eager[1], strict=True
    ):
        bound = 2e-6 if gradient.ndim > 1 else 1e-5  # of vectors, terms of all tokens cancel
        assert (gradient - expected).norm() <= bound * expected.norm(), name
        assert expected.any(), name


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_a_selective_recompute_changes_nothing(backend: str, flash: None) -> None:
    plain = run(model_of(), backend, PACKED)
    selective = model_of("selective")
    for _ in range(2):  # from the second pass on without a dispatch mode
        found = run(selective, backend, PACKED)
        assert torch.equal(found[0], plain[0])
        assert all(map(torch.equal, found[1], plain[1]))
