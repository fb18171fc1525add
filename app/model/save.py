"""Save the trained model or adapter, reload it, and compare it with the one in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import (
    AdapterConfig,
    check_adapter_file,
    check_same_logits,
    has_modified_base,
    probe_logits,
    reopen_converted,
    save_adapter,
    save_converted,
    saves_whole_model,
    verify_adapter,
    write_origin,
)
from app.model.architecture import model_class
from app.model.shards import Shards, WeightGatherer, round_weights, write_model
from app.process.collectives import all_gather_list, is_rank0, run_on_rank0
from common.errors import TrainingFault

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


def save_model(
    model: Any,
    adapter: AdapterConfig,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, Sequence[int]],
    *,
    base: Mapping[str, str | None],
    reload_base: Callable[[], PreTrainedModel],
    shards: Shards | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Path, Any]:
    """Save a trained model under `folder` and verify it; return its folder and the saved model.

    An adapter is written to `adapter/` in peft's format, together with the description `base` of
    its base model; a full model to `model/` as a Hugging Face folder in `dtype`, by default that of
    the base. The files are reloaded, and the logits of `probe` (token ids by model argument)
    compared with those of the trained model; what rounding to `dtype` changes is logged. The
    returned model has the saved weights. It is not `model` if the adapter had changed its base,
    which is then reloaded. TrainingFault if the reloaded model differs by more than rounding.

    If weights are sharded, all ranks call this with their `shards`, and rank 0 writes. There is no
    memory for a second model then: the gathered weights are restored into the model, and its logits
    compared with those from before.
    """
    import torch

    device = model.device if shards is None else shards.root_device
    rows = {name: torch.tensor([list(ids)], device=device) for name, ids in probe.items()}
    is_whole = saves_whole_model(adapter)
    saved = folder / ("model" if is_whole else "adapter")
    if not is_whole:  # peft's AutoPeftModel loads this revision of the base
        model.peft_config["default"].revision = base.get("revision")
    written = dtype or stored_dtype(model, architecture)
    is_rounded = is_whole and loses_bits(trained_dtype(model), written)
    try:
        if is_whole and shards is not None:
            difference = _save_gathered_model(model, saved, rows, shards, written)
        elif is_whole:
            difference = _save_whole(model, architecture, saved, rows, written)
        elif shards is not None:
            difference = _save_gathered_adapter(model, saved, rows, base, shards)
        else:
            difference, model = _save_adapter(model, saved, rows, reload_base)
            write_origin(saved, base)
    except ValueError as error:
        raise TrainingFault(f"the saved files failed verification: {error}") from error
    if is_rounded:
        log.info(
            "%s verified: reloaded as written in %s, which moves the logits of the trained weights "
            "by up to %.2g",
            saved.name,
            dtype_name(written),
            difference,
        )
    else:
        log.info("%s verified: reloaded logits match (max difference %.1g)", saved.name, difference)
    return saved, model


def _save_adapter(
    model: Any,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    reload_base: Callable[[], PreTrainedModel],
) -> tuple[float, Any]:
    if has_modified_base(model):
        save_converted(model, folder)
        return reopen_converted(model, folder, probe, reload_base)
    save_adapter(model, folder)
    return verify_adapter(model, folder, probe), model


def _save_whole(
    model: PreTrainedModel,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> float:
    """Return the largest difference of the reloaded logits from those of the trained model."""
    trained = probe_logits(model, probe)
    write_model(model, folder, dtype)
    # From here on the saved weights are evaluated, in their training dtypes.
    round_weights(model, dtype)
    saved = probe_logits(model, probe)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
    attention = model.config._attn_implementation
    reopened = model_class(architecture).from_pretrained(
        folder, dtype=widest, attn_implementation=attention
    )
    for name, parameter in reopened.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    reloaded = probe_logits(reopened.to(model.device), probe)
    return max(check_same_logits(saved, reloaded, folder), _largest_difference(trained, reloaded))


def _save_gathered_model(
    model: PreTrainedModel,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    shards: Shards,
    dtype: torch.dtype,
) -> float:
    trained = probe_logits(model, probe)
    shards.reshard(model)
    write_model(model, folder, dtype, shards)
    difference = _check_on_all(trained, probe_logits(model, probe), folder)
    # From here on the saved weights are evaluated, in their training dtypes.
    if not round_weights(model, dtype, shards):
        return difference
    return max(difference, _largest_difference(trained, probe_logits(model, probe)))


def _save_gathered_adapter(
    model: Any,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    base: Mapping[str, str | None],
    shards: Shards,
) -> float:
    if has_modified_base(model):
        raise ValueError("an adapter that changed its base can only be saved by a single process")
    in_memory = probe_logits(model, probe)
    shards.reshard(model)
    gatherer = WeightGatherer(shards)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = shards.weight_state(parameter).shape
            weight = gatherer.gather(name, parameter, shape)
            if is_rank0():
                weights[name] = weight.cpu()
    gatherer.check()

    def write() -> None:
        save_adapter(model, folder, weights)
        check_adapter_file(model, folder, weights=weights)
        write_origin(folder, base)

    run_on_rank0(write)
    return _check_on_all(in_memory, probe_logits(model, probe), folder)


def _check_on_all(in_memory: torch.Tensor, now: torch.Tensor, folder: Path) -> float:
    """Compare logits with `check_same_logits`; ValueError on all ranks if they differ on any."""
    difference, problems = 0.0, []
    try:
        difference = check_same_logits(in_memory, now, folder)
    except ValueError as error:
        problems = [str(error)]
    if gathered := all_gather_list(problems):
        raise ValueError(gathered[0])
    return difference


def stored_dtype(model: Any, architecture: PretrainedConfig) -> torch.dtype:
    """Return the dtype of the base's files, or the model's widest dtype if it has no base."""
    stored = architecture.dtype or architecture.get_text_config().dtype
    dtype: torch.dtype = stored or trained_dtype(model)
    return dtype


def trained_dtype(model: Any) -> torch.dtype:
    """Return the widest dtype of a model's trainable parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    widest: torch.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    return widest


def loses_bits(trained: torch.dtype, written: torch.dtype) -> bool:
    """Return whether weights of one dtype are rounded if they are written in another."""
    import torch

    return torch.promote_types(trained, written) != written


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name, as in settings: fp32, bf16 or fp16."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def _largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()
