"""Put an adapter on a base: what is frozen, what is added, what is trained."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter import targets
from app.model.adapter.lora import apply_lora
from app.model.adapter.modules import is_quantized, modules_of, name_of, sharing_embedding
from app.model.adapter.saved import load_adapter
from app.model.adapter.settings import (
    AdapterConfig,
    FreezeConfig,
    Ia3Config,
    LoraConfig,
    continued_from,
)
from app.model.adapter.wrap import check_token_rows_train, without_bitsandbytes, wrap
from app.model.multimodal import tower_modules
from app.model.patterns import by_ending, is_inside, shortest
from app.process.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)


@without_bitsandbytes()
def apply_ia3(model: PreTrainedModel, config: Ia3Config) -> peft.PeftModel:
    """Put vectors of ones on the outputs of keys and values and the inputs of the feed-forward.

    UserError for a pattern that matches nothing, and for an architecture that is not known.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    found = targets.find_targets(config, modules_of(model))
    if found.problems:
        raise UserError(found.problems)
    names, inner = found.matrices, found.scaled_inputs
    every = [*(name for name, _ in model.named_modules()), *tower_modules(model)]
    short = shortest(names, found.endings, every)
    short_inner = [one for one in short if by_ending(one, inner)]
    # peft wants feedforward_modules among target_modules, and compares them without a dot.
    if {name for name in names if name.endswith(tuple(short_inner))} != set(inner):
        short, short_inner = sorted(names), sorted(inner)
    counts = Counter(name.rpartition(".")[2] for name in names)
    log.info("ia3: vectors on %s", ", ".join(f"{end} x {count}" for end, count in counts.items()))
    return wrap(
        model,
        peft.IA3Config(
            task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
            target_modules=short,
            feedforward_modules=short_inner,
            fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
        ),
    )


KEY = "adapter.modules"


def apply_freeze(
    model: PreTrainedModel, config: FreezeConfig, *, token_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """Let only the chosen layers and modules train.

    UserError for a pattern that matches nothing, ValueError for weights that cannot train and for
    `token_ids` whose rows would not.
    """
    found = targets.find_targets(config, modules_of(model))
    if found.problems:
        raise UserError(found.problems)
    chosen = found.whole
    model.requires_grad_(False)
    for name in chosen:
        module = model.get_submodule(name)
        if is_quantized(module):
            raise UserError(
                f"adapter=freeze: {name} is quantized and cannot train; type quantization=none, "
                "or adapter=lora"
            )
        module.requires_grad_(True)
    _log_tied(model, chosen)
    if token_ids:
        _check_rows_train(model)
    return model


def _log_tied(model: PreTrainedModel, chosen: Sequence[str]) -> None:
    sharing = sharing_embedding(model)
    if len(sharing) > 1 and model.get_input_embeddings().weight.requires_grad:
        named = next(s for s in sharing if is_inside(s, chosen))
        others = ", ".join(name for name in sharing if name != named)
        log.info("freeze: %s trains, and with it %s: they are one weight", named, others)


def _check_rows_train(model: PreTrainedModel) -> None:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if not module.weight.requires_grad:
            name = name_of(model, module)
            raise UserError(
                f"model.added_tokens: with adapter=freeze the rows of new tokens in {name} would "
                f"stay what they started as; type {KEY}=[{name.rpartition('.')[2]}] (with what it "
                "already names), or adapter=lora"
            )


def apply_adapter(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
    device: torch.device | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and put the adapter's weights beside it; `full` leaves all weights trainable.

    Trainable parameters are fp32 unless `half_precision`. The rows `token_ids` of embedding and
    head train with the adapter. `device`: where starts are taken out of the base. ValueError for a
    pattern that matches nothing.
    """
    import torch

    dtype = model.dtype if half_precision else torch.float32
    if isinstance(config, Ia3Config) and token_ids:
        raise UserError(
            "adapter=ia3 cannot train the rows of new tokens (model.added_tokens); "
            "type adapter=lora or adapter=full"
        )
    if folder := continued_from(config):
        adapted = load_adapter(model, Path(folder), trainable=True, half_precision=half_precision)
        check_token_rows_train(adapted, token_ids)
    elif isinstance(config, LoraConfig):
        adapted = apply_lora(
            model, config, half_precision=half_precision, token_ids=token_ids, device=device
        )
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
