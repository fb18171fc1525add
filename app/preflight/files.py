"""What the settings name on disk: base, adapter, tokenizer, chat template, data. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter import continued_from, find_targets, is_adapter, saves_whole_model
from app.model.attention import why_not_batched
from app.model.layers import why_not_compiled
from app.model.neftune import why_no_noise
from app.model.quantization import find_stored_problem
from app.preflight.adapters import check_same_settings, check_saved_adapter
from app.preflight.base_model import (
    BaseModel,
    inspect_base,
    inspect_tokenizer,
    seen_from,
    text_numbers,
)
from app.preflight.couplings import has_data, is_on_tuned, is_training, requested_devices
from app.process.errors import UserError, nearest
from app.process.untrusted import reading
from app.strategy.settings import tensor_parallel_size
from data_modules import TEMPLATE_NAMES, check_datasets

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig


WITHOUT_PLAN = ("bart", "bloom", "falcon", "gpt2", "phi3", "t5")
"""model types without a tensor parallel plan of transformers that can be applied here"""


def check_tensor_parallel(together: int, base: BaseModel) -> list[str]:
    """List why `together` ranks cannot split the matrices of this base among them."""
    numbers = base.numbers
    kind = numbers.get("model_type")
    if together == 1:
        return []
    if kind in WITHOUT_PLAN:
        return [
            f"strategy.tensor_parallel_size={together}: there is no tensor parallel plan for "
            f"{kind} models; type strategy=fsdp"
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


def check_files(config: TrainConfig | TunedConfig, *, needs_weights: bool = True) -> list[str]:
    """List what is wrong with the files that a verb's settings name, and what does not fit them.

    Without `needs_weights`, a folder with a tokenizer is enough.
    """
    model = config.model
    problems: list[str] = []
    if model.path is not None or model.from_scratch or not needs_weights:
        try:
            with reading(
                f"model.path={model.path}: config.json",
                "copy or download its files again, or type another model.path",
            ):
                _check_model(config, problems, needs_weights=needs_weights)
        except UserError as error:
            problems = problems or error.problems  # the first problem is why the others came
    templates = [("model", model.chat_template)]
    if has_data(config):
        templates.insert(0, ("data", config.data.chat_template))
    for part, name in templates:
        if name is not None and name not in TEMPLATE_NAMES and not Path(name).is_file():
            problems.append(
                f"{part}.chat_template={name}: expected {' or '.join(TEMPLATE_NAMES)}, or a .jinja "
                f"file (no such file, seen from {seen_from()}){nearest(name, TEMPLATE_NAMES)}"
            )
    if has_data(config) and (config.data.datasets or config.data.test_datasets):
        problems += check_datasets(config.data)
    return problems


def _check_model(
    config: TrainConfig | TunedConfig, problems: list[str], *, needs_weights: bool
) -> None:
    """Add to `problems` what is wrong with a base, and with what is put on it."""
    base = inspect_base(config.model) if needs_weights else inspect_tokenizer(config.model)
    problems += base.problems
    sequence_len = config.data.sequence_len if has_data(config) else None
    if sequence_len is not None:
        problems += check_sequence_len(sequence_len, base)
    problems += [
        f"model.added_tokens: {token!r} is not a token; expected text without spaces around it, as "
        "<|im_start|>"
        for token in config.model.added_tokens
        if not token or token != token.strip()
    ]
    if reason := why_not_batched(base.numbers, sequence_len):
        problems.append(f"{base.name}: {reason}")
    stored = base.numbers.get("quantization_config")
    if stored and isinstance(stored, dict):
        trains_base = is_training(config) and saves_whole_model(config.adapter)
        problem = find_stored_problem(
            stored, config.quantization, base.name, trains_base=trains_base
        )
        problems += [problem] if problem else []
    if is_training(config):
        problems += _check_training(config, base)
        if needs_weights and (path := continued_from(config.adapter)):
            problems += check_same_settings(config.adapter, Path(path))
            problems += check_saved_adapter("adapter.path", Path(path), base, config.model)
    elif is_on_tuned(config) and (tuned := config.tuned_path) is not None:
        key = "run" if config.adapter_path is None else "adapter_path"
        if key == "adapter_path" or is_adapter(Path(tuned)):
            problems += check_saved_adapter(key, Path(tuned), base, config.model)


def _check_training(config: TrainConfig, base: BaseModel) -> list[str]:
    """List which settings of a training do not fit this base."""
    # An adapter whose training is continued keeps the settings of its folder.
    is_new = continued_from(config.adapter) is None
    problems = find_targets(config.adapter, base.modules).problems if is_new else []
    if (alpha := config.adapter.neftune_alpha) is not None:
        problem = why_no_noise(alpha, base.numbers)
        problems += [problem] if problem else []
    if config.trainer.compile:
        problem = why_not_compiled(base.numbers)
        problems += [problem] if problem else []
    together = tensor_parallel_size(config.strategy, requested_devices(config).ranks_per_node)
    return problems + check_tensor_parallel(together, base)


def check_sequence_len(sequence_len: int, base: BaseModel) -> list[str]:
    """Compare a typed length with the context that the base was trained for."""
    numbers = text_numbers(base.numbers)
    context = numbers.get("max_position_embeddings", numbers.get("n_positions"))
    if "relative_attention_num_buckets" in numbers:
        context = None  # T5's relative positions have no end, whatever its n_positions says
    if not isinstance(context, int) or sequence_len <= context:
        return []
    return [
        f"data.sequence_len={sequence_len} is more than the context of {base.name}, "
        f"{context} tokens; type data.sequence_len={context}"
    ]
