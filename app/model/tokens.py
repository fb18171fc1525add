"""Tokens that a base never learned: rows for them, and which rows are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.model.adapter import AdapterConfig, LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def resize_embeddings(model: PreTrainedModel, num_tokens: int) -> None:
    """Give embedding and head at least `num_tokens` rows; new ones start as the mean of the old."""
    embedding = model.get_input_embeddings()
    if embedding.num_embeddings >= num_tokens:
        return
    model.resize_token_embeddings(num_tokens, mean_resizing=False)


def trained_token_ids(
    tokenizer: PreTrainedTokenizerBase, added: list[str], adapter: AdapterConfig
) -> list[int]:
    """Return the ids whose rows train with an adapter: `added` ones and those that it names."""
    named = adapter.trainable_tokens if isinstance(adapter, LoraConfig) else []
    return sorted({tokenizer.convert_tokens_to_ids(token) for token in (*added, *named)})
