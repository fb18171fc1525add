"""Check the files that the settings name: base, saved adapter, chat template, data.

Needs no torch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import (
    ADAPTER_FILE,
    ORIGIN_FILE,
    AdapterConfig,
    Ia3Config,
    LoraConfig,
    continued_from,
    find_targets,
    is_adapter,
    resumed_adapter,
    saves_whole_model,
)
from app.model.adapter.apply import find_neftune_problem
from app.model.adapter.settings import ADAPTER_CONFIG, PEFT_TYPES, read_adapter_config
from app.model.architecture import num_experts, text_numbers
from app.model.attention import EXCHANGED, batching_error
from app.model.base import ModelConfig
from app.model.description import BaseDescription
from app.model.families import Shapes, family_of
from app.model.hub import COMMIT
from app.model.layers import compile_error
from app.model.quantization import find_quantization_conflict
from app.model.rope import rope_scaling
from app.preflight.base_model import current_folder, describe_base, inspect_base, inspect_tokenizer
from app.preflight.couplings import devices
from app.strategy.settings import (
    PIPELINED,
    StrategyConfig,
    context_parallel_size,
    divisors,
    expert_parallel_size,
    num_stages,
    tensor_parallel_size,
)
from common.errors import UserError, nearest
from common.installation import verb_command
from common.untrusted import check_kinds, read_header, read_json_object, read_text, reading
from data_modules import (
    OWN_TEMPLATE,
    TEMPLATE_NAMES,
    check_datasets,
    find_syntax_error,
    found_labels,
    with_format,
)

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig
    from app.model.recompute import RecomputeConfig


_MAX_LABELS = 20
"""most labels that a message names"""
_PLAIN_LABEL = re.compile(r"[a-z_][\w/-]*", re.ASCII | re.IGNORECASE)
_NOT_TEXT = ("true", "false", "null", "nan", "inf")
"""words that are not read as text without quotes"""
_IN_PEFT = {"alpha": "lora_alpha", "dropout": "lora_dropout"} | {
    name: name
    for name in (
        *("r", "target_modules", "feedforward_modules", "rank_pattern", "alpha_pattern"),
        *("use_dora", "use_rslora", "modules_to_save"),
    )
}
"""setting of an adapter -> its name in peft's adapter_config.json"""
_ANY_NAME = re.compile("")
_UNNAMED = ("layers", "init", "trainable_tokens", "experts")
"""settings that peft's file does not hold in the form in which they are typed"""


def check_tensor_parallel(size: int, base: BaseDescription) -> list[str]:
    """List why `size` ranks cannot split the matrices of this base among them."""
    numbers, model_type = base.config, base.model_type
    if size == 1:
        return []
    if not family_of(model_type).has_tensor_plan:
        return [
            f"strategy.tensor_parallel_size={size}: there is no tensor parallel plan for "
            f"{model_type} models; type strategy=fsdp"
        ]
    heads = numbers.get("num_attention_heads")
    counts = {
        "attention heads": heads,
        "key heads": numbers.get("num_key_value_heads") or heads,
        "inner features": numbers.get("intermediate_size"),
    }
    known = {what: count for what, count in counts.items() if isinstance(count, int)}
    fits = divisors(math.gcd(size, *known.values()), 2) if known else []
    return [
        devices.indivisible(
            *("tensor_parallel_size", size, count, f"the {count} {what} of {base.name}", fits),
            "strategy=fsdp",
        )
        for what, count in known.items()
        if count % size
    ][:1]


def check_split(
    strategy: StrategyConfig, base: BaseDescription, backend: str = EXCHANGED[0]
) -> list[str]:
    """List why ranks cannot share rows, layers or experts of this base with a backend."""
    size = context_parallel_size(strategy)
    problems = check_pipeline(strategy, base) if num_stages(strategy) > 1 else []
    if (experts := expert_parallel_size(strategy)) > 1:
        problems += check_expert_parallel(experts, base)
    if size > 1 and base.is_pair:
        problems.append(
            f"strategy.context_parallel_size={size} splits the rows of causal models, and "
            f"{base.model_type} is an encoder-decoder; type strategy.context_parallel_size=1"
        )
    elif size > 1 and backend not in EXCHANGED:
        problems.append(
            f"strategy.context_parallel_size={size} gives each rank a share of the heads, which "
            f"attention={backend} cannot compute; type attention={' or '.join(EXCHANGED)}, or "
            "strategy.context_parallel_size=1"
        )
    return problems


