"""LoRA on the fused experts of a mixture: peft's layers and files, computed by grouped products.

peft (0.21) adds B A to the weights of all experts in each forward pass and saves the sums for the
backward pass; here each expert multiplies its input by its own A and B instead.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
import torch
from torch import Tensor

from app.model.adapter.settings import LoraConfig
from app.model.experts import LowRank, expert_modules, packed_name, use_grouped_experts
from app.model.layers import by_ending, replaced
from common.errors import UserError

_WEIGHT = ".weight"


class ParamWrapper(peft.tuners.lora.layer.ParamWrapper):
    """peft's layer, but the experts receive A and B instead of a changed weight.

    It keeps the name of peft's class, by which peft (0.21) finds layers that can take a second
    adapter.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the experts' output for x; merged or disabled adapters run peft's own forward."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.merged or self.disable_adapters or not names:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        low_rank = vars(self.get_base_layer()).setdefault("low_rank", {})
        parts = [self._low_rank(name) for name in names]
        low_rank[self.parameter_name] = parts[0] if len(parts) == 1 else _stacked(parts)
        try:
            output = self.base_layer(x, *args, **kwargs)
        finally:
            del low_rank[self.parameter_name]
        return output

    def _low_rank(self, name: str) -> LowRank:
        """Return A and B by expert: peft has A [experts x rank, in] and B [out, rank x experts]."""
        a, b, rank = self.lora_A[name].weight, self.lora_B[name].weight, self.r[name]
        return LowRank(
            a.view(-1, rank, a.shape[1]),
            b.view(len(b), rank, -1).permute(2, 0, 1),
            self.scaling[name],
        )


def _stacked(parts: Sequence[LowRank]) -> LowRank:
    """Return the sum of several adapters as one whose rank is the sum of theirs."""
    b = [part.b * part.scale for part in parts]
    return LowRank(torch.cat([part.a for part in parts], 1), torch.cat(b, 2), 1.0)


def fuse_experts(model: torch.nn.Module) -> None:
    """Replace peft's forward on fused experts, if these compute by grouped products."""
    use_grouped_experts(model)  # other implementations ignore A and B
    experts = {id(module) for _, module in expert_modules(model)}
    for module in model.modules():
        is_plain = type(module) is peft.tuners.lora.layer.ParamWrapper
        if is_plain and id(module.get_base_layer()) in experts:
            module.__class__ = ParamWrapper


@contextmanager
def placeholders_for_packed(model: torch.nn.Module) -> Iterator[None]:
    """Show peft placeholders of 4-bit experts, with their shape, dtype and device, in this context.

    peft reads these while it adds an adapter.
    """
    added = []
    for _, module in expert_modules(model):
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            packed = module._modules.get(packed_name(name))
            if packed is not None:
                zero = torch.zeros((), dtype=packed.compute_dtype, device=packed.weight.device)
                placeholder = torch.nn.Parameter(zero.expand(packed.shape), requires_grad=False)
                module.register_parameter(name, placeholder)
                added.append((module, name))
    try:
        yield
    finally:
        for module, name in added:
            del module._parameters[name]


def keep_target_modules() -> AbstractContextManager[None]:
    """Stop peft from rewriting `target_modules`.

    For some mixtures (DeepSeek, GLM) peft (0.21) reads gate_proj, up_proj and down_proj as the
    experts that had these names before transformers 5, and would leave the linear modules of these
    names, in dense layers and shared experts, without an adapter.
    """
    from peft.utils import transformers_weight_conversion as conversion

    return replaced([(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)])


def to_stock_config(config: Any, model: Any) -> Any:
    """Return settings with which stock peft adapts the same weights that `config` adapts here.

    Modules that stock peft would read as experts (see `keep_target_modules`) become
    `target_parameters`, whose tensors have the same names and shapes in the file.
    """
    converted = _names_converted_to_experts(model)
    names = config.target_modules
    if config.peft_type != "LORA" or isinstance(names, str) or not names:
        return config
    moved = sorted(name for name in names if name.rpartition(".")[2] in converted)
    if not moved:
        return config
    stock = copy.deepcopy(config)
    stock.target_modules = sorted(set(names) - set(moved))
    weights = [f"{name}{_WEIGHT}" for name in moved]
    stock.target_parameters = sorted({*(config.target_parameters or ()), *weights})
    for patterns in (stock.rank_pattern, stock.alpha_pattern):
        patterns |= {
            f"({pattern}){re.escape(_WEIGHT)}": value for pattern, value in patterns.items()
        }
    # peft refuses dropout on parameters, and a finished adapter has no use for it.
    stock.lora_dropout = 0.0
    return stock


def from_stock_config(config: Any, model: Any) -> Any:
    """Undo `to_stock_config`; other settings are returned unchanged."""
    if config.peft_type != "LORA" or not config.target_parameters:
        return config
    linear = [
        name.replace(".base_layer", "")  # if the module has an adapter already
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    names = [
        name.removesuffix(_WEIGHT) for name in config.target_parameters if name.endswith(_WEIGHT)
    ]
    moved = [name for name in names if by_ending(name, linear)]
    if moved:
        weights = {f"{name}{_WEIGHT}" for name in moved}
        config.target_parameters = sorted(set(config.target_parameters) - weights) or None
        config.target_modules = sorted({*(config.target_modules or ()), *moved})
    return config


def _names_converted_to_experts(model: Any) -> set[str]:
    """Return the last name parts of modules that stock peft reads as a mixture's experts."""
    from peft.utils import transformers_weight_conversion as conversion

    model_type = model.config.model_type
    if conversion.get_checkpoint_conversion_mapping(model_type) is None:
        return set()
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {}))


def check_stock_peft_loads(config: LoraConfig, model: Any, names: Sequence[str]) -> None:
    """Raise UserError for DoRA on matrices that stock peft reads as a mixture's experts."""
    endings = {name.rpartition(".")[2] for name in names}
    if config.use_dora and (converted := sorted(endings & _names_converted_to_experts(model))):
        raise UserError(
            f"adapter.use_dora=true: peft treats {', '.join(converted)} of "
            f"{model.config.model_type} models as experts, for which it has no DoRA, so it could "
            "not load the saved adapter; type adapter.use_dora=false, or "
            "adapter.target_modules=[...] without them"
        )
