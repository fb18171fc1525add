"""Resolve an adapter's settings to modules of a base, equally before and after loading.

`find_targets` needs only the names and shapes of a `BaseDescription`. Needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.model.adapter.settings import AdapterConfig, FreezeConfig, Ia3Config, LoraConfig
from app.model.description import BaseDescription
from app.model.families import family_of
from app.model.layers import (
    Rule,
    by_ending,
    by_ending_or_expression,
    by_expression,
    by_key,
    check_patterns,
    expression_of_key,
    find_bypassed_linears,
    is_inside,
    last_parts,
    layer_numbers,
    match,
    unknown_layers_problem,
)
from common.text import percent

_THIN = 64
"""aspect ratio above which all-linear skips a matrix whose rank is below adapter.r"""
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
"""names of routers, which all-linear skips too if their rank is below adapter.r"""
_OWN_ADAPTERS = re.compile(r"\.\w+_adapter_list\b")
"""Zamba 2's low-rank matrices on a block shared by several layers, one per layer"""
_EXPERTS_SHARE = 1 / 3
"""share of the layers' weights above which adapter.experts=auto adapts the experts"""
_KEYS_AND_VALUES = (("k_proj", "v_proj"), ("k", "v"))
"""separate key and value matrices: of most models, of T5"""
_FEED_FORWARD = ("down_proj", "fc2", "DenseReluDense.wo", "dense_4h_to_h", "mlp.c_proj", "fc_out")
"""names of a feed-forward's second matrix, whose input IA3 scales"""


@dataclass(slots=True)
class Targets:
    """The modules that an adapter's settings select, by full name, and problems of the settings."""

    matrices: list[str] = field(default_factory=list)
    """linear modules that get low-rank matrices (LoRA) or a vector (IA3)"""
    experts: list[str] = field(default_factory=list)
    """parameters of fused experts that get low-rank matrices for each expert"""
    frozen_experts: str = ""
    """reason why a mixture's experts stay frozen; empty if they do not"""
    endings: list[str] = field(default_factory=list)
    """name endings to try first when naming `matrices` to peft"""
    scaled_inputs: list[str] = field(default_factory=list)
    """members of `matrices` whose input IA3 scales instead of their output"""
    full_modules: list[str] = field(default_factory=list)
    """modules trained in full: modules_to_save, and all targets of adapter=freeze"""
    thin: list[str] = field(default_factory=list)
    """thin matrices and routers of a rank below adapter.r, which all-linear skips"""
    not_plain: list[str] = field(default_factory=list)
    """modules that their layer does not use as plain linear modules, which all-linear skips"""
    own_adapters: list[str] = field(default_factory=list)
    """low-rank matrices that are part of the base, which all-linear skips"""
    problems: list[str] = field(default_factory=list)


def find_targets(config: AdapterConfig, base: BaseDescription) -> Targets:
    """Resolve the settings to modules of `base`, as far as these are known."""
    found = Targets()
    found.problems += _check_form(config) or _check_expressions(config, base)
    if found.problems:
        return found
    if isinstance(config, LoraConfig):
        _find_lora(config, base, found)
    elif isinstance(config, Ia3Config):
        _find_ia3(config, base, found)
    elif isinstance(config, FreezeConfig):
        layers = [] if config.layers == "none" else _chosen_layers(config.layers, base, found)
        modules = _find_modules(config.modules, by_ending_or_expression, "modules", base, found)
        found.full_modules = [*(layers or ()), *modules]
    return found


