"""Checks of files that need no torch: base model, adapter's targets, tokenizer, data.

All problems are listed together.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from app.errors import UserError, nearest
from app.model.adapter import goes_on, is_adapter, saves_whole_model
from app.model.base import ModelConfig
from app.preflight.adapters import check_goes_on, check_saved_adapter
from app.preflight.base_model import (
    ANOTHER_COPY,
    BaseModel,
    check_quantization,
    look_at_base,
    look_at_tokenizer,
    seen_from,
)
from app.preflight.compatibility import ranks_per_node
from app.preflight.compiling import check_compile_of_base
from app.preflight.packing import check_packing_of_base
from app.preflight.parallel import check_tensor_parallel
from app.preflight.targets import check_adapter, check_neftune
from app.strategy.settings import tensor_parallel_size
from app.untrusted import reading
from data_modules import TEMPLATE_NAMES, check_datasets


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
    problems += check_packing_of_base(config.packing, config.attention, base)
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
