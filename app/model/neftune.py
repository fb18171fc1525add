"""NEFTune: noise on the input embeddings during training (arXiv 2310.05914)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    import torch


def apply_neftune(model: torch.nn.Module, alpha: float | None) -> None:
    """Add uniform noise of size alpha / sqrt(tokens * width) to every document's embeddings.

    Apply it after the adapter, which may replace the embedding module. The noise is off in
    evaluation and not saved. None has no effect; UserError for encoder-decoder models.
    """
    if alpha is None:
        return
    if problem := find_neftune_problem(alpha, model.config.to_dict()):
        raise UserError(problem)
    noise = _EmbeddingNoise(alpha)
    model.register_forward_pre_hook(noise.record_positions, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise.add)


def find_neftune_problem(alpha: float, numbers: Mapping[str, Any]) -> str | None:
    """Return why NEFTune does not support a model with this config.json, or None if it does."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"adapter.neftune_alpha={alpha:g} is for causal models, and {numbers.get('model_type')} is "
        "an encoder-decoder: type adapter.neftune_alpha=null"
    )


class _EmbeddingNoise:
    """Hooks of one model: one records the positions of a batch, the other adds the noise."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.position_ids: torch.Tensor | None = None

    def record_positions(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs.get("position_ids")

    def add(
        self, embedding: torch.nn.Module, args: Any, embedded: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `embedded` [rows, tokens, width] with noise, or None in evaluation."""
        import torch

        if not embedding.training:
            return None
        lengths = torch.full_like(embedded[..., 0], embedded.shape[1], dtype=torch.float32)
        if self.position_ids is not None:
            lengths = document_lengths(self.position_ids).float()
        size = self.alpha * (lengths * embedded.shape[-1]).rsqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * size.unsqueeze(-1).to(embedded.dtype)


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's document, given positions that start at 0 in each document.

    int64 [rows, tokens] in and out, without a device sync. Padding tokens, all at position 0, count
    as documents of one token.
    """
    import torch

    document = (position_ids == 0).cumsum(dim=1) - 1
    counts = torch.zeros_like(position_ids).scatter_add_(1, document, torch.ones_like(position_ids))
    return counts.gather(1, document)
