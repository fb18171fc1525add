"""What an adapter is put on, against the names and shapes of the base: patterns, ranks, layers.

What cannot be known from headers is left to whoever builds the model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from app.model.adapter import AdapterConfig, FreezeConfig, Ia3Config, LoraConfig, goes_on
from app.model.layers import layer_numbers
from app.model.neftune import why_no_noise
from app.model.patterns import check_patterns, ending
from app.preflight.base_model import NOT_LINEAR, BaseModel
from app.preflight.shapes import Shapes

# Some files leave out the prefix that the module has in memory.
PREFIXES = ("", "model.", "transformer.")


def check_adapter(adapter: AdapterConfig, base: BaseModel) -> list[str]:
    """List what a new adapter's settings name that the base has not."""
    if goes_on(adapter):
        return []  # the settings of the adapter in that folder hold
    if problems := check_expressions(adapter, base):
        return problems
    if isinstance(adapter, LoraConfig):
        problems = check_target_modules(adapter, base) + check_rank_patterns(adapter, base)
        problems += check_layers(adapter.layers, base)
        return problems + check_modules("modules_to_save", adapter.modules_to_save, base)
    if isinstance(adapter, Ia3Config):
        return check_ia3(adapter, base) + check_layers(adapter.layers, base)
    if isinstance(adapter, FreezeConfig):
        problems = check_modules("modules", adapter.modules, base)
        if adapter.layers == "none":
            if not adapter.modules:
                problems.append(
                    "adapter.layers=none trains nothing; type 'adapter.layers=top 2', or "
                    "adapter.modules=[lm_head] beside it"
                )
            return problems
        return check_layers(adapter.layers, base) + problems
    return []


def check_expressions(adapter: AdapterConfig, base: BaseModel) -> list[str]:
    """Find what is not a regular expression, and what would be matched with the names for ever."""
    given: dict[str, list[str]] = {}
    if isinstance(adapter, LoraConfig):
        if isinstance(targets := adapter.target_modules, str):
            given[f"adapter.target_modules: {targets}"] = [targets]
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(adapter, key):
                given[f"adapter.{key}: {pattern}"] = [ending(pattern)]
    elif isinstance(adapter, FreezeConfig):
        given = {f"adapter.modules: {pattern}": [pattern] for pattern in adapter.modules}
    names = set(base.modules or ()) | set(base.shapes or ())
    return check_patterns(given, [prefix + name for name in names for prefix in PREFIXES])


def check_neftune(adapter: AdapterConfig, base: BaseModel) -> list[str]:
    """Say whether noise was asked for where there is none."""
    if adapter.neftune_alpha is None:
        return []
    problem = why_no_noise(adapter.neftune_alpha, base.numbers or {})
    return [problem] if problem else []


def check_target_modules(adapter: LoraConfig, base: BaseModel) -> list[str]:
    """Find every pattern that matches no weight, and ranks that exceed a matrix (as peft matches).

    A list's items match the ends of names, a string is a regular expression over whole names.
    """
    targets = adapter.target_modules
    if not _is_pattern(targets):
        return [
            f"adapter.target_modules={targets}: expected all-linear, a list like [q_proj, v_proj], "
            "or a regular expression"
        ]
    if base.shapes is None:
        return []
    if isinstance(targets, str) and targets.lower() == "all-linear":
        # There are always some, and tiny routers among them do not limit the rank.
        named = [name for name in base.shapes if not NOT_LINEAR.search(name)]
        named = [name for name in named if _rank_of(adapter, name)[0] != "adapter.r"]
        return _check_ranks(adapter, named, base.shapes)
    matched, problems = _find("target_modules", targets, base.shapes, base)
    return problems or _check_ranks(adapter, matched, base.shapes)


def check_rank_patterns(adapter: LoraConfig, base: BaseModel) -> list[str]:
    """Judge the values of rank_pattern and alpha_pattern, and find those that match no weight."""
    problems = [
        f"adapter.rank_pattern.{pattern}={rank}: expected a rank of 1 or more"
        for pattern, rank in adapter.rank_pattern.items()
        if rank < 1
    ]
    problems += [
        f"adapter.alpha_pattern.{pattern}={alpha}: expected a number above 0"
        for pattern, alpha in adapter.alpha_pattern.items()
        if not 0 < alpha < float("inf")
    ]
    linear = [name for name in base.shapes or () if not NOT_LINEAR.search(name)]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, key):
            expression = re.compile(ending(pattern))
            if linear and not any(map(expression.match, linear)):
                problems.append(_nothing(key, pattern, linear, base.name))
    return problems


