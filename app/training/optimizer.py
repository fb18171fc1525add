"""Which weights move how fast: parameter groups, optimizer, learning-rate schedule."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


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
    """decoupled decay of matrices; vectors (norms, biases) never decay"""
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
    model: torch.nn.Module, config: OptimizerConfig, *, lr: float, fused: bool
) -> torch.optim.Optimizer:
    """Build the optimizer over what trains; no group is ever empty."""
    import torch

    adamw = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": fused}
    if isinstance(config, MuonConfig):
        from app.training.muon import MuonWithAdamW

        embeddings = {id(p) for p in _embedding_weights(model)}
        matrices = [p for p in _trainable(model) if p.ndim == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        others = [p for p in _trainable(model) if id(p) not in chosen]
        return MuonWithAdamW(
            torch.optim.Muon(
                matrices,
                lr=lr * config.matrix_lr_ratio,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(_decay_groups(others, 0.0), **adamw),
        )
    return torch.optim.AdamW(_decay_groups(_trainable(model), config.weight_decay), **adamw)


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _embedding_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights that look tokens up; a tied head is the same parameter, an untied one is added."""
    import torch

    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    vocabulary = {weight.shape for weight in weights}
    heads = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return weights + [weight for weight in heads if weight.shape in vocabulary]


def _decay_groups(
    parameters: list[torch.nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    matrices = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    # An empty group crashes DeepSpeed's schedulers later on (OpenRLHF #1225).
    return [group for group in (matrices, vectors) if group["params"]]


def describe_groups(optimizer: torch.optim.Optimizer) -> str:
    """Say what each parameter group holds: weights, peak learning rate, decay."""
    return "; ".join(
        f"{sum(p.numel() for p in group['params']):,} weights at lr {group['lr']:g}, "
        f"decay {group['weight_decay']:g}"
        for group in optimizer.param_groups
    )


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
