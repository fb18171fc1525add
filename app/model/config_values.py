"""Check a config.json or generation_config.json in milliseconds, before a library reads it.

transformers computes with infinities, zeros and negative numbers, lets a key replace a method, and
imports torch, which takes seconds: what it says of a model type is read in its source, and used
only where that says it plainly; `load_architecture` checks the rest.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.text import shortened

_MAX_COUNT = 10_000
"""most layers or experts, each of which becomes a module"""
_MAX_LABELS = 100_000
"""most labels, each of which gets a name"""
_MAX_THETA = 1e15
_MAX_INTEGER = 1 << 63
_UNLIMITED = re.compile(r"\w*(limit|_max|max_\w+)")
"""keys of bounds, which may be infinite or huge for no bound"""
_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")
"""keys that transformers takes for the config of a language model"""
_AGAIN = "; download the file again"

RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        r"(num|n)_(\w+_)?(layers?|experts|blocks)|(en|de)coder_layers",
        lambda value: type(value) is int and 0 <= value <= _MAX_COUNT,
        f"a whole number of at most {_MAX_COUNT:,}",
    ),
    (
        r"num_labels",
        lambda value: type(value) is int and 0 <= value <= _MAX_LABELS,
        f"a whole number of at most {_MAX_LABELS:,}",
    ),
    (
        r"max_position_embeddings|n_positions",
        lambda value: value >= 1 and value % 1 == 0,  # musicflamingo's own is 1200.0
        f"a number of tokens (1 or more), or null for no limit{_AGAIN}",
    ),
    (
        r"original_max_position_embeddings|vocab_size|hidden_size|n_embd|d_model"
        r"|(num|n)_((attention|key_value)_)?heads?",
        lambda value: type(value) is int and value >= 1,
        f"a whole number of 1 or more{_AGAIN}",
    ),
    (
        r"\w*norm\w*_eps(ilon)?|\w*rms_eps",
        lambda value: 0 <= value < 1,
        "a number from 0 to below 1, such as 1e-06",
    ),
    (
        r"(\w+_)?rope_theta|rope_local_base_freq|rotary_(emb|embedding)_base",
        lambda value: 0 < value <= _MAX_THETA,
        f"a number above 0 and of at most {_MAX_THETA:.0e}{_AGAIN}",
    ),
    (
        r"partial_rotary_factor|rotary_pct|(attention|low_freq|high_freq|short|long)_factor|beta_(fast|slow)"
        r"|(short|long)_mscale|(attn|final)_logit_softcapping|query_pre_attn_scalar"
        r"|(embedding|residual|attention|lm_head)_multiplier|logits_scaling|logit_scale",
        lambda value: value > 0,
        f"a number above 0{_AGAIN}",
    ),
    (r"\w*(dropout|_pdrop|drop_rate)", lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    (r"initializer_(range|factor)|init_std", lambda value: value >= 0, "a number of 0 or more"),
)
"""keys with a range, at any depth -> whether a number is valid, and what is expected"""
SCALED = ("rope_parameters", "rope_scaling")
"""keys of rotary embeddings, whose `factor` says how many times longer texts may be"""
_MAX_FACTOR = 1 << 20
_NAMES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
"""files that name all model types"""
_METHOD = re.compile(r"^(?:    @(?:class|static)method\n|(?<!    )\n)    def (\w+)\(", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\((\w+)[^\n]*\):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^    (\w+): ([\w .|]+?)(?: =|$)", re.MULTILINE)


def check_numbers(where: str, values: Mapping[str, Any]) -> list[str]:
    """List the numbers of a file that no model can have, with key and value."""
    return [
        f"{where}: {path}={shortened(value)}: expected {expected}"
        for path, key, value in _numbers(values)
        if (expected := _expected(path, key, value)) is not None
    ]


def check_keys(where: str, values: Mapping[str, Any], config_class: type) -> list[str]:
    """List the keys of a file that would replace a method or another part of its class."""
    problems = []
    for key, value in values.items():
        member = inspect.getattr_static(config_class, key, None)
        is_method = inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod))
        if is_method or key in ("attribute_map", "sub_configs") or key.startswith("__"):
            problems.append(_method_error(where, key, value, config_class.__name__))
    parts: Any = getattr(config_class, "sub_configs", None)
    if not isinstance(parts, dict):  # a generation_config.json has none
        return problems
    fields = getattr(config_class, "__dataclass_fields__", {})
    problems += [
        _part_error(where, key, values[key], config_class.__name__)
        for key in _TEXT_CONFIGS
        if key not in parts and key not in fields and values.get(key) is not None
    ]
    for key, part in parts.items():
        if isinstance(values.get(key), dict) and inspect.isclass(part):
            problems += check_keys(f"{where}: {key}", values[key], part)
    return problems


def _method_error(where: str, key: str, value: Any, class_name: str) -> str:
    return (
        f"{where}: {key[:80]}={shortened(value)}: this is the name of a method or an internal "
        f"part of {class_name}, not a value of a model; remove the key, or download the file again"
    )


def _part_error(where: str, key: str, value: Any, class_name: str) -> str:
    return (
        f"{where}: {key}={shortened(value)}: {class_name} describes a single model without "
        "parts; remove the key, or download the file again"
    )


def _expected(path: str, key: str, value: float) -> str | None:
    if value != value:
        return "a number"
    is_bound = _UNLIMITED.fullmatch(key) is not None
    if math.isinf(value) and not is_bound:
        return f"a finite number{_AGAIN}"
    if key == "factor" and any(name in path for name in SCALED) and not 1 <= value <= _MAX_FACTOR:
        return f"a number from 1 to {_MAX_FACTOR:,}; download config.json again"
    is_single = path.endswith(key) or key.endswith("_factor")  # lists differ by layer
    for keys, is_valid, expected in RANGES if is_single else ():
        if re.fullmatch(keys, key):
            return None if is_valid(value) else expected
    if abs(value) >= _MAX_INTEGER and type(value) is int and not is_bound:
        return f"a number of at most 64 bits{_AGAIN}"
    return None


def _numbers(values: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield path, key and value of each number; the items of a list have the list's key."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, f"{path}.{name}" if path else str(name), str(name))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from _numbers(value, f"{path}.{number}", key)
    elif isinstance(values, (int, float)) and not isinstance(values, bool):
        yield path, key, values


def check_type(where: str, numbers: Mapping[str, Any]) -> list[str]:
    """List why the installed transformers cannot read a config.json; empty if that is not plain.

    Not for a model whose own code is trusted.
    """
    model_type = numbers.get("model_type")
    if not isinstance(model_type, str) or "auto_map" in numbers:
        return []
    if not any(f'"{model_type}"' in read_source(name) for name in _NAMES):
        return [
            f"{where}: transformers {importlib.metadata.version('transformers')} does not know "
            f"its model_type {model_type!r}; {newer_transformers(numbers)}, or take another base"
        ]
    if (source := _config_source(model_type)) is None:
        return []
    class_name, fields, body = source
    _, _, base_class = read_source("configuration_utils.py").partition("\nclass PreTrainedConfig(")
    methods = frozenset(_METHOD.findall(base_class))
    problems = [
        _method_error(where, key, numbers[key], class_name) for key in numbers if key in methods
    ]
    problems += [
        _part_error(where, key, numbers[key], class_name)
        for key in _TEXT_CONFIGS
        if numbers.get(key) is not None and key not in body
    ]
    return problems + [
        f"{where}: {key}={numbers[key]!r:.80}: expected a number ({annotation}); download the "
        "file again"
        for key, annotation in fields.items()
        if isinstance(numbers.get(key), (str, list, dict)) and is_number(key, annotation)
    ]


def is_number(key: str, annotation: str) -> bool:
    """Return whether a field takes numbers only; `check_token_ids` checks those of tokens."""
    is_token = key.endswith("_token_id")
    return not is_token and set(annotation.split(" | ")) <= {"int", "float", "None"}


def newer_transformers(numbers: Mapping[str, Any]) -> str:
    """Return the fix for a model_type that the installed transformers does not know."""
    from packaging.version import InvalidVersion, Version

    try:
        written_by = Version(str(numbers.get("transformers_version")))
    except InvalidVersion:
        return "install a newer transformers"
    if written_by <= Version(importlib.metadata.version("transformers")):
        return "install a newer transformers"
    return (
        f"its config.json was written by transformers {written_by}: "
        f"type pip install 'transformers>={written_by}'"
    )


def _config_source(model_type: str) -> tuple[str, dict[str, str], str] | None:
    """Return name, annotations by field and body of the config class that names `model_type`.

    None if it is derived from another class than PreTrainedConfig.
    """
    module = model_type.replace("-", "_")
    if not module.isidentifier():
        return None
    for class_name, parent, body in _CLASS.findall(
        read_source(f"models/{module}/configuration_{module}.py")
    ):
        if f'    model_type = "{model_type}"\n' in body and parent == "PreTrainedConfig":
            return class_name, dict(_FIELD.findall(body)), body
    return None


@functools.cache
def read_source(name: str) -> str:
    """Return the text of a source file of transformers; "" if there is none."""
    found = importlib.util.find_spec("transformers")
    folders = (found.submodule_search_locations or []) if found is not None else []
    files = (Path(folder, name) for folder in folders)
    return next((file.read_text("utf-8") for file in files if file.is_file()), "")
