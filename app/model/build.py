"""Build the model that is trained, in the one legal order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import TrainingFault, UserError
from app.model.adapter import (
    AdapterConfig,
    FullConfig,
    apply_adapter,
    changed_its_base,
    check_same_logits,
    is_adapter,
    load_adapter,
    probe_logits,
    reopen_converted,
    report_trainable,
    rows_needed,
    save_adapter,
    save_converted,
    saves_whole_model,
    verify_adapter,
    write_origin,
)
from app.model.attention import attention_implementation
from app.model.neftune import apply_neftune
from app.model.quantization import (
    QuantizationConfig,
    cast_unquantized,
    find_stored_problem,
    prepare_quantized,
    quantizable_layers,
    quantization_settings,
    stored_settings,
)
from app.model.recompute import RecomputeConfig, apply_recompute
from app.model.tokens import resize_embeddings

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str | None = None
    """folder or hub id of the base model (config.json, safetensors, tokenizer)"""
    revision: str | None = None
    """hub commit, tag or branch; pins what is downloaded"""
    trust_remote_code: bool = False
    """run Python files that come with the model; only together with a pinned revision"""
    tokenizer_path: str | None = None
    """folder or hub id of the tokenizer, where it is not the model's own"""
    added_tokens: list[str] = field(default_factory=list)
    """special tokens that are new to this base, as [<|im_start|>, <|im_end|>]; their rows train"""
    from_scratch: bool = False
    """start from random weights of `architecture` instead of a trained base"""
    architecture: dict[str, Any] = field(default_factory=dict)
    """the config.json numbers of this model: lets checks and plans run without a download"""
    chat_template: str | None = None
    """template by name for a tokenizer that has none; null where the base learned no chat tokens"""
    stop_tokens: list[str] = field(default_factory=list)
    """tokens that end an answer besides the EOS and the template's own, as [<|eot_id|>]"""
    wrap_class: str | None = None
    """layer class that sharding strategies wrap; null = what the model itself names"""


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
) -> torch.nn.Module:
    """Build base + adapter, ready to train on the CPU; `precision` is a resolved name.

    Tokens `new_ids` get rows in embedding and head; the rows `token_ids` train with an adapter.
    """
    # 1. Attention is named while loading: the model's layers look it up in their config.
    implementation = attention_implementation(backend)
    # 2. Weights, in the dtype they are kept in while training, quantized as they are read.
    dtype = weight_dtype(precision, adapter)
    model = load_base(config, implementation, dtype, quantization, new_ids)
    stored, trains_base = stored_settings(model.config), saves_whole_model(adapter)
    if stored and (
        problem := find_stored_problem(stored, quantization, config.path, trains_base=trains_base)
    ):
        raise UserError(problem)
    # 3. Recompute before the adapter: it switches on the base's layers, which peft then wraps.
    apply_recompute(model, recompute)
    # 4. The adapter last: it freezes what is there and adds what trains.
    adapted = apply_adapter(
        model, adapter, half_precision=precision == "bf16-pure", token_ids=token_ids
    )
    apply_neftune(adapted, adapter.neftune_alpha)
    adapted.train()
    report_trainable(adapted)  # refuses a model of which nothing trains
    return adapted


def weight_dtype(precision: str, adapter: AdapterConfig) -> torch.dtype:
    """Dtype that weights are kept in: under autocast trained ones are fp32, frozen ones are not."""
    import torch

    if precision == "bf16-pure":
        return torch.bfloat16
    if precision == "fp32" or isinstance(adapter, FullConfig):
        return torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def load_base(
    config: ModelConfig,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    new_ids: Sequence[int] = (),
) -> PreTrainedModel:
    """Load a base model's weights, or make random ones of `config.architecture`.

    Tokens `new_ids`, which the base never learned, get rows in embedding and head.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar a file says less than our one line
    architecture = load_architecture(config)
    auto_class = model_class(architecture)
    if config.from_scratch:
        model = auto_class.from_config(
            architecture, attn_implementation=implementation, dtype=dtype
        )
        resize_embeddings(model, new_ids)
        return model
    quantization = quantization or QuantizationConfig()
    stored = stored_settings(architecture)
    if stored and (problem := find_stored_problem(stored, quantization, config.path)):
        raise UserError(problem)
    # Also a setting that is None would replace the files' own, and their bits be read as numbers.
    how = {} if stored else {"quantization_config": quantization_settings(quantization, dtype)}
    with quantizable_layers(architecture.model_type):
        model, loading = auto_class.from_pretrained(
            config.path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=implementation,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **how,
        )
    # transformers fills what a file lacks with random numbers and goes on.
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[problem])):
            raise UserError(
                f"model.path={config.path}: {problem.replace('_keys', '')} tensors in its files: "
                f"{len(names)}, first {names[0]}; copy or download the model again"
            )
    # transformers calls every T5 tied, and would tie FLAN-T5's own head to a resized embedding.
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
    resize_embeddings(model, new_ids)
    if stored:
        cast_unquantized(model, dtype)
    if stored or quantization.method != "none":
        prepare_quantized(model, dtype)
    return model


def model_class(architecture: PretrainedConfig) -> Any:
    """Return the auto class that loads an architecture: encoder-decoder, or causal."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM


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


def load_architecture(config: ModelConfig) -> PretrainedConfig:
    """Read the model's config.json, or make it from `config.architecture` when from scratch."""
    import transformers
    from transformers import AutoConfig

    if config.from_scratch:
        numbers = dict(config.architecture)
        return AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    numbers, _ = transformers.PreTrainedConfig.get_config_dict(
        config.path, revision=config.revision
    )
    model_type = numbers.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING and not config.trust_remote_code:
        raise UserError(
            f"model.path={config.path}: transformers {transformers.__version__} does not know "
            f"its model_type {model_type!r}; take a newer transformers, or another base"
        )
    architecture = AutoConfig.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    if architecture.is_encoder_decoder and (
        getattr(architecture, "decoder_start_token_id", None) is None
    ):
        architecture.decoder_start_token_id = _start_of_generation(config)
    return architecture


def _start_of_generation(config: ModelConfig) -> int | None:
    """Read what a decoder begins with from generation_config.json, where config.json lacks it."""
    from transformers import GenerationConfig

    try:
        numbers = GenerationConfig.from_pretrained(str(config.path), revision=config.revision)
    except OSError:  # there is no such file
        return None
    start: int | None = numbers.decoder_start_token_id
    return start


def context_len(architecture: PretrainedConfig) -> int | None:
    """Tokens that a model was made for; None where its positions have no end (BLOOM, MPT)."""
    # Not by `to_dict`: GPT-2 keeps it under another name, which only the attribute knows.
    return getattr(architecture.get_text_config(), "max_position_embeddings", None)


def decoder_start_token_id(architecture: PretrainedConfig) -> int | None:
    """Return what a decoder begins each answer with; None for causal models.

    UserError where neither config.json nor generation_config.json names it.
    """
    if not architecture.is_encoder_decoder:
        return None
    start: int | None = getattr(architecture, "decoder_start_token_id", None)
    if start is None:
        raise UserError(
            f"{architecture.name_or_path or 'model.architecture'}: no decoder_start_token_id, with "
            f"which {architecture.model_type} models begin each answer; write it into config.json "
            "(T5 and its kin take the pad token, BART the EOS)"
        )
    return start


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
    log.info("saved and reopened: same logits (largest difference %.1e)", difference)
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
