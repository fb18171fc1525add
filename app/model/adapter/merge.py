"""Compute the change that adapters make to each weight of their base, in fp32.

peft wraps a base on the meta device, which tells which adapter tensor belongs to which weight; the
values come from the adapter's file. No whole model is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter.saved import add_saved_adapter, check_adapter_file, load_adapter
from app.model.adapter.saved_config import load_peft_config
from app.model.adapter.settings import ADAPTER_FILE, CONFIG_FILE
from app.model.adapter.weights import WRAPPERS
from app.model.adapter.wrap import unfuse_adapters, wrap
from app.model.description import names_by_id
from common.errors import UserError
from common.untrusted import reading

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

_DEFAULT = "default"
"""peft's name of a model's first adapter"""


@dataclass(slots=True)
class WeightChange:
    """The change that adapters make to one weight of the base."""

    update: Callable[[torch.Tensor], torch.Tensor] | None = None
    """weight in fp32 -> merged weight; None if the change is the sum of `deltas`"""
    deltas: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    """functions that compute the tensors to add to the weight"""
    tensors: set[int] = field(default_factory=set)
    """addresses of the adapter's tensors: tied weights that share all of them stay tied"""

    def delta(self) -> torch.Tensor:
        """Return the sum of the deltas, in fp32."""
        total = self.deltas[0]()
        for delta in self.deltas[1:]:
            total += delta()
        return total

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight, in fp32."""
        if self.update is not None:
            return self.update(weight.float())
        return weight.float() + self.delta()


def read_weight_changes(
    build: Callable[[], PreTrainedModel], adapters: Sequence[tuple[Path, float]]
) -> dict[str, WeightChange]:
    """Return the changes that adapters make to their base, by name of the base's weight.

    `adapters`: folder and factor of each; `build` returns the base on the meta device. Raises
    UserError for an adapter that cannot be merged, or not together with others.
    """
    changes: dict[str, WeightChange] = {}
    for folder, factor in adapters:
        with reading(f"the adapter in {folder}", "save it again, or use another one"):
            for name, change in _read_adapter_changes(build(), folder, factor).items():
                if change.update is not None and (len(adapters) > 1 or factor != 1):
                    raise UserError(
                        f"{folder} replaces or scales {name}, but only plain LoRA can be weighted "
                        "or summed; merge it alone, with merge.weight=1"
                    )
                known = changes.setdefault(name, WeightChange())
                known.update = change.update
                known.deltas += change.deltas
                known.tensors |= change.tensors
    return changes


def _read_adapter_changes(
    model: PreTrainedModel, folder: Path, factor: float
) -> dict[str, WeightChange]:
    from app.model.adapter.experts import from_stock_config

    config = from_stock_config(load_peft_config(folder), model)
    if getattr(config, "init_lora_weights", None) in ("pissa", "olora"):
        raise UserError(
            f"{folder / CONFIG_FILE}: init_lora_weights={config.init_lora_weights} changes the "
            "base, but the change is not in the adapter's files; have the tool that made it save "
            "a plain LoRA"
        )
    config.inference_mode = False
    names = dict(model.named_parameters(remove_duplicate=False))
    adapted = wrap(model, config, autocast_adapter_dtype=False)
    if copies := check_adapter_file(adapted, folder):
        raise UserError(
            f"{folder / ADAPTER_FILE}: it holds weights of the base too ({copies[0]}), which a "
            "merge cannot compare with those of this base; have the tool that made it save it with "
            "save_embedding_layers=False"
        )
    _load_on_meta(adapted, folder)
    changes: dict[str, WeightChange] = {}

    def add(name: str, change: WeightChange) -> None:
        if name in changes:
            raise UserError(f"{folder}: {name} is changed in two ways, so it cannot be merged")
        if name not in names:
            raise UserError(f"{folder}: the base has no weight {name} to merge into")
        changes[name] = change

    modules = list(adapted.get_base_model().named_modules(remove_duplicate=False))
    for path, module in modules:
        for leaf, change in _layer_changes(module, factor):
            add(_name_in_base(f"{path}.{leaf}"), change)
    for path, weight in adapted.get_base_model().named_parameters():
        name = _name_in_base(path)
        if weight.device.type != "meta" and name in names and name not in changes:
            add(name, _replacement(weight))
    return changes


def _load_on_meta(adapted: peft.PeftModel, folder: Path) -> None:
    """Replace the adapter's parameters, which are on the meta device, by the tensors of its file.

    peft's own loading would move the tensors to the base's device.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    in_file = peft.get_peft_model_state_dict(
        adapted, state_dict=dict(parameters), adapter_name=_DEFAULT, save_embedding_layers=False
    )
    names = names_by_id(parameters)
    tensors = load_file(folder / ADAPTER_FILE)
    for key, parameter in in_file.items():
        value = torch.nn.Parameter(tensors[key], requires_grad=False)
        for name in names[id(parameter)]:
            path, _, leaf = name.rpartition(".")
            adapted.get_submodule(path)._parameters[leaf] = value


