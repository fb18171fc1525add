"""Settings of the adapters, and the names of the files they are saved in; needs no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.facts import setting

CONFIG_FILE = "adapter_config.json"
ORIGIN_FILE = "base.json"
"""file in an adapter's folder with path, revision and fingerprints of its base"""
_START_FOLDER = "start_adapter"
"""folder of a run with the settings of the adapter in adapter.path, so that it resumes without it:
its checkpoints have the weights"""
SETTINGS_KEY = "adapter_config"
"""key of ORIGIN_FILE: the content of CONFIG_FILE as it was saved"""


def write_origin(folder: Path, base: Mapping[str, str | None]) -> None:
    """Record in `folder` the base that its adapter was trained on, and the adapter's settings."""
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
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
        16,
        ge=1,
        note="8 to 64 is usual",
        shown=("train",),
        aliases=("lora_r", "lora_rank", "rank"),
    )
    """rank of the matrices; a higher rank has more capacity and needs more memory"""
    alpha: float = setting(
        32.0,
        gt=0,
        note="the rank or twice it is usual",
        shown=("train",),
        aliases=("lora_alpha",),
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
    for name in (CONFIG_FILE, ORIGIN_FILE):
        (kept / name).unlink(missing_ok=True)
        if (Path(start) / name).exists():
            shutil.copyfile(Path(start) / name, kept / name)


def resumed_adapter(config: AdapterConfig, run: Path) -> AdapterConfig:
    """Return an adapter's settings to resume run `run` without the folder in adapter.path."""
    file = run / _START_FOLDER / CONFIG_FILE
    if isinstance(config, (LoraConfig, Ia3Config)) and config.path is not None and file.is_file():
        return replace(config, path=str(file))
    return config


def continued_from(config: AdapterConfig) -> str | None:
    """Return the folder of the adapter to continue training; None for a new adapter.

    In a resumed run it is the file with its settings, since the checkpoint has the weights.
    """
    return config.path if isinstance(config, (LoraConfig, Ia3Config)) else None


def saves_whole_model(config: AdapterConfig) -> bool:
    """Return whether the whole model is saved instead of an adapter."""
    return isinstance(config, (FullConfig, FreezeConfig))
