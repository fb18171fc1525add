"""Checks of files that need no torch: base model, adapter's targets, tokenizer, data.

All problems are listed together.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.errors import nearest
from app.model.adapter import LoraConfig
from app.model.build import ModelConfig
from app.preflight.base_model import (
    BaseModel,
    Shapes,
    look_at_base,
    look_at_tokenizer,
    read_header,
    seen_from,
)
from data_modules import TEMPLATE_NAMES, check_datasets


def check_files(config: Any, *, needs_weights: bool = True) -> list[str]:
    """List what is wrong with the files that the settings `config` of a verb name.

    Without `needs_weights`, a folder with a tokenizer is enough.
    """
    model: ModelConfig = config.model
    problems: list[str] = []
    if model.path is not None or model.from_scratch or not needs_weights:
        base = look_at_base(model) if needs_weights else look_at_tokenizer(model)
        problems += base.problems
        problems += check_sequence_len(config.data.sequence_len, base)
        names = {field.name for field in dataclasses.fields(config)}
        if "adapter" in names and isinstance(config.adapter, LoraConfig):
            problems += check_target_modules(config.adapter, base)
        if "adapter_path" in names and config.adapter_path is not None:
            problems += check_adapter_folder(Path(config.adapter_path))
    problems += check_chat_template(config.data.chat_template)
    if config.data.datasets or config.data.test_datasets:
        problems += check_datasets(config.data)
    return problems


def check_chat_template(name: str | None) -> list[str]:
    """Look for the file of a chat template that is no name."""
    if name is None or name in TEMPLATE_NAMES or Path(name).is_file():
        return []
    return [
        f"data.chat_template={name}: expected {' or '.join(TEMPLATE_NAMES)}, or a .jinja file "
        f"(no such file, seen from {seen_from()}){nearest(name, TEMPLATE_NAMES)}"
    ]


def check_adapter_folder(folder: Path) -> list[str]:
    """List what an adapter's folder lacks."""
    if not folder.is_dir():
        return [f"adapter_path={folder}: no such folder, seen from {seen_from()}"]
    problems = [
        f"adapter_path={folder}: no {name} there"
        for name in ("adapter_config.json", "adapter_model.safetensors")
        if not (folder / name).exists()
    ]
    return problems or read_header(folder / "adapter_model.safetensors")[1]


def check_sequence_len(sequence_len: int | None, base: BaseModel) -> list[str]:
    """Compare a typed length with the context that the model was made for."""
    numbers = base.numbers or {}
    context = numbers.get("max_position_embeddings", numbers.get("n_positions"))
    if sequence_len is None or not isinstance(context, int) or sequence_len <= context:
        return []
    return [
        f"data.sequence_len={sequence_len} is more than the context of {base.name}, "
        f"{context} tokens; type data.sequence_len={context}"
    ]


def check_target_modules(adapter: LoraConfig, base: BaseModel) -> list[str]:
    """Find every pattern that matches no weight, and ranks that exceed a matrix (as peft matches).

    A list's items match the ends of names, a string is a regular expression over whole names.
    """
    targets = adapter.target_modules
    is_list = isinstance(targets, list) and all(isinstance(item, str) for item in targets)
    if not (isinstance(targets, str) or is_list) or not targets:
        return [
            f"adapter.target_modules={targets}: expected all-linear, a list like [q_proj, v_proj], "
            "or a regular expression"
        ]
    if base.shapes is None:
        return []
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return []  # there are always some, and tiny routers among them do not limit the rank
    leaves = sorted({name.rpartition(".")[2] for name in base.shapes})
    matched, problems = [], []
    for pattern in [targets] if isinstance(targets, str) else targets:
        found, problem = _match(pattern, base.shapes, whole_name=isinstance(targets, str))
        matched += found
        if problem is None and not found:
            near = difflib.get_close_matches(pattern, leaves, n=1)
            problem = "matches no weight of the model"
            if pattern in leaves:
                problem += f" by its whole name; type adapter.target_modules=[{pattern}]"
            elif near:
                problem += f"; did you mean {near[0]}?"
        if problem is not None:
            there = f"{base.name} has {', '.join(leaves)}"
            problems.append(f"adapter.target_modules: {pattern} {problem} ({there})")
    return problems or _check_rank(adapter.r, matched, base.shapes)


def _match(pattern: str, names: Iterable[str], *, whole_name: bool) -> tuple[list[str], str | None]:
    if not whole_name:
        return [name for name in names if name == pattern or name.endswith(f".{pattern}")], None
    try:
        expression = re.compile(pattern)
    except re.error as error:
        return [], f"is no regular expression ({error})"
    # Some files leave out the prefix that the module has in memory.
    prefixes = ("", "model.", "transformer.")
    return [n for n in names if any(expression.fullmatch(p + n) for p in prefixes)], None


def _check_rank(r: int, matched: list[str], shapes: Shapes) -> list[str]:
    if not matched:
        return []
    smallest = min(matched, key=lambda name: min(shapes[name]))
    limit = min(shapes[smallest])
    if r <= limit:
        return []
    shape = " x ".join(map(str, shapes[smallest]))
    return [f"adapter.r={r} is more than {smallest} ({shape}) has; type adapter.r={limit} or less"]
