"""Models with ALiBi are trained unpacked; packing them is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from app.model.attention import AttentionConfig, choose_backend, packing_error
from app.model.attention.inputs import attention_inputs
from app.model.attention.probes import check_isolation
from tests.families import tiny_family


def falcon(*, alibi: bool = False) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FalconConfig(**shape, initializer_range=0.2, alibi=alibi, attn_implementation="eager")
    return FalconForCausalLM(config)


MODELS: dict[str, Callable[..., Any]] = {
    "bloom": partial(tiny_family, "bloom"),
    "mpt": partial(tiny_family, "mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
    "falcon": falcon,
}


def made(name: str, **numbers: Any) -> Any:
    model = MODELS[name](**numbers).eval()
    assert choose_backend(AttentionConfig(), model.config, "cpu", "fp32").backend == "eager"
    return model


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def logits(model: Any, tokens: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths[0]])
    if len(lengths) > 1:
        positions = torch.arange(tokens.shape[1])
    return model(
        input_ids=tokens,
        position_ids=positions.expand(len(tokens), -1),
        use_cache=False,
        **attention_inputs(model, "eager", lengths, tokens),
    ).logits


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_row_has_the_logits_of_the_row_alone(name: str) -> None:
    model, tokens, lengths = made(name), ids(3, 12), [[12], [5], [1]]
    padded = logits(model, tokens, lengths)
    for row, (length,) in enumerate(lengths):
        alone = model(input_ids=tokens[row : row + 1, :length], use_cache=False).logits[0]
        assert torch.allclose(padded[row, :length], alone, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_alibi_is_not_packed(name: str) -> None:
    model = made(name, **({"alibi": True} if name == "falcon" else {}))
    with pytest.raises(ValueError, match=r"models compute their ALiBi bias .* packing=none"):
        check_isolation(model, "eager")
    assert packing_error(model.config.to_dict())


@torch.no_grad()
def test_falcon_with_rotary_positions_is_packed() -> None:
    model, tokens = made("falcon"), ids(1, 12)
    check_isolation(model, "eager")
    assert packing_error(model.config.to_dict()) is None
    packed = logits(model, tokens, [[5, 7]])
    for document in (slice(0, 5), slice(5, 12)):
        alone = model(input_ids=tokens[:, document], use_cache=False).logits[0]
        assert torch.allclose(packed[0, document], alone, atol=1e-5)
