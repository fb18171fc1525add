"""The modules of a base by name and shape, and how a loaded model has them."""

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
    """The modules of a base by full name, in forward order; None where only loading would tell."""

    name: str = "the model"
    model_type: str | None = None
    linear: Mapping[str, tuple[int, ...]] | None = None
    """plain, quantized and GPT-2's transposed matrices: name -> shape of the weight"""
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """fused experts: full name of the parameter -> its shape, [experts, ...]"""
    weighted: Sequence[str] | None = None
    """those that hold weights, themselves or in modules inside"""
    layers: Sequence[str] | None = None
    """the repeated layers, an encoder's before its decoder's; empty if the model names none"""
    embeddings: Sequence[str] = ()
    """the input embedding, then the modules that share its weight"""
    head: str | None = None


def modules_of(model: PreTrainedModel) -> BaseModules:
    """Return the modules of a model."""
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
        elif isinstance(module, torch.nn.Linear):  # whose weight may be packed to another shape
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
    """Return the parameters of a module that hold a matrix for each expert, by full name."""
    from app.model.experts import PackedExperts, packed_shapes

    if (
        isinstance(module, PackedExperts)
        or "expert" not in f"{name} {type(module).__name__}".lower()
    ):
        return {}
    shapes = {own: tuple(each.shape) for own, each in module.named_parameters(recurse=False)}
    shapes |= packed_shapes(module)
    return {f"{name}.{own}": shape for own, shape in shapes.items() if len(shape) == 3}


def sharing_embedding(model: PreTrainedModel) -> list[str]:
    """Return the full names of the modules that hold the input embedding's weight, itself first."""
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
    """Return whether the head is the input embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether any weight of a module is packed, and therefore not trainable as it is."""
    import torch

    return any(type(parameter) is not torch.nn.Parameter for parameter in module.parameters())
