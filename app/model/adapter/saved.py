"""An adapter on disk: written, read back, and refused when it is not what it should be."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter.saved_config import CONFIG_FILE, load_peft_config, read_adapter_config
from app.model.adapter.settings import ADAPTER_FILE, ORIGIN_FILE
from app.model.adapter.wrap import without_bitsandbytes, wrap
from app.model.patterns import check_patterns, expression_of_key, last_parts
from app.model.weight_reads import find_bypassed_linears
from app.process.errors import UserError
from app.process.untrusted import reading

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""of the largest logit: how far a reopened model may be from the one in memory"""


def is_adapter(folder: Path) -> bool:
    """Say whether `folder` holds an adapter rather than a whole model."""
    return (folder / CONFIG_FILE).exists()


@without_bitsandbytes()
def load_adapter(
    model: PreTrainedModel, folder: Path, *, trainable: bool = False, half_precision: bool = False
) -> peft.PeftModel:
    """Put a saved adapter on its base, for use or, `trainable`, to go on with; its settings hold.

    To go on with, its weights are fp32 unless `half_precision`. ValueError when the file is not
    this base's or changes nothing: peft itself says nothing when a file holds none of the
    adapter's tensors, and the model then answers like its base.
    """
    from app.model.adapter.experts import from_stock_config

    with reading(f"the adapter in {folder}", "save it again, or take another one"):
        config = from_stock_config(load_peft_config(folder), model)
        _check_patterns(config, model, folder)
        _note_other_base(folder, config.base_model_name_or_path, model.name_or_path)
        config.base_model_name_or_path = model.name_or_path or None
        config.inference_mode = False
        wrapped = wrap(model, config, autocast_adapter_dtype=False)
        if trainable:
            _check_called(wrapped, model.config.model_type, folder)
        in_fp32 = not half_precision if trainable else _is_fp32(folder)
        _read_into(wrapped, folder, "default", in_fp32=in_fp32)
    if trainable:
        log.info("adapter: going on from %s, whose settings hold", folder)
        return wrapped.train()
    config.inference_mode = True
    return wrapped.requires_grad_(False).eval()


def _check_called(model: peft.PeftModel, model_type: str, folder: Path) -> None:
    """Refuse to go on with an adapter on a module whose weight its layer reads by itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    endings = tuple(f".{one}" for one in find_bypassed_linears(model_type))
    tuned = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if left := [name for name in tuned if name.endswith(endings)]:
        raise UserError(
            f"{folder / CONFIG_FILE}: target_modules: {', '.join(last_parts(left))} of "
            f"{model_type} models is no plain product, and an adapter on it is left out and "
            "would not train; begin a new one on other modules: leave out adapter.path"
        )


def _check_patterns(config: peft.PeftConfig, model: PreTrainedModel, folder: Path) -> None:
    """Refuse a saved adapter with regular expressions that are invalid or may never end."""
    settings = config.to_dict()
    given: dict[str, list[str]] = {}
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(settings.get(key), str):
            given[key] = [settings[key]]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in settings.get(key) or {}:
            given[f"{key}: {pattern}"] = [expression_of_key(pattern)]
    layers = settings.get("layers_pattern") or []
    for pattern in [layers] if isinstance(layers, str) else layers:
        given[f"layers_pattern: {pattern}"] = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."]
    for name in settings.get("modules_to_save") or []:
        given[f"modules_to_save: {name}"] = [rf"(^|.*\.){name}($|\..*)"]
    names = [name for name, _ in model.named_modules()]
    if problems := check_patterns(given, names):
        raise UserError([f"{folder / CONFIG_FILE}: {problem}" for problem in problems])


def required_embedding_rows(model: PreTrainedModel, folder: Path) -> int:
    """Count the rows of the embedding that a saved adapter was made with, as far as it says."""
    from safetensors import safe_open

    settings, problems = read_adapter_config(folder)
    if problems:
        raise UserError(problems)
    trained = settings.get("trainable_token_indices")
    lists = trained.values() if isinstance(trained, dict) else [trained or []]
    rows = max((index + 1 for indices in lists for index in indices), default=0)
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        whole = f"base_model.model.{name}.weight"
        if whole in file.keys():  # noqa: SIM118
            rows = max(rows, file.get_slice(whole).get_shape()[0])
    return rows


def save_adapter(
    model: peft.PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter in peft's own format, as safetensors.

    `weights` are the parameters that train, by name, where the model itself holds parts of them.
    """
    from app.model.adapter.experts import to_stock_config

    own = model.peft_config["default"]
    sort_sets(own)
    model.peft_config["default"] = to_stock_config(own, model.get_base_model())
    try:
        model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=weights)
    finally:
        model.peft_config["default"] = own


def sort_sets(config: peft.PeftConfig) -> None:
    """Sort a config's sets, whose order differs between processes: all write the same file."""
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))


