"""Which of a model's modules are its repeated layers, and which of them a setting means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch

TOP = re.compile(r"top\s+(\d+)")


def decoder_layers(model: torch.nn.Module, instead: str = "adapter.layers=all") -> list[str]:
    """Return the full names of the repeated layers in forward order.

    An encoder's layers come before its decoder's. ValueError for a model that does not say which
    of its classes is a layer, with what to type `instead`.
    """
    classes = set(model._no_split_modules or ())
    layers: list[str] = []
    for name, module in model.named_modules():
        is_numbered = name.rpartition(".")[2].isdigit()
        is_inside = layers and name.startswith(f"{layers[-1]}.")
        # By its bases, too: a strategy may have put a class of its own before the model's.
        of_layer = any(base.__name__ in classes for base in type(module).__mro__)
        if is_numbered and not is_inside and of_layer:
            layers.append(name)
    if not layers:
        raise UserError(
            f"{instead.partition('=')[0]}: {model.config.model_type} models do not say which of "
            f"their modules are layers; type {instead}"
        )
    return layers


def why_not_compiled(numbers: Mapping[str, Any]) -> str | None:
    """Say why the layers of a model of these config.json numbers are not compiled; None if so."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"trainer.compile=true: {numbers.get('model_type')} models have two sides, whose lengths "
        "change from batch to batch, and each new pair would be compiled for; "
        "type trainer.compile=false"
    )


def choose_layers(setting: Any, names: Sequence[str]) -> list[str]:
    """Return those of `names` that `setting` means, in forward order."""
    return [names[number] for number in layer_numbers(setting, len(names))]


def layer_numbers(setting: Any, num_layers: int) -> Sequence[int]:
    """Return the numbers, ascending from 0, of the layers that `adapter.layers` means.

    ValueError for a word or number that this many layers do not have. Needs no torch.
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
