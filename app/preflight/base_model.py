"""Inspect a base model's folder before it is loaded: its config.json, modules, and problems.

Reads headers and sizes, never weights, and fetches nothing from the hub. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

from app.model.architecture import check_token_ids, text_numbers
from app.model.base import INDEX, WEIGHTS, ModelConfig, check_dtypes, check_head
from app.model.config_values import check_numbers, check_type
from app.model.description import LAYER, BaseDescription, describe_config, describe_files
from app.model.gguf import unpack_command
from app.model.hub import find_offline_problem
from app.model.quantization import stored_method
from app.model.tokenizer_file import TOKENIZER_FILE, check_tokenizer_file
from common.text import shortened
from common.untrusted import Header, check_kinds, limits, read_header, read_json_object, read_text

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_LANGUAGE_MODEL = re.compile(r"(^|\.)(language|text)_model\.")
"""layer stacks of the language model in the files of a multimodal checkpoint"""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_TOKENIZER_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_TOKENIZER_TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")
WHOLE_BYTES = 256 << 20
"""weights of up to this size are read whole, in about half a second"""
TENSOR_BLOCK_BYTES = 4096
"""bytes read at the start, in the middle and at the end of each tensor of a larger folder"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Folder:
    """The folder of a base or a tokenizer; each file is read once for all checks."""

    path: Path
    _files: dict[str, tuple[dict[str, Any], str | None]] = dataclasses.field(default_factory=dict)

    def read(self, name: str) -> tuple[dict[str, Any], str | None]:
        """Return the object in a JSON file, and the file's problem; empty if it does not exist."""
        if name not in self._files:
            file = self.path / name
            self._files[name] = read_json_object(file) if file.exists() else ({}, None)
        return self._files[name]


def inspect_base(model: ModelConfig) -> tuple[BaseDescription, list[str]]:
    """Describe the base of a folder, a hub id or an architecture, and list its problems."""
    if model.from_scratch or model.path is None or not Path(model.path).is_dir():
        name = "model.architecture" if model.from_scratch or not model.path else model.path
        found = _check_from_scratch(model) if model.from_scratch else []
        if not model.from_scratch and model.path is not None:
            found = _check_missing("model.path", model.path)
        return describe_config(name, model.architecture), found + _check_tokenizer(model)
    files = _Folder(Path(model.path))
    folder = files.path
    name, config = str(folder), folder / "config.json"
    if not config.exists():
        return BaseDescription(name=name), [_folder_error(folder)]
    values, problem = files.read(config.name)
    problems = [problem] if problem else check_config(str(config), values)
    problems += check_kinds(folder)
    if (folder / "adapter_config.json").exists():
        problems.append(
            f"{folder / 'adapter_config.json'}: an adapter in the folder of a base is applied "
            "whenever the base is loaded; move adapter_config.json and adapter_model.safetensors "
            "to a separate folder (adapter.path=FOLDER continues its training), or remove them"
        )
    if (generation := folder / "generation_config.json").exists():
        ids, problem = files.read(generation.name)
        problems += (
            [problem]
            if problem
            else check_numbers(str(generation), ids)
            + check_token_ids(str(generation), "", ids, values)
        )
    problems += [
        f"{config}: {key} selects the attention code of transformers, and can name other code; "
        "remove it (attention=NAME selects it)"
        for key in values
        if key.startswith(("_attn", "attn_implementation"))
        and key != "_attn_implementation_autoset"  # true or false, written by transformers 4.48
    ]
    problems += _check_code("model.path", files, model)
    headers, damage = _read_headers(folder)
    base = BaseDescription(name=name, config=values)
    problems += damage
    if not damage:
        tensors = {key: shape for each in headers.values() for key, shape in each.shapes.items()}
        problems += _check_layers_of_files(config, values, tensors)
        problems += check_head(str(config), values.get("architectures"), tensors)
        text, stored = text_numbers(values), values.get("quantization_config")
        if not any(part.get("quantization_config") for part in (values, text)):
            problems += check_dtypes(headers)
        is_packed = isinstance(stored, dict) and stored and stored_method(stored) != "int8"
        # Which modules of a multimodal model are its language model is known only once it is built.
        if text is values:
            base = describe_files(name, values, tensors, is_packed=bool(is_packed))
    problems += [each for each in _check_tokenizer(model, files) if each not in problems]
    return base, problems