def check_expert_parallel(size: int, base: BaseDescription) -> list[str]:
    """List why `size` ranks cannot split the experts of this base among them."""
    if size == 1 or not base.config:
        return []
    count = num_experts(text_numbers(base.config))
    if count < 2:
        return [
            f"strategy.expert_parallel_size={size} splits the experts of a mixture, and "
            f"{base.name} ({base.model_type}) has none; type strategy.expert_parallel_size=1"
        ]
    what = f"the {count} experts of {base.name}"
    problem = devices.indivisible("expert_parallel_size", size, count, what, divisors(count))
    return [problem] * (count % size > 0)


def check_pipeline(strategy: StrategyConfig, base: BaseDescription) -> list[str]:
    """List why the layers of this base cannot be divided into the stages of a pipeline."""
    if (stages := num_stages(strategy)) == 1:
        return []
    if base.model_type not in PIPELINED:
        return [
            f"strategy=fsdp_pp: stages of {base.model_type} models are not tested yet, but those "
            f"of {', '.join(PIPELINED)}; type strategy=fsdp"
        ]
    if base.num_layers is None or base.num_layers >= stages:
        return []
    return [
        f"strategy=fsdp_pp has {stages} stages, and {base.name} only {base.num_layers} layers; "
        f"type strategy.pipeline_parallel_size={base.num_layers} or less with "
        "strategy.schedule=1f1b, or strategy=fsdp"
    ]


def check_files(
    config: TrainConfig | TunedConfig, *, needs_weights: bool = True, resumes: bool = False
) -> list[str]:
    """List problems of the files that a verb's settings name, and settings that do not fit them.

    With `needs_weights=False` a folder with a tokenizer is enough as the base. `resumes`: whether
    the run in output.dir resumes from a checkpoint.
    """
    model = config.model
    problems: list[str] = []
    if model.path is not None or model.from_scratch or not needs_weights:
        try:
            with reading(
                f"model.path={model.path}: config.json",
                "copy or download its files again, or type another model.path",
            ):
                _check_model(config, problems, needs_weights=needs_weights, resumes=resumes)
        except UserError as error:
            problems = problems or error.problems  # those found before may have caused it
    problems += _check_templates(config)
    if not devices.has_data(config):
        return problems
    if config.objective.name == "distill" and (teacher := config.objective.teacher_path):
        problems += _check_teacher(teacher)
    if config.data.loss_datasets or config.data.test_datasets:
        data = with_format(config.data, config.objective.row_format)
        of_rows = check_datasets(data)
        problems += of_rows
        if config.objective.name == "classify" and not config.model.labels and not of_rows:
            problems.append(_missing_labels(found_labels(data)))
    return problems


def _check_teacher(path: str) -> list[str]:
    for folder in (Path(path), Path(path) / "adapter"):
        if is_adapter(folder):
            return [
                f"objective.teacher={path} is an adapter; type {verb_command('merge')} "
                f"adapter_path={folder} output.dir=MERGED first, and objective.teacher=MERGED"
            ]
    problems = inspect_base(ModelConfig(path=path))[1]
    return [problem.replace("model.path", "objective.teacher") for problem in problems]


def _missing_labels(found: Sequence[str]) -> str:
    shown = found[:_MAX_LABELS]
    names = [*map(_typed_label, shown), *["..."] * (len(found) > len(shown))]
    words = shlex.quote(f"model.labels=[{', '.join(names or ['NAME', 'NAME', '...'])}]")
    rows = f", and the first rows have {len(found):,}" if found else ""
    return (
        "objective=classify needs the names of the classes, in the order of the head's outputs"
        f"{rows}; type {words}, or model.labels=[NAME] if labels are numbers to predict"
    )


def _typed_label(name: str) -> str:
    """Return a name as an element of a list on the command line, in quotes unless it is a word.

    "..." for a name that cannot be typed: Hydra undoes no escape but that of the quotes.
    """
    if "\\" in name or not name.isprintable():
        return "..."
    is_word = _PLAIN_LABEL.fullmatch(name) and name.lower() not in _NOT_TEXT
    return name if is_word else '"' + name.replace('"', '\\"') + '"'


