"""Which modules of a base an adapter's settings mean: the same answer before and after loading.

`find_targets` reads names and shapes alone. Preflight has them from the headers of a base's files
or from the numbers of its config.json, `modules.modules_of` from a model. Needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.adapter.modules import BaseModules
from app.model.adapter.settings import AdapterConfig, FreezeConfig, Ia3Config, LoraConfig
from app.model.layers import layer_numbers, unknown_layers_problem
from app.model.patterns import (
    Rule,
    by_ending,
    by_ending_or_expression,
    by_expression,
    by_key,
    check_patterns,
    expression_of_key,
    is_inside,
    last_parts,
    match,
)
from app.model.weight_reads import find_bypassed_linears

if TYPE_CHECKING:
    pass

THIN = 64
"""a matrix this many times longer than wide does not limit the rank of all-linear"""
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
"""a mixture's router does not either; in most models it is not a linear module"""
OWN_ADAPTERS = re.compile(r"\.\w+_adapter_list\b")
"""Zamba 2's low-rank matrices beside a block of several layers: each layer runs its own alone"""
EXPERTS_SHARE = 1 / 3
"""of the weights of the layers: where experts hold more, adapter.experts=auto adapts them"""
KEYS_AND_VALUES = (("k_proj", "v_proj"), ("k", "v"))
"""matrices of their own: most models, T5"""
FUSED = {
    "bloom": "query_key_value",
    "falcon": "query_key_value",
    "gpt2": "c_attn",
    "gpt_bigcode": "c_attn",
    "gpt_neox": "query_key_value",
    "mpt": "Wqkv",
    "phi3": "qkv_proj",
}
"""model_type -> the matrix that is query, key and value in one: IA3 scales the query with them"""
FEED_FORWARD = (
    "down_proj",
    "fc2",
    "DenseReluDense.wo",
    "dense_4h_to_h",
    "mlp.c_proj",
    "fc_out",
)
"""the second matrix of a feed-forward, whose input IA3 scales"""
OWN_FORWARD = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"),
    **dict.fromkeys(("llama4", "llama4_text"), "router"),
}
"""model_type -> a linear module that does not give W x: a kernel reads its weight, or it returns
two tensors; peft puts no LoRA on it"""


@dataclass(slots=True)
class Targets:
    """What an adapter's settings mean in a base, by full name, and what is wrong with them."""

    matrices: list[str] = field(default_factory=list)
    """linear modules that get low-rank matrices (LoRA) or a vector (IA3)"""
    experts: list[str] = field(default_factory=list)
    """parameters of fused experts, each of which gets low-rank matrices"""
    frozen_experts: str = ""
    """why a mixture's experts get none"""
    endings: list[str] = field(default_factory=list)
    """the name endings that may stand for all of `matrices`"""
    scaled_inputs: list[str] = field(default_factory=list)
    """those of `matrices` whose input IA3 scales instead of their output"""
    whole: list[str] = field(default_factory=list)
    """modules whose own weights are trained: modules_to_save, and all of adapter=freeze"""
    thin: list[str] = field(default_factory=list)
    """gates and routers, which all-linear leaves out where the rank exceeds theirs"""
    read: list[str] = field(default_factory=list)
    """linear modules that are not called for W x, which all-linear leaves out"""
    own_adapters: list[str] = field(default_factory=list)
    """low-rank matrices that are part of the base, which all-linear leaves out"""
    problems: list[str] = field(default_factory=list)


def find_targets(config: AdapterConfig, base: BaseModules) -> Targets:
    """Return which modules of `base` the settings mean, as far as it is known."""
    found = Targets()
    found.problems += _check_form(config) or _check_expressions(config, base)
    if not found.problems and isinstance(config, LoraConfig):
        _find_lora(config, base, found)
    elif not found.problems and isinstance(config, Ia3Config):
        _find_ia3(config, base, found)
    elif not found.problems and isinstance(config, FreezeConfig):
        _find_freeze(config, base, found)
    return found


def _check_form(config: AdapterConfig) -> list[str]:
    """List the values that mean nothing on any base."""
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
            "adapter=freeze: nothing would train; type 'adapter.layers=top 2', or name modules as "
            "adapter.modules=[lm_head]"
        )
    return problems


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list) and value != []
    return is_list and all(isinstance(name, str) and name for name in value)


def _check_expressions(config: AdapterConfig, base: BaseModules) -> list[str]:
    """List the regular expressions that are none, or would take too long on the base's names."""
    given: dict[str, list[str]] = {}
    if isinstance(config, LoraConfig):
        if isinstance(targets := config.target_modules, str):
            given[f"adapter.target_modules: {targets}"] = [targets]
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, key):
                given[f"adapter.{key}: {pattern}"] = [expression_of_key(pattern)]
    elif isinstance(config, FreezeConfig):
        given = {f"adapter.modules: {pattern}": [pattern] for pattern in config.modules}
    return check_patterns(given, dict.fromkeys([*(base.linear or ()), *(base.weighted or ())]))