def inspect_tokenizer(model: ModelConfig) -> tuple[BaseDescription, list[str]]:
    """Describe what a preview needs of a base: its config.json, if it exists; list problems.

    Those of the tokenizer are among them.
    """
    name, files, problems = model.path or "model.architecture", None, []
    if model.path is None or not Path(model.path).is_dir():
        config: Mapping[str, Any] = model.architecture
        problems += _check_missing("model.path", model.path) if model.path else []
    else:
        files = _Folder(Path(model.path))
        config, problem = files.read("config.json")
        problems += [problem] if problem else []
        problems += _check_code("model.path", files, model)
    problems += _check_tokenizer(model, files)
    return BaseDescription(name=name, config=config), problems


def _check_from_scratch(model: ModelConfig) -> list[str]:
    if "model_type" in model.architecture:
        problems = check_config("model.architecture", model.architecture)
    else:
        problems = [
            "model.from_scratch=true needs the shape of the model: type model.architecture="
            "{model_type: llama, hidden_size: 128, ...}, or model=tiny_base_scratch"
        ]
    if model.path is not None:
        problems.append(
            f"model.from_scratch=true reads no weights, but model.path={model.path}: "
            "type model.path=null, or model.from_scratch=false"
        )
    if model.tokenizer_path is None:
        problems.append("model.from_scratch=true needs model.tokenizer_path=FOLDER_OR_HUB_ID")
    return problems


def check_config(where: str, numbers: Mapping[str, Any]) -> list[str]:
    """List problems of the keys that every config.json has, and of its module counts."""
    if "model_type" not in numbers:
        return [f"{where}: no model_type, so this is not a transformers model"]
    problems = []
    if not isinstance(numbers["model_type"], str):
        problems.append(f"{where}: model_type={shortened(numbers['model_type'])}: expected a name")
    problems += check_type(where, numbers) + check_numbers(where, numbers)
    problems += check_token_ids(where, "", numbers, numbers)
    if (text := text_numbers(numbers)) is not numbers:
        problems += check_token_ids(where, "text_config.", text, numbers)
    classes = numbers.get("architectures")
    are_names = isinstance(classes, list) and all(type(name) is str for name in classes)
    if classes is not None and not are_names:
        problems.append(
            f"{where}: architectures={shortened(classes)}: expected a list of class names; "
            "download config.json again, or remove the key"
        )
    if not isinstance(numbers.get("quantization_config") or {}, dict):
        problems.append(f"{where}: quantization_config is not an object; remove it")
    return problems


def _check_layers_of_files(
    file: Path, numbers: Mapping[str, Any], tensors: Iterable[str]
) -> list[str]:
    """Compare the number of layers in config.json with the layers of the weight files.

    Only if all layers are in one stack; for other models the loader lists the unused weights.
    """
    layers = [found for name in tensors if (found := LAYER.match(name))]
    if (text := text_numbers(numbers)) is not numbers:
        numbers = text
        layers = [found for found in layers if _LANGUAGE_MODEL.search(found["stack"])]
    key = next((key for key in _NUM_LAYERS if type(numbers.get(key)) is int), None)
    if key is None or len({found["stack"] for found in layers}) != 1:
        return []
    num_saved = max(int(found["number"]) for found in layers) + 1
    if num_saved < numbers[key]:
        return [
            f"{file}: {key}={numbers[key]}, but the weight files have {num_saved} layers: those "
            f"from layer {num_saved} on are missing; write {key}={num_saved}, or download the "
            "model again"
        ]
    # Multi-token prediction layers come after the others, and are not built.
    extra = numbers.get("num_nextn_predict_layers")
    described = numbers[key] + (extra if isinstance(extra, int) else 0)
    unused = sorted(found.string for found in layers if int(found["number"]) >= described)
    if not unused:
        return []
    return [
        f"{file}: {key}={numbers[key]}, but the weight files have {num_saved} layers: "
        f"{len(unused)} tensors would not be used, {unused[0]} is the first; write "
        f"{key}={num_saved}, or download config.json again"
    ]


