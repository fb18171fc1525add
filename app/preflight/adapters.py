"""Whether a saved adapter fits the base and the settings that it is to be used with."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.model.adapter import ADAPTER_FILE, ORIGIN_FILE, AdapterConfig, Ia3Config, LoraConfig
from app.model.adapter.saved_config import CONFIG_FILE, KINDS, read_adapter_config
from app.model.base import ModelConfig
from app.preflight.base_model import BaseModel, seen_from
from app.preflight.fingerprint import describe_base, same_form
from app.preflight.shapes import Shapes
from app.process.launch import is_first_rank
from app.process.untrusted import check_kinds, odd_dtypes, read_header, read_json_object, reading

log = logging.getLogger(__name__)

SETTINGS = {
    # setting of adapter=lora: its name in peft's file
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "feedforward_modules": "feedforward_modules",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
}
ANY_NAME = re.compile("")
UNNAMED = ("layers", "init", "trainable_tokens", "experts")
"""settings that peft's file does not keep as they are typed"""


def check_saved_adapter(key: str, folder: Path, base: BaseModel, model: ModelConfig) -> list[str]:
    """List why the adapter that the setting `key` names cannot be put on the base."""
    what = f"{key}={folder}"
    if folder.is_file():
        return [f"{what} is a file; type {key}={folder.parent}, if the adapter is the folder"]
    if not folder.is_dir():
        return [f"{what}: no such folder, seen from {seen_from()}"]
    if (folder / "adapter" / CONFIG_FILE).exists():
        return [f"{what} is a run, not an adapter; type {key}={folder}/adapter"]
    whole = folder / "model" if (folder / "model" / "config.json").exists() else folder
    if (whole / "config.json").exists() and not (folder / CONFIG_FILE).exists():
        return [
            f"{what}: no {CONFIG_FILE} there; it is a whole model, not an adapter; "
            f"type model.path={whole} and leave {key} out"
        ]
    file = folder / ADAPTER_FILE
    if not file.exists() and (folder / "adapter_model.bin").exists():
        return [
            f"{what}: adapter_model.bin is a pickle, which can run code when it is read; convert "
            'it once with python -c "import torch; from safetensors.torch import save_file; '
            f"save_file(torch.load('{folder}/adapter_model.bin', weights_only=True), '{file}')\""
        ]
    problems = [
        f"{what}: no {name} there"
        for name in (CONFIG_FILE, ADAPTER_FILE)
        if not (folder / name).exists()
    ]
    if problems:
        return problems
    if problems := check_kinds(folder) or read_adapter_config(folder)[1]:
        return problems
    shapes, problems = read_header(file)
    if empty := sorted(name for name, shape in shapes.items() if 0 in shape):
        problems.append(
            f"{file}: {len(empty)} of {len(shapes)} tensors are empty, {empty[0]} is the first, as "
            "a save of sharded weights leaves them; save the adapter again"
        )
    elif not shapes and not problems:
        problems.append(f"{file}: holds no tensors; save the adapter again")
    elif not problems and (odd := odd_dtypes(file, ANY_NAME)):
        problems.append(
            f"{file}: {odd[0]}, and an adapter's weights are F32, BF16, F16 or F64 "
            f"({len(odd)} of {len(shapes)} tensors are not); save the adapter again"
        )
    if problems:
        return problems
    return _check_base(what, folder, shapes, base, model) + _check_tokens(what, folder, model)


def check_same_settings(adapter: AdapterConfig, folder: Path) -> list[str]:
    """List the typed settings that differ from those of the adapter in `folder`."""
    if not (folder / CONFIG_FILE).exists():
        return []  # `check_saved_adapter` reports it
    settings, problems = read_adapter_config(folder)
    if problems:
        return []
    kind = KINDS[read_json_object(folder / CONFIG_FILE)[0]["peft_type"]]
    if kind != adapter.name:
        return [
            f"adapter.path={folder} is an adapter of adapter={kind}, but here "
            f"adapter={adapter.name}; type adapter={kind}"
        ]
    default = LoraConfig() if kind == "lora" else Ia3Config()
    problems = []
    for name in (*SETTINGS, *UNNAMED):
        typed = getattr(adapter, name, None)
        if typed == getattr(default, name, None):
            continue
        if name in UNNAMED:
            problems.append(
                f"adapter.{name}={typed}, but the adapter at {folder} keeps its own: leave "
                f"adapter.{name} out"
            )
        elif not _same(typed, saved := settings.get(SETTINGS[name])):
            problems.append(
                f"adapter.{name}={typed}, but the adapter at {folder} has {name}={saved}: "
                f"leave adapter.{name} out"
            )
    return problems


def _same(typed: Any, saved: Any) -> bool:
    """Compare a setting with peft's; the order of a list does not matter."""
    if isinstance(typed, list) and isinstance(saved, list):
        return sorted(typed) == sorted(saved)
    return bool(typed == saved) or (not typed and not saved)


