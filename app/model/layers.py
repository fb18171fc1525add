"""Which of a model's modules are its repeated layers, and which of them `adapter.layers` means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch

TOP = re.compile(r"top\s+(\d+)")


def decoder_layers(model: torch.nn.Module, instead: str = "adapter.layers=all") -> list[str]:
    """Return the full names of the repeated layers in forward order, an encoder's first.

    ValueError for a model that names no class of layers, with what to type `instead`.
    """
    layers = repeated_layers(model)
    if not layers:
        raise ValueError(unknown_layers_problem(model.config.model_type, instead))
    return layers


def unknown_layers_problem(model_type: str | None, instead: str) -> str:
    """Return what is wrong with a model whose layers are not known."""
    return (
        f"{instead.partition('=')[0]}: {model_type} models do not name their layers; type {instead}"
    )


def repeated_layers(model: torch.nn.Module) -> list[str]:
    """Return what `decoder_layers` does; nothing for a model that names no class of layers."""
    classes = set(model._no_split_modules or ())
    layers: list[str] = []
    for name, module in model.named_modules():
        is_numbered = name.rpartition(".")[2].isdigit()
        is_inside = layers and name.startswith(f"{layers[-1]}.")
        # By its bases, too: a strategy may have put a class of its own before the model's.
        is_layer = any(base.__name__ in classes for base in type(module).__mro__)
        if is_numbered and not is_inside and is_layer:
            layers.append(name)
    return layers


def why_not_compiled(numbers: Mapping[str, Any]) -> str | None:
    """Return why layers of a model with these config.json numbers are not compiled, or None."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"trainer.compile=true: {numbers.get('model_type')} models have two sides, whose lengths "
        "change from batch to batch, and each new pair would be compiled for; "
        "type trainer.compile=false"
    )


def layer_numbers(setting: Any, num_layers: int) -> Sequence[int]:
    """Return the numbers of the layers that `adapter.layers` means, ascending from 0.

    ValueError for a word that is not understood, and for a layer that the model does not have.
    """
    numbers = range(num_layers)
    if setting == "all":
        return numbers
    if isinstance(setting, str) and (top := TOP.fullmatch(setting.strip())):
        count = int(top[1])
        if not 1 <= count <= num_layers:
            raise UserError(
                f"adapter.layers={setting!r}, but the model has {num_layers} layers; "
                f"type a number from 1 to {num_layers}, as 'adapter.layers=top {num_layers}'"
            )
        return numbers[-count:]
    if isinstance(setting, (list, tuple)) and setting and all(type(n) is int for n in setting):
        missing = [number for number in setting if number not in numbers]
        if missing:
            raise UserError(
                f"adapter.layers={list(setting)}: the model has no layer {missing[0]}; "
                f"its {num_layers} layers have the numbers 0 to {num_layers - 1}"
            )
        return sorted(set(setting))
    if type(setting) is int:
        raise UserError(
            f"adapter.layers={setting} could mean a number of layers or one layer; "
            f"type 'adapter.layers=top {setting}' or adapter.layers=[{setting}]"
        )
    raise UserError(
        f"adapter.layers={setting!r} is not understood; type all, 'adapter.layers=top 8' for the "
        "last eight, or their numbers as adapter.layers=[0,1]"
    )