def _check_missing(key: str, path: str) -> list[str]:
    """List why a path that is not a folder cannot be read; empty if it may be a hub id."""
    if "://" in path:
        return [f"{key}={path}: URLs are not supported; type a folder or a hub id like org/name"]
    if Path(path).is_file():
        file = Path(path)
        if file.suffix == ".gguf":
            return [
                f"{key}={path}: training needs a Hugging Face folder; write one of this file with "
                f"`{unpack_command(file, file.with_suffix(''))}`, and type "
                f"{key}={file.with_suffix('')}"
            ]
        return [f"{key}={path}: this is a file; type its folder"]
    parent = Path(path).parent
    looks_local = path.startswith((".", "/", "~")) or (parent != Path() and parent.is_dir())
    if _HUB_ID.fullmatch(path) and not looks_local:
        offline = find_offline_problem(key, path)
        return [offline] if offline else []
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, siblings, n=1)
    hint = f"; did you mean {parent / near[0]}?" if near else "; a hub id has the form org/name"
    return [f"{key}={path}: no such folder in {current_folder()}{hint}"]


def current_folder() -> str:
    """Return the current folder as messages show it: below the home folder as `~/...`."""
    home, current = Path.home(), Path.cwd()
    return f"~/{current.relative_to(home)}" if current.is_relative_to(home) else str(current)