def _check_base(
    what: str, folder: Path, shapes: Shapes, base: BaseModel, model: ModelConfig
) -> list[str]:
    """Compare the base that an adapter was made on with this one: by fingerprint, else by shape."""
    if not (folder / ORIGIN_FILE).exists():
        return _check_shapes(what, shapes, base)
    made_on, problem = read_json_object(folder / ORIGIN_FILE)
    if problem is None and not all(v is None or isinstance(v, str) for v in made_on.values()):
        problem = f"{folder / ORIGIN_FILE}: expected a text for each key"
    if problem is not None:
        return [f"{problem}; remove that file to compare shapes alone"]
    here = describe_base(model)
    known, different = False, []
    for name, part in (("fingerprint", "config.json or shapes"), ("weights", "weights")):
        then, now = made_on.get(name), here[name]
        known = known or None not in (then, now)
        if name == "weights" and not same_form(made_on, here):
            if is_first_rank():
                log.warning(
                    "%s: %s is of an earlier version, so the weights of its base are not compared "
                    "with these, only config.json and shapes",
                    what,
                    ORIGIN_FILE,
                )
            continue
        if then is not None and now is not None and then != now:
            different.append(f"{part} differ ({then[:12]} then, {now[:12]} here)")
    if not known and here["fingerprint"] is None and made_on.get("fingerprint") is None:
        # Both are on the hub and not fetched yet: only their names can be compared.
        for name in ("path", "revision"):
            then, now = made_on.get(name), here[name]
            if then and now and then != now:
                different.append(f"{name} differs")
    if not different:
        return [] if known else _check_shapes(what, shapes, base)
    return [
        f"{what} was made on another base: {made_on.get('path')}{_at(made_on)}, and here "
        f"model.path={model.path}{_at(here)}: {'; '.join(different)}. Type "
        f"model.path={made_on.get('path')}, or remove {folder / ORIGIN_FILE} if the two are one"
    ]


def _check_tokens(what: str, folder: Path, model: ModelConfig) -> list[str]:
    """List the tokens of the tokenizer beside an adapter that the base's tokenizer lacks."""
    ours = Path(model.tokenizer_path or model.path or "") / "tokenizer.json"
    theirs = folder / "tokenizer.json"
    if not ours.exists() or not theirs.exists():
        return []
    try:
        known = _tokens_in(ours) | set(model.added_tokens)
    except (AttributeError, TypeError, ValueError, KeyError):
        return []  # loading it reports what is wrong with it
    with reading(theirs, "remove it, or save the adapter again"):
        added = read_json_object(theirs)[0].get("added_tokens", [])
        missing = [entry["content"] for entry in added if entry["content"] not in known]
    if not missing:
        return []
    typed = ",".join([*model.added_tokens, *missing])
    return [
        f"{what} was trained with tokens that the tokenizer in {ours.parent} does not have: "
        f"{', '.join(missing)}; type 'model.added_tokens=[{typed}]'"
    ]


def _tokens_in(file: Path) -> set[str]:
    content = read_json_object(file)[0]
    vocab = content.get("model", {}).get("vocab", {})  # of pieces: a list of token and score
    tokens = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    return tokens | {entry["content"] for entry in content.get("added_tokens", [])}


def _at(base: Mapping[str, Any]) -> str:
    return f" at {base['revision']}" if base.get("revision") else ""


def _check_shapes(what: str, shapes: Shapes, base: BaseModel) -> list[str]:
    """Compare the sides of A and B with the matrix of the base that each pair stands beside."""
    matrices = base.modules.linear
    if matrices is None:
        return []
    sides_of_experts: dict[str, set[int]] = {}
    for name, shape in base.modules.experts.items():
        sides_of_experts.setdefault(name.rpartition(".")[0], set()).update(shape[1:])
    found, problems = 0, []
    for name, shape in shapes.items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part not in ("A.weight", "B.weight") or len(shape) != 2:
            continue
        side = shape[1] if part == "A.weight" else shape[0]
        if (experts := module.replace(".base_layer", "")) in sides_of_experts:
            found += 1
            if side not in sides_of_experts[experts]:
                problems.append(
                    f"{what}: {module}.lora_{part} is {shape[0]} x {shape[1]}, which fits none of "
                    f"the experts' weights of {base.name}; it was made on another base"
                )
            continue
        if module not in matrices:
            continue
        found += 1
        matrix = matrices[module]
        if side not in matrix:
            problems.append(
                f"{what}: {module}.lora_{part} is {shape[0]} x {shape[1]}, but {module} of "
                f"{base.name} is {matrix[0]} x {matrix[1]}; it was made on another base"
            )
    beside = [name for name in shapes if ".lora_A.weight" in name]
    if beside and not found:
        problems.append(
            f"{what}: none of its {len(beside)} matrices is in {base.name}, {beside[0]} is the "
            "first; it was made on another base"
        )
    return problems[:1]