def check_adapter_file(
    model: peft.PeftModel,
    folder: Path,
    *,
    adapter_name: str = "default",
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Raise ValueError unless the file holds each adapter tensor, finite, of the right shape.

    An adapter that changes nothing is refused as well. With `weights`, as `save_adapter` was given
    them, it must hold their very numbers.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    expected = peft.get_peft_model_state_dict(
        model, state_dict=weights, adapter_name=adapter_name, save_embedding_layers=False
    )
    file = folder / ADAPTER_FILE
    saved = load_file(file)
    if saved.keys() != expected.keys():
        missing, unknown = expected.keys() - saved.keys(), saved.keys() - expected.keys()
        raise ValueError(
            f"{file}: {len(missing)} of {len(expected)} adapter tensors are missing "
            f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}"
        )
    for name, tensor in saved.items():
        if not tensor.numel():
            raise ValueError(
                f"{file}: {name} is empty (shape {list(tensor.shape)}), as a save of sharded "
                f"weights leaves it; this base needs {list(expected[name].shape)}"
            )
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{file}: {name} has shape {list(tensor.shape)}, "
                f"this base needs {list(expected[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: {name} holds NaN or infinity")
        if weights is not None and not torch.equal(tensor, expected[name]):
            raise ValueError(f"{file}: {name} reads back another one than was written")
    _check_changes_something(file, saved)


def _check_changes_something(file: Path, saved: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that leave the base as it is, or wipe out what they scale."""

    def all_of(kind: str, holds: Callable[[torch.Tensor], bool]) -> bool:
        tensors = [tensor for name, tensor in saved.items() if kind in name]
        return bool(tensors) and all(map(holds, tensors))

    # lora_B starts at zero and the vectors of IA3 at one: if every one still is, nothing changes.
    for kind in ("lora_A", "lora_B", "ia3_l", "trainable_tokens_delta"):
        if all_of(kind, lambda tensor: not tensor.any()):
            raise ValueError(f"{file}: every {kind} is zero, nothing was learned")
    if all_of("ia3_l", lambda tensor: bool((tensor == 1).all())):
        raise ValueError(f"{file}: every ia3_l is one, nothing was learned")


def verify_adapter(model: peft.PeftModel, folder: Path, probe: Mapping[str, torch.Tensor]) -> float:
    """Reopen a saved adapter beside the one in memory and compare their logits.

    `probe` is what `probe_logits` takes; returns the largest difference of two logits. ValueError
    when they differ by more than the file's rounding.
    """
    in_memory = probe_logits(model, probe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_training = model.training
    _add_empty(model, folder, "reopened")
    try:
        _read_into(model, folder, "reopened", in_fp32=_is_fp32(folder))
        model.set_adapter("reopened")
        reopened = probe_logits(model, probe)
    finally:
        model.set_adapter("default")
        model.delete_adapter("reopened")
        for parameter in trained:
            parameter.requires_grad_(True)
        model.train(was_training)
    return check_same_logits(in_memory, reopened, folder)


def add_saved_adapter(model: peft.PeftModel, folder: Path, name: str) -> None:
    """Put a further saved adapter beside those of a model, for use; `name` is not active yet.

    UserError where it is not this base's.
    """
    from app.model.adapter.experts import fuse_experts

    with reading(f"the adapter in {folder}", "save it again, or take another one"):
        _add_empty(model, folder, name)
        _read_into(model, folder, name, in_fp32=_is_fp32(folder))
    fuse_experts(model)


def _add_empty(model: peft.PeftModel, folder: Path, name: str) -> None:
    from app.model.adapter.experts import (
        from_stock_config,
        keep_target_modules,
        placeholders_for_packed,
    )

    base = model.get_base_model()
    config = from_stock_config(load_peft_config(folder), base)
    with keep_target_modules(), placeholders_for_packed(base):
        model.add_adapter(name, config, autocast_adapter_dtype=_is_fp32(folder))


def _read_into(model: peft.PeftModel, folder: Path, adapter_name: str, *, in_fp32: bool) -> None:
    """Give the adapter `adapter_name` of a model the weights of a file, once they are checked."""
    import peft
    import torch
    from safetensors.torch import load_file

    check_adapter_file(model, folder, adapter_name=adapter_name)
    # Before the weights come: peft makes them in the dtype of the layer beside them, which would
    # round them on a half-precision base, and fp32 on one of int8, which would not.
    dtype = torch.float32 if in_fp32 else model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if adapter_name in name.split("."):
            parameter.data = parameter.data.to(dtype)
    peft.set_peft_model_state_dict(
        model, load_file(folder / ADAPTER_FILE), adapter_name=adapter_name
    )
    # DoRA has measured the first weights: autocast would reuse its cached copies of them.
    torch.clear_autocast_cache()


def _is_fp32(folder: Path) -> bool:
    """Say whether the adapter is kept in fp32."""
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118


def _note_other_base(folder: Path, named: str | None, here: str) -> None:
    """Log when an adapter from elsewhere names another base; ours are compared by fingerprint."""
    if named and named != here and not (folder / ORIGIN_FILE).exists():
        log.info("adapter: %s was made on %s, and is put on %s", folder, named, here)


def probe_logits(model: torch.nn.Module, probe: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one row, without dropout or gradient.

    `probe`: `input_ids` [1, tokens], and `decoder_input_ids` for an encoder-decoder model.
    """
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**probe, use_cache=False).logits[0].float()
    model.train(was_training)
    return logits


def check_same_logits(
    in_memory: torch.Tensor, reopened: torch.Tensor, folder: Path, tolerance: float = TOLERANCE
) -> float:
    """Return the largest difference; ValueError when what was saved is not what was trained."""
    difference = (in_memory - reopened).abs().max().item()
    scale = in_memory.abs().max().item()
    if not math.isfinite(difference) or difference > tolerance * max(scale, 1.0):
        raise ValueError(f"{folder}: reopened, its logits differ by {difference:.3g} from memory")
    return difference
