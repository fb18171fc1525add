"""List trainable weights by the base's names, without the parts that peft adds to a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.quantization import storage_of
from app.model.weight_reads import find_bypassed_children
from common.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class TrainableReport:
    """Counts of a model's parameters."""

    num_trainable: int
    num_total: int
    dtypes: dict[str, int]
    """number of parameters by dtype"""
    num_bytes: int
    """size of all parameters"""


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count the parameters of a model; raise UserError if none is trainable."""
    dtypes: dict[str, int] = {}
    trainable = num_bytes = 0
    for parameter in model.parameters():
        storage = storage_of(parameter)
        dtypes[storage.dtype] = dtypes.get(storage.dtype, 0) + storage.num_weights
        num_bytes += storage.num_bytes
        trainable += storage.num_weights if parameter.requires_grad else 0
    if not trainable:
        raise UserError("no parameter would be trained: check adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes, num_bytes)


def external_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Yield each layer with the weights it reads without calling the module that owns them.

    A strategy that shards weights must gather these for the layer too (DeepSpeed calls them
    external parameters). IA3's vectors and LoRA's embedding matrices are in parameter containers;
    trained token rows are written into the whole embedding; DoRA computes norms of a matrix and its
    adapter; fused experts receive A and B; mixers read the weight of their convolution.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    containers = (torch.nn.ParameterDict, torch.nn.ParameterList)
    for layer in model.modules():
        owners: list[torch.nn.Module] = [
            child for child in layer.children() if isinstance(child, containers)
        ]
        if isinstance(layer, TrainableTokensLayer):
            owners.append(layer.get_base_layer())
            if layer.tied_adapter is not None:
                owners.append(layer.tied_adapter)
        elif isinstance(layer, ParamWrapper):
            owners += [*layer.lora_A.values(), *layer.lora_B.values()]
        elif isinstance(layer, LoraLayer) and len(layer.lora_magnitude_vector) > 0:
            owners += layer.children()
        read = (layer._modules.get(name) for name in find_bypassed_children(layer.__class__))
        owners += [child for child in read if child is not None]
        for owner in owners:
            for weight in owner.parameters():
                yield layer, weight


KINDS = {
    "lora_A": "lora A",
    "lora_B": "lora B",
    "lora_embedding_A": "lora embedding A",
    "lora_embedding_B": "lora embedding B",
    "lora_magnitude_vector": "magnitude",
    "ia3_l": "ia3 vector",
    "trainable_tokens_delta": "token rows",
}
"""peft's name of an adapter's part -> its usual name"""
_PREFIX = "base_model.model."
WRAPPERS = {"base_layer", "original_module", "modules_to_save", "token_adapter", "default"}
"""parts that peft adds to the name of a base's weight"""


@dataclass(frozen=True, slots=True)
class TrainableWeight:
    """One trainable parameter."""

    name: str
    """full name in the base, as model.layers.0.self_attn.q_proj.lora_A.weight"""
    module: str
    """full name of its module in the base, as model.layers.0.self_attn.q_proj"""
    kind: str
    """a value of KINDS; for a parameter of the base its own name: weight, bias"""
    parameter: torch.nn.Parameter

    @property
    def is_vector(self) -> bool:
        """Whether it scales or shifts single features; IA3 stores its vectors as [n, 1]."""
        return self.parameter.ndim < 2 or self.kind == "ia3 vector"


def trainable_weights(model: torch.nn.Module) -> list[TrainableWeight]:
    """List the trainable parameters in the model's order; a tied one is listed once."""
    from peft.tuners.lora.layer import ParamWrapper

    expert_parameters = {
        name: module.parameter_name
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }

    def unique_name(name: str) -> str:
        """Insert the expert parameter: one module may have an adapter on each of several."""
        owner, _, part = name.partition(".lora_")
        parameter = expert_parameters.get(owner)
        return name if parameter is None else f"{owner}.{parameter}.lora_{part}"

    return [
        _described(unique_name(name), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def adapter_matrices(model: torch.nn.Module) -> list[TrainableWeight]:
    """List the adapter weights that every token passes through: all but trained token rows."""
    on_modules = set(KINDS.values()) - {"token rows"}
    return [weight for weight in trainable_weights(model) if weight.kind in on_modules]


def expert_matrices(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int, int]]:
    """Yield the low-rank matrices of fused experts, each with the dimension of its experts.

    The last number is that of equal blocks of this dimension that hold parts of all experts: peft
    has A [experts x rank, in], and B [out, rank x experts].
    """
    from peft.tuners.lora.layer import ParamWrapper

    for layer in module.modules():
        if isinstance(layer, ParamWrapper):
            for name, rank in layer.r.items():
                yield layer.lora_A[name], 0, 1
                yield layer.lora_B[name], 1, rank


def _described(name: str, parameter: torch.nn.Parameter) -> TrainableWeight:
    parts = name.split(".")
    if name.startswith(_PREFIX):
        parts = [part for part in name.removeprefix(_PREFIX).split(".") if part not in WRAPPERS]
    name = ".".join(parts)
    for place, part in enumerate(parts):
        if part in KINDS:
            return TrainableWeight(name, ".".join(parts[:place]), KINDS[part], parameter)
    return TrainableWeight(name, ".".join(parts[:-1]), parts[-1], parameter)