def _check_form(config: AdapterConfig) -> list[str]:
    problems: list[str] = []
    if isinstance(config, LoraConfig):
        targets = config.target_modules
        if not _is_names(targets) and not (isinstance(targets, str) and targets):
            problems.append(
                f"adapter.target_modules={targets}: expected all-linear, a list like "
                "[q_proj, v_proj], or a regular expression"
            )
        problems += [
            f"adapter.rank_pattern.{pattern}={rank}: expected a rank of 1 or more"
            for pattern, rank in config.rank_pattern.items()
            if rank < 1
        ]
        problems += [
            f"adapter.alpha_pattern.{pattern}={alpha}: expected a number above 0"
            for pattern, alpha in config.alpha_pattern.items()
            if not 0 < alpha < math.inf
        ]
    elif isinstance(config, Ia3Config):
        for key in ("target_modules", "feedforward_modules"):
            value = getattr(config, key)
            is_empty = key == "feedforward_modules" and value == []
            if value != "auto" and not is_empty and not _is_names(value):
                problems.append(f"adapter.{key}={value}: expected auto, or a list like [k_proj]")
    elif isinstance(config, FreezeConfig) and config.layers == "none" and not config.modules:
        problems.append(
            "adapter=freeze: nothing would be trained; type 'adapter.layers=top 2', or list "
            "modules, as adapter.modules=[lm_head]"
        )
    return problems


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list) and value != []
    return is_list and all(isinstance(name, str) and name for name in value)


def _check_expressions(config: AdapterConfig, base: BaseDescription) -> list[str]:
    expressions: dict[str, list[str]] = {}
    if isinstance(config, LoraConfig):
        if isinstance(targets := config.target_modules, str):
            expressions[f"adapter.target_modules: {targets}"] = [targets]
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, key):
                expressions[f"adapter.{key}: {pattern}"] = [expression_of_key(pattern)]
    elif isinstance(config, FreezeConfig):
        expressions = {f"adapter.modules: {pattern}": [pattern] for pattern in config.modules}
    if not expressions:
        return []
    return check_patterns(
        expressions, dict.fromkeys([*(base.linear or ()), *(base.weighted or ())])
    )


def _find_lora(config: LoraConfig, base: BaseDescription, found: Targets) -> None:
    found.full_modules = _find_modules(
        config.modules_to_save, by_ending, "modules_to_save", base, found
    )
    for name in found.full_modules:
        # peft ties the copies of some models' modules, but not when it loads them again.
        is_tied = len(base.embeddings) > 1
        if is_tied and any(is_inside(embedding, [name]) for embedding in base.embeddings):
            tied = [embedding for embedding in base.embeddings if embedding != name]
            found.problems.append(
                f"adapter.modules_to_save: {name} is tied to {', '.join(tied)}, but peft would "
                "train a separate copy of it; type adapter.trainable_tokens=[...] to train the "
                "rows of some tokens, or adapter=full"
            )
    names = _linear_in_layers(config.layers, base, found)
    if base.linear is None or found.problems:
        return
    names = [name for name in names if not is_inside(name, found.full_modules)]
    own_forward = family_of(base.model_type).refuses_lora
    if _is_all_linear(config):
        found.not_plain = _not_plain(names, base, own_forward)
        found.own_adapters = [name for name in names if _OWN_ADAPTERS.search(name)]
        skipped = {*found.not_plain, *found.own_adapters}
        for name in (name for name in names if name not in skipped):
            short, long = min(base.linear[name]), max(base.linear[name])
            is_thin = short < config.r and (long > _THIN * short or _ROUTER.search(name))
            if name != base.head:
                (found.thin if is_thin else found.matrices).append(name)
        if not found.matrices:
            found.problems.append(
                "adapter.target_modules: all-linear matches no linear module "
                f"({base.name} has {', '.join(last_parts(base.linear)) or 'none'})"
            )
    else:
        found.matrices = _find_linear(config.target_modules, "target_modules", names, base, found)
        instead = ", or type adapter.target_modules=all-linear, which skips it"
        _refuse(_not_plain(found.matrices, base, own_forward), instead, base, found)
    targets = config.target_modules
    found.endings = targets if isinstance(targets, list) else last_parts(found.matrices)
    if base.head in found.matrices and base.head in base.embeddings:
        found.problems.append(
            f"adapter.target_modules: {base.head} is tied to this base's embedding, and an adapter "
            "would change both; type adapter.trainable_tokens=[...] to train the rows of some "
            "tokens"
        )
    if not found.problems:
        _find_experts(config, base, found)
        shapes = {**base.linear, **{name: base.experts[name][-2:] for name in found.experts}}
        found.problems += _check_ranks(config, shapes, found.matrices + found.experts)


