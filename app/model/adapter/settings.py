"""Settings of the adapters, and of saved ones, whose keys are checked before peft sees them.

Needs no torch.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, nearest
from common.facts import setting
from common.text import shortened
from common.untrusted import read_json_object

if TYPE_CHECKING:
    import peft

ADAPTER_CONFIG = "adapter_config.json"
ORIGIN_FILE = "base.json"
"""file in an adapter's folder with path, revision and fingerprints of its base"""
_START_FOLDER = "start_adapter"
"""folder of a run with the settings of the adapter in adapter.path, so that it resumes without it:
its checkpoints have the weights"""
SETTINGS_KEY = "adapter_config"
"""key of ORIGIN_FILE: the content of ADAPTER_CONFIG as it was saved"""


def write_origin(folder: Path, base: Mapping[str, str | None]) -> None:
    """Record in `folder` the base that its adapter was trained on, and the adapter's settings."""
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    content = dict(base) | {SETTINGS_KEY: json.dumps(settings)}
    (folder / ORIGIN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


ADAPTER_FILE = "adapter_model.safetensors"
INITS = ("default", "gaussian", "pissa", "olora")


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    name: str = "lora"
    """lora (trains low-rank matrices), ia3 (vectors), freeze (some layers), full (all weights)"""
    neftune_alpha: float | None = setting(None, gt=0, note="5 to 15 is usual")
    """noise on the input embeddings in training; 5 to 15 is usual (NEFTune, arXiv 2310.05914)"""


@dataclass(kw_only=True, slots=True)
class LoraConfig(AdapterConfig):
    name: str = setting("lora", grants="nothing")
    path: str | None = setting(None, is_path=True)
    """folder of an adapter to continue training, with the settings it was saved with"""
    r: int = setting(
        16, ge=1, note="8 to 64 is usual", shown=("train",), aliases=("lora_r", "lora_rank", "rank")
    )
    """rank of the matrices; a higher rank has more capacity and needs more memory"""
    alpha: float = setting(
        32.0, gt=0, note="the rank or twice it is usual", shown=("train",), aliases=("lora_alpha",)
    )
    """the update is scaled by alpha / r (alpha / sqrt(r) with use_rslora)"""
    dropout: float = setting(
        0.0,
        ge=0,
        lt=1,
        note="0, or 0.05 to 0.1 for few rows over many epochs",
        shown=("train",),
        aliases=("lora_dropout",),
    )
    """dropout of the adapter's input; above 0 it costs memory and time"""
    target_modules: Any = setting("all-linear", shown=("train",), grants="nothing")
    """all-linear, a list of module name endings, or a regular expression over full names"""
    rank_pattern: dict[str, int] = setting(default_factory=dict, grants="nothing")
    """ranks other than r, by module name ending or regular expression, as {down_proj: 32}"""
    alpha_pattern: dict[str, float] = setting(default_factory=dict, grants="nothing")
    """alphas other than alpha, by module name ending or regular expression"""
    experts: str = setting("auto", choices=("auto", "lora", "frozen"))
    """fused experts of a mixture of experts: lora (matrices of rank r for each expert), frozen, or
    auto: lora with all-linear if experts hold more than a third of the layers' weights"""
    layers: Any = setting("all", grants="nothing")
    """decoder layers that get an adapter: all, `top 8` (the last eight), or a list of numbers"""
    init: str = setting("default", choices=INITS)
    """initial weights: default, gaussian, pissa (principal components of the base's weights,
    arXiv 2404.02948), olora (their QR factors, arXiv 2406.01775)"""
    use_dora: bool = False
    """train each weight's magnitude separately from its direction (slower; arXiv 2402.09353)"""
    use_rslora: bool = False
    """scale by alpha / sqrt(r), stable at high ranks (arXiv 2312.03732)"""
    trainable_tokens: list[str] = setting(default_factory=list, grants="nothing")
    """tokens whose embedding and head rows are trained too, as [<|im_start|>, <|im_end|>]"""
    modules_to_save: list[str] = setting(default_factory=list, grants="nothing")
    """modules trained in full and saved with the adapter, as [lm_head] (unless it is tied)"""
    lora_plus_ratio: float | None = setting(None, gt=0, le=1000, note="16 is usual")
    """learning rate of B divided by that of A; 16 is usual (LoRA+, arXiv 2402.12354)"""
    lora_plus_weight_decay: float | None = setting(None, ge=0, le=10)
    """weight decay of B if lora_plus_ratio is set; null = optimizer.weight_decay"""


@dataclass(kw_only=True, slots=True)
class Ia3Config(AdapterConfig):
    name: str = "ia3"
    path: str | None = setting(None, is_path=True)
    """folder of an adapter to continue training, with the settings it was saved with"""
    target_modules: Any = setting("auto", grants="nothing")
    """auto (keys, values and feed-forward of the architecture), or a list of module name endings"""
    feedforward_modules: Any = setting("auto", grants="nothing")
    """target_modules whose input is scaled instead of their output"""
    layers: Any = "all"
    """decoder layers that get an adapter: all, `top 8` (the last eight), or a list of numbers"""


@dataclass(kw_only=True, slots=True)
class FreezeConfig(AdapterConfig):
    name: str = "freeze"
    layers: Any = setting("top 2", grants="nothing")
    """decoder layers to train: `top 2` (the last two), a list of numbers, all, or none"""
    modules: list[str] = setting(default_factory=list, grants="nothing")
    """other modules to train: name endings or regular expressions, as [lm_head, 'norm']"""


@dataclass(kw_only=True, slots=True)
class FullConfig(AdapterConfig):
    name: str = "full"


DEFAULT_LR = {"lora": 2e-4, "ia3": 3e-3, "freeze": 2e-5, "full": 2e-5}


def keep_start(config: AdapterConfig, run: Path) -> None:
    """Copy the settings of the adapter in adapter.path, if there is one, into a run's folder."""
    if (start := continued_from(config)) is None:
        return
    kept = run / _START_FOLDER
    kept.mkdir(exist_ok=True)
    for name in (ADAPTER_CONFIG, ORIGIN_FILE):
        (kept / name).unlink(missing_ok=True)
        if (Path(start) / name).exists():
            shutil.copyfile(Path(start) / name, kept / name)


def resumed_adapter(config: AdapterConfig, run: Path) -> AdapterConfig:
    """Return an adapter's settings to resume run `run` without the folder in adapter.path."""
    file = run / _START_FOLDER / ADAPTER_CONFIG
    if isinstance(config, (LoraConfig, Ia3Config)) and config.path is not None and file.is_file():
        return replace(config, path=str(file))
    return config


def continued_from(config: AdapterConfig) -> str | None:
    """Return the folder of the adapter to continue training; None for a new adapter.

    In a resumed run it is the file with its settings, since the checkpoint has the weights.
    """
    return config.path if isinstance(config, (LoraConfig, Ia3Config)) else None


def saves_whole_model(config: AdapterConfig) -> bool:
    return isinstance(config, (FullConfig, FreezeConfig))


log = logging.getLogger(__name__)

PEFT_TYPES = {"LORA": "lora", "IA3": "ia3"}
"""peft_type -> option of `adapter=`"""
_INITS = ("gaussian", "orthogonal", "eva", "pissa", "olora")
"""initializations by name that do not change the base, or always in the same way"""
_MAX_RANK = 65_536
_MAX_NUMBER = 1 << 21
"""largest layer number or token id; a token id needs as many rows of the embedding"""
_MAX_NAMES = 10_000
_MAX_PATTERN = 10_000
"""most characters of a name or regular expression"""


UNSUPPORTED_FIELDS = {
    "alora_invocation_tokens": "it is active only after certain tokens",
    "arrow_config": "it routes tokens among several adapters",
    "kasa_config": "it scales singular values",
    "layer_replication": "it runs layers of the base several times",
    "megatron_config": "its layers are those of Megatron",
    "monteclora_config": "it draws its weights at random",
    "use_bdlora": "its matrices are block-diagonal",
    "use_qalora": "it pools the input of each layer",
    "velora_config": "it compresses activations",
}
"""fields of peft that change what an adapter computes -> why we do not load one"""


Check = Callable[[Any], bool]


def _is_int(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


_is_count, _is_rank = _is_int(0, _MAX_NUMBER), _is_int(1, _MAX_RANK)


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_PATTERN


def _is_list_of(is_valid: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(is_valid, value))
    )


def _is_names(value: Any) -> bool:
    return _is_name(value) or (value != [] and _is_list_of(_is_name)(value))


def _is_null_or(*checks: Check) -> Check:
    return lambda value: value is None or any(is_valid(value) for is_valid in checks)


def _is_pattern_of(is_valid: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and len(value) <= _MAX_NAMES
        and all(map(_is_name, value))
        and all(map(is_valid, value.values()))
    )


def _is_indices(value: Any) -> bool:
    of_token = _is_list_of(_is_count)
    return of_token(value) or (isinstance(value, dict) and all(map(of_token, value.values())))


_Rule = tuple[Check, str]
"""whether a value is valid, and what is expected"""
_FLAG: _Rule = (lambda value: isinstance(value, bool), "true or false")
_TEXT: _Rule = (lambda value: value is None or isinstance(value, str), "a text or null")
_NAMES: _Rule = (_is_names, "a name, a regular expression or a list of names")
_NAMES_OR_NULL: _Rule = (_is_null_or(_is_names, _is_list_of(_is_name)), "a list of names or null")
_SHARED: dict[str, _Rule] = {
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "task_type": (
        lambda value: value in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS"),
        "CAUSAL_LM, SEQ_2_SEQ_LM, SEQ_CLS or null (other types have a head that is not built: use "
        "an adapter of a language model or of a classifier of texts)",
    ),
    "inference_mode": _FLAG,
    "target_modules": _NAMES,
    "exclude_modules": _NAMES_OR_NULL,
    "modules_to_save": _NAMES_OR_NULL,
    "fan_in_fan_out": _FLAG,
}
RULES: dict[str, dict[str, _Rule]] = {
    "LORA": _SHARED
    | {
        "r": (_is_rank, f"a rank from 1 to {_MAX_RANK:,}"),
        "lora_alpha": (_is_scale, "a number above 0"),
        "lora_dropout": (
            lambda value: type(value) in (int, float) and 0 <= value < 1,
            "a number from 0 to below 1",
        ),
        "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
        "use_dora": _FLAG,
        "use_rslora": _FLAG,
        "lora_bias": _FLAG,
        "ensure_weight_tying": _FLAG,
        "rank_pattern": (_is_pattern_of(_is_rank), f"ranks from 1 to {_MAX_RANK:,} by module name"),
        "alpha_pattern": (_is_pattern_of(_is_scale), "numbers above 0 by module name"),
        "layers_to_transform": (
            _is_null_or(_is_count, _is_list_of(_is_count)),
            "a list of layer numbers or null",
        ),
        "layers_pattern": _NAMES_OR_NULL,
        "target_parameters": (_is_null_or(_is_list_of(_is_name)), "a list of names or null"),
        "trainable_token_indices": (_is_null_or(_is_indices), "lists of token ids or null"),
        "init_lora_weights": (
            lambda value: isinstance(value, bool) or value in (None, *_INITS),
            f"true, false, {', '.join(_INITS[:-1])} or {_INITS[-1]} (others change the base in a "
            "way that the adapter's files do not contain, pissa_niter by a random decomposition: "
            "have the tool that made it save a plain LoRA)",
        ),
    },
    "IA3": _SHARED | {"feedforward_modules": _NAMES_OR_NULL, "init_ia3_weights": _FLAG},
}
"""peft_type -> keys that are passed on to peft, with the rule of each"""
WITHOUT_EFFECT = {
    *("peft_type", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
    *("runtime_config", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
}
"""keys without effect on trained weights, such as how these were initialized"""


_NOT_COMPARED = {"base_model_name_or_path", "revision", "inference_mode"} | WITHOUT_EFFECT
"""keys that may change after training: where the base is, and those without effect"""


def read_adapter_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a saved adapter to pass on to peft, and problems of the file."""
    file = folder / ADAPTER_CONFIG
    content, problem = read_json_object(file)
    if problem is not None:
        return {}, [problem]
    kind = content.get("peft_type")
    if not isinstance(kind, str) or kind not in PEFT_TYPES:
        return {}, [
            f"{file}: peft_type {_brief(kind)} is not supported; expected {' or '.join(PEFT_TYPES)}"
        ]
    rules = RULES[kind]
    problems = [
        f"{file}: {key}={_brief(content[key])}: expected {expected}"
        for key, (is_valid, expected) in rules.items()
        if key in content and not is_valid(content[key])
    ]
    if "target_modules" not in content and not content.get("target_parameters"):
        problems.append(f"{file}: no target_modules, so nothing is adapted; save the adapter again")
    unknown = [key for key in content if key not in rules and key not in WITHOUT_EFFECT]
    problems += [_unknown(file, key, content[key], rules) for key in unknown if content[key]]
    problems = problems or _find_edits(folder, content)
    return {key: value for key, value in content.items() if key in rules}, problems


def _find_edits(folder: Path, content: Mapping[str, Any]) -> list[str]:
    file = folder / ORIGIN_FILE
    if not file.exists():
        return []
    origin, problem = read_json_object(file)
    if problem is not None or SETTINGS_KEY not in origin:
        return []  # `check_saved_adapter` reports it; earlier versions recorded no settings
    try:
        saved = json.loads(origin[SETTINGS_KEY])
    except (TypeError, ValueError):
        saved = None
    if not isinstance(saved, dict):
        return [f"{file}: {SETTINGS_KEY} is not a JSON object as text; copy the file again"]
    return [
        f"{folder / ADAPTER_CONFIG}: {key}={_brief(content.get(key))}, but the adapter was trained "
        f"with {key}={_brief(saved.get(key))}; write that value again, or remove {SETTINGS_KEY} "
        f"from {file} to use the edited file"
        for key in sorted(saved.keys() | content.keys())
        if key not in _NOT_COMPARED and _sorted(saved.get(key)) != _sorted(content.get(key))
    ]


def _sorted(value: Any) -> Any:
    """Return a list of names in one order: peft's sets have none."""
    is_names = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return sorted(value) if is_names else value


def load_peft_config(folder: Path) -> peft.PeftConfig:
    """Return the settings of a saved adapter as peft's; raise UserError listing their problems."""
    import peft

    settings, problems = read_adapter_config(folder)
    if problems:
        raise UserError(problems)
    if settings.get("init_lora_weights") == "eva":
        settings["init_lora_weights"] = True  # without effect on trained weights
    kind = read_json_object(folder / ADAPTER_CONFIG)[0]["peft_type"]
    config: peft.PeftConfig = {"LORA": peft.LoraConfig, "IA3": peft.IA3Config}[kind](**settings)
    return config


def _unknown(file: Path, key: str, value: Any, known: Mapping[str, Any]) -> str:
    if (reason := UNSUPPORTED_FIELDS.get(key)) is not None:
        return (
            f"{file}: {key}={_brief(value)} is not supported: {reason}; have the tool that made "
            "it save a plain LoRA"
        )
    return (
        f"{file}: {key[:80]!r}={_brief(value)} is not supported, and ignoring it may change the "
        f"adapter{nearest(key[:80], known)}; have the tool that made it save a plain LoRA, or "
        "remove the key if it has no effect"
    )


def _brief(value: Any) -> str:
    return shortened(repr(value) if isinstance(value, str) else value)
