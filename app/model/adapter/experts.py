"""LoRA on the fused experts of a mixture: peft's layers and files, computed in grouped products.

peft (0.21) adds B A to the weights of all experts at each forward pass and keeps the sums for the
backward pass; here each expert's A and B are small products beside its own.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import peft
import torch
from torch import Tensor

from app.model.adapter.settings import LoraConfig
from app.model.experts import LowRank, expert_modules, packed_name, use_grouped_experts
from app.model.patterns import by_ending
from app.process.errors import UserError

WEIGHT = ".weight"


class ParamWrapper(peft.tuners.lora.layer.ParamWrapper):
    """peft's own layer, whose experts take A and B instead of a changed weight.

    Of the same name: by it peft (0.21) knows the layers to which it may add a second adapter.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the experts make of x; peft's own way where adapters are merged."""
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
        """Return A and B by expert; peft stacks A [experts x rank, inputs], and B by rank first."""
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return LowRank(
            a.view(self.num_experts, -1, a.shape[1]),
            b.view(len(b), -1, self.num_experts).permute(2, 0, 1),
            self.scaling[name],
        )


def _stacked(parts: Sequence[LowRank]) -> LowRank:
    """Return the sum of several adapters as one of all their ranks."""
    b = [part.b * part.scale for part in parts]
    return LowRank(torch.cat([part.a for part in parts], 1), torch.cat(b, 2), 1.0)


def fuse_experts(model: torch.nn.Module) -> None:
    """Let LoRA on fused experts compute beside their weights, where these compute grouped."""
    use_grouped_experts(model)  # other implementations would not look at A and B
    experts = {id(module) for _, module in expert_modules(model)}
    for module in model.modules():
        is_plain = type(module) is peft.tuners.lora.layer.ParamWrapper
        if is_plain and id(module.get_base_layer()) in experts:
            module.__class__ = ParamWrapper


@contextlib.contextmanager
def placeholders_for_packed(model: torch.nn.Module) -> Iterator[None]:
    """Let peft find the shape, dtype and device of experts in 4 bits while it adds an adapter."""
    shown = []
    for _, module in expert_modules(model):
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            packed = module._modules.get(packed_name(name))
            if packed is not None:
                one = torch.zeros((), dtype=packed.compute_dtype, device=packed.weight.device)
                stand_in = torch.nn.Parameter(one.expand(packed.shape), requires_grad=False)
                module.register_parameter(name, stand_in)
                shown.append((module, name))
    try:
        yield
    finally:
        for module, name in shown:
            del module._parameters[name]


@contextlib.contextmanager
def keep_target_modules() -> Iterator[None]:
    """Let peft take `target_modules` as they are.

    peft (0.21) takes gate_proj, up_proj and down_proj of some mixtures (DeepSeek, GLM) for their
    experts, as they were called before transformers 5, and would leave the linear modules of these
    names without an adapter: dense layers and shared experts.
    """
    from peft.utils import transformers_weight_conversion as conversion

    own = conversion.convert_peft_config_for_transformers

    def keep(*_: Any, **__: Any) -> None:
        """Convert nothing."""

    conversion.convert_peft_config_for_transformers = keep
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = own


def to_stock_config(config: Any, model: Any) -> Any:
    """Return settings with which stock peft adapts the very weights that `config` does here.

    Modules that stock peft would convert to experts (see `keep_target_modules`) become
    `target_parameters`: the tensors of the file have the same names and shapes.
    """
    taken = _taken_for_experts(model)
    names = config.target_modules
    if config.peft_type != "LORA" or isinstance(names, str) or not names:
        return config
    moved = sorted(name for name in names if name.rpartition(".")[2] in taken)
    if not moved:
        return config
    stock = copy.deepcopy(config)
    stock.target_modules = sorted(set(names) - set(moved))
    weights = [f"{name}{WEIGHT}" for name in moved]
    stock.target_parameters = sorted({*(config.target_parameters or ()), *weights})
    for patterns in (stock.rank_pattern, stock.alpha_pattern):
        patterns |= {f"({pattern}){re.escape(WEIGHT)}": one for pattern, one in patterns.items()}
    stock.lora_dropout = (
        0.0  # which peft has for modules only; an adapter that is used drops nothing
    )
    return stock


def from_stock_config(config: Any, model: Any) -> Any:
    """Return the settings that `to_stock_config` was made of, or `config` itself."""
    if config.peft_type != "LORA" or not config.target_parameters:
        return config
    linear = [
        name.replace(".base_layer", "")  # where an adapter is on it already
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    names = [
        name.removesuffix(WEIGHT) for name in config.target_parameters if name.endswith(WEIGHT)
    ]
    moved = [name for name in names if by_ending(name, linear)]
    if moved:
        weights = {f"{name}{WEIGHT}" for name in moved}
        config.target_parameters = sorted(set(config.target_parameters) - weights) or None
        config.target_modules = sorted({*(config.target_modules or ()), *moved})
    return config


def _taken_for_experts(model: Any) -> set[str]:
    """Return the last names of modules that stock peft takes for a mixture's experts."""
    from peft.utils import transformers_weight_conversion as conversion

    model_type = model.config.model_type
    if conversion.get_checkpoint_conversion_mapping(model_type) is None:
        return set()
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {}))


def check_stock_peft_loads(config: LoraConfig, model: Any, names: Sequence[str]) -> None:
    """Raise UserError for DoRA on matrices that stock peft takes for a mixture's experts."""
    endings = {name.rpartition(".")[2] for name in names}
    if config.use_dora and (taken := sorted(endings & _taken_for_experts(model))):
        raise UserError(
            f"adapter.use_dora=true: peft takes {', '.join(taken)} of {model.config.model_type} "
            "models for their experts, which it gives no DoRA, and could not open what is saved; "
            "type adapter.use_dora=false, or adapter.target_modules=[...] without them"
        )
