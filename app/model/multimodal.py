"""Multimodal checkpoints of which text trains the language model alone.

Their towers for images and sound, and what projects these into the language model, are not built:
they take no memory, and no adapter, strategy or count meets them. All other modules keep the names
that they have in the whole model, so that adapters fit it. A whole model that is saved gets the
towers' weights back from the base's files.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

LANGUAGE_MODEL, TOWERS = "loft_language_model", "loft_towers"
"""attributes of a model without towers: the name of its language model, and of all that went"""
TOWER_FILES = "loft_tower_files"
"""attribute of a model: the names of its towers' weights by file of its base"""
CALLED = {"gemma3n": ("embed_vision", "embed_audio")}
"""model_type -> modules beside the language model that a forward pass on text calls all the same"""
NEEDED = {
    "qwen2_audio": "its audio tower's device",
    "voxtral_realtime": "input_features",
}
"""model_type -> what a forward pass asks for besides text, which its signature does not tell"""
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""files of a base that say how its towers read images and sound"""


def language_model_class(architecture: PretrainedConfig) -> Any:
    """Return a multimodal model's class without its towers; None where an architecture has none.

    UserError for a model that does not run on text alone.
    """
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    whole = known.get(type(architecture), None)
    if whole is None or "text_config" not in architecture.sub_configs:
        return None
    if architecture.is_encoder_decoder or architecture.get_text_config() is architecture:
        return None
    needed = [
        name
        for name, parameter in inspect.signature(whole.forward).parameters.items()
        if parameter.default is parameter.empty
        and name not in ("self", "input_ids")
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    path = architecture.name_or_path
    where = f"model.path={path}" if path else "model.architecture"
    if needed := needed or [NEEDED[kind] for kind in NEEDED if kind == architecture.model_type]:
        raise UserError(
            f"{where}: {architecture.model_type} models do not run on text alone "
            f"(their forward pass needs {', '.join(needed)}); type model.path=ANOTHER_BASE"
        )
    parts = [type(getattr(architecture, name, None)) for name in architecture.sub_configs]
    towers = [modeling_auto.MODEL_MAPPING.get(part, None) for part in parts]
    is_timm = any(tower is not None and "Timm" in tower.__name__ for tower in towers)
    if is_timm and importlib.util.find_spec("timm") is None:
        raise UserError(
            f"{where}: {architecture.model_type} models are built with timm, which is not "
            "installed; type pip install timm torchvision"
        )
    return _without_towers(whole)


@cache
def _without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Derive a class of the same name, under which the model is saved, that has no towers."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        text = config.get_text_config()
        for name in config.sub_configs:
            if (part := getattr(config, name)) is not None and part is not text:
                part._attn_implementation = "eager"  # which every tower can be built with
        whole.__init__(self, config, *args, **kwargs)
        _drop_towers(self)

    def from_config(cls: Any, config: Any, *, trust_remote_code: bool = False, **how: Any) -> Any:
        return cls._from_config(config, **how)

    members = {"__init__": __init__, "from_config": classmethod(from_config)}
    members["__module__"] = whole.__module__
    return type(whole.__name__, (whole,), members)


def _drop_towers(model: Any) -> None:
    """Remove what stands beside the language model and its head, on the way down to it."""
    import torch

    language_model = _find_language_model(model)
    kept = {model.get_input_embeddings(), model.get_output_embeddings()}
    called = CALLED.get(model.config.model_type, ())
    dropped: list[str] = []
    parent, prefix = model, ""
    for step in language_model.split("."):
        for name, child in list(parent.named_children()):
            if name not in (step, *called) and kept.isdisjoint(child.modules()):
                inside = (f"{prefix}{name}.{inner}" for inner, _ in child.named_modules())
                dropped += [inner.rstrip(".") for inner in inside]
                parent._modules[name] = None
        for name in list(parent._parameters):  # as the row that ends each line of an image
            # Not None: transformers would initialize it, which is nothing of an empty tensor.
            del parent._parameters[name]
            setattr(parent, name, torch.empty(0, device="cpu"))
        parent, prefix = parent.get_submodule(step), f"{prefix}{step}."
    setattr(model, LANGUAGE_MODEL, language_model)
    setattr(model, TOWERS, dropped)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        name: tied for name, tied in model.all_tied_weights_keys.items() if name in names
    }


def _find_language_model(model: Any) -> str:
    from transformers import PreTrainedModel

    kind = type(model.config.get_text_config())
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and type(module.config) is kind:
            return name
    raise UserError(
        f"{model.config.name_or_path or 'model.architecture'}: which part of a "
        f"{model.config.model_type} model reads text is not known; type model.path=ANOTHER_BASE"
    )


def tower_modules(model: Any) -> list[str]:
    """Return the full names of the modules that are not there; none for models of text alone."""
    names: list[str] = getattr(model, TOWERS, [])
    return names


def language_model_name(model: Any) -> str:
    """Return the name of the language model in a multimodal one, "" for a model of text alone."""
    name: str = getattr(model, LANGUAGE_MODEL, "")
    return name


def describe_language_model(model: Any) -> str:
    """Return how messages call a model; one without its towers by what it lacks."""
    towers = outermost(tower_modules(model))
    return (
        f"the model without {', '.join(towers)}, which text does not reach,"
        if towers
        else "the model"
    )


def outermost(names: Iterable[str]) -> list[str]:
    """Return the modules that lie in no other of them."""
    found: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def record_tower_files(model: Any, files: Iterable[Path]) -> None:
    """Note which tensors of a base's files the model has no weight for."""
    if not tower_modules(model):
        return
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix, held = model.base_model_prefix, model.state_dict()
    left: dict[Path, list[str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                renamed, _ = rename_source_key(name, renamings, converters, prefix, held)
                if not held.keys() & {name, renamed}:
                    left.setdefault(file, []).append(name)
    setattr(model, TOWER_FILES, left)


def read_towers(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of the towers that are not there, as they are, by file of the base."""
    from safetensors import safe_open

    for file, names in getattr(model, TOWER_FILES, {}).items():
        with safe_open(file, framework="pt") as opened:
            yield {name: opened.get_tensor(name) for name in names}


def copy_processors(model: Any, folder: Path) -> None:
    """Copy what says how images and sound are read from the base into the folder of its copy."""
    for base in {file.parent for file in getattr(model, TOWER_FILES, {})}:
        for name in PROCESSORS:
            if (base / name).is_file():
                shutil.copyfile(base / name, folder / name)
