"""Trade time for memory: which activations are computed again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("none", "full")


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: str = "none"
    """none: keep all activations; full: only each decoder layer's input (less memory, slower)"""


def apply_recompute(model: PreTrainedModel, config: RecomputeConfig) -> None:
    """Switch non-reentrant gradient checkpointing on for every decoder layer."""
    if config.mode != "full":
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reentrant checkpointing loses the gradients of adapters whose layer input is frozen. It alone
    # needs gradients to flow into the first layer; with them the backward pass would go below the
    # lowest layer that trains. T5's attention asks for them once more, by its own switch.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for module in layer.modules():
                if module is not layer and "gradient_checkpointing" in vars(module):
                    module.gradient_checkpointing = False
