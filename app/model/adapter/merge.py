"""What an adapter makes of each weight of its base: tensor by tensor, in fp32, never a whole model.

peft builds the adapter's layers on a base on `meta`, which says what belongs to which weight; their
numbers come from the adapter's file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter.saved import add_saved_adapter, check_adapter_file, load_adapter
from app.model.adapter.saved_config import CONFIG_FILE, load_peft_config
from app.model.adapter.settings import ADAPTER_FILE
from app.model.adapter.wrap import unfuse_adapters, wrap
from app.process.errors import UserError
from app.process.untrusted import reading

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

FIRST = "default"
AROUND = {"base_layer", "original_module", "token_adapter", "modules_to_save", FIRST}
"""what peft puts into the name of a base's weight"""


@dataclass(slots=True)
class WeightChange:
    """What adapters make of one weight of the base.

    `update`: whole weight in fp32 -> merged, for all but sums; `deltas`: what is added to it.
    """

    update: Callable[[torch.Tensor], torch.Tensor] | None = None
    deltas: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    tensors: set[int] = field(default_factory=set)
    """addresses of the adapter's tensors: tied weights that share all of them stay tied"""

    def delta(self) -> torch.Tensor:
        """Return the sum of what is added, fp32."""
        total = self.deltas[0]()
        for delta in self.deltas[1:]:
            total += delta()
        return total

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight, fp32."""
        if self.update is not None:
            return self.update(weight.float())
        return weight.float() + self.delta()


def read_weight_changes(
    build: Callable[[], PreTrainedModel], adapters: Sequence[tuple[Path, float]]
) -> dict[str, WeightChange]:
    """Return what `adapters` change of their base, by the weight's name in the base.

    `adapters`: folder and factor of each; `build` makes the base on `meta`. UserError for a kind of
    adapter that cannot be merged, or not beside others.
    """
    changes: dict[str, WeightChange] = {}
    for folder, weight in adapters:
        with reading(f"the adapter in {folder}", "save it again, or take another one"):
            for name, change in _read_one(build(), folder, weight).items():
                if change.update is not None and (len(adapters) > 1 or weight != 1):
                    raise UserError(
                        f"{folder} replaces or scales {name}, and only what LoRA adds can be "
                        "weighted or summed; merge it alone, with merge.weight=1"
                    )
                known = changes.setdefault(name, WeightChange())
                known.update = change.update
                known.deltas += change.deltas
                known.tensors |= change.tensors
    return changes


def _read_one(model: PreTrainedModel, folder: Path, factor: float) -> dict[str, WeightChange]:
    from app.model.adapter.experts import from_stock_config

    config = from_stock_config(load_peft_config(folder), model)
    if getattr(config, "init_lora_weights", None) in ("pissa", "olora"):
        raise UserError(
            f"{folder / CONFIG_FILE}: init_lora_weights={config.init_lora_weights} changes the "
            "base, which its file does not hold; have the tool that made it convert it to a LoRA"
        )
    config.inference_mode = False
    names = dict(model.named_parameters(remove_duplicate=False))
    adapted = wrap(model, config, autocast_adapter_dtype=False)
    check_adapter_file(adapted, folder)
    _read_into_meta(adapted, folder)
    changes: dict[str, WeightChange] = {}

    def add(name: str, change: WeightChange) -> None:
        if name in changes:
            raise UserError(f"{folder}: {name} is changed in two ways, which cannot be merged")
        if name not in names:
            raise UserError(f"{folder}: this base has no weight {name} to merge into")
        changes[name] = change

    modules = list(adapted.get_base_model().named_modules(remove_duplicate=False))
    for path, module in modules:
        for leaf, change in _changes_of(module, factor):
            add(_in_base(f"{path}.{leaf}"), change)
    for path, weight in adapted.get_base_model().named_parameters():
        name = _in_base(path)
        if weight.device.type != "meta" and name in names and name not in changes:
            add(name, _replaced(weight))
    return changes


def _read_into_meta(adapted: peft.PeftModel, folder: Path) -> None:
    """Put the tensors of an adapter's file in the place of its parameters, which are on `meta`.

    peft's own loading would move them to where the base is.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    own = dict(adapted.named_parameters(remove_duplicate=False))
    in_file = peft.get_peft_model_state_dict(
        adapted, state_dict=dict(own), adapter_name=FIRST, save_embedding_layers=False
    )
    names: dict[int, list[str]] = {}
    for name, parameter in own.items():
        names.setdefault(id(parameter), []).append(name)
    tensors = load_file(folder / ADAPTER_FILE)
    for key, parameter in in_file.items():
        value = torch.nn.Parameter(tensors[key], requires_grad=False)
        for name in names[id(parameter)]:
            path, _, leaf = name.rpartition(".")
            adapted.get_submodule(path)._parameters[leaf] = value


