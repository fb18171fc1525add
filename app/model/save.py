"""What was trained, on disk: written, reopened, and compared with what is in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import TrainingFault
from app.model.adapter import (
    AdapterConfig,
    changed_its_base,
    check_same_logits,
    probe_logits,
    reopen_converted,
    save_adapter,
    save_converted,
    saves_whole_model,
    verify_adapter,
    write_origin,
)
from app.model.base import model_class

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
) -> tuple[Path, Any]:
    """Save what was trained under `folder`, reopen it and compare; return where, and the model.

    Adapters go to `adapter/` in peft's format with `base`, which says what they were made on; full
    models to `model/` as a Hugging Face folder in the dtype the base came in. The logits of
    `probe`, token ids by name of the model's argument, are compared. The returned model is what is
    on disk: another one than `model` where the adapter had changed its base, which is then read
    again. TrainingFault when what is on disk is not what is in memory.
    """
    import torch

    rows = {name: torch.tensor([list(ids)], device=model.device) for name, ids in probe.items()}
    try:
        if saves_whole_model(adapter):
            saved = folder / "model"
            difference = _save_whole(model, architecture, saved, rows)
        else:
            saved = folder / "adapter"
            difference, model = _save_adapter(model, saved, rows, reload_base)
            write_origin(saved, base)
    except ValueError as error:
        raise TrainingFault(f"what was saved does not read back: {error}") from error
    log.info("saved and reopened: logits differ by at most %.1e", difference)
    return saved, model


def _save_adapter(
    model: Any,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    reload_base: Callable[[], PreTrainedModel],
) -> tuple[float, Any]:
    if changed_its_base(model):
        save_converted(model, folder)
        return reopen_converted(model, folder, probe, reload_base)
    save_adapter(model, folder)
    return verify_adapter(model, folder, probe), model


def _save_whole(
    model: PreTrainedModel,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
) -> float:
    kept = {name: parameter.dtype for name, parameter in model.named_parameters()}
    widest = max(kept.values(), key=lambda dtype: dtype.itemsize)
    _cast_weights(model, dict.fromkeys(kept, architecture.dtype or widest))
    model.save_pretrained(folder)
    reopened = (
        model_class(architecture)
        .from_pretrained(
            folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
        .to(model.device)
    )
    in_memory, on_disk = probe_logits(model, probe), probe_logits(reopened, probe)
    # What is measured after this is the saved model, computed as it was in training.
    _cast_weights(model, kept)
    return check_same_logits(in_memory, on_disk, folder)


def _cast_weights(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the parameters alone: `model.to` would round the rotary frequencies as well."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
