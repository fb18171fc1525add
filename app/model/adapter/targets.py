"""From the patterns that a person types to the full names of modules, each pattern checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from app.model.layers import choose_layers, decoder_layers
from app.model.patterns import check_patterns, ending
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MAX_PLACES = 8
"""of a model that a pattern leaves out: more are not typed"""


def linear_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the linear modules by full name: plain, quantized, and GPT-2's Conv1D."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
    }


def matrix_shape(module: Any) -> tuple[int, int]:
    """Return a linear module's (inputs, outputs); a packed weight's own shape is another."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return module.in_features, module.out_features


def name_of(model: PreTrainedModel, wanted: torch.nn.Module) -> str:
    """Return a module's full name."""
    return next(name for name, module in model.named_modules() if module is wanted)


def is_tied(model: PreTrainedModel) -> bool:
    """Say whether the head is the input embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def is_quantized(module: torch.nn.Module) -> bool:
    """Say whether any weight of a module is packed, and therefore not trainable as it is."""
    import torch

    return any(type(parameter) is not torch.nn.Parameter for parameter in module.parameters())


def in_layers(model: PreTrainedModel, setting: Any, names: Iterable[str]) -> list[str]:
    """Keep those names that lie in the layers that `adapter.layers` means."""
    if setting == "all":
        return list(names)
    prefixes = tuple(f"{layer}." for layer in choose_layers(setting, decoder_layers(model)))
    return [name for name in names if name.startswith(prefixes)]


def match(patterns: Any, names: Sequence[str], key: str) -> list[str]:
    """Return the names that `patterns` mean: a list of name endings, or one regular expression.

    UserError, naming the setting `key`, for every pattern that matches nothing.
    """
    if isinstance(patterns, str):
        if problems := check_patterns({f"{key}: {patterns}": [patterns]}, names):
            raise UserError(problems[0])
        matched = {name for name in names if re.fullmatch(patterns, name)}
        if not matched:
            hint = f"; type {key}=[{patterns}]" if any(map(is_ending(patterns), names)) else ""
            raise nothing_matches(key, [patterns], names, f"; it is matched to full names{hint}")
        return [name for name in names if name in matched]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"{key}={patterns}: expected names, as [q_proj, v_proj]")
    unmatched = [pattern for pattern in patterns if not any(map(is_ending(pattern), names))]
    if unmatched:
        raise nothing_matches(key, unmatched, names)
    return [name for name in names if any(is_ending(pattern)(name) for pattern in patterns)]


def is_ending(pattern: str) -> Any:
    """Return a test for names that are `pattern` or end in it after a dot."""
    return lambda name: name == pattern or name.endswith(f".{pattern}")


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Say whether a module is one of `modules` or lies in one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def matches_as_peft(pattern: str, name: str) -> bool:
    """Say whether a key of rank_pattern or alpha_pattern means this module, as peft reads it."""
    return re.match(ending(pattern), name) is not None


def pattern_without(kept: Sequence[str], left_out: Sequence[str]) -> str | None:
    """Return a regular expression of full names for `kept` that leaves `left_out` out.

    None where it would have to name more than MAX_PLACES places of a model.
    """
    around = {
        ".".join(name.split(".")[:end]) for name in kept for end in range(name.count(".") + 2)
    }
    places: dict[str, None] = {}
    for name in left_out:
        parts = name.split(".")
        own = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        place = re.escape(next((prefix for prefix in own if prefix not in around), name))
        anywhere = re.sub(r"\d+", r"\\d+", place)  # in every layer, where none of them is kept
        is_kept = any(re.match(rf"{anywhere}\b", other) for other in kept)
        places[place if is_kept else anywhere] = None
    if len(places) > MAX_PLACES:
        return None
    return rf"(?!({'|'.join(places)})\b).*\.({'|'.join(endings(kept))})"


def nothing_matches(
    key: str, patterns: Sequence[str], names: Collection[str], hint: str = ""
) -> UserError:
    """Return the error for patterns without a module; it lists the names that there are."""
    said = ", ".join(map(repr, patterns))
    verb = "matches" if len(patterns) == 1 else "match"
    return UserError(
        f"{key}: {said} {verb} no module{hint}; the model has {', '.join(endings(names))}"
    )


def endings(names: Iterable[str]) -> list[str]:
    """Return the last parts of names, each once and sorted; layer numbers are none."""
    last = {name.rpartition(".")[2] for name in names} - {""}
    return sorted(ending for ending in last if not ending.isdigit())


def shortest(names: Sequence[str], candidates: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return `candidates` where these endings mean exactly `names` among `every`, else `names`.

    An adapter's file is for other programs as well, and they understand short names best.
    """
    short = sorted(set(candidates))
    suffixes = tuple(f".{ending}" for ending in short)
    meant = {name for name in every if name in short or name.endswith(suffixes)}
    return short if meant == set(names) else sorted(names)