def _check_templates(config: TrainConfig | TunedConfig) -> list[str]:
    """List the chat templates that do not exist, and the syntax errors of those that are used.

    A file that cannot be read is refused later.
    """
    model, found = config.model, list[str | None]()
    named = [("model.chat_template", model.chat_template)]
    named += [("data.chat_template", config.data.chat_template)] if devices.has_data(config) else []
    for key, name in named:
        if name is None or name in TEMPLATE_NAMES:
            continue
        if (file := Path(name)).is_file():
            found.append(find_syntax_error(f"{key}={name}", read_text(file, "json_mib")[0]))
        else:
            found.append(
                f"{key}={name}: expected {' or '.join(TEMPLATE_NAMES)}, or a .jinja file "
                f"(no such file in {current_folder()}){nearest(name, TEMPLATE_NAMES)}"
            )
    if devices.has_data(config) and config.data.datasets and config.data.chat_template is None:
        folder, text = Path(model.tokenizer_path or model.path or ""), None
        if (file := folder / "chat_template.jinja").is_file():
            text = read_text(file, "json_mib")[0]
        elif (file := folder / "tokenizer_config.json").is_file():
            text = read_json_object(file)[0].get("chat_template")
        found.append(find_syntax_error(OWN_TEMPLATE, text) if isinstance(text, str) else None)
    return [problem for problem in found if problem]


def _check_model(
    config: TrainConfig | TunedConfig, problems: list[str], *, needs_weights: bool, resumes: bool
) -> None:
    """Add to `problems` those of the base, and of the adapters for it."""
    base, found = inspect_base(config.model) if needs_weights else inspect_tokenizer(config.model)
    problems += found
    sequence_len = config.data.sequence_len if devices.has_data(config) else None
    if sequence_len is not None:
        problems += check_sequence_len(sequence_len, base, config.model.context_len)
    problems += [
        f"model.added_tokens: {token!r} is not a token; expected text without leading or trailing "
        "spaces, such as <|im_start|>"
        for token in config.model.added_tokens
        if not token or token != token.strip()
    ]
    if reason := batching_error(base.config, sequence_len):
        problems.append(f"{base.name}: {reason}")
    stored = base.config.get("quantization_config")
    if stored and isinstance(stored, dict):
        trains_base = devices.is_training(config) and saves_whole_model(config.adapter)
        problem = find_quantization_conflict(
            stored, config.quantization, base.name, trains_base=trains_base
        )
        problems += [problem] if problem else []
    if devices.is_training(config):
        problems += _check_training(config, base)
        is_kept = resumes and config.adapter != resumed_adapter(
            config.adapter, Path(config.output.dir or "")
        )
        if needs_weights and not is_kept and (path := continued_from(config.adapter)):
            problems += check_same_settings(config.adapter, Path(path))
            problems += check_saved_adapter("adapter.path", Path(path), base, config.model)
    elif (tuned := config.tuned_path) is not None:
        key = "run" if config.adapter_path is None else "adapter_path"
        if key == "adapter_path" or is_adapter(Path(tuned)):
            problems += check_saved_adapter(key, Path(tuned), base, config.model)
        for index, adapter in enumerate(config.merge.adapters if devices.is_merge(config) else ()):
            key = f"merge.adapters[{index}].path"
            problems += check_saved_adapter(key, Path(adapter.path), base, config.model)


def _check_training(config: TrainConfig, base: BaseDescription) -> list[str]:
    # An adapter that is trained further keeps the settings of its folder.
    is_new = continued_from(config.adapter) is None
    problems = list(find_targets(config.adapter, base).problems) if is_new else []
    if (alpha := config.adapter.neftune_alpha) is not None:
        problems.append(find_neftune_problem(alpha, base.config) or "")
    if config.trainer.compile:
        problems.append(compile_error(base.config) or "")
    problems += check_recompute(config.recompute, base)
    problems += check_split(config.strategy, base)
    size = tensor_parallel_size(config.strategy, devices.requested_devices(config).ranks_per_node)
    problems += check_tensor_parallel(size, base) if size > 1 else []
    return [problem for problem in problems if problem]


def check_recompute(config: RecomputeConfig, base: BaseDescription) -> list[str]:
    """Check that there are as many layers, encoder and decoder together, as recompute counts."""
    layers, every, number = base.num_layers, config.every, config.num_layers
    if layers is None or max(every, number or 1) <= layers:
        return []
    if every <= layers:
        return [
            f"recompute.num_layers={number}: {base.name} has {layers} layers; type a smaller "
            "number, or leave it out for all of them"
        ]
    return [
        f"recompute.every={every} has no effect: {base.name} has {layers} layers, of which every "
        f"n-th is recomputed; type a number up to {max(layers // 2, 1)}, or leave it out"
    ]


