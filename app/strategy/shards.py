"""A tensor that lies in parts on several ranks. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of which each rank holds a part, or none: known by its shape till it is gathered."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    """returns the whole, on every rank; all ranks must call it, in the same order"""


StateTensor = Any
"""a Tensor or a ShardedTensor"""
