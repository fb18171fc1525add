"""Tokens that a base never learned: rows for them, and which rows are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.model.adapter import AdapterConfig, LoraConfig
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def num_rows(architecture: PretrainedConfig, new_ids: Sequence[int] = ()) -> int:
    """Return how many rows the embedding has, once there is one for each of `new_ids`."""
    rows: int = architecture.get_text_config().vocab_size
    return max([rows, *(index + 1 for index in new_ids)])


def resize_embeddings(model: PreTrainedModel, new_ids: Sequence[int]) -> None:
    """Give the tokens `new_ids` rows in embedding and head; each starts as the mean of the others.

    A base often has more rows than its tokenizer has tokens: those are used first, and the mean is
    of the rows before them. The rows are the same in every call.
    """
    if not new_ids:
        return
    rows = model.get_input_embeddings().num_embeddings
    needed = max(new_ids) + 1
    if needed > rows:
        # Without means: those of transformers are drawn at random from a fitted distribution.
        model.resize_token_embeddings(needed, mean_resizing=False)
    made = list(range(rows, needed))
    ids = sorted({*new_ids, *made})
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _start_as_the_mean(embedding.weight.data, ids)
    if head.weight is not embedding.weight:
        _start_as_the_mean(head.weight.data, ids)
    # A bias does not train with its row: that of a row which was there stays the base's.
    if head.bias is not None:
        _start_as_the_mean(head.bias.data, made)
    if "final_logits_bias" in model._buffers:  # BART's bias of the head, shape [1, rows]
        _start_as_the_mean(model.final_logits_bias[0], made)


def _start_as_the_mean(weight: torch.Tensor, ids: list[int]) -> None:
    """Set the rows `ids` to the mean of the rows before the first of them, in place."""
    import torch

    if ids:
        weight[ids] = weight[: ids[0]].mean(dim=0, dtype=torch.float32).to(weight.dtype)


def trained_token_ids(
    tokenizer: PreTrainedTokenizerBase, added: Sequence[str], adapter: AdapterConfig
) -> list[int]:
    """Return the ids whose rows train with an adapter: `added` ones and those that it names.

    ValueError for a name that is not one token.
    """
    named = adapter.trainable_tokens if isinstance(adapter, LoraConfig) else []
    known = tokenizer.get_vocab()
    unknown = [token for token in named if token not in known]
    if unknown:
        raise UserError(
            f"adapter.trainable_tokens: {', '.join(map(repr, unknown))} is no token of this "
            f"tokenizer; type 'model.added_tokens=[{','.join(unknown)}]' to add it"
        )
    return sorted({known[token] for token in (*added, *named)})
