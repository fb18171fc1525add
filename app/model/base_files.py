"""Check a base's weight files against its config.json: shapes, dtypes, unused tensors, NaN.

transformers ignores tensors that the model does not have, and loads NaN without a warning.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.architecture import model_class
from app.model.classifier import is_classifier
from app.model.description import names_by_id
from app.model.multimodal import outermost, tower_modules
from app.model.quantization import quantizable_layers
from app.process.launch import is_first_on_machine, is_first_rank
from common.errors import UserError
from common.untrusted import FLOATS, Header, read_header

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT = re.compile(r"(^|\.)weight$")
"""matches names of weights; other tensors may be masks or positions"""
_DIGITS = re.compile(r"\d+")
_LABELS = re.compile(r"Classification|Reward|QuestionAnswering|MultipleChoice|NextSentence")
"""matches class names of models that do not generate text"""
_HEADS = {"lm_head", "embed_out", "output_layer"}
"""names of language-model heads"""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads from a base's folder."""
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / name for name in weight_map.values()})


def read_headers(files: Iterable[Path]) -> dict[Path, Header]:
    """Return the header of each file; UserError for a damaged one."""
    headers = {}
    for file in files:
        headers[file], problems = read_header(file)
        if problems:
            raise UserError(problems)
    return headers


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in `files`; UserError for a damaged header."""
    headers = read_headers(files).values()
    return {name: shape for header in headers for name, shape in header.shapes.items()}


def check_dtypes(headers: Mapping[Path, Header]) -> list[str]:
    """Return a problem for weights that are not floats, although config.json has no quantization.

    At most one problem, for the first such file.
    """
    for file, header in headers.items():
        if others := header.non_floats(WEIGHT):
            return [
                f"{file}: {others[0]}, but config.json has no quantization_config for it; expected "
                "F32, BF16, F16 or F64: download config.json and the weights again, or use "
                "another base"
            ]
    return []


def check_head(where: str, classes: object, names: Iterable[str]) -> list[str]:
    """Return a problem if a base is a classifier or reward model without a language-model head.

    `classes` is `architectures` of config.json, `names` are the tensors in its files. With tied
    embeddings such a base would load and train without an error.
    """
    labels = [name for name in classes if _LABELS.search(name)] if isinstance(classes, list) else []
    if not labels or any(_HEADS & set(name.split(".")) for name in names):
        return []
    return [
        f"{where}: architectures={labels[0]}: this model classifies or rates texts, and its files "
        "have no language-model head; type model.path=FOLDER_OR_HUB_ID of the language model that "
        "it was trained from"
    ]


def has_own_head(model: PreTrainedModel, folder: Path) -> bool:
    """Return whether the files of a model that is tied hold a head unlike its embedding.

    transformers loads these as two weights, whatever config.json says.
    """
    import torch

    stored = [file for file in weight_files(folder) if file.is_file()]
    files = {name: file for file in stored for name in read_shapes([file])}
    pairs = [
        (head, embedding)
        for head, embedding in model.all_tied_weights_keys.items()
        if _HEADS & set(head.split(".")) and head in files and embedding in files
    ]
    return any(
        not torch.equal(read_tensor(files[head], head), read_tensor(files[embedding], embedding))
        for head, embedding in pairs
    )


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Return one tensor of a file, which is opened for it alone.

    Pages of a mapped file count as used memory until it is closed.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name).clone()
    return tensor


def check_shapes(
    architecture: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path, **how: bool
) -> None:
    """Raise UserError if the shapes in the weight files are not those of config.json.

    The model is built on `meta`, before memory is allocated; `how` are further arguments of
    `from_config`. Tensors with other names in the files are left to the loader.
    """
    import torch

    with torch.device("meta"), quantizable_layers(architecture.model_type):
        model = model_class(architecture).from_config(copy.deepcopy(architecture), **how)
    for name, parameter in model.named_parameters():
        in_file, described = shapes.get(name), tuple(parameter.shape)
        if in_file is not None and in_file != described:
            raise UserError(
                f"{folder / 'config.json'} describes a different model from the weights beside it: "
                f"{name} would be {_describe(described)}, and is {_describe(in_file)} in the "
                "files; copy or download config.json and the weights again"
            )
    if missing := _missing(model, shapes):
        raise UserError(
            f"{folder / 'config.json'} describes a different model from the weights beside it: "
            f"{len(missing)} tensors are not in the files, first {missing[0]}; copy or download "
            "config.json and the weights again"
        )


def _missing(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return weights that the files lack although they have them for other layers, and the head.

    A weight shared by several modules may be stored under any of their names.
    """
    names = names_by_id(dict(model.named_parameters(remove_duplicate=False)))
    known = {_DIGITS.sub("#", name) for name in shapes}
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        shared[0]
        for shared in names.values()
        if not any(name in shapes for name in shared)
        and any(_DIGITS.sub("#", name) in known for name in shared)
        and not any(each.search(name) for each in ignored for name in shared)
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight or is_classifier(model):
        return missing  # a language model's files have no head of a classifier yet
    embeddings, heads = names[id(embedding.weight)], names[id(head.weight)]
    # Compare shapes, because a head may have any name in the files.
    alike = {name for name, shape in shapes.items() if shape == tuple(head.weight.shape)}
    is_known = any(name in shapes for name in embeddings)
    return missing + (heads[:1] if is_known and not alike - set(embeddings) else [])


