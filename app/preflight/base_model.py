"""What a model's folder says of it before it is loaded: numbers, shapes, and what is wrong.

Reads headers and sizes, never weights, and needs no torch. Hub ids are not fetched.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.model.base import ModelConfig
from app.model.hub import problem_offline
from app.model.quantization import QuantizationConfig, find_stored_problem, stored_method
from app.preflight.shapes import Shapes, shapes_of_architecture
from app.process.untrusted import check_kinds, read_header, read_json_object, read_text

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
NUMBERED = re.compile(r"(?P<stack>\D*?)\.?(?P<layer>\d+)\.")
"""the first number in a tensor's name is that of its layer"""
COUNTS = re.compile(r"(num|n)_(\w+_)?(layers?|experts|blocks)|(en|de)coder_layers")
MAX_COUNT = 10_000
"""of layers or experts, each of which is a module to be made"""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ANOTHER_COPY = "copy or download its files again, or type another model.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
TOKENIZER_TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")
NOT_LINEAR = re.compile(
    r"(^|\.)(embed\w*|wte|wpe|word_embeddings|lm_head|embed_out|\w*norm\w*|ln_\w+)$"
)


@dataclasses.dataclass(slots=True)
class BaseModel:
    """What is known of a base before it is loaded; None where only loading would tell."""

    name: str
    numbers: dict[str, Any] | None = None
    shapes: Shapes | None = None
    modules: list[str] | None = None
    """full names of the modules that have weights, and of those around them"""
    problems: list[str] = dataclasses.field(default_factory=list)


def look_at_base(model: ModelConfig) -> BaseModel:
    """Read what a base's files say of it, and what is wrong with them."""
    if model.from_scratch:
        return _look_at_architecture(model)
    assert model.path is not None
    folder = Path(model.path)
    if folder.is_dir():
        return _look_at_folder(folder, model)
    base = BaseModel(model.path, dict(model.architecture) or None)
    base.shapes = shapes_of_architecture(model.architecture)
    problem = _problem_of_missing("model.path", model.path)
    base.problems += [problem] if problem else []
    base.problems += _check_tokenizer(model)
    return base


def look_at_tokenizer(model: ModelConfig) -> BaseModel:
    """Read what a preview needs of a base: its tokenizer's files, and config.json where it is."""
    if model.path is None or not (folder := Path(model.path)).is_dir():
        base = BaseModel(model.path or "model.architecture", dict(model.architecture) or None)
        problem = _problem_of_missing("model.path", model.path) if model.path else None
        base.problems += [problem] if problem else []
    else:
        base = BaseModel(model.path)
        if (folder / "config.json").exists():
            base.numbers, problem = read_json_object(folder / "config.json")
            base.problems += [problem] if problem else []
        if not model.trust_remote_code:
            base.problems += _check_code("model.path", folder)
        if model.tokenizer_path is None:
            base.problems += _check_tokenizer_files(folder)
    base.problems += _check_tokenizer(model)
    return base


def _look_at_architecture(model: ModelConfig) -> BaseModel:
    base = BaseModel("model.architecture", dict(model.architecture))
    if "model_type" not in model.architecture:
        base.problems.append(
            "model.from_scratch=true needs the shape of the model: type model.architecture="
            "{model_type: llama, hidden_size: 128, ...}, or model=tiny_base_scratch"
        )
    else:
        base.problems += check_config("model.architecture", model.architecture)
    if model.path is not None:
        base.problems.append(
            f"model.from_scratch=true reads no weights, but model.path={model.path}: "
            "type model.path=null, or model.from_scratch=false"
        )
    if model.tokenizer_path is None:
        base.problems.append("model.from_scratch=true needs model.tokenizer_path=FOLDER_OR_HUB_ID")
    else:
        base.problems += _check_tokenizer(model)
    base.shapes = shapes_of_architecture(model.architecture)
    return base


def _look_at_folder(folder: Path, model: ModelConfig) -> BaseModel:
    base = BaseModel(str(folder))
    if not (folder / "config.json").exists():
        base.problems.append(_why_no_model_folder(folder))
        return base
    numbers, problem = read_json_object(folder / "config.json")
    base.numbers = numbers
    base.problems += [problem] if problem else check_config(str(folder / "config.json"), numbers)
    base.problems += check_kinds(folder) + _check_adapter_beside(folder)
    if (generation := folder / "generation_config.json").exists():
        problem = read_json_object(generation)[1]
        base.problems += [problem] if problem else []
    base.problems += [
        f"{folder / 'config.json'}: {key} is private to transformers and can name code; remove it"
        for key in numbers
        if key.startswith("_attn")
    ]
    if not model.trust_remote_code:
        base.problems += _check_code("model.path", folder)
    tensors, problems = _read_tensors(folder)
    base.problems += problems or check_layers_of_files(folder / "config.json", numbers, tensors)
    base.shapes = None if problems else _matrices(tensors)
    base.modules = None if problems else _modules(tensors, base.shapes)
    stored = numbers.get("quantization_config")
    if isinstance(stored, dict) and stored and stored_method(stored) != "int8":
        base.shapes = shapes_of_architecture(numbers)  # the headers have those of packed weights
    if model.tokenizer_path is None:
        base.problems += _check_tokenizer_files(folder)
    else:
        base.problems += _check_tokenizer(model)
    return base


