"""Which algorithm moves the weights, and what it is told: the optimizer of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import bitsandbytes
import schedulefree
import torch
import transformers.optimization

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


class Adafactor(transformers.optimization.Adafactor):
    """Transformers' Adafactor, whose state stays in fp32 when it is restored.

    Not torch's: there the rate is a share of each weight's own size, so that LoRA's B, which
    starts at zero, hardly moves, and every weight is asked for its size on the host in every step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state as it was; torch alone would round it to the weights' dtype."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def build_adafactor(
    groups: list[dict[str, Any]], *, beta2_decay: float, clip_threshold: float
) -> torch.optim.Optimizer:
    """Build Adafactor over parameter groups; `lr` is what it is for AdamW."""
    return Adafactor(
        groups,
        decay_rate=beta2_decay,
        clip_threshold=clip_threshold,
        scale_parameter=False,
        relative_step=False,
    )


class MuonWithAdamW(torch.optim.Optimizer):
    """Step two optimizers as one; a schedule sees the groups of both.

    Muon (github.com/KellerJordan/Muon; torch.optim.Muon) takes two-dimensional weights only.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        # The same dictionaries, so that a new learning rate reaches the part that uses it.
        self.param_groups = [*muon.param_groups, *adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure with gradients, then both optimizers; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return both parts' states."""
        return {"muon": self.parts[0].state_dict(), "adamw": self.parts[1].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both parts' states."""
        for part, name in zip(self.parts, ("muon", "adamw"), strict=True):
            part.load_state_dict(state_dict[name])
        self.param_groups = [*self.parts[0].param_groups, *self.parts[1].param_groups]


log = logging.getLogger(__name__)

MOMENTS = ("state1", "state2")
"""bitsandbytes' names of them in a weight's state; they may be paged, the rest never is"""


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """Bitsandbytes' AdamW of 8 bits, in which a group may keep its moments in fp32.

    Its own way to say so is a table of the whole process by the parameters' addresses.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return what holds for one parameter of a group."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group["optim_bits"]
        return config


def build_adamw8bit(
    groups: list[dict[str, Any]],
    looked_up: Collection[int],
    *,
    betas: tuple[float, float],
    eps: float,
    is_paged: bool,
) -> torch.optim.Optimizer:
    """Build AdamW over parameter groups, with moments in blocks of 256 numbers of 8 bits.

    `looked_up`: ids of parameters whose moments stay in fp32, as in arXiv 2110.02861: rows of an
    embedding have gradients as unlike as their tokens are frequent, and a block that holds large
    and small moments loses the small ones. Parameters below 4096 numbers keep fp32, too.
    """
    if is_paged and groups[0]["params"][0].device.type == "cpu":
        log.info("optimizer: on the CPU paged_adamw8bit is adamw8bit, there is nowhere to page to")
        is_paged = False
    split = []
    for group in groups:
        for bits, name in ((8, group["name"]), (32, f"{group['name']}, fp32 moments")):
            params = [p for p in group["params"] if (id(p) in looked_up) == (bits == 32)]
            if params:
                split.append(group | {"name": name, "params": params, "optim_bits": bits})
    return AdamW8bit(split, betas=betas, eps=eps, is_paged=is_paged)


def build_schedule_free(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Build schedule-free AdamW over parameter groups; the warm-up is the schedule's."""
    return schedulefree.AdamWScheduleFree(groups, betas=betas, eps=eps)


def use_training_weights(optimizer: Any) -> None:
    """Put the weights that gradients are taken at into the model; nothing for other optimizers."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.train()


def use_averaged_weights(optimizer: Any) -> None:
    """Put the averaged weights into the model, to be measured or saved; nothing for others."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.eval()


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
    """Build the optimizer over what trains; no group is ever empty.

    Each group has a `name`, and as `lr_ratio` its learning rate over `lr`. `fused` is of AdamW
    alone.
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
    if isinstance(config, AdafactorConfig):
        return build_adafactor(
            groups, beta2_decay=config.beta2_decay, clip_threshold=config.clip_threshold
        )
    assert isinstance(config, AdamWConfig)
    betas = (config.beta1, config.beta2)
    if isinstance(config, ScheduleFreeConfig):
        return build_schedule_free(groups, betas=betas, eps=config.eps)
    if isinstance(config, AdamW8bitConfig):
        return build_adamw8bit(
            groups,
            _looked_up(model, weights),
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
    """Build Muon for matrices and AdamW for the rest, or one of them where that is all there is."""
    import torch

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


def _looked_up(model: torch.nn.Module, weights: Sequence[TrainedWeight]) -> set[int]:
    """Ids of the parameters of which a step reads the rows, or columns, of its tokens alone."""
    by_kind = [w.parameter for w in weights if w.kind in ("token rows", "lora embedding A")]
    return {id(parameter) for parameter in (*embedding_weights(model), *by_kind)}


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of now, without the ratios of LoRA+, Muon and patterns."""
    group = optimizer.param_groups[-1]
    return float(group["lr"] / group["lr_ratio"])