def _describe(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def check_all_used(
    model: PreTrainedModel,
    unexpected: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
) -> None:
    """Raise UserError if the model does not use layers or biases that its files contain.

    Tensors of parts that the model class does not have, such as an image encoder, are only logged.
    """
    modules = {_DIGITS.sub("#", name) for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    unused: list[str] = []
    other_parts: list[str] = []
    for name in sorted(unexpected):
        module, _, leaf = name.rpartition(".")
        module = _DIGITS.sub("#", module)
        known = {module, prefix + module, module.removeprefix(prefix)} & modules
        # Old files contain masks, such as `attn.bias` with four dimensions.
        is_mask = leaf == "bias" and len(shapes.get(name, (1,))) != 1
        is_extra = _is_in_extra_layer(name, model.config)
        is_unused = known and leaf in ("weight", "bias") and not is_mask and not is_extra
        (unused if is_unused else other_parts).append(name)
    if unused:
        raise UserError(
            f"model.path={path}: {len(unused)} tensors in its files would not be used, first "
            f"{unused[0]}: config.json describes a smaller model (the number of layers, as "
            "num_hidden_layers, or whether they have a bias); download config.json again"
        )
    if not is_first_rank():
        return
    if towers := outermost(tower_modules(model)):
        log.info("model: %s not loaded: text does not use them", ", ".join(towers))
    elif other_parts:
        log.info(
            "model: %d tensors in its files belong to parts that %s does not have, first %s",
            len(other_parts),
            type(model).__name__,
            other_parts[0],
        )


def _is_in_extra_layer(name: str, config: PretrainedConfig) -> bool:
    """Return whether a tensor belongs to a multi-token prediction layer, after all other layers."""
    text = config.get_text_config()
    extra = getattr(text, "num_nextn_predict_layers", None) or 0
    number = _DIGITS.search(name)
    layers = getattr(text, "num_hidden_layers", None)
    if number is None or layers is None:
        return False
    return bool(layers <= int(number[0]) < layers + extra)


def check_finite(files: Iterable[Path], dtype: torch.dtype) -> None:
    """Raise UserError for weights that are not finite, or would overflow in `dtype`.

    The first rank of each node checks the node's own files. transformers has just read them, so
    they come from the page cache.
    """
    if not is_first_on_machine():
        return
    import torch

    for file in files:
        state = file.stat()
        for name, smallest, largest in _extremes(file, state.st_size, state.st_mtime_ns):
            if not (float("-inf") < smallest and largest < float("inf")):
                raise UserError(
                    f"{file}: {name} contains NaN or infinity, so no loss could be finite; "
                    "download the file again, or use another base"
                )
            most = torch.finfo(dtype).max
            if not (-most <= smallest and largest <= most):
                raise UserError(
                    f"{file}: {name} contains {max(largest, -smallest):.3g}, which overflows in "
                    f"{dtype}; type trainer.precision=bf16 or fp32"
                )


@cache
def _extremes(file: Path, size: int, changed: int) -> list[tuple[str, float, float]]:
    """Return name, minimum and maximum of each float tensor; NaN if it contains any.

    `size` and `changed` (its modification time) only identify the file's version in the cache.
    """
    import torch
    from safetensors import safe_open

    found = []
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if opened.get_slice(name).get_dtype() in FLOATS:
                tensor = opened.get_tensor(name)
                if tensor.numel():
                    smallest, largest = torch.aminmax(tensor)
                    found.append((name, smallest.item(), largest.item()))
    return found
