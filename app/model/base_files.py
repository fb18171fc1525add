"""Check a base's weight files against the model built from them: all used, all finite.

transformers drops tensors that the model does not have, and loads NaN without a warning.
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
from app.model.multimodal import outermost, tower_modules
from app.model.quantization import quantizable_layers
from app.process.errors import UserError
from app.process.launch import is_first_here, is_first_rank
from app.process.untrusted import FLOATS, Header, read_header

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT = re.compile(r"(^|\.)weight$")
"""names of weights; other tensors may be masks or positions"""
DIGITS = re.compile(r"\d+")
LABELS = re.compile(r"Classification|Reward|QuestionAnswering|MultipleChoice|NextSentence")
"""names of classes whose models write no text"""
HEADS = {"lm_head", "embed_out", "output_layer"}
"""names of modules that write text"""


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors of a base's folder that transformers reads."""
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
    """Return which weights are not floats, in files whose config.json says of no quantization."""
    for file, header in headers.items():
        if odd := header.odd_dtypes(WEIGHT):
            return [
                f"{file}: {odd[0]}, and config.json has no quantization_config that says how to "
                "read it; expected F32, BF16, F16 or F64: download config.json and the weights "
                "again, or take another base"
            ]
    return []


def check_head(where: str, classes: object, names: Iterable[str]) -> list[str]:
    """Refuse a base whose `architectures` label or rate texts, and whose files have no head to
    write them with.

    With embedding and head tied it would train all the same, as a language model that it is not.
    """
    labels = [name for name in classes if LABELS.search(name)] if isinstance(classes, list) else []
    if not labels or any(HEADS & set(name.split(".")) for name in names):
        return []
    return [
        f"{where}: architectures={labels[0]}: this model labels or rates texts, and its files have "
        "no head that writes them; type model.path=FOLDER_OR_HUB_ID of the language model that it "
        "was made of"
    ]


def check_shapes(
    architecture: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path, **how: bool
) -> None:
    """Compare config.json with the headers of the weight files, before memory is allocated.

    `how` are further arguments of `from_config`; the model is built on `meta`. Tensors that have
    other names in files are left to the loader.
    """
    import torch

    with torch.device("meta"), quantizable_layers(architecture.model_type):
        model = model_class(architecture).from_config(copy.deepcopy(architecture), **how)
    for name, parameter in model.named_parameters():
        there, described = shapes.get(name), tuple(parameter.shape)
        if there is not None and there != described:
            raise UserError(
                f"{folder / 'config.json'} describes another model than the weights beside it: "
                f"{name} would be {_by(described)}, and is {_by(there)} in the files; copy or "
                "download config.json and the weights again"
            )
    if missing := _missing(model, shapes):
        raise UserError(
            f"{folder / 'config.json'} describes another model than the weights beside it: "
            f"{len(missing)} tensors are not in the files, {missing[0]} is the first; copy or "
            "download config.json and the weights again"
        )


def _missing(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return which weights the files lack: those that other layers in them have, and the head.

    A weight that several modules share may be under any of their names.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    known = {DIGITS.sub("#", name) for name in shapes}
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        shared[0]
        for shared in names.values()
        if not any(name in shapes for name in shared)
        and any(DIGITS.sub("#", name) in known for name in shared)
        and not any(each.search(name) for each in ignored for name in shared)
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return missing
    embeddings, heads = (names[id(one.weight)] for one in (embedding, head))
    # By its shape: a head may have any name in the files.
    alike = {name for name, shape in shapes.items() if shape == tuple(head.weight.shape)}
    is_known = any(name in shapes for name in embeddings)
    return missing + (heads[:1] if is_known and not alike - set(embeddings) else [])


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def check_all_used(
    model: PreTrainedModel,
    unexpected: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
) -> None:
    """Raise UserError where layers of the files, or a bias, would not be used.

    Tensors of parts that this model class does not have, as an image encoder, are only logged.
    """
    modules = {DIGITS.sub("#", name) for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    left: list[str] = []
    apart: list[str] = []
    for name in sorted(unexpected):
        module, _, leaf = name.rpartition(".")
        module = DIGITS.sub("#", module)
        known = {module, prefix + module, module.removeprefix(prefix)} & modules
        # Old files have masks among the weights, as `attn.bias` of four dimensions.
        is_mask = leaf == "bias" and len(shapes.get(name, (1,))) != 1
        is_extra = _is_of_extra_layer(name, model.config)
        is_left = known and leaf in ("weight", "bias") and not is_mask and not is_extra
        (left if is_left else apart).append(name)
    if left:
        raise UserError(
            f"model.path={path}: {len(left)} tensors in its files would not be used, {left[0]} is "
            "the first: config.json describes a smaller model (the number of layers, as "
            "num_hidden_layers, or whether they have a bias); download config.json again"
        )
    if not is_first_rank():
        return
    if towers := outermost(tower_modules(model)):
        log.info("model: %s not loaded: text does not reach them", ", ".join(towers))
    elif apart:
        log.info(
            "model: %d tensors in its files are of parts that a %s does not have, first %s",
            len(apart),
            type(model).__name__,
            apart[0],
        )


def _is_of_extra_layer(name: str, config: PretrainedConfig) -> bool:
    """Return whether a tensor is of a multi-token prediction layer, after all others."""
    text = config.get_text_config()
    extra = getattr(text, "num_nextn_predict_layers", None) or 0
    number = DIGITS.search(name)
    layers = getattr(text, "num_hidden_layers", None)
    if number is None or layers is None:
        return False
    return bool(layers <= int(number[0]) < layers + extra)


def check_finite(files: Iterable[Path], dtype: torch.dtype) -> None:
    """Raise UserError for weights that are not finite, or would not be in `dtype`.

    Each machine reads its own files: the first rank there checks them, each tensor once, from the
    page cache, since transformers has just read it.
    """
    if not is_first_here():
        return
    import torch

    for file in files:
        state = file.stat()
        for name, smallest, largest in _extremes(file, state.st_size, state.st_mtime_ns):
            if not (float("-inf") < smallest and largest < float("inf")):
                raise UserError(
                    f"{file}: {name} holds NaN or infinity, so no loss could be finite; download "
                    "the file again, or take another base"
                )
            most = torch.finfo(dtype).max
            if not (-most <= smallest and largest <= most):
                raise UserError(
                    f"{file}: {name} holds {max(largest, -smallest):.3g}, which {dtype} cannot; "
                    "type trainer.precision=bf16 or fp32"
                )


@cache
def _extremes(file: Path, size: int, changed: int) -> list[tuple[str, float, float]]:
    """Return the minimum and maximum of each tensor, NaN where it has any."""
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
