"""The one way in which peft is put on a model: with what it does wrongly put right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.model.adapter import targets
from app.model.adapter.rows import check_rows, declare_ties

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel


def wrap(
    model: PreTrainedModel, config: peft.PeftConfig, *, autocast_adapter_dtype: bool = True
) -> peft.PeftModel:
    """Put a new adapter of these settings on a base, which is frozen.

    ValueError where some of the modules that share the embedding's weight would not be trained.
    """
    import peft

    declare_ties(model)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    check_rows(adapted)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.ia3.IA3Layer) and targets.is_quantized(module):
            module.register_forward_hook(_keep_dtype)
    # peft asks for gradients at the embedding's output where layers are computed again; only
    # reentrant checkpointing needs them, and the backward pass would go too deep.
    model.disable_input_require_grads()
    return adapted


def _keep_dtype(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """On a quantized layer peft's IA3 returns fp32, also in the middle of a bf16 model."""
    return output.to(inputs[0].dtype)
