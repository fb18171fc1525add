"""Train only the language model of multimodal checkpoints, on text.

Towers (image and audio encoders and their projectors) are not built: they take no memory, and are
invisible to adapters, strategies and parameter counts. All other modules keep their names in the
full model, so that adapters can be loaded into it. When a full model is saved, the weights of the
towers are copied from the base's files.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

LANGUAGE_MODEL, TOWERS = "loft_language_model", "loft_towers"
"""attributes of a model without towers: the name of its language model; the names of all modules
that were not built"""
_TOWER_FILES = "loft_tower_files"
"""attribute of a model without towers: names of the towers' weights, by file of the base"""
_CALLED_ON_TEXT = {"gemma3n": ("embed_vision", "embed_audio")}
"""model_type -> modules outside the language model that a forward pass on text calls"""
HIDDEN_INPUTS = {"qwen2_audio": "its audio tower's device", "voxtral_realtime": "input_features"}
"""model_type -> required inputs besides text that are not in the signature of the forward pass"""
_PROCESSORS = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""files of a base with the settings of its image and audio processors"""


def language_model_class(architecture: PretrainedConfig) -> Any:
    """Return the class of a multimodal model without towers; None for a text-only architecture.

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
    if not needed and architecture.model_type in HIDDEN_INPUTS:
        needed = [HIDDEN_INPUTS[architecture.model_type]]
    if needed:
        raise UserError(
            f"{where}: {architecture.model_type} models do not run on text alone "
            f"(their forward pass needs {', '.join(needed)}); type model.path=ANOTHER_BASE"
        )
    parts = [type(getattr(architecture, name, None)) for name in architecture.sub_configs]
    towers = [modeling_auto.MODEL_MAPPING.get(part, None) for part in parts]
    is_timm = any(tower is not None and "Timm" in tower.__name__ for tower in towers)
    if is_timm and importlib.util.find_spec("timm") is None:
        raise UserError(
            f"{where}: {architecture.model_type} models need the package timm, which is not "
            "installed; type pip install timm torchvision"
        )
    return _without_towers(whole)


def from_config(cls: Any, config: Any, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Build a model as an auto class does; a class method of the classes that are derived here."""
    return cls._from_config(config, **kwargs)


@cache
def _without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Derive a class without towers; it has the same name, which is saved in config.json."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        text = config.get_text_config()
        for name in config.sub_configs:
            if (part := getattr(config, name)) is not None and part is not text:
                part._attn_implementation = "eager"  # supported by every tower
        whole.__init__(self, config, *args, **kwargs)
        _drop_towers(self)

    members = {"__init__": __init__, "from_config": classmethod(from_config)}
    members["__module__"] = whole.__module__
    return type(whole.__name__, (whole,), members)


def _drop_towers(model: Any) -> None:
    import torch

    language_model = _find_language_model(model)
    kept = {model.get_input_embeddings(), model.get_output_embeddings()}
    called = _CALLED_ON_TEXT.get(model.config.model_type, ())
    dropped: list[str] = []
    parent, prefix = model, ""
    for step in language_model.split("."):
        for name, child in list(parent.named_children()):
            if name not in (step, *called) and kept.isdisjoint(child.modules()):
                inside = (f"{prefix}{name}.{inner}" for inner, _ in child.named_modules())
                dropped += [inner.rstrip(".") for inner in inside]
                parent._modules[name] = None
        for name in list(parent._parameters):  # such as the embedding of an image's line break
            # Not None: transformers would try to initialize it; an empty tensor is a no-op.
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
        f"{model.config.name_or_path or 'model.architecture'}: cannot find the language model in a "
        f"{model.config.model_type} model; type model.path=ANOTHER_BASE"
    )


def tower_modules(model: Any) -> list[str]:
    """Return the full names of the modules that were not built; none for text-only models."""
    names: list[str] = getattr(model, TOWERS, [])
    return names


def language_model_name(model: Any) -> str:
    """Return the name of the language model in a multimodal model; "" for a text-only model."""
    name: str = getattr(model, LANGUAGE_MODEL, "")
    return name


def describe_language_model(model: Any) -> str:
    """Return a description of a model for messages, which names the towers that were not built."""
    towers = ", ".join(outermost(tower_modules(model)))
    return f"the model without {towers}, which are not used for text," if towers else "the model"


def outermost(names: Iterable[str]) -> list[str]:
    """Return the modules that are not inside another one of `names`, parents first."""
    found: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def record_tower_files(model: Any, files: Iterable[Path]) -> None:
    """Record the tensors in a base's files that belong to its towers, for `read_towers`."""
    if not tower_modules(model):
        return
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix, held = model.base_model_prefix, model.state_dict()
    tower_weights: dict[Path, list[str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                renamed, _ = rename_source_key(name, renamings, converters, prefix, held)
                if not held.keys() & {name, renamed}:
                    tower_weights.setdefault(file, []).append(name)
    setattr(model, _TOWER_FILES, tower_weights)


def read_towers(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the unchanged weights of the towers, one file of the base at a time."""
    from safetensors import safe_open

    for file, names in getattr(model, _TOWER_FILES, {}).items():
        with safe_open(file, framework="pt") as opened:
            yield {name: opened.get_tensor(name) for name in names}


def copy_processors(model: Any, folder: Path) -> None:
    """Copy the settings of the base's image and audio processors into `folder`."""
    for base in {file.parent for file in getattr(model, _TOWER_FILES, {})}:
        for name in _PROCESSORS:
            if (base / name).is_file():
                shutil.copyfile(base / name, folder / name)