def _name_in_base(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _replacement(weight: torch.Tensor) -> WeightChange:
    return WeightChange(update=lambda _: weight.float(), tensors={weight.data_ptr()})


def _layer_changes(module: Any, factor: float) -> list[tuple[str, WeightChange]]:
    """Return the changes that one of peft's layers makes, by name of the base layer's weight."""
    import peft

    if isinstance(module, peft.tuners.lora.LoraLayer):
        return _lora_changes(module, factor)
    if isinstance(module, peft.tuners.ia3.IA3Layer):
        return _ia3_changes(module)
    if isinstance(module, peft.tuners.trainable_tokens.TrainableTokensLayer):
        rows, indices = module.trainable_tokens_delta[_DEFAULT], module.token_indices[_DEFAULT]

        def replace_rows(weight: torch.Tensor) -> torch.Tensor:
            weight = weight.clone()
            weight[indices] = rows.float()
            return weight

        return [("weight", WeightChange(update=replace_rows, tensors={rows.data_ptr()}))]
    return []


def _lora_changes(layer: Any, factor: float) -> list[tuple[str, WeightChange]]:
    import peft

    is_embedding = _DEFAULT in layer.lora_embedding_A
    if is_embedding:
        a, b = layer.lora_embedding_A[_DEFAULT], layer.lora_embedding_B[_DEFAULT]
    elif _DEFAULT in layer.lora_A:
        a, b = layer.lora_A[_DEFAULT].weight, layer.lora_B[_DEFAULT].weight
    else:
        return []
    a, b = _fp32(a), _fp32(b)
    tensors, scale = {a.data_ptr(), b.data_ptr()}, layer.scaling[_DEFAULT] * factor
    if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
        deltas = [lambda: _experts_delta(layer, a, b, scale)]
        return [(layer.parameter_name, WeightChange(deltas=deltas, tensors=tensors))]
    bias = None if is_embedding else layer.lora_B[_DEFAULT].bias
    if bias is not None:
        raise UserError(
            "lora_bias=true cannot be merged, since layers of the base may have no bias"
        )
    if a.ndim != 2:
        raise UserError(f"LoRA on a {type(layer.get_base_layer()).__name__} cannot be merged")
    is_transposed = is_embedding or layer.fan_in_fan_out

    def delta() -> torch.Tensor:
        product = b @ a * scale
        return product.T if is_transposed else product

    if _DEFAULT not in layer.lora_magnitude_vector:
        return [("weight", WeightChange(deltas=[delta], tensors=tensors))]
    if factor != 1:
        raise UserError("a DoRA adapter cannot be weighted; type merge.weight=1")
    magnitude = _fp32(layer.lora_magnitude_vector[_DEFAULT].weight)

    def apply_dora(weight: torch.Tensor) -> torch.Tensor:
        whole = weight + delta()
        norms = whole.norm(dim=0 if is_transposed else 1)
        ratio = magnitude / norms
        return whole * (ratio if is_transposed else ratio.unsqueeze(1))

    return [("weight", WeightChange(update=apply_dora, tensors=tensors))]


def _experts_delta(layer: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale B A for a parameter of fused experts: [experts, ...], in its orientation."""
    import torch

    if layer.num_experts == 1:
        return b @ a * scale
    # peft's layout: A is [experts * rank, in], B is [out, rank * experts].
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layer.num_experts)
    equation = "ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio"
    return torch.einsum(equation, b, a) * scale


def _ia3_changes(layer: Any) -> list[tuple[str, WeightChange]]:
    if _DEFAULT not in layer.ia3_l:
        return []
    vector = _fp32(layer.ia3_l[_DEFAULT])
    tensors = {vector.data_ptr()}
    factors = vector.T if layer.fan_in_fan_out else vector
    changes = [("weight", WeightChange(update=lambda weight: weight * factors, tensors=tensors))]
    if not layer.is_feedforward and layer.get_base_layer().bias is not None:
        changes.append(
            ("bias", WeightChange(update=lambda bias: bias * vector.flatten(), tensors=tensors))
        )
    return changes


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float()


def load_weighted_adapters(
    model: PreTrainedModel, adapters: Sequence[tuple[Path, float]]
) -> peft.PeftModel:
    """Load adapters (folder and factor of each) onto their base, unmerged, for inference."""
    import peft

    (first_folder, first_factor), *others = adapters
    adapted = load_adapter(model, first_folder)
    factors = {_DEFAULT: first_factor}
    for number, (folder, factor) in enumerate(others, start=1):
        factors[f"adapter{number}"] = factor
        add_saved_adapter(adapted, folder, f"adapter{number}")
    if factors == {_DEFAULT: 1.0}:
        return adapted
    unfuse_adapters(adapted)
    adapted.base_model.set_adapter(list(factors))
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in factors.keys() & module.scaling.keys():
                module.scaling[name] *= factors[name]
    return adapted.requires_grad_(False).eval()