def _not_plain(
    names: list[str], base: BaseDescription, own_forward: str | None = None
) -> list[str]:
    """Return the linear modules on which an adapter would have no effect.

    Their layer reads the weight instead of calling the module. `own_forward`: a further ending, on
    which peft refuses LoRA.
    """
    endings = tuple(
        f".{end}" for end in (own_forward, *find_bypassed_linears(base.model_type)) if end
    )
    return [name for name in names if name.endswith(endings)]


def _refuse(names: list[str], instead: str, base: BaseDescription, found: Targets) -> None:
    if names:
        found.problems.append(
            f"adapter.target_modules: {', '.join(last_parts(names))} of {base.model_type} models "
            "cannot take an adapter, since their layers do not use it as a plain linear module; "
            f"choose others{instead}"
        )


def _find_experts(config: LoraConfig, base: BaseDescription, found: Targets) -> None:
    """Choose the experts that get low-rank matrices, or record why they get none."""
    if not base.experts:
        if config.experts == "lora":
            found.problems.append(
                f"adapter.experts=lora: {base.name} has no fused experts, which peft could adapt; "
                "type adapter.experts=auto"
            )
        return
    if config.experts == "frozen":
        found.frozen_experts = "adapter.experts=frozen"
        return
    in_experts = sum(map(math.prod, base.experts.values()))
    in_linear = sum(math.prod(s) for name, s in (base.linear or {}).items() if name != base.head)
    share = in_experts / (in_experts + in_linear)
    if reason := _peft_error(config):
        if config.experts == "lora":
            found.problems.append(f"adapter.experts=lora: {reason}")
        else:
            found.frozen_experts = reason
    elif config.experts == "lora" or (_is_all_linear(config) and share > _EXPERTS_SHARE):
        layers = None if config.layers == "all" else _chosen_layers(config.layers, base, found)
        found.experts = [n for n in base.experts if layers is None or is_inside(n, layers)]
    elif not _is_all_linear(config):
        found.frozen_experts = "not in adapter.target_modules; type adapter.experts=lora"
    else:
        found.frozen_experts = (
            f"they hold {percent(share, 0)} of the weights; type adapter.experts=lora"
        )


def _is_all_linear(config: LoraConfig) -> bool:
    return str(config.target_modules).lower() == "all-linear"


def _peft_error(config: LoraConfig) -> str | None:
    """Return why peft (0.21) cannot put this LoRA on a parameter, and what to type."""
    if config.dropout:
        return "peft has no dropout for fused experts; type adapter.dropout=0"
    if config.use_dora:
        return "peft has no DoRA for fused experts; type adapter.use_dora=false"
    if config.init in ("pissa", "olora"):
        return f"peft has no init={config.init} for fused experts; type adapter.init=default"
    return None


def _check_ranks(
    config: LoraConfig, linear: Mapping[str, Sequence[int]], matrices: list[str]
) -> list[str]:
    """List patterns that match nothing, and ranks above a matrix's: one problem per setting."""
    problems: list[str] = []
    for key in ("rank_pattern", "alpha_pattern"):
        if patterns := list(getattr(config, key)):
            problems += match(
                patterns,
                matrices,
                by_key,
                key=f"adapter.{key}",
                what="module that gets an adapter",
                where="the adapter",
            )[1]
    setting_of = dict.fromkeys(matrices, ("adapter.r", config.r))
    for pattern, rank in reversed(config.rank_pattern.items()):  # the first one wins, as in peft
        setting = f"adapter.rank_pattern.{pattern}", rank
        setting_of |= dict.fromkeys(by_key(pattern, matrices), setting)
    smallest: dict[tuple[str, int], str] = {}
    for name, setting in setting_of.items():
        if min(linear[name]) < min(linear[smallest.setdefault(setting, name)]):
            smallest[setting] = name
    return problems + [
        f"{key}={rank} is above the rank of {name} ({' x '.join(map(str, linear[name]))}); type "
        f"{key}={min(linear[name])} or less"
        for (key, rank), name in smallest.items()
        if rank > min(linear[name])
    ]


