"""Which weights train, by the base's own names: what peft puts around a name is taken off here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.quantization import storage_of
from app.model.weight_reads import find_bypassed_children
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class TrainableReport:
    """Trainable and all parameters: their numbers, their dtypes and their bytes."""

    num_trainable: int
    num_total: int
    dtypes: dict[str, int]
    num_bytes: int


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count the trainable parameters; UserError where there are none."""
    dtypes: dict[str, int] = {}
    trainable = num_bytes = 0
    for parameter in model.parameters():
        storage = storage_of(parameter)
        dtypes[storage.dtype] = dtypes.get(storage.dtype, 0) + storage.num_weights
        num_bytes += storage.num_bytes
        trainable += storage.num_weights if parameter.requires_grad else 0
    if not trainable:
        raise UserError("no weight would be trained: look at adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes, num_bytes)


def external_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Yield layers, and the weights that each reads without calling the module that owns them.

    Strategies gather them for both.

    IA3's vectors and LoRA's of embeddings lie in mere containers, trained token rows are put into
    the whole embedding, DoRA measures what a matrix and its adapter come to, experts are given
    their matrices, and mixers read the weight of their convolution.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
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
        elif isinstance(layer, ParamWrapper):
            reached += [*layer.lora_A.values(), *layer.lora_B.values()]
        elif isinstance(layer, LoraLayer) and len(layer.lora_magnitude_vector) > 0:
            reached += layer.children()
        read = (layer._modules.get(name) for name in find_bypassed_children(layer.__class__))
        reached += [child for child in read if child is not None]
        for owner in reached:
            for weight in owner.parameters():
                yield layer, weight


KINDS = {
    # peft's name for a part of an adapter: what people call it
    "lora_A": "lora A",
    "lora_B": "lora B",
    "lora_embedding_A": "lora embedding A",
    "lora_embedding_B": "lora embedding B",
    "lora_magnitude_vector": "magnitude",
    "ia3_l": "ia3 vector",
    "trainable_tokens_delta": "token rows",
}
PREFIX = "base_model.model."
WRAPPERS = {"base_layer", "modules_to_save", "token_adapter", "default"}


@dataclass(frozen=True, slots=True)
class TrainableWeight:
    """One parameter that trains."""

    name: str
    """its full name in the base, as model.layers.0.self_attn.q_proj.lora_A.weight"""
    module: str
    """full name of its module in the base, as model.layers.0.self_attn.q_proj"""
    kind: str
    """a value of KINDS, or the parameter's own name where it is the base's: weight, bias"""
    parameter: torch.nn.Parameter

    @property
    def is_vector(self) -> bool:
        """Whether it scales or shifts each feature alone; IA3 keeps its vectors as [n, 1]."""
        return self.parameter.ndim < 2 or self.kind == "ia3 vector"


def trainable_weights(model: torch.nn.Module) -> list[TrainableWeight]:
    """List the parameters that train, in the model's order; a tied one comes once."""
    nested = _nested_parameters(model)
    return [
        _described(_named_apart(name, nested), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _nested_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Return the names of the modules that peft puts around experts, and the parameter of each."""
    from peft.tuners.lora.layer import ParamWrapper

    return {
        name: module.parameter_name
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


def _named_apart(name: str, nested: Mapping[str, str]) -> str:
    """Name an adapter's part by the parameter that it is for, where several are on one module."""
    owner, _, part = name.partition(".lora_")
    return f"{owner}.{nested[owner]}.lora_{part}" if owner in nested else name


def adapter_matrices(model: torch.nn.Module) -> list[TrainableWeight]:
    """List what an adapter puts on modules of the base, whose every token goes through it."""
    on_modules = set(KINDS.values()) - {"token rows"}
    return [weight for weight in trainable_weights(model) if weight.kind in on_modules]


def _described(name: str, parameter: torch.nn.Parameter) -> TrainableWeight:
    parts = name.split(".")
    if name.startswith(PREFIX):
        parts = [part for part in name.removeprefix(PREFIX).split(".") if part not in WRAPPERS]
    name = ".".join(parts)
    for place, part in enumerate(parts):
        if part in KINDS:
            return TrainableWeight(name, ".".join(parts[:place]), KINDS[part], parameter)
    return TrainableWeight(name, ".".join(parts[:-1]), parts[-1], parameter)
