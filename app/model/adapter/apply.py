"""Put an adapter on a base: what is frozen, what is added, what trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter.freeze import apply_freeze
from app.model.adapter.ia3 import apply_ia3
from app.model.adapter.lora import apply_lora
from app.model.adapter.rows import check_rows_train
from app.model.adapter.saved import load_adapter
from app.model.adapter.settings import (
    AdapterConfig,
    FreezeConfig,
    Ia3Config,
    LoraConfig,
    goes_on,
)

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel


def apply_adapter(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and put the adapter's weights beside it; `full` leaves all weights trainable.

    What trains is fp32 unless `half_precision`. The rows `token_ids` of embedding and head train
    with the adapter. ValueError for a pattern that matches nothing.
    """
    import torch

    dtype = model.dtype if half_precision else torch.float32
    if isinstance(config, Ia3Config) and token_ids:
        raise ValueError(
            "adapter=ia3 cannot train the rows of new tokens (model.added_tokens); "
            "type adapter=lora or adapter=full"
        )
    if folder := goes_on(config):
        adapted = load_adapter(model, Path(folder), trainable=True, half_precision=half_precision)
        check_rows_train(adapted, token_ids)
    elif isinstance(config, LoraConfig):
        adapted = apply_lora(model, config, half_precision=half_precision, token_ids=token_ids)
    elif isinstance(config, Ia3Config):
        adapted = apply_ia3(model, config)
    elif isinstance(config, FreezeConfig):
        adapted = apply_freeze(model, config, token_ids=token_ids)
    else:
        return model
    _cast_trained(adapted, dtype)
    return adapted


def _cast_trained(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