def check_config(where: str, numbers: Mapping[str, Any]) -> list[str]:
    """Judge what every config.json has, and the counts by which modules are made."""
    if "model_type" not in numbers:
        return [f"{where}: no model_type, so this is no transformers model"]
    problems = []
    if not isinstance(numbers["model_type"], str):
        problems.append(f"{where}: model_type={_brief(numbers['model_type'])}: expected a name")
    parts = [("", numbers)]
    parts += [(f"{key}.", part) for key, part in numbers.items() if isinstance(part, dict)]
    for prefix, part in parts:
        for key, count in part.items():
            if not COUNTS.fullmatch(key) or not isinstance(count, (int, float)):
                continue
            if isinstance(count, float) or not 0 <= count <= MAX_COUNT:
                problems.append(
                    f"{where}: {prefix}{key}={_brief(count)}: expected a whole number of at most "
                    f"{MAX_COUNT:,}"
                )
    if not isinstance(numbers.get("quantization_config") or {}, dict):
        problems.append(f"{where}: quantization_config is not an object; remove it")
    return problems


def check_layers_of_files(
    file: Path, numbers: Mapping[str, Any], tensors: Iterable[str]
) -> list[str]:
    """Compare the number of layers in config.json with those that the weights are of.

    Only where all layers stand in one stack; of others the loader tells which weights it left.
    """
    key = next((key for key in NUM_LAYERS if type(numbers.get(key)) is int), None)
    numbered = [match for name in tensors if (match := NUMBERED.match(name))]
    if key is None or len({match["stack"] for match in numbered}) != 1:
        return []
    # Layers that predict further tokens stand behind the others, and are not made.
    extra = numbers.get("num_nextn_predict_layers")
    told = numbers[key] + (extra if isinstance(extra, int) else 0)
    left = sorted(match.string for match in numbered if int(match["layer"]) >= told)
    if not left:
        return []
    there = max(int(match["layer"]) for match in numbered) + 1
    return [
        f"{file}: {key}={numbers[key]}, but the weights beside it are of {there} layers: "
        f"{len(left)} tensors would not be used, {left[0]} is the first; write {key}={there}, or "
        "download config.json again"
    ]


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_adapter_beside(folder: Path) -> list[str]:
    """Refuse an adapter in a base's folder: transformers would load it with the base, unasked."""
    if not (folder / "adapter_config.json").exists():
        return []
    return [
        f"{folder / 'adapter_config.json'}: an adapter in the folder of a base is put on it "
        "whenever the base is loaded; move adapter_config.json and adapter_model.safetensors to a "
        "folder of their own (adapter.path=FOLDER goes on with it), or remove them"
    ]


def check_quantization(
    quantization: QuantizationConfig, base: BaseModel, *, trains_base: bool
) -> list[str]:
    """Compare what was typed with how the base's files are quantized."""
    stored = (base.numbers or {}).get("quantization_config")
    if not stored or not isinstance(stored, dict):
        return []
    problem = find_stored_problem(stored, quantization, base.name, trains_base=trains_base)
    return [problem] if problem else []