def _find_lora(config: LoraConfig, base: BaseModules, found: Targets) -> None:
    found.whole = _find_modules(config.modules_to_save, by_ending, "modules_to_save", base, found)
    for name in found.whole:
        # peft ties copies of some models' modules, and forgets to when it reads them again.
        if len(base.embeddings) > 1 and any(is_inside(one, [name]) for one in base.embeddings):
            shared = [one for one in base.embeddings if one != name]
            found.problems.append(
                f"adapter.modules_to_save: {name} shares one weight with {', '.join(shared)}, and "
                "peft would train it apart from them; type adapter.trainable_tokens=[...] to "
                "train the rows of some tokens, or adapter=full"
            )
    names = _linear_in_layers(config.layers, base, found)
    if base.linear is None or found.problems:
        return
    names = [name for name in names if not is_inside(name, found.whole)]
    own = OWN_FORWARD.get(base.model_type or "")
    if _is_all_linear(config):
        found.read = _not_called(names, base, own)
        found.own_adapters = [name for name in names if OWN_ADAPTERS.search(name)]
        left_out = {*found.read, *found.own_adapters}
        for name in (name for name in names if name not in left_out):
            short, long = min(base.linear[name]), max(base.linear[name])
            is_thin = short < config.r and (long > THIN * short or ROUTER.search(name))
            if name != base.head:
                (found.thin if is_thin else found.matrices).append(name)
        if not found.matrices:
            found.problems.append(
                "adapter.target_modules: all-linear matches no linear module "
                f"({base.name} has {', '.join(last_parts(base.linear)) or 'none'})"
            )
    else:
        found.matrices = _find_linear(config.target_modules, "target_modules", names, base, found)
        instead = ", or type adapter.target_modules=all-linear, which leaves it out"
        _refuse(_not_called(found.matrices, base, own), instead, base, found)
    targets = config.target_modules
    found.endings = targets if isinstance(targets, list) else last_parts(found.matrices)
    if base.head in found.matrices and base.head in base.embeddings:
        found.problems.append(
            f"adapter.target_modules: {base.head} is also this base's embedding, and a change of "
            "one would change both; type adapter.trainable_tokens=[...] to train the rows of some "
            "tokens"
        )
    if not found.problems:
        _find_experts(config, base, found)
        shapes = {**base.linear, **{name: base.experts[name][-2:] for name in found.experts}}
        found.problems += _check_ranks(config, shapes, found.matrices + found.experts)


def _not_called(names: list[str], base: BaseModules, own: str | None = None) -> list[str]:
    """Return the linear modules that are not called for W x, where an adapter changes nothing.

    `own`: one besides, which peft's LoRA refuses.
    """
    endings = tuple(f".{one}" for one in (own, *find_bypassed_linears(base.model_type)) if one)
    return [name for name in names if name.endswith(endings)]


def _refuse(names: list[str], instead: str, base: BaseModules, found: Targets) -> None:
    if names:
        found.problems.append(
            f"adapter.target_modules: {', '.join(last_parts(names))} of {base.model_type} models "
            f"is no plain product, and an adapter on it would be left out; name others{instead}"
        )


def _find_experts(config: LoraConfig, base: BaseModules, found: Targets) -> None:
    """Choose the experts that get low-rank matrices, or say why they get none."""
    if not base.experts:
        if config.experts == "lora":
            found.problems.append(
                f"adapter.experts=lora: {base.name} has no experts in one weight, which peft could "
                "adapt; type adapter.experts=auto"
            )
        return
    if config.experts == "frozen":
        found.frozen_experts = "adapter.experts=frozen"
        return
    in_experts = sum(map(math.prod, base.experts.values()))
    in_linear = sum(math.prod(s) for name, s in (base.linear or {}).items() if name != base.head)
    share = in_experts / (in_experts + in_linear)
    if reason := _why_peft_cannot(config):
        if config.experts == "lora":
            found.problems.append(f"adapter.experts=lora: {reason}")
        else:
            found.frozen_experts = reason
    elif config.experts == "lora" or (_is_all_linear(config) and share > EXPERTS_SHARE):
        layers = None if config.layers == "all" else _chosen_layers(config.layers, base, found)
        found.experts = [n for n in base.experts if layers is None or is_inside(n, layers)]
    elif not _is_all_linear(config):
        found.frozen_experts = "not in adapter.target_modules; type adapter.experts=lora"
    else:
        found.frozen_experts = f"they hold {share:.0%} of the weights; type adapter.experts=lora"


def _is_all_linear(config: LoraConfig) -> bool:
    return str(config.target_modules).lower() == "all-linear"


