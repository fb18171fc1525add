"""The optimizer of a run and its learning rate: settings by name, builders, parameter groups.

Each combination of learning rate and weight decay is a group; no group is empty. The schedule is a
pure function of the step. Momentum is never scheduled, not even by one_cycle.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import (
    DEFAULT_LR,
    AdapterConfig,
    LoraConfig,
    TrainableWeight,
    trainable_weights,
)
from app.model.layers import by_wildcard
from common.errors import UserError
from common.facts import setting

if TYPE_CHECKING:
    import torch

    from app.training.objective.settings import ObjectiveConfig


@dataclass(kw_only=True, slots=True)
class LrPattern:
    """A separate learning rate for the weights whose names match a pattern."""

    pattern: str = setting(grants="nothing")
    """pattern of full weight names, with * for any text: '*.embed_tokens.*', '*.layers.0.*',
    '*.q_proj.lora_A.weight'"""
    ratio: float
    """factor on the learning rate of these weights; multiplies the ratios of LoRA+ and Muon"""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = "adamw"
    """optimizer: adamw, adamw8bit, paged_adamw8bit, adafactor, muon or schedule_free"""
    lr: float | None = setting(
        None,
        gt=0,
        le=10,
        note="2e-4 for LoRA, 2e-5 for full",
        resume="lr",
        shown=("train",),
        aliases=("learning_rate",),
    )
    """peak learning rate; null = by adapter: LoRA 2e-4, IA3 3e-3, freeze and full 2e-5"""
    lr_by_pattern: list[LrPattern] = setting(default_factory=list, resume="lr")
    """separate learning rates by weight name: [{pattern: '*.embed_tokens.*', ratio: 0.1}]"""
    scale_lr: str = setting("none", choices=("none", "linear", "sqrt"), resume="lr")
    """how `lr` scales with the ratio of the global batch size to `base_batch_size`: none, linear or
    sqrt"""
    base_batch_size: int = setting(8, ge=1, resume="lr")
    """global batch size that `lr` was tuned for, in packs (rows when not packing); only with
    scale_lr"""
    weight_decay: float = setting(0.0, ge=0, le=10, note="0 to 0.1 is usual")
    """decay of matrices; vectors (norms, biases, IA3) and token rows never decay"""


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    name: str = setting("adamw", grants="nothing")
    beta1: float = setting(0.9, ge=0, lt=1, aliases=("adam_beta1",))
    """decay of the running mean of gradients"""
    beta2: float = setting(0.999, ge=0, lt=1, aliases=("adam_beta2",))
    """decay of the running mean of squared gradients"""
    eps: float = setting(1e-8, gt=0, lt=1, aliases=("adam_epsilon",))
    """added to the denominator of the update for numerical stability"""


@dataclass(kw_only=True, slots=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 8-bit moments (bitsandbytes), which take a quarter of the memory of fp32 ones."""

    name: str = "adamw8bit"


@dataclass(kw_only=True, slots=True)
class PagedAdamW8bitConfig(AdamW8bitConfig):
    """AdamW with 8-bit moments that are paged to host memory when GPU memory runs out."""

    name: str = "paged_adamw8bit"


@dataclass(kw_only=True, slots=True)
class AdafactorConfig(OptimizerConfig):
    """Second moments factored into rows and columns (arXiv 1804.04235): hardly any memory."""

    name: str = "adafactor"
    beta2_decay: float = setting(-0.8, ge=-1, lt=0, note="-0.8 is usual")
    """exponent of the decay of the running mean of squared gradients: 1 - t ** beta2_decay in step
    t"""
    clip_threshold: float = setting(1.0, gt=0, note="1.0 is usual")
    """maximum root mean square of a matrix's update, relative to `lr`"""


@dataclass(kw_only=True, slots=True)
class MuonConfig(AdamWConfig):
    """Orthogonalized updates for matrices, AdamW for embeddings, head and vectors."""

    name: str = "muon"
    momentum: float = setting(0.95, ge=0, lt=1)
    """Nesterov momentum of the updates of matrices"""
    matrix_lr_ratio: float = setting(2.0, gt=0, le=1000)
    """ratio of the learning rate of matrices to `lr`, which embeddings, head and vectors use"""


@dataclass(kw_only=True, slots=True)
class ScheduleFreeConfig(AdamWConfig):
    """AdamW that averages its weights instead of decaying its learning rate (arXiv 2405.15682)."""

    name: str = "schedule_free"
    beta1: float = setting(0.9, ge=0, lt=1)
    """where gradients are taken: 0 = at the newest weights, 1 = at the averaged weights, values
    between them interpolate"""


