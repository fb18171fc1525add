"""NEFTune: noise on the input embeddings while training (arXiv 2310.05914)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch


def apply_neftune(model: torch.nn.Module, alpha: float | None) -> None:
    """Add uniform noise of size alpha / sqrt(tokens * width) to every document's embeddings.

    Call it after the adapter, which may replace the embedding module. It is not saved, and has no
    effect in evaluation. None changes nothing; UserError for encoder-decoder models.
    """
    if alpha is None:
        return
    if problem := why_no_noise(alpha, model.config.to_dict()):
        raise UserError(problem)
    noise = _EmbeddingNoise(alpha)
    model.register_forward_pre_hook(noise.see_documents, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise.add)


def why_no_noise(alpha: float, numbers: Mapping[str, Any]) -> str | None:
    """Return why a model of these config.json `numbers` gets no noise, None where it can."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"adapter.neftune_alpha={alpha:g} is for causal models, and {numbers.get('model_type')} is "
        "an encoder-decoder: type adapter.neftune_alpha=null"
    )


class _EmbeddingNoise:
    """Hooks of one model: the model's forward gives the positions, the embedding gets the noise."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.position_ids: torch.Tensor | None = None

    def see_documents(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs.get("position_ids")

    def add(
        self, embedding: torch.nn.Module, args: Any, embedded: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `embedded` [rows, tokens, width] with noise; None leaves it as it is."""
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
    """Return the length of each token's document; positions start at 0 in each.

    int64 [rows, tokens] in and out, without a device sync. Padding, all at position 0, counts as
    documents of one token.
    """
    import torch

    document = (position_ids == 0).cumsum(dim=1) - 1
    counts = torch.zeros_like(position_ids).scatter_add_(1, document, torch.ones_like(position_ids))
    return counts.gather(1, document)