def check_sequence_len(
    sequence_len: int, base: BaseDescription, extended: int | None = None
) -> list[str]:
    """Check that data.sequence_len is at most the context length of the base, or `extended`."""
    context = base.context_len if extended is None else extended
    if context is None or sequence_len <= context:
        return []
    numbers = text_numbers(base.config)
    is_fixed = "n_positions" in numbers or rope_scaling(numbers)[0] != "default"  # as GPT-2's table
    longer = f", or model.context_len={sequence_len} to scale its rope"
    return [
        f"data.sequence_len={sequence_len} exceeds the context length of {base.name}, "
        f"{context} tokens; type data.sequence_len={context}"
        f"{'' if base.is_pair or is_fixed else longer}"
    ]


def check_saved_adapter(
    key: str, folder: Path, base: BaseDescription, model: ModelConfig
) -> list[str]:
    """List why the adapter in `folder`, named by setting `key`, cannot be applied to the base."""
    what = f"{key}={folder}"
    if folder.is_file():
        return [f"{what} is a file; type {key}={folder.parent} if that folder is the adapter"]
    if not folder.is_dir():
        return [f"{what}: no such folder in {current_folder()}"]
    if (folder / "adapter" / ADAPTER_CONFIG).exists():
        return [f"{what} is a run, not an adapter; type {key}={folder}/adapter"]
    whole = folder / "model" if (folder / "model" / "config.json").exists() else folder
    if (whole / "config.json").exists() and not (folder / ADAPTER_CONFIG).exists():
        return [
            f"{what} has no {ADAPTER_CONFIG}: it is a whole model, not an adapter; "
            f"type model.path={whole} and leave {key} out"
        ]
    file = folder / ADAPTER_FILE
    if not file.exists() and (folder / "adapter_model.bin").exists():
        return [
            f"{what}: adapter_model.bin is a pickle, which can run code when it is read; convert "
            'it once with python -c "import torch; from safetensors.torch import save_file; '
            f"save_file(torch.load('{folder}/adapter_model.bin', weights_only=True), '{file}')\""
        ]
    problems = [
        f"{what}: the folder has no {name}"
        for name in (ADAPTER_CONFIG, ADAPTER_FILE)
        if not (folder / name).exists()
    ]
    if problems:
        return problems
    if problems := check_kinds(folder) or read_adapter_config(folder)[1]:
        return problems
    header, problems = read_header(file)
    shapes = header.shapes
    if empty := sorted(name for name, shape in shapes.items() if 0 in shape):
        problems.append(
            f"{file}: {len(empty)} of {len(shapes)} tensors are empty, {empty[0]} is the first; "
            "sharded weights were saved without gathering them; save the adapter again"
        )
    elif not shapes and not problems:
        problems.append(f"{file}: no tensors in this file; save the adapter again")
    elif not problems and (others := header.non_floats(_ANY_NAME)):
        problems.append(
            f"{file}: {others[0]}, but an adapter's weights must be F32, BF16, F16 or F64 "
            f"({len(others)} of {len(shapes)} tensors are not); save the adapter again"
        )
    if problems:
        return problems
    return _check_base(what, folder, shapes, base, model) + _check_tokens(what, folder, model)


def check_same_settings(adapter: AdapterConfig, folder: Path) -> list[str]:
    """List the typed settings that differ from those of the adapter in `folder`."""
    if not (folder / ADAPTER_CONFIG).exists():
        return []  # `check_saved_adapter` reports it
    settings, problems = read_adapter_config(folder)
    if problems:
        return []
    kind = PEFT_TYPES[read_json_object(folder / ADAPTER_CONFIG)[0]["peft_type"]]
    if kind != adapter.name:
        return [
            f"adapter.path={folder} was trained with adapter={kind}, but adapter={adapter.name} is "
            f"chosen; type adapter={kind}"
        ]
    default = LoraConfig() if kind == "lora" else Ia3Config()
    problems = []
    for name in (*_IN_PEFT, *_UNNAMED):
        typed = getattr(adapter, name, None)
        if typed == getattr(default, name, None):
            continue
        if name in _UNNAMED:
            problems.append(
                f"adapter.{name}={typed}, but the adapter in {folder} keeps its own value; leave "
                f"adapter.{name} out"
            )
            continue
        saved = settings.get(_IN_PEFT[name])
        is_same = typed == saved or not (typed or saved)
        if isinstance(typed, list) and isinstance(saved, list):
            is_same = sorted(typed) == sorted(saved)
        if not is_same:
            problems.append(
                f"adapter.{name}={typed}, but the adapter in {folder} has {name}={saved}; "
                f"leave adapter.{name} out"
            )
    return problems


