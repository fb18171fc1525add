"""Windows and chunks that a model's layers are told by their mask alone.

transformers describes a mask by a function of a query's and a key's position. Kept as that function
instead of a matrix over whole rows, it holds inside each document of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class MaskRule:
    """Which keys a query of a document sees, by their positions in that document.

    `function` takes row, head, query and key, as transformers' mask functions do; up to `size`
    tokens a document is seen as without the rule.
    """

    function: Callable[..., torch.Tensor]
    size: int
    _visible: dict[int, torch.Tensor] = field(default_factory=dict)

    def visible(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return for documents of this length, bool [1, 1, tokens, tokens]; kept for all layers."""
        import torch

        if tokens not in self._visible:
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
            position = torch.arange(tokens, device=device)
            seen = self.function(zero, zero, position.view(1, 1, -1, 1), position.view(1, 1, 1, -1))
            self._visible[tokens] = seen.expand(1, 1, tokens, tokens)
        return self._visible[tokens]


def build_mask_rule(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskRule | None:
    """Return what transformers hands to layers as their mask; None where all of the past is seen.

    Registered beside our attention functions. ValueError for masks that are not of positions alone.
    """
    if use_vmap:
        raise UserError(
            "this model's attention mask depends on more than the positions of tokens, which only "
            "eager attention computes: type attention=eager packing=none"
        )
    return None if local_size is None else MaskRule(mask_function, local_size)