def _why_peft_cannot(config: LoraConfig) -> str | None:
    """Return why peft (0.21) cannot put this LoRA on a parameter, and what to type."""
    what = "peft's LoRA on the experts' fused weights"
    if config.dropout:
        return f"{what} has no dropout; type adapter.dropout=0"
    if config.use_dora:
        return f"{what} knows no DoRA; type adapter.use_dora=false"
    if config.init in ("pissa", "olora"):
        return f"{what} starts from nothing else; type adapter.init=default"
    return None


def _check_ranks(
    config: LoraConfig, linear: Mapping[str, Sequence[int]], matrices: list[str]
) -> list[str]:
    """List patterns that mean no matrix, and ranks above a matrix's: one problem each setting."""
    problems: list[str] = []
    for key in ("rank_pattern", "alpha_pattern"):
        problems += match(
            list(getattr(config, key)),
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
        f"{key}={rank} is more than {name} ({' x '.join(map(str, linear[name]))}) has; type "
        f"{key}={min(linear[name])} or less"
        for (key, rank), name in smallest.items()
        if rank > min(linear[name])
    ]


def _find_ia3(config: Ia3Config, base: BaseModules, found: Targets) -> None:
    names = _linear_in_layers(config.layers, base, found)
    if base.linear is None or found.problems:
        return
    targets, inputs = config.target_modules, config.feedforward_modules
    if targets == "auto":
        targets = _ia3_targets_of(base, names, found)
    found.endings = targets
    found.matrices = _find_linear(targets, "target_modules", names, base, found)
    _refuse(_not_called(found.matrices, base), "", base, found)
    if inputs == "auto":
        inner = {name for ending in FEED_FORWARD for name in by_ending(ending, found.matrices)}
        found.scaled_inputs = [name for name in found.matrices if name in inner]
        return
    found.scaled_inputs = _find_linear(inputs, "feedforward_modules", names, base, found)
    outside = [name for name in found.scaled_inputs if name not in found.matrices]
    if outside and not found.problems:
        found.problems.append(
            f"adapter.feedforward_modules={inputs} means {outside[0]}, which is not among "
            f"adapter.target_modules={targets}; type adapter.target_modules="
            f"[{','.join(dict.fromkeys([*targets, *inputs]))}]"
        )


def _ia3_targets_of(base: BaseModules, names: Sequence[str], found: Targets) -> list[str]:
    """Return the endings of keys, values and feed-forward by architecture."""

    def exists(ending: str) -> bool:
        return bool(by_ending(ending, names))

    attention = [list(pair) for pair in KEYS_AND_VALUES if all(map(exists, pair))]
    fused = FUSED.get(base.model_type or "")
    if fused is not None and exists(fused):
        attention = [[fused]]
    feed_forward = [ending for ending in FEED_FORWARD if exists(ending)]
    if attention and feed_forward:
        return [*attention[0], feed_forward[0]]
    found.problems.append(
        f"adapter=ia3: which modules of {base.model_type} models are keys, values and feed-forward "
        "is not known; type adapter.target_modules=[...] and adapter.feedforward_modules=[...]; "
        f"{base.name} has {', '.join(last_parts(names))}"
    )
    return []


def _find_freeze(config: FreezeConfig, base: BaseModules, found: Targets) -> None:
    layers = [] if config.layers == "none" else _chosen_layers(config.layers, base, found)
    modules = _find_modules(config.modules, by_ending_or_expression, "modules", base, found)
    found.whole = [*(layers or ()), *modules]


def _chosen_layers(setting: Any, base: BaseModules, found: Targets) -> list[str] | None:
    """Return the names of the layers that `adapter.layers` means; None where they are not known."""
    if base.layers is not None and not base.layers:
        found.problems.append(unknown_layers_problem(base.model_type, "adapter.layers=all"))
        return None
    try:
        numbers = layer_numbers(setting, 1 << 20 if base.layers is None else len(base.layers))
    except ValueError as error:
        found.problems.append(str(error))
        return None
    return None if base.layers is None else [base.layers[number] for number in numbers]


def _linear_in_layers(setting: Any, base: BaseModules, found: Targets) -> list[str]:
    names = list(base.linear or ())
    layers = None if setting == "all" else _chosen_layers(setting, base, found)
    return names if layers is None else [name for name in names if is_inside(name, layers)]


def _find_linear(
    patterns: str | list[str], key: str, names: list[str], base: BaseModules, found: Targets
) -> list[str]:
    """Return the linear modules that a list of endings, or one regular expression, means."""
    if isinstance(patterns, str):
        patterns, rule = [patterns], by_expression
    else:
        rule = by_ending
    embeddings = [p for p in patterns if by_ending(p, base.embeddings[:1]) and rule is by_ending]
    found.problems += [
        f"adapter.{key}: {pattern} is the embedding, which has no inputs to multiply; type "
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
    patterns: list[str], rule: Rule, key: str, base: BaseModules, found: Targets
) -> list[str]:
    if base.weighted is None:
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