def build_optimizer(
    model: torch.nn.Module,
    config: OptimizerConfig,
    adapter: AdapterConfig,
    *,
    lr: float,
    fused: bool,
    states_folder: Path | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; no group is ever empty.

    Each group has a `name` and, as `lr_ratio`, the ratio of its learning rate to `lr`. Only AdamW
    reads `fused`, and `states_folder`: the folder whose disk has its states, or None.
    """
    weights = trainable_weights(model)
    _check_patterns(weights, config.lr_by_pattern)
    if isinstance(config, MuonConfig):
        return _build_muon(model, weights, config, adapter, lr, fused)
    decay, patterns = config.weight_decay, config.lr_by_pattern
    groups = _parameter_groups(weights, adapter, lr=lr, weight_decay=decay, patterns=patterns)
    if isinstance(config, AdafactorConfig):
        from transformers.optimization import Adafactor

        # Not torch's: its learning rate is relative to each weight's norm, so that LoRA's B, which
        # starts at zero, hardly moves, and it reads the norm of every weight on the host.
        return Adafactor(
            groups,
            decay_rate=config.beta2_decay,
            clip_threshold=config.clip_threshold,
            scale_parameter=False,
            relative_step=False,
        )
    assert isinstance(config, AdamWConfig)
    betas = (config.beta1, config.beta2)
    if isinstance(config, ScheduleFreeConfig):
        from app.training.algorithms import build_schedule_free

        return build_schedule_free(groups, betas=betas, eps=config.eps)
    if isinstance(config, AdamW8bitConfig):
        from app.training.eight_bit import build_adamw8bit

        # Of these a step only uses the rows or columns of its tokens.
        by_kind = [w.parameter for w in weights if w.kind in ("token rows", "lora embedding A")]
        return build_adamw8bit(
            groups,
            {id(parameter) for parameter in (*embedding_weights(model), *by_kind)},
            betas=betas,
            eps=config.eps,
            is_paged=isinstance(config, PagedAdamW8bitConfig),
        )
    if states_folder is not None:
        from app.strategy.disk_states import AdamWOnDisk

        return AdamWOnDisk(groups, states_folder, betas=betas, eps=config.eps)
    return _build_adamw(groups, config, fused)


def _build_adamw(
    groups: list[dict[str, Any]], config: AdamWConfig, fused: bool
) -> torch.optim.Optimizer:
    import torch

    betas = (config.beta1, config.beta2)
    # fused=False would also disable torch's default for unfused steps, which joins the tensors.
    return torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=fused or None)


def _build_muon(
    model: torch.nn.Module,
    weights: Sequence[TrainableWeight],
    config: MuonConfig,
    adapter: AdapterConfig,
    lr: float,
    fused: bool,
) -> torch.optim.Optimizer:
    """Build Muon for matrices and AdamW for the rest, or only one if the other has no weights."""
    import torch

    from app.training.algorithms import MuonWithAdamW

    vocabulary = {id(parameter) for parameter in vocabulary_weights(model)}
    matrices: list[TrainableWeight] = []
    others: list[TrainableWeight] = []
    for weight in weights:
        is_other = weight.parameter.ndim != 2 or weight.is_vector
        is_other |= id(weight.parameter) in vocabulary
        (others if is_other else matrices).append(weight)
    patterns = config.lr_by_pattern
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        kind = GroupKind("muon matrices", config.weight_decay, config.matrix_lr_ratio)
        groups = _make_groups({kind: matrices}, lr=lr, patterns=patterns)
        parts.append(
            torch.optim.Muon(groups, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        groups = _parameter_groups(others, adapter, lr=lr, weight_decay=0.0, patterns=patterns)
        parts.append(_build_adamw(groups, config, fused))
    return parts[0] if len(parts) == 1 else MuonWithAdamW(*parts)


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the current learning rate, without the ratios of LoRA+, Muon and patterns."""
    group = optimizer.param_groups[-1]
    return float(group["lr"] / group["lr_ratio"])


@dataclass(frozen=True, slots=True)
class GroupKind:
    name: str
    weight_decay: float
    lr_ratio: float = 1.0


def _parameter_groups(
    weights: Iterable[TrainableWeight],
    adapter: AdapterConfig,
    *,
    lr: float,
    weight_decay: float,
    patterns: Sequence[LrPattern],
) -> list[dict[str, Any]]:
    """Divide weights by learning rate and weight decay.

    With `adapter.lora_plus_ratio` the B matrices of linear layers have a higher learning rate
    (LoRA+, arXiv 2402.12354); those of embeddings do not, since there A starts at zero, not B.
    """
    matrices, no_decay = GroupKind("matrices", weight_decay), GroupKind("no decay", 0.0)
    lora_b = None
    if isinstance(adapter, LoraConfig) and adapter.lora_plus_ratio is not None:
        own = adapter.lora_plus_weight_decay
        lora_b = GroupKind("lora B", weight_decay if own is None else own, adapter.lora_plus_ratio)
    kinds: dict[GroupKind, list[TrainableWeight]] = {
        kind: [] for kind in (matrices, lora_b, no_decay) if kind is not None
    }
    for weight in weights:
        # The row of a token would decay in every step, even in those without the token.
        if weight.is_vector or weight.kind == "token rows":
            kinds[no_decay].append(weight)
        elif lora_b is not None and weight.kind == "lora B":
            kinds[lora_b].append(weight)
        else:
            kinds[matrices].append(weight)
    return _make_groups(kinds, lr=lr, patterns=patterns)


def _make_groups(
    kinds: Mapping[GroupKind, Sequence[TrainableWeight]],
    *,
    lr: float,
    patterns: Sequence[LrPattern],
) -> list[dict[str, Any]]:
    """Build a group for each kind, and for each pattern within a kind, that has any weights.

    Each group has a `name` and, as `lr_ratio`, the ratio of its learning rate to `lr`.
    """
    groups = []
    for kind, weights in kinds.items():
        for pattern in (None, *patterns):
            ratio = kind.lr_ratio * (1.0 if pattern is None else pattern.ratio)
            group = {
                "name": kind.name if pattern is None else f"{kind.name}, {pattern.pattern}",
                "params": [w.parameter for w in weights if _first_match(w, patterns) is pattern],
                "lr": lr * ratio,
                "lr_ratio": ratio,
                "weight_decay": kind.weight_decay,
            }
            # An empty group crashes DeepSpeed's schedulers (OpenRLHF #1225).
            if group["params"]:
                groups.append(group)
    return groups


def _first_match(weight: TrainableWeight, patterns: Iterable[LrPattern]) -> LrPattern | None:
    return next((each for each in patterns if by_wildcard(each.pattern, [weight.name])), None)


def _check_patterns(weights: Sequence[TrainableWeight], patterns: Sequence[LrPattern]) -> None:
    used = [_first_match(weight, patterns) for weight in weights]
    names = [weight.name for weight in weights]
    problems = []
    for each in patterns:
        if any(match is each for match in used):
            continue
        if by_wildcard(each.pattern, names):
            why = "an earlier pattern matches the same weights; type it before that one"
        else:
            why = f"matches no trainable parameter; {_nearest(each.pattern, names)}"
        problems.append(f"optimizer.lr_by_pattern: {each.pattern} {why}")
    if problems:
        raise UserError(problems)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    for wider in (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"):
        if by_wildcard(wider, names):
            return f"type {{pattern: '{wider}'}}, since full names are compared"
    any_layer = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    near = difflib.get_close_matches(pattern, any_layer, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(near)}"


def embedding_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights of all embeddings; a tied head is the same parameter."""
    import torch

    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]


def vocabulary_weights(model: Any) -> list[torch.nn.Parameter]:
    """Return the weights of all embeddings, and of a head that is not tied to them."""
    import torch

    weights = embedding_weights(model)
    shapes = {weight.shape for weight in weights}
    head = model.get_output_embeddings()
    # The wrapper of an adapter also contains the adapter's matrices.
    in_head = [m.weight for m in head.modules() if isinstance(m, torch.nn.Linear)]
    return weights + [weight for weight in in_head if weight.shape in shapes]


_STATES = {"adamw": 2, "schedule_free": 2, "muon": 1, "adafactor": 0, "paged_adamw8bit": 0}
"""optimizer states per weight, in the weight's dtype and on the device"""
_VOCABULARY_STATES = {"muon": 2}
"""the same for the weights of embeddings and head, where they differ: AdamW updates them"""
_EIGHT_BIT_STATES = {"adamw8bit": 2}
"""optimizer states per weight of one byte each, or in fp32 for embeddings"""


def states_of_weights(optimizer: str, part: str, num_trained: float, num_bytes: float) -> float:
    """Return the bytes of the optimizer states that some weights have on the device.

    part: "embedding", "head" or "rest" of the model; num_bytes: what the weights themselves take.
    """
    states = _STATES.get(optimizer, 0)
    if part != "rest":
        states = _VOCABULARY_STATES.get(optimizer, states)
    each = 4 if part == "embedding" else 1
    return states * num_bytes + _EIGHT_BIT_STATES.get(optimizer, 0) * each * num_trained


SHAPES = ("cosine", "linear", "constant", "one_cycle", "wsd")
USUAL_LR = {
    # Lowest and highest of published recipes: 1e-5 for LoRA on a 70B model (axolotl),
    # 5e-5 for full fine-tuning (transformers' default), 3e-3 for IA3 (arXiv 2205.05638).
    "lora": (1e-5, 5e-4),
    "ia3": (1e-3, 1e-2),
    "freeze": (1e-6, 5e-5),
    "full": (1e-6, 5e-5),
}
FAR = 10.0
"""factor outside the usual range from which on a run gets a warning"""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    shape: str = setting("cosine", choices=SHAPES)
    """shape of the learning rate after the warm-up: cosine, linear, constant, one_cycle, or wsd
    (warmup-stable-decay: constant, then a steep decay at the end)"""
    warmup_ratio: float = setting(0.03, ge=0, lt=1, shown=("train",))
    """share of all steps over which the learning rate rises from 0 to its peak"""
    warmup_steps: int | None = setting(None, ge=0, instead_of="warmup_ratio")
    """length of the warm-up in optimizer steps; overrides warmup_ratio"""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """final learning rate of cosine, linear, one_cycle and wsd, as a share of the peak"""
    start_lr_ratio: float = setting(0.04, gt=0, le=1)
    """initial learning rate of one_cycle, as a share of the peak"""
    decay_ratio: float = setting(0.2, gt=0, le=1, note="0.1 to 0.2 is usual")
    """share of all optimizer steps, at the end of the run, over which wsd decays"""


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps, config)
    )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the share of the peak learning rate at optimizer step `step`, counted from 0.

    The first step has a rate above 0; the last step of the warm-up reaches the peak.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(config.warmup_ratio * total_steps)
    if config.shape == "one_cycle":
        return _one_cycle(step, warmup, total_steps, config)
    if step < warmup:
        return (step + 1) / warmup
    start = warmup
    if config.shape == "wsd":
        start = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
    progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
    remaining = {
        "cosine": _half_cosine(progress),
        "linear": 1.0 - progress,
        "constant": 1.0,
        # The best decay compared by Haegele et al. (arXiv 2405.18392): over a fifth of the steps
        # it is as good as a cosine over all of them.
        "wsd": 1.0 - math.sqrt(progress),
    }[config.shape]
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def _one_cycle(step: int, warmup: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the factor of a one-cycle schedule: half a cosine up, half a cosine down.

    Equals torch's OneCycleLR if the peak falls on a whole step (arXiv 1708.07120).
    """
    peak = max(warmup - 1, 0)
    if step < peak:
        return 1.0 + (config.start_lr_ratio - 1.0) * _half_cosine(step / peak)
    progress = min(1.0, (step - peak) / max(1, total_steps - 1 - peak))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The peak learning rate, where it comes from, and a warning if it is unusual."""

    value: float
    sentence: str
    """where the value comes from, with the arithmetic if it was scaled"""
    warning: str | None


def resolve_lr(
    optimizer: OptimizerConfig,
    adapter: AdapterConfig,
    global_batch_size: int,
    *,
    from_scratch: bool,
    objective: ObjectiveConfig | None = None,
) -> LearningRate:
    """Resolve the peak learning rate of a run.

    `global_batch_size`: packs (rows when not packing) per optimizer step over all ranks. No warning
    is given for a model trained from scratch. `objective`: None for sft.
    """
    ratio = 1.0 if objective is None else objective.lr_ratio
    start = DEFAULT_LR[adapter.name] * ratio if optimizer.lr is None else optimizer.lr
    value, sentence = start, f"lr {format_lr(start)}"
    if optimizer.scale_lr != "none":
        growth = global_batch_size / optimizer.base_batch_size
        factor = f"{global_batch_size} / {optimizer.base_batch_size}"
        if optimizer.scale_lr == "sqrt":
            value, factor = start * math.sqrt(growth), f"sqrt({factor})"
        else:
            value, factor = start * growth, f"({factor})"
        sentence = f"lr {format_lr(start)} x {factor} = {format_lr(value)}"
    if optimizer.lr is None:
        of = "" if objective is None or ratio == 1 else f" with objective={objective.name}"
        sentence += f" ({format_lr(start)} is the default of adapter={adapter.name}{of})"
    warning = None if from_scratch else _warning(value, adapter.name, optimizer.scale_lr, ratio)
    return LearningRate(value, sentence, warning)


def _warning(value: float, method: str, scale_lr: str, ratio: float) -> str | None:
    lowest, highest = (bound * ratio for bound in USUAL_LR[method])
    if lowest / FAR <= value <= highest * FAR:
        return None
    factor, where = (value / highest, "above") if value > highest else (lowest / value, "below")
    unscaled = "" if scale_lr == "none" else " optimizer.scale_lr=none"
    return (
        f"warning: learning rate {format_lr(value)} is {factor:.0f} times {where} the usual range "
        f"of adapter={method} ({format_lr(lowest)} to {format_lr(highest)}); "
        f"type optimizer.lr={format_lr(DEFAULT_LR[method] * ratio)}{unscaled} if that is not "
        "intended"
    )


def format_lr(lr: float) -> str:
    """Format a learning rate as 2e-4 or 5.66e-4; from 0.01 up as a plain number."""
    if lr >= 0.01 or lr == 0:
        return f"{lr:.3g}"
    mantissa, exponent = f"{lr:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
