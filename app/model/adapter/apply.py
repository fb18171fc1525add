"""Put an adapter on a base: what is frozen, what is added, what trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.model.adapter.settings import AdapterConfig, LoraConfig

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel


def apply_adapter(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and put the adapter's weights beside it; `full` leaves all weights trainable.

    Adapter weights are fp32 unless `half_precision`. The rows `token_ids` of embedding and head
    train with the adapter. ValueError for a pattern that matches nothing.
    """
    if not isinstance(config, LoraConfig):
        return model
    import peft

    patterns = config.target_modules
    if isinstance(patterns, list):
        _check_every_pattern_matches(model, patterns)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=patterns,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=not half_precision)


def _check_every_pattern_matches(model: PreTrainedModel, patterns: list[str]) -> None:
    """peft is content when one pattern of several matches; a misspelt one would go unnoticed."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(name == pattern or name.endswith(f".{pattern}") for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in names} - {""})
            raise ValueError(
                f"adapter.target_modules: {pattern!r} matches no module; "
                f"the model has {', '.join(leaves)}"
            )
