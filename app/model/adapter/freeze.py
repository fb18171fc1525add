"""Freeze: some layers and modules train as they are, the rest of the base stays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.model.adapter import targets
from app.model.adapter.rows import sharing_embedding
from app.model.adapter.settings import FreezeConfig
from app.model.layers import choose_layers, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

KEY = "adapter.modules"


def apply_freeze(
    model: PreTrainedModel, config: FreezeConfig, *, token_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """Let only the chosen layers and modules train.

    ValueError for a pattern that matches nothing, for weights that cannot train, and for
    `token_ids` whose rows would not.
    """
    chosen = _layers(model, config) + _modules(model, config.modules)
    if not chosen:
        raise ValueError(
            "adapter=freeze: nothing would train; type 'adapter.layers=top 2', or name modules as "
            "adapter.modules=[lm_head]"
        )
    model.requires_grad_(False)
    for name in chosen:
        module = model.get_submodule(name)
        if targets.is_quantized(module):
            raise ValueError(
                f"adapter=freeze: {name} is quantized and cannot train; type quantization=none, "
                "or adapter=lora"
            )
        module.requires_grad_(True)
    _say_tied(model, chosen)
    if token_ids:
        _check_rows_train(model)
    return model


def _layers(model: PreTrainedModel, config: FreezeConfig) -> list[str]:
    if config.layers == "none":
        return []
    return choose_layers(config.layers, decoder_layers(model))


def _modules(model: PreTrainedModel, patterns: Sequence[str]) -> list[str]:
    """Return the modules that the patterns mean: each an ending, or else an expression."""
    modules = {name: module for name, module in model.named_modules() if name}
    names = [n for n, module in modules.items() if next(module.parameters(), None) is not None]
    chosen: list[str] = []
    for pattern in patterns:
        is_ending = any(map(targets.is_ending(pattern), names))
        chosen += targets.match([pattern] if is_ending else pattern, names, KEY)
    return chosen


def _say_tied(model: PreTrainedModel, chosen: Sequence[str]) -> None:
    sharing = sharing_embedding(model)
    if len(sharing) > 1 and model.get_input_embeddings().weight.requires_grad:
        named = next(s for s in sharing if targets.is_inside(s, chosen))
        others = ", ".join(name for name in sharing if name != named)
        log.info("freeze: %s trains, and with it %s: they are one weight", named, others)


def _check_rows_train(model: PreTrainedModel) -> None:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if not module.weight.requires_grad:
            name = targets.name_of(model, module)
            raise ValueError(
                f"model.added_tokens: with adapter=freeze the rows of new tokens in {name} would "
                f"stay what they started as; type {KEY}=[{name.rpartition('.')[2]}] (with what it "
                "already names), or adapter=lora"
            )
