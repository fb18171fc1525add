"""Which weights move how fast: parameter groups, optimizer, learning-rate schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.model.adapter import AdapterConfig, LoraConfig, TrainedWeight, trained_weights

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = "adamw"
    """adamw, or muon (orthogonalised updates for matrices, AdamW for the rest)"""
    lr: float | None = None
    """peak learning rate; null = by what is trained: LoRA 2e-4, IA3 3e-3, freeze and full 2e-5"""
    scale_lr: str = "none"
    """none, linear or sqrt: how `lr` grows with the global batch over `base_batch_size`"""
    base_batch_size: int = 8
    """packs a global step (rows when not packing) that `lr` is meant for; only with scale_lr"""
    weight_decay: float = 0.0
    """decoupled decay of matrices; vectors (norms, biases, IA3) and token rows never decay"""
    beta1: float = 0.9
    """decay of the running mean of gradients"""
    beta2: float = 0.999
    """decay of the running mean of squared gradients"""
    eps: float = 1e-8
    """keeps the division by the root of small second moments finite"""


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimizerConfig):
    name: str = "muon"
    momentum: float = 0.95
    """Nesterov momentum of the matrices' updates"""
    matrix_lr_ratio: float = 2.0
    """learning rate of the matrices over `lr`, which embeddings, head and vectors use"""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    shape: str = "cosine"
    """cosine, linear or constant, after the warm-up"""
    warmup_ratio: float = 0.03
    """share of all optimizer steps in which the learning rate rises from 0"""
    warmup_steps: int | None = None
    """the same in steps; wins over warmup_ratio"""
    min_lr_ratio: float = 0.0
    """where cosine and linear end, as a share of the peak"""


def build_optimizer(
    model: torch.nn.Module,
    config: OptimizerConfig,
    adapter: AdapterConfig,
    *,
    lr: float,
    fused: bool,
) -> torch.optim.Optimizer:
    """Build the optimizer over what trains; no group is ever empty.

    Each group has a `name`, and as `lr_ratio` its learning rate over `lr`.
    """
    weights = trained_weights(model)
    if isinstance(config, MuonConfig):
        optimizer = _build_muon(model, weights, config, adapter, lr, fused)
    else:
        optimizer = _build_adamw(parameter_groups(weights, config, adapter, lr), config, fused)
    _check_every_weight_is_in_one_group(weights, optimizer)
    return optimizer


def parameter_groups(
    weights: Sequence[TrainedWeight], config: OptimizerConfig, adapter: AdapterConfig, lr: float
) -> list[dict[str, Any]]:
    """Divide weights by how fast they move and whether they decay.

    With `adapter.lora_plus_ratio` every B of a linear layer moves faster than all else (LoRA+,
    arXiv 2402.12354); in LoRA of an embedding, where A starts at zero instead of B, none does.
    """
    matrices = _group("matrices", lr, config.weight_decay)
    no_decay = _group("no decay", lr, 0.0)
    lora_b = _lora_plus_group(config, adapter, lr)
    for weight in weights:
        # A token's row would shrink in every step, also in all those that never see the token.
        if weight.is_vector or weight.kind == "token rows":
            no_decay["params"].append(weight.parameter)
        elif lora_b is not None and weight.kind == "lora B":
            lora_b["params"].append(weight.parameter)
        else:
            matrices["params"].append(weight.parameter)
    # An empty group crashes DeepSpeed's schedulers later on (OpenRLHF #1225).
    return [group for group in (matrices, lora_b, no_decay) if group and group["params"]]


def _lora_plus_group(
    config: OptimizerConfig, adapter: AdapterConfig, lr: float
) -> dict[str, Any] | None:
    if not isinstance(adapter, LoraConfig) or adapter.lora_plus_ratio is None:
        return None
    weight_decay = adapter.lora_plus_weight_decay
    if weight_decay is None:
        weight_decay = config.weight_decay
    return _group("lora B", lr, weight_decay, lr_ratio=adapter.lora_plus_ratio)


def _group(name: str, lr: float, weight_decay: float, *, lr_ratio: float = 1.0) -> dict[str, Any]:
    return {
        "name": name,
        "params": [],
        "lr": lr * lr_ratio,
        "lr_ratio": lr_ratio,
        "weight_decay": weight_decay,
    }


def _build_adamw(
    groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool
) -> torch.optim.Optimizer:
    import torch

    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=fused)


def _build_muon(
    model: torch.nn.Module,
    weights: Sequence[TrainedWeight],
    config: MuonConfig,
    adapter: AdapterConfig,
    lr: float,
    fused: bool,
) -> torch.optim.Optimizer:
    """Build Muon for matrices and AdamW for the rest, or one of them where that is all there is."""
    import torch

    from app.training.muon import MuonWithAdamW

    looked_up = {id(parameter) for parameter in _embedding_weights(model)}
    matrices = _group("muon matrices", lr, config.weight_decay, lr_ratio=config.matrix_lr_ratio)
    others = []
    for weight in weights:
        if weight.parameter.ndim != 2 or weight.is_vector or id(weight.parameter) in looked_up:
            others.append(weight)
        else:
            matrices["params"].append(weight.parameter)
    parts: list[torch.optim.Optimizer] = []
    if matrices["params"]:
        parts.append(
            torch.optim.Muon([matrices], momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        groups = parameter_groups(others, replace(config, weight_decay=0.0), adapter, lr)
        parts.append(_build_adamw(groups, config, fused))
    return parts[0] if len(parts) == 1 else MuonWithAdamW(*parts)


def _check_every_weight_is_in_one_group(
    weights: Sequence[TrainedWeight], optimizer: torch.optim.Optimizer
) -> None:
    grouped = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for weight in weights:
        if (count := grouped.pop(id(weight.parameter), 0)) != 1:
            raise ValueError(f"{weight.module} ({weight.kind}) is in {count} parameter groups")
    if grouped:
        raise ValueError(f"the optimizer holds {len(grouped)} weights that do not train")


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of now, without the ratios that LoRA+ and Muon put on it."""
    group = optimizer.param_groups[-1]
    return float(group["lr"] / group["lr_ratio"])


def _embedding_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights that look tokens up; a tied head is the same parameter, an untied one is added."""
    import torch

    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    vocabulary = {weight.shape for weight in weights}
    heads = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return weights + [weight for weight in heads if weight.shape in vocabulary]


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Build the schedule over `total_steps` optimizer steps, the same for any number of ranks."""
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps, config)
    )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses.

    The first step already moves; the peak is reached with the warm-up's last step.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    remaining = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
        "constant": 1.0,
    }[config.shape]
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining
