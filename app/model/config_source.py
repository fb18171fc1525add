"""What the installed transformers says of a model type in its source, read without importing it.

transformers imports torch, which takes seconds; a config.json that it would refuse is refused here
in milliseconds. Only what the source says plainly is used: `load_architecture` checks the rest.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.model.config_values import TEXT_CONFIGS, method_error, part_error

_NAMES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
"""files that name all model types"""
_METHOD = re.compile(r"^(?:    @(?:class|static)method\n|(?<!    )\n)    def (\w+)\(", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\((\w+)[^\n]*\):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^    (\w+): ([\w .|]+?)(?: =|$)", re.MULTILINE)


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
        method_error(where, key, numbers[key], class_name) for key in numbers if key in methods
    ]
    problems += [
        part_error(where, key, numbers[key], class_name)
        for key in TEXT_CONFIGS
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