def _find_ia3(config: Ia3Config, base: BaseDescription, found: Targets) -> None:
    names = _linear_in_layers(config.layers, base, found)
    if base.linear is None or found.problems:
        return
    targets, inputs = config.target_modules, config.feedforward_modules
    if targets == "auto":
        targets = _ia3_targets_of(base, names, found)
    found.endings = targets
    found.matrices = _find_linear(targets, "target_modules", names, base, found)
    _refuse(_not_plain(found.matrices, base), "", base, found)
    if inputs == "auto":
        inner = {name for ending in _FEED_FORWARD for name in by_ending(ending, found.matrices)}
        found.scaled_inputs = [name for name in found.matrices if name in inner]
        return
    found.scaled_inputs = _find_linear(inputs, "feedforward_modules", names, base, found)
    outside = [name for name in found.scaled_inputs if name not in found.matrices]
    if outside and not found.problems:
        found.problems.append(
            f"adapter.feedforward_modules={inputs} matches {outside[0]}, which "
            f"adapter.target_modules={targets} does not match; type adapter.target_modules="
            f"[{','.join(dict.fromkeys([*targets, *inputs]))}]"
        )


def _ia3_targets_of(base: BaseDescription, names: Sequence[str], found: Targets) -> list[str]:
    def exists(ending: str) -> bool:
        return bool(by_ending(ending, names))

    attention = [list(pair) for pair in _KEYS_AND_VALUES if all(map(exists, pair))]
    fused = family_of(base.model_type).queries_and_keys
    if fused is not None and exists(fused):
        attention = [[fused]]
    feed_forward = [ending for ending in _FEED_FORWARD if exists(ending)]
    if attention and feed_forward:
        return [*attention[0], feed_forward[0]]
    found.problems.append(
        f"adapter=ia3: the keys, values and feed-forward of {base.model_type} models are not "
        "known; type adapter.target_modules=[...] and adapter.feedforward_modules=[...]; "
        f"{base.name} has {', '.join(last_parts(names))}"
    )
    return []


def _chosen_layers(setting: Any, base: BaseDescription, found: Targets) -> list[str] | None:
    if base.layers is not None and not base.layers:
        found.problems.append(unknown_layers_problem(base.model_type, "adapter.layers=all"))
        return None
    try:
        numbers = layer_numbers(setting, 1 << 20 if base.layers is None else len(base.layers))
    except ValueError as error:
        found.problems.append(str(error))
        return None
    return None if base.layers is None else [base.layers[number] for number in numbers]


def _linear_in_layers(setting: Any, base: BaseDescription, found: Targets) -> list[str]:
    names = list(base.linear or ())
    layers = None if setting == "all" else _chosen_layers(setting, base, found)
    return names if layers is None else [name for name in names if is_inside(name, layers)]


def _find_linear(
    patterns: str | list[str], key: str, names: list[str], base: BaseDescription, found: Targets
) -> list[str]:
    if isinstance(patterns, str):
        patterns, rule = [patterns], by_expression
    else:
        rule = by_ending
    embeddings = [p for p in patterns if by_ending(p, base.embeddings[:1]) and rule is by_ending]
    found.problems += [
        f"adapter.{key}: {pattern} is the embedding, which is not a linear module; type "
        "adapter.trainable_tokens=[...] to train some of its rows, or "
        f"adapter.modules_to_save=[{pattern}] for all of them"
        for pattern in embeddings
    ]
    patterns = [pattern for pattern in patterns if pattern not in embeddings]
    matched, problems = match(
        patterns, names, rule, key=f"adapter.{key}", what="linear module", where=base.name
    )
    found.problems += problems
    return matched


def _find_modules(
    patterns: list[str], rule: Rule, key: str, base: BaseDescription, found: Targets
) -> list[str]:
    if not patterns or base.weighted is None:
        return []
    matched, problems = match(
        patterns,
        base.weighted,
        rule,
        key=f"adapter.{key}",
        what="module with weights",
        where=base.name,
    )
    found.problems += problems
    return matched
