"""Find a model's repeated layers, and those that the setting `adapter.layers` selects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    import torch

_TOP = re.compile(r"top\s+(\d+)")


def decoder_layers(model: torch.nn.Module, instead: str = "adapter.layers=all") -> list[str]:
    """Return the full names of the repeated layers in forward order, those of an encoder first.

    `instead`: setting that the message of the ValueError suggests if the model does not declare the
    class of its layers.
    """
    layers = repeated_layers(model)
    if not layers:
        raise ValueError(unknown_layers_problem(model.config.model_type, instead))
    return layers


def unknown_layers_problem(model_type: str | None, instead: str) -> str:
    """Return the error message for a model that does not declare the class of its layers."""
    return (
        f"{instead.partition('=')[0]}: {model_type} models do not declare the class of their "
        f"layers; type {instead}"
    )


def repeated_layers(model: torch.nn.Module) -> list[str]:
    """Return the same as `decoder_layers`; an empty list if the layer class is not declared."""
    classes = set(model._no_split_modules or ())
    layers: list[str] = []
    for name, module in model.named_modules():
        is_numbered = name.rpartition(".")[2].isdigit()
        is_inside = layers and name.startswith(f"{layers[-1]}.")
        # Base classes count too: FSDP2 replaces a layer's class by a class derived from it.
        is_layer = any(base.__name__ in classes for base in type(module).__mro__)
        if is_numbered and not is_inside and is_layer:
            layers.append(name)
    return layers


def compile_error(numbers: Mapping[str, Any]) -> str | None:
    """Return why a model with these config.json values cannot be compiled; None if it can."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"trainer.compile=true: {numbers.get('model_type')} models are encoder-decoders: each new "
        "pair of input and output lengths would be compiled again; type trainer.compile=false"
    )


def layer_numbers(setting: Any, num_layers: int) -> Sequence[int]:
    """Return the indices of the layers that `adapter.layers` selects, ascending from 0.

    Raises UserError for an invalid value or a layer that the model does not have.
    """
    numbers = range(num_layers)
    if setting == "all":
        return numbers
    if isinstance(setting, str) and (top := _TOP.fullmatch(setting.strip())):
        count = int(top[1])
        if not 1 <= count <= num_layers:
            raise UserError(
                f"adapter.layers={setting!r}, but the model has {num_layers} layers; "
                f"type a number from 1 to {num_layers}, for example 'adapter.layers=top "
                f"{num_layers}'"
            )
        return numbers[-count:]
    if isinstance(setting, (list, tuple)) and setting and all(type(n) is int for n in setting):
        missing = [number for number in setting if number not in numbers]
        if missing:
            raise UserError(
                f"adapter.layers={list(setting)}: the model has no layer {missing[0]}; "
                f"its {num_layers} layers are numbered 0 to {num_layers - 1}"
            )
        return sorted(set(setting))
    if type(setting) is int:
        raise UserError(
            f"adapter.layers={setting} could mean a count of layers or a single layer; "
            f"type 'adapter.layers=top {setting}' or adapter.layers=[{setting}]"
        )
    raise UserError(
        f"adapter.layers={setting!r} is not valid; type all, 'adapter.layers=top 8' for the last "
        "eight layers, or a list of layer numbers such as adapter.layers=[0,1]"
    )
