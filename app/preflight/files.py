"""Checks of files that need no torch: base model, adapter's targets, tokenizer, data.

All problems are listed together.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from app.model.adapter import goes_on, is_adapter, saves_whole_model
from app.model.attention import AttentionConfig, why_not_batched, why_not_packed
from app.model.base import ModelConfig
from app.model.layers import why_not_compiled
from app.preflight.adapters import check_goes_on, check_saved_adapter
from app.preflight.base_model import (
    ANOTHER_COPY,
    BaseModel,
    check_quantization,
    look_at_base,
    look_at_tokenizer,
    seen_from,
)
from app.preflight.couplings import ranks_per_node
from app.preflight.targets import check_adapter, check_neftune
from app.process.errors import UserError, nearest
from app.process.untrusted import reading
from app.strategy.settings import tensor_parallel_size
from data_modules import TEMPLATE_NAMES, PackingConfig, check_datasets


def check_compile_of_base(trainer: Any, base: BaseModel) -> list[str]:
    """List why the layers of this base cannot be compiled once for all batches."""
    problem = why_not_compiled(base.numbers or {}) if trainer.compile else None
    return [problem] if problem else []


def check_packing_of_base(
    packing: PackingConfig, attention: AttentionConfig, base: BaseModel, longest: int | None = None
) -> list[str]:
    """List why documents up to `longest` tokens cannot be kept apart in this base."""
    numbers = base.numbers or {}
    if reason := why_not_batched(numbers, longest):
        return [f"{base.name}: {reason}"]
    if packing.method == "none":
        return []
    if reason := why_not_packed(numbers):
        return [f"packing={packing.method}: {reason}"]
    if numbers.get("is_encoder_decoder") and attention.backend == "eager":
        return [
            f"packing={packing.method}: attention=eager cannot keep the documents of a pack apart "
            "in an encoder-decoder model: type packing=none"
        ]
    return []


WITHOUT_PLAN = ("bart", "bloom", "falcon", "gpt2", "phi3", "t5")
"""kinds of models that are known here, and that transformers gives no plan which we can follow"""


def check_tensor_parallel(together: int, base: BaseModel) -> list[str]:
    """List why `together` ranks cannot split the layers of this base."""
    numbers: dict[str, Any] = base.numbers or {}
    kind = numbers.get("model_type")
    if together == 1:
        return []
    if kind in WITHOUT_PLAN:
        return [
            f"strategy.tensor_parallel_size={together}: there is no plan by which the matrices of "
            f"a {kind} model are cut; type strategy=fsdp"
        ]
    heads = numbers.get("num_attention_heads")
    sides = {
        "attention heads": heads,
        "key heads": numbers.get("num_key_value_heads") or heads,
        "inner features": numbers.get("intermediate_size"),
    }
    known = {what: side for what, side in sides.items() if isinstance(side, int)}
    common = math.gcd(together, *known.values()) if known else 0
    fits = [str(n) for n in range(2, common + 1) if common % n == 0]
    instead = f"strategy.tensor_parallel_size={' or '.join(fits)}, or " if fits else ""
    return [
        f"strategy.tensor_parallel_size={together} does not divide the {side} {what} of "
        f"{base.name} ({side} / {together} leaves {side % together}); type {instead}strategy=fsdp"
        for what, side in known.items()
        if side % together
    ][:1]


def check_files(config: Any, *, needs_weights: bool = True) -> list[str]:
    """List what is wrong with the files that the settings `config` of a verb name.

    Without `needs_weights`, a folder with a tokenizer is enough.
    """
    model: ModelConfig = config.model
    problems: list[str] = []
    if model.path is not None or model.from_scratch or not needs_weights:
        try:
            with reading(f"model.path={model.path}: config.json", ANOTHER_COPY):
                _check_model(config, problems, needs_weights=needs_weights)
        except UserError as error:
            problems = problems or error.problems  # the first one told is why the others came
    problems += check_chat_template("data.chat_template", config.data.chat_template)
    problems += check_chat_template("model.chat_template", model.chat_template)
    if config.data.datasets or config.data.test_datasets:
        problems += check_datasets(config.data)
    return problems


def _check_model(config: Any, problems: list[str], *, needs_weights: bool) -> None:
    """Add to `problems` what is wrong with a base, and with what is put on it."""
    model: ModelConfig = config.model
    base = look_at_base(model) if needs_weights else look_at_tokenizer(model)
    problems += base.problems
    problems += check_sequence_len(config.data.sequence_len, base)
    problems += check_added_tokens(model.added_tokens)
    problems += check_packing_of_base(
        config.packing, config.attention, base, config.data.sequence_len
    )
    names = {field.name for field in dataclasses.fields(config)}
    trains_base = "adapter" in names and saves_whole_model(config.adapter)
    problems += check_quantization(config.quantization, base, trains_base=trains_base)
    if "adapter" in names:
        problems += check_adapter(config.adapter, base)
        problems += check_neftune(config.adapter, base)
        problems += check_compile_of_base(config.trainer, base)
        together = tensor_parallel_size(config.strategy, ranks_per_node(config))
        problems += check_tensor_parallel(together, base)
        if needs_weights and (going_on := goes_on(config.adapter)) is not None:
            problems += check_goes_on(config.adapter, Path(going_on))
            problems += check_saved_adapter("adapter.path", Path(going_on), base, model)
    if "adapter_path" in names and (tuned := config.tuned_path) is not None:
        key = "run" if config.adapter_path is None else "adapter_path"
        if key == "adapter_path" or is_adapter(Path(tuned)):
            problems += check_saved_adapter(key, Path(tuned), base, model)


def check_chat_template(key: str, name: str | None) -> list[str]:
    """Look for the file of a chat template that is no name."""
    if name is None or name in TEMPLATE_NAMES or Path(name).is_file():
        return []
    return [
        f"{key}={name}: expected {' or '.join(TEMPLATE_NAMES)}, or a .jinja file "
        f"(no such file, seen from {seen_from()}){nearest(name, TEMPLATE_NAMES)}"
    ]


def check_added_tokens(added: list[str]) -> list[str]:
    """Refuse what no tokenizer can take for a token of its own."""
    return [
        f"model.added_tokens: {token!r} is no token; expected text without spaces around it, as "
        "<|im_start|>"
        for token in added
        if not token or token != token.strip()
    ]


def check_sequence_len(sequence_len: int | None, base: BaseModel) -> list[str]:
    """Compare a typed length with the context that the model was made for."""
    numbers = base.numbers or {}
    context = numbers.get("max_position_embeddings", numbers.get("n_positions"))
    if "relative_attention_num_buckets" in numbers:
        context = None  # T5's relative positions have no end, whatever its n_positions says
    if sequence_len is None or not isinstance(context, int) or sequence_len <= context:
        return []
    return [
        f"data.sequence_len={sequence_len} is more than the context of {base.name}, "
        f"{context} tokens; type data.sequence_len={context}"
    ]
