"""Documents of a batch are grouped once, and answers are written by an attention with a cache.

`tests/parity/test_attention_families.py` compares what is computed with documents alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from app.model.attention import attend, attention_implementation, generation_attention
from app.model.attention.documents import group_documents
from app.model.attention.inputs import has_attention
from tests.tiny import random_ids, tiny_llama

LENGTHS = [[5, 9, 3, 30, 7, 20], [40, 1, 2]]
TOKENS = 80


def test_every_position_is_in_exactly_one_group() -> None:
    groups = group_documents(LENGTHS, (2, TOKENS), torch.device("cpu"))
    assert groups is not None
    flat = torch.cat([index.flatten() for index in groups.gather])
    assert torch.equal(flat[groups.restore], torch.arange(2 * TOKENS))
    assert group_documents([[7], [5]], (2, 7), torch.device("cpu")) is None, "rows of one each"


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_generation_uses_an_attention_with_a_cache(backend: str) -> None:
    model, ids = tiny_llama(), random_ids(2, 6)
    model.set_attn_implementation(attention_implementation(backend))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with generation_attention(model):
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert model.config._attn_implementation == attention_implementation(backend)
    model.set_attn_implementation("eager")
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(answer, expected)


def test_an_unsupported_variant_is_refused() -> None:
    part = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="attention=eager"):
        attend.attend_by_document(torch.nn.Identity(), part, part, part, None, softcap=50.0)


@pytest.mark.parametrize(
    ("family", "expected"), [("gpt2", True), ("dots3_note_text", True), ("mamba2", False)]
)
def test_attention_is_recognized_by_any_name_of_its_heads(family: str, expected: bool) -> None:
    model: Any = SimpleNamespace(config=CONFIG_MAPPING[family]())
    assert has_attention(model) is expected
