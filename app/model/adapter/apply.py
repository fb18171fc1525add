"""Apply an adapter to a base: freeze weights, add new ones, choose which train.

NEFTune adds noise to the input embeddings during training (arXiv 2310.05914).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import targets
from app.model.adapter.lora import apply_lora
from app.model.adapter.saved import load_adapter
from app.model.adapter.settings import (
    AdapterConfig,
    FreezeConfig,
    Ia3Config,
    LoraConfig,
    continued_from,
)
from app.model.adapter.wrap import check_token_rows_train, without_bitsandbytes, wrap
from app.model.description import describe_model, is_quantized, name_of, sharing_embedding
from app.model.layers import by_ending, is_inside, shortest
from app.model.multimodal import tower_modules
from common.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@without_bitsandbytes()
def _apply_ia3(model: PreTrainedModel, config: Ia3Config) -> peft.PeftModel:
    """Add IA3 vectors, initially ones, to keys and values (outputs) and feed-forward (inputs).

    Raises UserError if a pattern matches nothing or the architecture is unknown.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    found = targets.find_targets(config, describe_model(model))
    if found.problems:
        raise UserError(found.problems)
    names, inner = found.matrices, found.scaled_inputs
    all_names = [*(name for name, _ in model.named_modules()), *tower_modules(model)]
    short = shortest(names, found.endings, all_names)
    short_inner = [ending for ending in short if by_ending(ending, inner)]
    # peft wants feedforward_modules to be among target_modules, and compares endings without a dot.
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


def _apply_freeze(
    model: PreTrainedModel, config: FreezeConfig, *, token_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """Make only the chosen layers and modules trainable.

    Raises UserError if a pattern matches nothing, a chosen weight is quantized, or the rows of
    `token_ids` would stay frozen.
    """
    found = targets.find_targets(config, describe_model(model))
    if found.problems:
        raise UserError(found.problems)
    model.requires_grad_(False)
    for name in found.full_modules:
        module = model.get_submodule(name)
        if is_quantized(module):
            raise UserError(
                f"adapter=freeze: {name} is quantized and cannot train; type quantization=none, "
                "or adapter=lora"
            )
        module.requires_grad_(True)
    sharing = sharing_embedding(model)
    if len(sharing) > 1 and model.get_input_embeddings().weight.requires_grad:
        named = next(name for name in sharing if is_inside(name, found.full_modules))
        others = ", ".join(name for name in sharing if name != named)
        log.info("freeze: %s is tied to %s, so both are trained", named, others)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if token_ids and not module.weight.requires_grad:
            name = name_of(model, module)
            raise UserError(
                f"model.added_tokens: with adapter=freeze the rows of new tokens in {name} would "
                f"keep their initial values; type adapter.modules=[{name.rpartition('.')[2]}] "
                "(and the modules already in that list), or adapter=lora"
            )
    return model


def apply_adapter(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
    device: torch.device | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and add the adapter's weights; `full` leaves all weights trainable.

    Trainable parameters are fp32 unless `half_precision`. The rows `token_ids` of embedding and
    head train too. `device`: where PiSSA and OLoRA decompose the base's weights. Raises UserError
    if a pattern matches nothing.
    """
    import torch

    dtype = model.dtype if half_precision else torch.float32
    if isinstance(config, Ia3Config) and token_ids:
        raise UserError(
            "adapter=ia3 cannot train the embedding rows of new tokens (model.added_tokens); "
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
        adapted = _apply_ia3(model, config)
    elif isinstance(config, FreezeConfig):
        adapted = _apply_freeze(model, config, token_ids=token_ids)
    else:
        return model
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def apply_neftune(model: torch.nn.Module, alpha: float | None) -> None:
    """Add uniform noise of size alpha / sqrt(tokens * width) to every document's embeddings.

    Apply it after the adapter, which may replace the embedding module. The noise is off in
    evaluation and not saved. None has no effect; UserError for encoder-decoder models.
    """
    if alpha is None:
        return
    if problem := find_neftune_problem(alpha, model.config.to_dict()):
        raise UserError(problem)
    noise = _EmbeddingNoise(alpha)
    model.register_forward_pre_hook(noise.record_positions, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise.add)


def find_neftune_problem(alpha: float, numbers: Mapping[str, Any]) -> str | None:
    """Return why NEFTune does not support a model with this config.json, or None if it does."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"adapter.neftune_alpha={alpha:g} is for causal models, and {numbers.get('model_type')} is "
        "an encoder-decoder: type adapter.neftune_alpha=null"
    )


class _EmbeddingNoise:
    """Hooks of one model: one records the positions of a batch, the other adds the noise."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.position_ids: torch.Tensor | None = None

    def record_positions(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs.get("position_ids")

    def add(
        self, embedding: torch.nn.Module, args: Any, embedded: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `embedded` [rows, tokens, width] with noise, or None in evaluation."""
        import torch

        if not embedding.training:
            return None
        lengths = torch.full_like(embedded[..., 0], embedded.shape[1], dtype=torch.float32)
        if self.position_ids is not None:
            lengths = document_lengths(self.position_ids).float()
        size = self.alpha * (lengths * embedded.shape[-1]).rsqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * size.unsqueeze(-1).to(embedded.dtype)


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's document, given positions that start at 0 in each document.

    int64 [rows, tokens] in and out, without a device sync. Padding tokens, all at position 0, count
    as documents of one token.
    """
    import torch

    document = (position_ids == 0).cumsum(dim=1) - 1
    counts = torch.zeros_like(position_ids).scatter_add_(1, document, torch.ones_like(position_ids))
    return counts.gather(1, document)
