"""Windows and chunks given only by a mask function apply inside each document."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from app.model.attention import attend
from app.model.attention.attend import (
    MaskRule,
    attend_by_document,
    attend_in_blocks,
    build_mask_rule,
    window_rule,
)
from app.model.attention.documents import group_documents
from app.model.attention.inputs import _dense_mask
from app.model.attention.varlen import VarlenKernel, attend_by_boundaries
from tests.model.test_attention_varlen import varlen_2_13

LENGTHS, TOKENS = [[5, 9, 3, 30, 7, 20]], 80
LAYER = torch.nn.Identity()
KERNEL = VarlenKernel.of(varlen_2_13)


def rule(kind: str, size: int) -> MaskRule:
    rows = torch.zeros(1, dtype=torch.int64)
    functions = {
        "window": sliding_window_causal_mask_function(size),
        "chunk": chunked_causal_mask_function(size, rows),
    }
    built = build_mask_rule(mask_function=functions[kind], local_size=size)
    assert built is not None
    return built


def parts(tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))


def expected(kind: str, size: int) -> torch.Tensor:
    """Attention of each document alone, with a dense mask."""
    query, key, value = parts(TOKENS)
    key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
    outputs, start = [], 0
    for length in (*LENGTHS[0], TOKENS - sum(LENGTHS[0])):
        number = torch.arange(length)
        mask = number.unsqueeze(1) >= number
        if kind == "window":
            mask &= number.unsqueeze(1) - number < size
        else:
            mask &= number.unsqueeze(1) // size == number // size
        cut = (part[:, :, start : start + length] for part in (query, key, value))
        q, k, v = cut
        scores = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(1, 2))
        start += length
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("size", [1, 4, 9, 100])
@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("block", [attend.BLOCK_TOKENS, 3])
def test_a_mask_rule_holds_in_every_document(
    block: int, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "BLOCK_TOKENS", block)
    groups = group_documents(LENGTHS, (1, TOKENS), torch.device("cpu"))
    output, _ = attend_by_document(LAYER, *parts(TOKENS), rule(kind, size), documents=groups)
    torch.testing.assert_close(output, expected(kind, size))


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_masks_are_shared_by_layers_and_by_blocks_that_look_the_same(kind: str) -> None:
    ruled, cpu = rule(kind, 4), torch.device("cpu")
    first = ruled.visible(range(2, 7), range(7), cpu)
    assert first.shape == (1, 1, 5, 7)
    assert ruled.visible(range(10, 15), range(8, 15), cpu) is first
    whole = rule(kind, 4).visible(range(15), range(15), cpu)
    assert torch.equal(whole[..., 10:15, 8:15], first)


def test_layers_save_the_masks_of_blocks_once() -> None:
    query, key, value = (part.requires_grad_() for part in parts(TOKENS))
    saved, shared = set(), window_rule(TOKENS)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (60, TOKENS):
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(2):
            last = attend_in_blocks(query[:, :, -60:], key, value, shared, dropout=0, scaling=None)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(last, whole[:, :, -60:])
    assert len(saved) == 1


def test_a_plain_causal_mask_has_no_rule() -> None:
    assert build_mask_rule(mask_function=causal_mask_function) is None


def test_a_mask_of_more_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more than the positions .* type attention=eager"):
        build_mask_rule(mask_function=causal_mask_function, use_vmap=True)
    whole = torch.zeros(1, 1, 6, 6)
    with pytest.raises(ValueError, match=r"mask that Identity computed .* type attention=eager"):
        attend_by_document(LAYER, *parts(6), whole)  # type: ignore[arg-type]


def test_varlen_supports_only_the_layers_own_window() -> None:
    query, key, value = parts(12)
    ours, _ = attend_by_boundaries(
        LAYER, query, key, value, rule("window", 4), sliding_window=4, kernel=KERNEL
    )
    by_document, _ = attend_by_document(LAYER, query, key, value, rule("window", 4))
    torch.testing.assert_close(ours, by_document)
    attend_by_boundaries(LAYER, query, key, value, rule("chunk", 12), kernel=KERNEL)
    for kind, window in (("window", None), ("chunk", None), ("chunk", 3)):
        with pytest.raises(ValueError, match="another kind of mask: type attention=sdpa"):
            attend_by_boundaries(
                LAYER, query, key, value, rule(kind, 4), sliding_window=window, kernel=KERNEL
            )


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_dense_mask_is_that_of_each_document(window: int | None) -> None:
    shape, device = (1, sum(LENGTHS[0])), torch.device("cpu")
    mask = _dense_mask(LENGTHS, shape, device, torch.float32, window=window)
    blocks = []
    for length in LENGTHS[0]:
        number = torch.arange(length)
        distance = number.unsqueeze(1) - number
        blocks.append((distance >= 0) & (distance < (window or length)))
    assert torch.equal(mask[0, 0] == 0, torch.block_diag(*blocks).bool())
