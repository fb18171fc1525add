"""Weights that a layer reads although they belong to a module that it does not call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def reached_weights(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Go over layers and what each reads past its owner's forward: strategies gather it for both.

    IA3's vectors and LoRA's of embeddings lie in mere containers, trained token rows are put into
    the whole embedding, and DoRA measures what a matrix and its adapter come to.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    containers = (torch.nn.ParameterDict, torch.nn.ParameterList)
    for layer in model.modules():
        reached: list[torch.nn.Module] = [
            child for child in layer.children() if isinstance(child, containers)
        ]
        if isinstance(layer, TrainableTokensLayer):
            reached.append(layer.get_base_layer())
            if layer.tied_adapter is not None:
                reached.append(layer.tied_adapter)
        elif isinstance(layer, LoraLayer) and len(layer.lora_magnitude_vector) > 0:
            reached += layer.children()
        for owner in reached:
            for weight in owner.parameters():
                yield layer, weight
