"""NEFTune: noise on the input embeddings while training (arXiv 2310.05914)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def apply_neftune(model: torch.nn.Module, alpha: float | None) -> None:
    """Add uniform noise of size alpha / sqrt(tokens * width) to every document's embeddings."""
    if alpha is not None:
        raise NotImplementedError