def _check_base(
    what: str, folder: Path, shapes: Shapes, base: BaseDescription, model: ModelConfig
) -> list[str]:
    """Compare this base with the one an adapter was trained on: by fingerprint, else by shapes."""
    if not (folder / ORIGIN_FILE).exists():
        return _check_shapes(what, shapes, base)
    origin, problem = read_json_object(folder / ORIGIN_FILE)
    if problem is None and not all(v is None or isinstance(v, str) for v in origin.values()):
        problem = f"{folder / ORIGIN_FILE}: expected text for each key"
    if problem is not None:
        return [f"{problem}; remove that file to compare only shapes"]
    current = describe_base(model)
    is_compared, differences = False, []
    for name, part in (("fingerprint", "config.json or shapes"), ("weights", "weights")):
        then, now = origin.get(name), current[name]
        is_compared = is_compared or None not in (then, now)
        if then is not None and now is not None and then != now:
            differences.append(f"{part} differ ({then[:12]} then, {now[:12]} now)")
    if not is_compared and current["fingerprint"] is None and origin.get("fingerprint") is None:
        # Both are on the hub and not fetched yet: only their names can be compared.
        for name in ("path", "revision"):
            then, now = origin.get(name), current[name]
            # A branch or a tag may have been that commit.
            is_comparable = name == "path" or all(
                COMMIT.fullmatch(revision or "") for revision in (then, now)
            )
            if then and now and then != now and is_comparable:
                differences.append(f"{name} differs")
    if not differences:
        return [] if is_compared else _check_shapes(what, shapes, base)
    return [
        f"{what} was trained on another base: {origin.get('path')}{_at(origin)}, not "
        f"model.path={model.path}{_at(current)}: {'; '.join(differences)}; type "
        f"model.path={origin.get('path')}, or remove {folder / ORIGIN_FILE} if they are the same"
    ]


def _check_tokens(what: str, folder: Path, model: ModelConfig) -> list[str]:
    """List the tokens of the tokenizer saved with an adapter that the base's tokenizer lacks."""
    ours = Path(model.tokenizer_path or model.path or "") / "tokenizer.json"
    theirs = folder / "tokenizer.json"
    if not ours.exists() or not theirs.exists():
        return []
    content = read_json_object(ours)[0]
    try:
        # A mapping of tokens, or for a unigram model a list of (token, score).
        vocab = content.get("model", {}).get("vocab", {})
        known = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
        known |= {entry["content"] for entry in content.get("added_tokens", [])}
        known |= set(model.added_tokens)
    except (AttributeError, TypeError, ValueError, KeyError):
        return []  # an invalid tokenizer is reported when it is loaded
    with reading(theirs, "remove it, or save the adapter again"):
        added = read_json_object(theirs)[0].get("added_tokens", [])
        missing = [entry["content"] for entry in added if entry["content"] not in known]
    if not missing:
        return []
    typed = ",".join([*model.added_tokens, *missing])
    return [
        f"{what} was trained with tokens that the tokenizer in {ours.parent} lacks: "
        f"{', '.join(missing)}; type 'model.added_tokens=[{typed}]'"
    ]


def _at(base: Mapping[str, Any]) -> str:
    return f" at {base['revision']}" if base.get("revision") else ""


def _check_shapes(what: str, shapes: Shapes, base: BaseDescription) -> list[str]:
    """Compare the shapes of each A and B with those of the matrix that they adapt."""
    matrices = base.linear
    if matrices is None:
        return []
    experts: dict[str, set[int]] = {}
    for name, shape in base.experts.items():
        experts.setdefault(name.rpartition(".")[0], set()).update(shape[1:])
    num_found, problems = 0, []
    for name, shape in shapes.items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        sides = experts.get(module.replace(".base_layer", "")) or matrices.get(module)
        if part not in ("A.weight", "B.weight") or len(shape) != 2 or sides is None:
            continue
        num_found += 1
        if (shape[1] if part == "A.weight" else shape[0]) in sides:
            continue
        why = f"which fits none of the experts' weights of {base.name}"
        if matrix := matrices.get(module):
            why = f"but {module} of {base.name} is {matrix[0]} x {matrix[1]}"
        problems.append(
            f"{what}: {module}.lora_{part} is {shape[0]} x {shape[1]}, {why}; it was trained on "
            "another base"
        )
    adapted = [name for name in shapes if ".lora_A.weight" in name]
    if adapted and not num_found:
        problems.append(
            f"{what}: {base.name} has none of its {len(adapted)} matrices, {adapted[0]} is the "
            "first; it was trained on another base"
        )
    return problems[:1]
