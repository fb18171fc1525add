"""Build the model to train, in the only valid order of steps; or load a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.model.adapter.apply import apply_adapter, apply_neftune
from app.model.adapter.saved import is_adapter, load_adapter, required_embedding_rows
from app.model.adapter.settings import AdapterConfig, FullConfig, saves_whole_model
from app.model.adapter.wrap import report_trainable, skip_redundant_casts
from app.model.attention import attention_implementation
from app.model.base import ModelConfig, load_base
from app.model.layers import disable_bypassing_kernels
from app.model.quantization import (
    QuantizationConfig,
    find_quantization_conflict,
    stored_quantization,
)
from app.model.recompute import RecomputeConfig, apply_recompute
from app.model.save import has_config_of_its_own
from app.model.streaming import stream_layers
from app.model.tokenizer import resize_embeddings
from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(
    config: ModelConfig,
    quantization: QuantizationConfig,
    backend: str,
    adapter: AdapterConfig,
    recompute: RecomputeConfig,
    precision: str,
    *,
    new_ids: Sequence[int] = (),
    token_ids: Sequence[int] = (),
    on_meta: bool = False,
    on_host: bool = False,
    device: torch.device | None = None,
) -> torch.nn.Module:
    """Build base + adapter, ready to train.

    `backend` is the attention backend and `precision` the precision, both already resolved. The
    tokens `new_ids` get rows in embedding and head; an adapter trains the rows `token_ids`.
    `on_meta` builds the same modules on the meta device, for ranks that receive their weights from
    others. Weights are loaded, quantized and decomposed on `device`, and with `on_host` moved back
    to the CPU afterwards. Random weights are drawn on the CPU.
    """
    # The default device of all tensors that are created without one.
    with torch.device("meta") if on_meta else nullcontext():
        # 1. Attention: layers look up the implementation in the config they are built from.
        implementation = attention_implementation(backend)
        # 2. Weights, in their training dtype, quantized while they are loaded.
        model = load_base(
            config,
            implementation,
            weight_dtype(precision, adapter),
            quantization,
            new_ids,
            on_meta=on_meta,
            on_host=on_host,
            device=device,
        )
        _set_wrap_class(model, config.wrap_class)
        _check_base(model, config, quantization, adapter)
        # 3. Recompute, before the adapter: it is set on the base's layers, which peft then wraps.
        apply_recompute(model, recompute)
        # 4. The adapter, last: it freezes the base and adds trainable parameters.
        adapted = apply_adapter(
            model,
            adapter,
            half_precision=precision == "bf16-pure",
            token_ids=token_ids,
            device=device,
        )
        if precision != "fp32":
            skip_redundant_casts(adapted)
        # Last, because it depends on which modules are wrapped or quantized.
        disable_bypassing_kernels(adapted)
        apply_neftune(adapted, adapter.neftune_alpha)
        apply_streaming(adapted, config, device)
        adapted.train()
        report_trainable(adapted)  # raises if there are no trainable parameters
        return adapted


def apply_streaming(
    model: torch.nn.Module, config: ModelConfig, device: torch.device | None
) -> None:
    """With `model.stream`, move a model to `device`, all but the frozen matrices of its layers.

    Call it after all that reads weights outside of their layer's forward. Does nothing on meta.
    """
    if config.stream is None or next(model.parameters()).is_meta:
        return
    stream_layers(model, config.stream, device or torch.device("cpu"))


def _set_wrap_class(model: PreTrainedModel, wrap_class: str | None) -> None:
    """Replace the layer classes that the model declares by `model.wrap_class`."""
    if wrap_class is None:
        return
    classes = {type(module).__name__ for module in model.modules()}
    if wrap_class not in classes:
        known = " or ".join(sorted(model._no_split_modules or ())) or "its decoder layer's class"
        raise UserError(
            f"model.wrap_class={wrap_class}: this {model.config.model_type} model has no module "
            f"of that class; type model.wrap_class={known}"
        )
    model._no_split_modules = [wrap_class]


def _check_base(
    model: PreTrainedModel,
    config: ModelConfig,
    quantization: QuantizationConfig,
    adapter: AdapterConfig,
) -> None:
    """Raise UserError if the settings conflict with a base as it is stored, or cannot save it."""
    stored = stored_quantization(model.config)
    trains_base = saves_whole_model(adapter)
    if stored and (
        problem := find_quantization_conflict(
            stored, quantization, config.path, trains_base=trains_base
        )
    ):
        raise UserError(problem)
    if trains_base and model.config.is_encoder_decoder and not has_config_of_its_own(model):
        raise UserError(
            f"adapter={adapter.name} saves the whole model, but the files of model.path="
            f"{config.path} hold a head unlike the embedding, which config.json cannot say of an "
            "encoder-decoder; type adapter=lora"
        )


def weight_dtype(precision: str, adapter: AdapterConfig) -> torch.dtype:
    """Return the dtype of the base's weights.

    Under autocast trainable weights are in fp32 and frozen weights in half precision.
    """
    if precision == "bf16-pure":
        return torch.bfloat16
    if precision == "fp32" or isinstance(adapter, FullConfig):
        return torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def load_tuned(
    config: ModelConfig,
    tuned: Path,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    new_ids: Sequence[int] = (),
    *,
    device: torch.device | None = None,
) -> torch.nn.Module:
    """Load the result of a run from the folder `tuned`: a whole model, or an adapter and its base.

    The base of `config` gets as many embedding rows as the adapter was trained with, even without
    `new_ids`.
    """
    if is_adapter(tuned):
        base = load_base(config, implementation, dtype, quantization, new_ids, device=device)
        rows = base.get_input_embeddings().num_embeddings
        resize_embeddings(base, range(rows, required_embedding_rows(base, tuned)))
        model = load_adapter(base, tuned)
        apply_streaming(model, config, device)
        return model
    whole = ModelConfig(
        path=str(tuned),
        rope_len=config.rope_len,
        labels=config.labels,
        multi_label=config.multi_label,
    )
    return load_base(whole, implementation, dtype, quantization, device=device)
