"""Build the model that is trained, in the one legal order; or load what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter import (
    AdapterConfig,
    FullConfig,
    apply_adapter,
    drop_needless_copies,
    is_adapter,
    load_adapter,
    report_trainable,
    rows_needed,
    saves_whole_model,
)
from app.model.attention import attention_implementation
from app.model.base import ModelConfig, load_base
from app.model.neftune import apply_neftune
from app.model.quantization import QuantizationConfig, find_stored_problem, stored_settings
from app.model.recompute import RecomputeConfig, apply_recompute
from app.model.tokenizer import resize_embeddings
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
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
) -> torch.nn.Module:
    """Build base + adapter, ready to train on the CPU; `precision` is a resolved name.

    Tokens `new_ids` get rows in embedding and head; the rows `token_ids` train with an adapter.
    `on_meta`: the same modules without numbers, for ranks to which others hand theirs; `on_host`:
    nothing of it on a GPU.
    """
    import torch

    # What is made without a word of where is made there.
    with torch.device("meta") if on_meta else nullcontext():
        # 1. Attention is named while loading: the model's layers look it up in their config.
        implementation = attention_implementation(backend)
        # 2. Weights, in the dtype they are kept in while training, quantized as they are read.
        dtype = weight_dtype(precision, adapter)
        where = {"on_meta": on_meta, "on_host": on_host}
        model = load_base(config, implementation, dtype, quantization, new_ids, **where)
        _name_layers(model, config.wrap_class)
        stored, trains_base = stored_settings(model.config), saves_whole_model(adapter)
        if stored and (
            problem := find_stored_problem(
                stored, quantization, config.path, trains_base=trains_base
            )
        ):
            raise UserError(problem)
        # 3. Recompute before the adapter: it switches on the base's layers, which peft then wraps.
        apply_recompute(model, recompute)
        # 4. The adapter last: it freezes what is there and adds what trains.
        adapted = apply_adapter(
            model, adapter, half_precision=precision == "bf16-pure", token_ids=token_ids
        )
        if precision != "fp32":
            drop_needless_copies(adapted)
        apply_neftune(adapted, adapter.neftune_alpha)
        adapted.train()
        report_trainable(adapted)  # refuses a model of which nothing trains
        return adapted


def _name_layers(model: PreTrainedModel, wrap_class: str | None) -> None:
    """Let `model.wrap_class` say which of the modules are the layers, in place of the model."""
    if wrap_class is None:
        return
    classes = {type(module).__name__ for module in model.modules()}
    if wrap_class not in classes:
        known = " or ".join(sorted(model._no_split_modules or ())) or "its decoder layer's class"
        raise UserError(
            f"model.wrap_class={wrap_class}: no module of this {model.config.model_type} model is "
            f"of that class; type model.wrap_class={known}"
        )
    model._no_split_modules = [wrap_class]


def weight_dtype(precision: str, adapter: AdapterConfig) -> torch.dtype:
    """Dtype that weights are kept in: under autocast trained ones are fp32, frozen ones are not."""
    import torch

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
) -> torch.nn.Module:
    """Load what a run saved in `tuned`: an adapter on the base of `config`, or a whole model.

    The embedding gets the rows that an adapter was made with, also where `new_ids` names none.
    """
    if is_adapter(tuned):
        base = load_base(config, implementation, dtype, quantization, new_ids)
        rows = base.get_input_embeddings().num_embeddings
        resize_embeddings(base, range(rows, rows_needed(base, tuned)))
        return load_adapter(base, tuned)
    return load_base(ModelConfig(path=str(tuned)), implementation, dtype, quantization)
