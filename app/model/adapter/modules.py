"""Names and shapes of a base's modules, described from a loaded model; and queries on modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.layers import repeated_layers
from app.model.multimodal import describe_language_model, language_model_name
from app.model.patterns import is_inside

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModules:
    """The modules of a base by full name, in forward order; None if only loading can tell."""

    name: str = "the model"
    model_type: str | None = None
    linear: Mapping[str, tuple[int, ...]] | None = None
    """linear modules, also quantized and GPT-2's transposed ones: name -> shape of the weight"""
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """fused experts: full name of the parameter -> its shape, [experts, ...]"""
    weighted: Sequence[str] | None = None
    """modules that contain weights, directly or in a submodule"""
    layers: Sequence[str] | None = None
    """the repeated layers, an encoder's before its decoder's; empty if the model has none"""
    embeddings: Sequence[str] = ()
    """the input embedding, then the modules that share its weight"""
    head: str | None = None
    """the output embedding"""


def modules_of(model: PreTrainedModel) -> BaseModules:
    """Describe the modules of a model; of a multimodal one, those of its language model."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear: dict[str, tuple[int, ...]] = {}
    weighted = []
    experts: dict[str, tuple[int, ...]] = {}
    head = model.get_output_embeddings()
    language_model = language_model_name(model)
    for name, module in model.named_modules():
        if language_model and module is not head and not is_inside(name, [language_model]):
            continue
        if isinstance(module, Conv1D):
            linear[name] = (module.nx, module.nf)
        elif isinstance(module, torch.nn.Linear):  # a quantized weight has another shape
            linear[name] = (module.out_features, module.in_features)
        if name and next(module.parameters(), None) is not None:
            weighted.append(name)
        experts |= _experts_of(name, module)
    return BaseModules(
        name=describe_language_model(model),
        model_type=model.config.model_type,
        linear=linear,
        experts=experts,
        weighted=weighted,
        layers=repeated_layers(model),
        embeddings=sharing_embedding(model),
        head=None if head is None else name_of(model, head),
    )


def _experts_of(name: str, module: Any) -> dict[str, tuple[int, ...]]:
    """Return a module's parameters with one matrix per expert, by full name."""
    from app.model.experts import PackedExperts, packed_shapes

    if (
        isinstance(module, PackedExperts)
        or "expert" not in f"{name} {type(module).__name__}".lower()
    ):
        return {}
    parameters = module.named_parameters(recurse=False)
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in parameters}
    shapes |= packed_shapes(module)
    return {f"{name}.{leaf}": shape for leaf, shape in shapes.items() if len(shape) == 3}


def sharing_embedding(model: PreTrainedModel) -> list[str]:
    """Return full names of all modules that hold the input embedding's weight, embedding first."""
    embedding = model.get_input_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if module._parameters.get("weight") is embedding.weight
    ]
    own = name_of(model, embedding)
    return [own, *(name for name in names if name != own)]


def name_of(model: PreTrainedModel, wanted: torch.nn.Module) -> str:
    """Return a module's full name."""
    return next(name for name, module in model.named_modules() if module is wanted)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether head and input embedding share one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether any weight of a module is quantized, and so cannot train itself."""
    import torch

    return any(type(parameter) is not torch.nn.Parameter for parameter in module.parameters())