def check_ia3(adapter: Ia3Config, base: BaseModel) -> list[str]:
    """Find patterns that match no weight, and feed-forward modules that are no targets."""
    problems: list[str] = []
    for key in ("target_modules", "feedforward_modules"):
        patterns = getattr(adapter, key)
        if patterns == "auto" or (key == "feedforward_modules" and patterns == []):
            continue
        if not isinstance(patterns, list) or not _is_pattern(patterns):
            problems.append(f"adapter.{key}={patterns}: expected auto, or a list like [k_proj]")
        elif base.shapes is not None:
            problems += _find(key, patterns, base.shapes, base)[1]
    targets, inner = adapter.target_modules, adapter.feedforward_modules
    if problems or not (isinstance(targets, list) and isinstance(inner, list)):
        return problems
    outside = [name for name in inner if not any(_ends(name, t) or _ends(t, name) for t in targets)]
    if base.shapes is not None:
        matched = _find("target_modules", targets, base.shapes, base)[0]
        outside = [
            pattern
            for pattern in inner
            if not set(_match(pattern, base.shapes, whole_name=False)) <= set(matched)
        ]
    if not outside:
        return []
    return [
        f"adapter.feedforward_modules={inner}: {', '.join(outside)} is not among "
        f"adapter.target_modules={targets}; type adapter.target_modules="
        f"[{','.join([*targets, *outside])}]"
    ]


def check_layers(setting: Any, base: BaseModel) -> list[str]:
    """Judge the form of adapter.layers, and its range where the number of layers is known."""
    try:
        layer_numbers(setting, num_layers(base.numbers or {}) or 1 << 20)
    except ValueError as error:
        return [str(error)]
    return []


def num_layers(numbers: Mapping[str, Any]) -> int | None:
    """Return how many layers a config.json tells of, an encoder's and a decoder's together."""
    for names in (("encoder_layers", "decoder_layers"), ("num_hidden_layers",), ("n_layer",)):
        counts = [numbers.get(name) for name in names]
        if all(isinstance(count, int) for count in counts):
            return sum(count for count in counts if count is not None)
    encoder = numbers.get("num_layers")  # T5, whose decoder is as deep where nothing is said
    decoder = numbers.get("num_decoder_layers") or encoder
    return encoder + decoder if isinstance(encoder, int) and isinstance(decoder, int) else None


def check_modules(key: str, patterns: Any, base: BaseModel) -> list[str]:
    """Find patterns that match no module of the base's files."""
    if not patterns or base.modules is None:
        return []
    problems = []
    for pattern in patterns:
        found = _match(pattern, base.modules, whole_name=False)
        if not found and key == "modules":  # those of freeze may be regular expressions as well
            found = _match(pattern, base.modules, whole_name=True)
        if not found:
            problems.append(_nothing(key, pattern, base.modules, base.name))
    return problems


def _is_pattern(targets: Any) -> bool:
    is_list = isinstance(targets, list) and all(isinstance(item, str) for item in targets)
    return bool(targets) and (isinstance(targets, str) or is_list)


def _find(
    key: str, patterns: str | list[str], names: Iterable[str], base: BaseModel
) -> tuple[list[str], list[str]]:
    """Return the names that any of `patterns` matches, and a problem for each that matches none."""
    matched: list[str] = []
    problems: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = _match(pattern, names, whole_name=isinstance(patterns, str))
        matched += found
        if not found:
            problems.append(_nothing(key, pattern, names, base.name))
    return matched, problems


def _nothing(key: str, pattern: str, names: Iterable[str], base: str) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in names} - {""})
    near = difflib.get_close_matches(pattern, leaves, n=1)
    problem = "matches no weight of the model"
    if pattern in leaves:
        problem += f" by its whole name; type adapter.{key}=[{pattern}]"
    elif near:
        problem += f"; did you mean {near[0]}?"
    return f"adapter.{key}: {pattern} {problem} ({base} has {', '.join(leaves)})"


def _match(pattern: str, names: Iterable[str], *, whole_name: bool) -> list[str]:
    if not whole_name:
        return [name for name in names if _ends(name, pattern)]
    expression = re.compile(pattern)
    return [n for n in names if any(expression.fullmatch(p + n) for p in PREFIXES)]


def _ends(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}")


def _check_ranks(adapter: LoraConfig, matched: list[str], shapes: Shapes) -> list[str]:
    """Compare the rank of each matched matrix with its shape; one problem for each setting."""
    limits: dict[tuple[str, int], str] = {}
    for name in matched:
        key, rank = _rank_of(adapter, name)
        smallest = limits.setdefault((key, rank), name)
        if min(shapes[name]) < min(shapes[smallest]):
            limits[key, rank] = name
    return [
        f"{key}={rank} is more than {name} ({' x '.join(map(str, shapes[name]))}) has; "
        f"type {key}={min(shapes[name])} or less"
        for (key, rank), name in limits.items()
        if rank > min(shapes[name])
    ]


def _rank_of(adapter: LoraConfig, name: str) -> tuple[str, int]:
    """Return the setting that decides on a matrix's rank, and the rank."""
    for pattern, rank in adapter.rank_pattern.items():
        if re.match(ending(pattern), name):
            return f"adapter.rank_pattern.{pattern}", rank
    return "adapter.r", adapter.r