def _problem_of_missing(key: str, path: str) -> str | None:
    """Say why a path that is no folder cannot be read; None where it may be a hub id."""
    if "://" in path:
        return f"{key}={path}: URLs are not read; type a folder or a hub id like org/name"
    if Path(path).is_file():
        return f"{key}={path}: this is a file; type the folder that it is in"
    parent = Path(path).parent
    looks_local = path.startswith((".", "/", "~")) or (parent != Path() and parent.is_dir())
    if HUB_ID.fullmatch(path) and not looks_local:
        return problem_offline(key, path)
    siblings = [str(parent / entry.name) for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path, siblings, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; a hub id has the form org/name"
    return f"{key}={path}: no such folder, seen from {seen_from()}{hint}"


def seen_from() -> str:
    home, here = Path.home(), Path.cwd()
    return f"~/{here.relative_to(home)}" if here.is_relative_to(home) else str(here)


def _why_no_model_folder(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return (
            f"model.path={folder} is an adapter, not a base; type the base's folder "
            "(adapter_config.json names it)"
        )
    found = sorted(entry.name for entry in folder.iterdir())[:5]
    below = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    hint = f"; did you mean {below[0]}?" if below else ""
    return f"model.path={folder}: no config.json there, found {', '.join(found) or 'nothing'}{hint}"


def _check_code(key: str, folder: Path) -> list[str]:
    """Refuse a folder that brings Python."""
    brings = [file.name for file in sorted(folder.glob("*.py"))]
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and "auto_map" in read_json_object(folder / name)[0]:
            brings.append(f"auto_map in {name}")
    if not brings:
        return []
    return [
        f"{key}={folder} brings its own Python ({', '.join(brings)}); read it, then type "
        "model.trust_remote_code=true"
    ]


def _check_tokenizer(model: ModelConfig) -> list[str]:
    """Look at model.tokenizer_path, where the tokenizer is not the base's own."""
    if model.tokenizer_path is None:
        return []
    folder = Path(model.tokenizer_path)
    if not folder.is_dir():
        problem = _problem_of_missing("model.tokenizer_path", model.tokenizer_path)
        return [problem] if problem else []
    problems = _check_tokenizer_files(folder)
    if not model.trust_remote_code and model.tokenizer_path != model.path:
        problems += _check_code("model.tokenizer_path", folder)
    return problems


def _check_tokenizer_files(folder: Path) -> list[str]:
    if problems := check_kinds(folder):
        return problems
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return [
            f"{folder}: no tokenizer there (looked for {', '.join(TOKENIZER_FILES[:2])} ...); "
            "type model.tokenizer_path=FOLDER_OR_HUB_ID"
        ]
    for name in (*TOKENIZER_JSON, *TOKENIZER_TEXTS):
        if (file := folder / name).exists():
            read = read_json_object(file) if name in TOKENIZER_JSON else read_text(file, "json_mib")
            if (problem := read[1]) is not None:
                return [problem]
    return []


def read_shapes(folder: Path) -> tuple[Shapes | None, list[str]]:
    """Read the matrices of a folder's safetensors from their headers; None where there are none."""
    tensors, problems = _read_tensors(folder)
    return (None if problems else _matrices(tensors)), problems


def _read_tensors(folder: Path) -> tuple[Shapes, list[str]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map, problems = _read_index(index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        weight_map, problems = {}, []
        files = [folder / "model.safetensors"]
        if not files[0].exists():
            return {}, [_why_no_weights(folder)]
    shapes: Shapes = {}
    for file in files:
        header, wrong = read_header(file)
        shapes |= header
        problems += wrong
    missing = sorted(set(weight_map) - set(shapes)) if not problems else []
    if missing:
        problems.append(
            f"{index}: {len(missing)} tensors are in no file, {missing[0]} is the first; "
            "download the model again"
        )
    return shapes, problems


def _matrices(tensors: Shapes) -> Shapes:
    matrices: Shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in tensors.items()
        if len(shape) == 2 and name.endswith(".weight")
    }
    embeddings = [shape for name, shape in matrices.items() if NOT_LINEAR.search(name)]
    if embeddings and "lm_head" not in matrices:
        matrices["lm_head"] = embeddings[0]  # tied weights are saved once
    return matrices


def _modules(tensors: Shapes, matrices: Shapes | None) -> list[str]:
    names = {name.rpartition(".")[0] for name in tensors} | set(matrices or ())
    parts = [name.split(".") for name in names]
    return sorted({".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)})


def _read_index(index: Path) -> tuple[dict[str, str], list[str]]:
    content, problem = read_json_object(index)
    weight_map = content.get("weight_map")
    if problem is None and not isinstance(weight_map, dict):
        problem = f"{index}: no weight_map"
    if problem is not None or not isinstance(weight_map, dict):
        return {}, [problem or ""]
    names = set(map(str, weight_map.values()))
    if odd := sorted(name for name in names if name in ("", ".", "..") or "\0" in name):
        return {}, [f"{index}: {odd[0]!r} is not a file's name; download the model again"]
    if not all(isinstance(name, str) for name in weight_map.values()):
        return {}, [f"{index}: weight_map names a file by a number or a list; download it again"]
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:
        return {}, [f"{index}: {outside[0]!r} points out of the folder; refused"]
    return weight_map, []


def _why_no_weights(folder: Path) -> str:
    partial = sorted(file.name for file in folder.glob("*.incomplete"))
    if partial:
        return f"{folder}: the download did not finish ({partial[0]}); download the model again"
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if not pickles:
        return f"{folder}: no model.safetensors there"
    return (
        f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; convert it once "
        'with python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
    )
