"""Parameter groups by learning rate and weight decay, none of them empty."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from app.model.adapter import AdapterConfig, LoraConfig, TrainedWeight
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class LrPattern:
    """A learning rate of their own for the weights whose names match a pattern."""

    pattern: str
    """whole names, * for any text: '*.embed_tokens.*', '*.layers.0.*', '*.q_proj.lora_A.weight'"""
    ratio: float
    """their learning rate over what it would be; multiplies the ratios of LoRA+ and Muon"""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A group's settings before any pattern."""

    name: str
    weight_decay: float
    lr_ratio: float = 1.0


def parameter_groups(
    weights: Iterable[TrainedWeight],
    adapter: AdapterConfig,
    *,
    lr: float,
    weight_decay: float,
    patterns: Sequence[LrPattern],
) -> list[dict[str, Any]]:
    """Divide weights by learning rate and weight decay.

    With `adapter.lora_plus_ratio` the B matrices of linear layers have a higher rate (LoRA+, arXiv
    2402.12354); those of embeddings do not, where A starts at zero instead of B.
    """
    matrices, no_decay = GroupKind("matrices", weight_decay), GroupKind("no decay", 0.0)
    lora_b = _lora_plus(adapter, weight_decay)
    kinds: dict[GroupKind, list[TrainedWeight]] = {
        kind: [] for kind in (matrices, lora_b, no_decay) if kind is not None
    }
    for weight in weights:
        # A token's row would decay in every step, also in those that never see the token.
        if weight.is_vector or weight.kind == "token rows":
            kinds[no_decay].append(weight)
        elif lora_b is not None and weight.kind == "lora B":
            kinds[lora_b].append(weight)
        else:
            kinds[matrices].append(weight)
    return make_groups(kinds, lr=lr, patterns=patterns)


def _lora_plus(adapter: AdapterConfig, weight_decay: float) -> GroupKind | None:
    if not isinstance(adapter, LoraConfig) or adapter.lora_plus_ratio is None:
        return None
    if adapter.lora_plus_weight_decay is not None:
        weight_decay = adapter.lora_plus_weight_decay
    return GroupKind("lora B", weight_decay, adapter.lora_plus_ratio)


def make_groups(
    kinds: Mapping[GroupKind, Sequence[TrainedWeight]],
    *,
    lr: float,
    patterns: Sequence[LrPattern],
) -> list[dict[str, Any]]:
    """Make a group for each kind, and for each pattern within a kind, that has any weights.

    Each group has a `name`, and as `lr_ratio` its learning rate over `lr`.
    """
    groups = []
    for kind, weights in kinds.items():
        for pattern in (None, *patterns):
            ratio = kind.lr_ratio * (1.0 if pattern is None else pattern.ratio)
            group = {
                "name": kind.name if pattern is None else f"{kind.name}, {pattern.pattern}",
                "params": [w.parameter for w in weights if first_match(w, patterns) is pattern],
                "lr": lr * ratio,
                "lr_ratio": ratio,
                "weight_decay": kind.weight_decay,
            }
            # An empty group crashes DeepSpeed's schedulers later on (OpenRLHF #1225).
            if group["params"]:
                groups.append(group)
    return groups


def first_match(weight: TrainedWeight, patterns: Iterable[LrPattern]) -> LrPattern | None:
    """Return the first pattern that matches a weight's full name."""
    return next((each for each in patterns if fnmatchcase(weight.name, each.pattern)), None)


def check_patterns(weights: Sequence[TrainedWeight], patterns: Sequence[LrPattern]) -> None:
    """Raise UserError, with the nearest names, for patterns that change no weight."""
    used = [first_match(weight, patterns) for weight in weights]
    problems = []
    for each in patterns:
        if any(match is each for match in used):
            continue
        if any(fnmatchcase(weight.name, each.pattern) for weight in weights):
            why = "an earlier pattern matches the same weights; type it before that one"
        else:
            why = f"matches no trainable parameter; {_nearest(each.pattern, weights)}"
        problems.append(f"optimizer.lr_by_pattern: {each.pattern} {why}")
    if problems:
        raise UserError(problems)


def _nearest(pattern: str, weights: Sequence[TrainedWeight]) -> str:
    for wider in (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"):
        if any(fnmatchcase(weight.name, wider) for weight in weights):
            return f"type {{pattern: '{wider}'}}, since full names are compared"
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", weight.name) for weight in weights)
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
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
    # An adapter's wrapper contains matrices of its own.
    in_head = [m.weight for m in head.modules() if isinstance(m, torch.nn.Linear)]
    return weights + [weight for weight in in_head if weight.shape in shapes]


def check_every_weight_is_in_one_group(
    weights: Iterable[TrainedWeight], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Raise ValueError if a weight is in no group or in several, or a group is empty."""
    groups = list(groups)
    if empty := [group["name"] for group in groups if not group["params"]]:
        raise ValueError(f"the parameter group {empty[0]} is empty")
    grouped = Counter(id(p) for group in groups for p in group["params"])
    for weight in weights:
        if (count := grouped.pop(id(weight.parameter), 0)) != 1:
            raise ValueError(f"{weight.module} ({weight.kind}) is in {count} parameter groups")
    if grouped:
        raise ValueError(f"the optimizer holds {len(grouped)} weights that are not trainable")
