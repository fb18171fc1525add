"""Run a model in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in this context; afterwards, the model has its mode again."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