def _in_base(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in AROUND)


def _replaced(weight: torch.Tensor) -> WeightChange:
    return WeightChange(update=lambda _: weight.float(), tensors={weight.data_ptr()})


def _changes_of(module: Any, factor: float) -> list[tuple[str, WeightChange]]:
    """Return the changes that one layer of peft makes, by the names of its base's weights."""
    import peft

    if isinstance(module, peft.tuners.lora.LoraLayer):
        return _of_lora(module, factor)
    if isinstance(module, peft.tuners.ia3.IA3Layer):
        return _of_ia3(module)
    if isinstance(module, peft.tuners.trainable_tokens.TrainableTokensLayer):
        rows, indices = module.trainable_tokens_delta[FIRST], module.token_indices[FIRST]

        def put_rows(weight: torch.Tensor) -> torch.Tensor:
            weight = weight.clone()
            weight[indices] = rows.float()
            return weight

        return [("weight", WeightChange(update=put_rows, tensors={rows.data_ptr()}))]
    return []


def _of_lora(layer: Any, factor: float) -> list[tuple[str, WeightChange]]:
    import peft

    is_embedding = FIRST in layer.lora_embedding_A
    if not is_embedding and FIRST not in layer.lora_A:
        return []  # of another rank pattern, or none here
    parts = (
        (layer.lora_embedding_A, layer.lora_embedding_B)
        if is_embedding
        else (
            layer.lora_A,
            layer.lora_B,
        )
    )
    a, b = (_fp32(part[FIRST] if is_embedding else part[FIRST].weight) for part in parts)
    tensors, scale = {a.data_ptr(), b.data_ptr()}, layer.scaling[FIRST] * factor
    if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
        name = layer.parameter_name
        return [
            (name, WeightChange(deltas=[lambda: _of_experts(layer, a, b, scale)], tensors=tensors))
        ]
    bias = None if is_embedding else layer.lora_B[FIRST].bias
    if bias is not None:
        raise UserError("lora_bias=true cannot be merged: a base's layer may have no bias")
    if a.ndim != 2:
        raise UserError(f"LoRA on a {type(layer.get_base_layer()).__name__} cannot be merged")
    is_transposed = is_embedding or layer.fan_in_fan_out

    def delta() -> torch.Tensor:
        product = b @ a * scale
        return product.T if is_transposed else product

    if FIRST not in layer.lora_magnitude_vector:
        return [("weight", WeightChange(deltas=[delta], tensors=tensors))]
    if factor != 1:
        raise UserError("an adapter of DoRA cannot be weighted; type merge.weight=1")
    magnitude = _fp32(layer.lora_magnitude_vector[FIRST].weight)

    def scaled(weight: torch.Tensor) -> torch.Tensor:
        whole = weight + delta()
        norms = whole.norm(dim=0 if is_transposed else 1)
        ratio = magnitude / norms
        return whole * (ratio if is_transposed else ratio.unsqueeze(1))

    return [("weight", WeightChange(update=scaled, tensors=tensors))]


def _of_experts(layer: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what is added to a parameter that holds all experts: [experts, ...] as it is kept."""
    import torch

    if layer.num_experts == 1:
        return b @ a * scale
    # [experts * rank, in] and [out, rank * experts], as peft's ParamWrapper lays them out.
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layer.num_experts)
    form = "ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio"
    return torch.einsum(form, b, a) * scale


def _of_ia3(layer: Any) -> list[tuple[str, WeightChange]]:
    if FIRST not in layer.ia3_l:
        return []
    vector = _fp32(layer.ia3_l[FIRST])
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
    """Put `adapters`, folders with weights, on their base as they would be served unmerged."""
    import peft

    (first, weight), *others = adapters
    adapted = load_adapter(model, first)
    names = {FIRST: weight}
    for number, (folder, factor) in enumerate(others, start=1):
        names[f"adapter{number}"] = factor
        add_saved_adapter(adapted, folder, f"adapter{number}")
    if names == {FIRST: 1.0}:
        return adapted
    unfuse_adapters(adapted)
    adapted.base_model.set_adapter(list(names))
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in names.keys() & module.scaling.keys():
                module.scaling[name] *= names[name]
    return adapted.requires_grad_(False).eval()
