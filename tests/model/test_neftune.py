"""Noise on the input embeddings: its size by document, and where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.adapter import FullConfig, apply_adapter, save_adapter
from app.model.adapter.apply import apply_neftune, document_lengths
from common.errors import UserError
from tests.tiny import random_ids, tiny_llama, tiny_t5

WIDTH = 32
PACKED = torch.tensor([[*range(3), *range(9), *range(4)], [*range(10), *[0] * 6]])


def noisy(alpha: float = 5.0, adapter: Any = None, **llama: Any) -> Any:
    """A model in training mode with noise, that keeps what its first layer is given."""
    model = apply_adapter(tiny_llama(**llama), adapter or FullConfig(), half_precision=False)
    apply_neftune(model, alpha)
    model.seen = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda _, args: model.seen.append(args[0]))
    return model.train()


def noise_of(model: Any, ids: Tensor, **inputs: Tensor) -> Tensor:
    """What was added to the embeddings of `ids` [rows, tokens, width]."""
    model(input_ids=ids, use_cache=False, **inputs)
    model.eval()
    model(input_ids=ids, use_cache=False, **inputs)
    model.train()
    return (model.seen[-2] - model.seen[-1]).detach()


def test_the_noise_of_packed_documents_is_bounded_by_their_own_lengths() -> None:
    """640 draws a token come near to their bound; one by the row's length would be another."""
    alpha = 15.0
    model, largest = noisy(alpha), torch.zeros(2, 16)
    for _ in range(20):
        noise = noise_of(model, random_ids(2, 16), position_ids=PACKED)
        largest = torch.maximum(largest, noise.abs().amax(dim=-1))
    bound = alpha / (document_lengths(PACKED) * WIDTH).sqrt()
    assert (largest <= bound * 1.0001).all()
    assert (largest >= bound * 0.9).all()


def test_one_document_a_row_gets_the_noise_of_the_reference() -> None:
    """The paper's line: uniform in +-alpha / sqrt(L * d), drawn from the global generator."""
    model, ids = noisy(5.0), random_ids(2, 16)
    torch.manual_seed(3)
    noise = noise_of(model, ids, position_ids=torch.arange(16).expand(2, 16))
    torch.manual_seed(3)
    bound = 5.0 / math.sqrt(16 * WIDTH)
    expected = torch.empty(2, 16, WIDTH).uniform_(-bound, bound)
    assert torch.allclose(noise, expected, atol=1e-6)


def test_there_is_no_noise_in_evaluation_and_none_without_alpha() -> None:
    plain, model, ids = tiny_llama(), noisy(5.0).eval(), random_ids()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    before = tiny_llama().train()
    apply_neftune(before, None)
    assert torch.equal(before(input_ids=ids).logits, tiny_llama().train()(input_ids=ids).logits)
    assert not torch.equal(noisy(5.0)(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_trained_token_rows_get_noise_and_gradients(tmp_path: Path) -> None:
    """The adapter wraps the embedding; the hook belongs on the wrapper."""
    import peft

    base = tiny_llama()
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[5, 6]
    )
    model = peft.get_peft_model(base, lora)
    apply_neftune(model, 5.0)
    ids = torch.tensor([[5, 6, 7, 8]])
    model.train()
    first, second = (model(input_ids=ids).logits.detach() for _ in range(2))
    assert not torch.equal(first, second)
    model(input_ids=ids, labels=ids).loss.backward()
    rows = [p for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    assert rows and all(row.grad is not None and row.grad.any() for row in rows)
    save_adapter(model, tmp_path)
    assert "neftune" not in (tmp_path / "adapter_config.json").read_text().lower()


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UserError, match=r"is for causal models.*type adapter.neftune_alpha=null"):
        apply_neftune(tiny_t5(), 5.0)