def _folder_error(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return (
            f"model.path={folder} is an adapter, not a base; type the base's folder "
            "(adapter_config.json names it)"
        )
    found = sorted(entry.name for entry in folder.iterdir())[:5]
    below = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    hint = f"; did you mean {below[0]}?" if below else ""
    return (
        f"model.path={folder}: the folder has no config.json, only "
        f"{', '.join(found) or 'no file at all'}{hint}"
    )


def _check_code(key: str, folder: _Folder, model: ModelConfig) -> list[str]:
    """List the Python code that a folder contains or names, unless the settings trust it."""
    if model.trust_remote_code:
        return []
    code = [file.name for file in sorted(folder.path.glob("*.py"))]
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in folder.read(name)[0]:
            code.append(f"auto_map in {name}")
    if not code:
        return []
    return [
        f"{key}={folder.path} contains its own Python code ({', '.join(code)}); read it, then "
        "type model.trust_remote_code=true"
    ]


def _check_tokenizer(model: ModelConfig, base: _Folder | None = None) -> list[str]:
    """List problems of the tokenizer's files: in model.tokenizer_path, else in `base`."""
    key = "model.path" if model.tokenizer_path is None else "model.tokenizer_path"
    path = model.path if model.tokenizer_path is None else model.tokenizer_path
    if path is None:
        return []
    is_own = model.tokenizer_path not in (None, model.path)
    files = _Folder(Path(path)) if base is None or is_own else base
    folder = files.path
    if not folder.is_dir():
        return _check_missing(key, path) if is_own else []
    code = _check_code(key, files, model) if is_own else []
    if problems := check_kinds(folder):
        return problems
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return [
            f"{folder}: no tokenizer found (looked for {', '.join(_TOKENIZER_FILES[:2])} ...); "
            "type model.tokenizer_path=FOLDER_OR_HUB_ID",
            *code,
        ]
    tokenizer = folder / TOKENIZER_FILE
    if tokenizer.exists() and (problems := check_tokenizer_file(tokenizer)):
        return [*problems, *code]
    for name in _TOKENIZER_JSON:
        if (problem := files.read(name)[1]) is not None:
            return [problem, *code]
    for file in (folder / name for name in _TOKENIZER_TEXTS):
        if file.exists() and (problem := read_text(file, "json_mib")[1]) is not None:
            return [problem, *code]
    longest = files.read("tokenizer_config.json")[0].get("model_max_length")
    if longest is None or (type(longest) in (int, float) and longest >= 1):
        return code
    return [
        f"{folder / 'tokenizer_config.json'}: model_max_length={shortened(longest)}: expected a "
        "number of tokens (1 or more); remove the key, or download the file again",
        *code,
    ]


def _read_headers(folder: Path) -> tuple[dict[Path, Header], list[str]]:
    index = folder / INDEX
    if index.exists():
        weight_map, problems = _read_index(index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        weight_map, problems = {}, []
        files = [folder / WEIGHTS]
        if not files[0].exists():
            return {}, [_weights_error(folder)]
    headers: dict[Path, Header] = {}
    for file in files:
        headers[file], found = read_header(file)
        problems += found
    saved = {name for header in headers.values() for name in header.shapes}
    missing = sorted(weight_map.keys() - saved) if not problems else []
    if missing:
        problems.append(
            f"{index}: {len(missing)} tensors are in no file, {missing[0]} is the first; "
            "download the model again"
        )
    return headers, problems


def _read_index(index: Path) -> tuple[dict[str, str], list[str]]:
    content, problem = read_json_object(index)
    weight_map = content.get("weight_map")
    if problem is None and not isinstance(weight_map, dict):
        problem = f"{index}: no weight_map"
    if problem is not None or not isinstance(weight_map, dict):
        return {}, [problem or ""]
    names = set(map(str, weight_map.values()))
    if invalid := sorted(name for name in names if name in ("", ".", "..") or "\0" in name):
        return {}, [f"{index}: {invalid[0]!r} is not a file name; download the model again"]
    if not all(isinstance(name, str) for name in weight_map.values()):
        return {}, [f"{index}: weight_map has a file name that is not text; download it again"]
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:
        return {}, [f"{index}: {outside[0]!r} is outside of the folder; download the model again"]
    return weight_map, []


def _weights_error(folder: Path) -> str:
    partial = sorted(file.name for file in folder.glob("*.incomplete"))
    if partial:
        return f"{folder}: the download is incomplete ({partial[0]}); download the model again"
    shards = sorted(file.name for file in folder.glob("model-*-of-*.safetensors"))
    if shards:
        return (
            f"{folder}: has {len(shards)} shards, {shards[0]} is the first, but no {INDEX}; "
            "download the model again"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        return f"{folder}: the folder has no model.safetensors"
    return (
        f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; convert it once "
        'with python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
    )


def describe_base(model: ModelConfig) -> dict[str, str | None]:
    """Describe a base by its path, its revision, and two fingerprints of a folder's files.

    `fingerprint` covers config.json and the safetensors headers (names, shapes and dtypes): it
    distinguishes models, but not two training runs of one model. `weights` covers the bytes of all
    tensors (blocks of each tensor in a large folder), and distinguishes those, too.
    """
    fingerprint = weights = None
    if model.path is not None and (folder := Path(model.path)).is_dir():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        digest, sample = hashlib.sha256(), hashlib.sha256()
        for file in (folder / "config.json", *files):
            if file.is_file():
                digest.update(_start_of(file))
        # The size of all files together: a large model may be split into many small files.
        is_small = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
        for file in files:
            state = file.stat()
            stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
            sample.update(_digest_of(file, stamp, is_whole=is_small))
        fingerprint, weights = digest.hexdigest(), sample.hexdigest()
    return {
        "path": model.path,
        "revision": model.revision,
        "fingerprint": fingerprint,
        "weights": weights,
    }


@cache
def _digest_of(file: Path, stamp: tuple[int, ...], *, is_whole: bool) -> bytes:
    """Return the digest of a safetensors file; cached until the file changes."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        whole = iter(lambda: stream.read(1 << 20), b"")
        for block in whole if is_whole else _read_parts(file, stream):
            digest.update(block)
    return digest.digest()


def _read_parts(file: Path, stream: FileIO) -> Iterator[bytes]:
    """Read a safetensors file's size, its header and three blocks of each tensor."""
    size, header = file.stat().st_size, _start_of(file)
    yield size.to_bytes(8, "little")
    yield header
    for begin, end in _ranges_of(header, size):
        last = max(end - TENSOR_BLOCK_BYTES, begin)
        for offset in sorted({begin, (begin + last) // 2, last}):
            stream.seek(offset)
            yield stream.read(TENSOR_BLOCK_BYTES)


def _ranges_of(header: bytes, size: int) -> list[tuple[int, int]]:
    """Return the byte range of each tensor in a file, clipped to the file's size."""
    start = len(header)
    try:
        tensors = [t for name, t in json.loads(header[8:]).items() if name != "__metadata__"]
        ranges = [(int(begin), int(end)) for begin, end in (t["data_offsets"] for t in tensors)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return [(0, size)]  # damaged: `base_model` reports it

    def clip(offset: int) -> int:
        return min(max(offset, 0), size)

    return [(clip(start + begin), clip(start + end)) for begin, end in ranges]


def _start_of(file: Path) -> bytes:
    """Return the whole of a JSON file, or the header of a safetensors file."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = stream.read(8)
        return length + stream.read(
            min(int.from_bytes(length, "little"), limits().header_mib << 20)
        )
