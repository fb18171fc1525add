"""The optimizer of a run: settings by name, and the builder that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.adapter import AdapterConfig, TrainedWeight, trained_weights
from app.training.parameter_groups import (
    GroupKind,
    LrPattern,
    check_every_weight_is_in_one_group,
    check_patterns,
    embedding_weights,
    make_groups,
    parameter_groups,
    vocabulary_weights,
)

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = "adamw"
    """adamw, adamw8bit, paged_adamw8bit, adafactor, muon or schedule_free"""
    lr: float | None = None
    """peak learning rate; null = by what is trained: LoRA 2e-4, IA3 3e-3, freeze and full 2e-5"""
    lr_by_pattern: list[LrPattern] = field(default_factory=list)
    """weights that learn faster or slower, by name: [{pattern: '*.embed_tokens.*', ratio: 0.1}]"""
    scale_lr: str = "none"
    """none, linear or sqrt: how `lr` grows with the global batch over `base_batch_size`"""
    base_batch_size: int = 8
    """packs a global step (rows when not packing) that `lr` is meant for; only with scale_lr"""
    weight_decay: float = 0.0
    """decoupled decay of matrices; vectors (norms, biases, IA3) and token rows never decay"""


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    beta1: float = 0.9
    """decay of the running mean of gradients"""
    beta2: float = 0.999
    """decay of the running mean of squared gradients"""
    eps: float = 1e-8
    """keeps the division by the root of small second moments finite"""


@dataclass(kw_only=True, slots=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with moments of 8 bits (bitsandbytes): a quarter of AdamW's memory for them."""

    name: str = "adamw8bit"


@dataclass(kw_only=True, slots=True)
class PagedAdamW8bitConfig(AdamW8bitConfig):
    """The same, with moments that move to the host when the GPU's memory runs out."""

    name: str = "paged_adamw8bit"


@dataclass(kw_only=True, slots=True)
class AdafactorConfig(OptimizerConfig):
    """Second moments by row and column alone (arXiv 1804.04235): hardly any memory."""

    name: str = "adafactor"
    beta2_decay: float = -0.8
    """in step t the running means of squared gradients decay by 1 - t ** beta2_decay"""
    clip_threshold: float = 1.0
    """the root mean square of a matrix's update over `lr` is clipped to this"""


@dataclass(kw_only=True, slots=True)
class MuonConfig(AdamWConfig):
    """Orthogonalised updates for matrices, AdamW for embeddings, head and vectors."""

    name: str = "muon"
    momentum: float = 0.95
    """Nesterov momentum of the matrices' updates"""
    matrix_lr_ratio: float = 2.0
    """learning rate of the matrices over `lr`, which embeddings, head and vectors use"""


@dataclass(kw_only=True, slots=True)
class ScheduleFreeConfig(AdamWConfig):
    """AdamW that averages its weights instead of lowering its rate (arXiv 2405.15682)."""

    name: str = "schedule_free"
    beta1: float = 0.9
    """where gradients are taken: share of the averaged weights, the rest of the newest ones"""


def build_optimizer(
    model: torch.nn.Module,
    config: OptimizerConfig,
    adapter: AdapterConfig,
    *,
    lr: float,
    fused: bool,
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; no group is ever empty.

    Each group has a `name`, and as `lr_ratio` its learning rate over `lr`. `fused` is read by AdamW
    only.
    """
    weights = trained_weights(model)
    check_patterns(weights, config.lr_by_pattern)
    if isinstance(config, MuonConfig):
        optimizer = _build_muon(model, weights, config, adapter, lr, fused)
    else:
        groups = parameter_groups(
            weights,
            adapter,
            lr=lr,
            weight_decay=config.weight_decay,
            patterns=config.lr_by_pattern,
        )
        optimizer = _build(model, weights, groups, config, fused)
    check_every_weight_is_in_one_group(weights, optimizer.param_groups)
    return optimizer


def _build(
    model: torch.nn.Module,
    weights: Sequence[TrainedWeight],
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    fused: bool,
) -> torch.optim.Optimizer:
    from app.training.algorithms import build_adafactor, build_schedule_free

    if isinstance(config, AdafactorConfig):
        return build_adafactor(
            groups, beta2_decay=config.beta2_decay, clip_threshold=config.clip_threshold
        )
    assert isinstance(config, AdamWConfig)
    betas = (config.beta1, config.beta2)
    if isinstance(config, ScheduleFreeConfig):
        return build_schedule_free(groups, betas=betas, eps=config.eps)
    if isinstance(config, AdamW8bitConfig):
        from app.training.eight_bit import build_adamw8bit

        return build_adamw8bit(
            groups,
            _embeddings(model, weights),
            betas=betas,
            eps=config.eps,
            is_paged=isinstance(config, PagedAdamW8bitConfig),
        )
    return _build_adamw(groups, config, fused)


def _build_adamw(
    groups: list[dict[str, Any]], config: AdamWConfig, fused: bool
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
    """Build Muon for matrices and AdamW for the rest, or only one of them if the other has none."""
    import torch

    from app.training.algorithms import MuonWithAdamW

    vocabulary = {id(parameter) for parameter in vocabulary_weights(model)}
    matrices, others = [], []
    for weight in weights:
        if weight.parameter.ndim != 2 or weight.is_vector or id(weight.parameter) in vocabulary:
            others.append(weight)
        else:
            matrices.append(weight)
    patterns = config.lr_by_pattern
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        kind = GroupKind("muon matrices", config.weight_decay, config.matrix_lr_ratio)
        groups = make_groups({kind: matrices}, lr=lr, patterns=patterns)
        parts.append(
            torch.optim.Muon(groups, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        groups = parameter_groups(others, adapter, lr=lr, weight_decay=0.0, patterns=patterns)
        parts.append(_build_adamw(groups, config, fused))
    return parts[0] if len(parts) == 1 else MuonWithAdamW(*parts)


def _embeddings(model: torch.nn.Module, weights: Sequence[TrainedWeight]) -> set[int]:
    """Return ids of parameters of which a step reads only its tokens' rows or columns."""
    by_kind = [w.parameter for w in weights if w.kind in ("token rows", "lora embedding A")]
    return {id(parameter) for parameter in (*embedding_weights(model), *by_kind)}


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the current learning rate, without the ratios of LoRA+, Muon and patterns."""
    group = optimizer.param_groups[-1]
    return float(group["lr"] / group["lr_ratio"])
