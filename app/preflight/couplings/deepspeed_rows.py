"""Rows on DeepSpeed's ZeRO: its package, its stages, and a config of its own."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from app.preflight.couplings.situation import Coupling
from app.strategy.deepspeed_config import DEEPSPEED_KEYS, FURTHER_DEEPSPEED_KEYS
from app.strategy.settings import ZeroConfig

PYTORCHS_OWN = {
    "zero1": "fsdp_grad_op",
    "zero2": "fsdp_grad_op",
    "zero2_offload": "fsdp_offload",
    "zero3": "fsdp",
    "zero3_offload": "fsdp_offload",
    "zero3_nvme": "fsdp_offload",
    "zero3_hpz": "fsdp_hybrid",
    "zeropp": "fsdp_hybrid",
}
"""what of PyTorch comes nearest to a strategy of DeepSpeed"""

DEEPSPEED_ROWS = (
    Coupling(
        "strategy.name trainer.accelerator",
        lambda s: isinstance(s.config.strategy, ZeroConfig) and not _has_deepspeed(),
        lambda s: (
            f"strategy={s.config.strategy.name} needs the package deepspeed, which is not installed"
        ),
        lambda s: (
            f"strategy={_by_pytorch(s.config.strategy.name, on_gpu=s.on_gpu)}, or "
            "DS_BUILD_OPS=0 pip install deepspeed "
            "(its operators are built when they are first used)"
        ),
        is_of_machine=True,
    ),
    Coupling(
        "strategy.stage strategy.offload_parameters",
        lambda s: s.config.strategy.stage < 3 and s.config.strategy.offload_parameters != "none",
        lambda s: (
            f"strategy.offload_parameters={s.config.strategy.offload_parameters} moves weights "
            f"that are spread over the ranks, and strategy.stage={s.config.strategy.stage} leaves "
            "all of them with every rank"
        ),
        lambda s: "strategy.stage=3, or strategy.offload_parameters=none",
    ),
    Coupling(
        "strategy.name",
        lambda s: s.config.strategy.name == "zero3_nvme",
        lambda s: (
            "strategy=zero3_nvme would keep weights and optimizer states on a disk, which is not "
            "there yet"
        ),
        lambda s: "strategy=zero3_offload, which keeps them in host memory",
    ),
    Coupling(
        "strategy.stage strategy.partition_within_node strategy.quantized_weights "
        "strategy.quantized_gradients",
        lambda s: (
            s.config.strategy.stage < 3
            and (
                s.config.strategy.partition_within_node
                or s.config.strategy.quantized_weights
                or s.config.strategy.quantized_gradients
            )
        ),
        lambda s: (
            "partition_within_node, quantized_weights and quantized_gradients say how weights that "
            f"are spread travel, and strategy.stage={s.config.strategy.stage} spreads none"
        ),
        lambda s: "strategy.stage=3, or strategy=zeropp",
    ),
    Coupling(
        "strategy.quantized_weights strategy.quantized_gradients strategy.name trainer.accelerator",
        lambda s: (
            not s.on_gpu
            and (s.config.strategy.quantized_weights or s.config.strategy.quantized_gradients)
        ),
        lambda s: (
            f"strategy={s.config.strategy.name} quantizes what travels by operators that DeepSpeed "
            f"has for GPUs alone, and this run is on {s.device}"
        ),
        lambda s: "strategy=zero3_hpz, which leaves the quantizing out",
        is_of_machine=True,
    ),
    Coupling(
        "strategy.config",
        lambda s: bool(_owned(s.config.strategy.config)),
        lambda s: (
            "strategy.config: "
            + ", ".join(
                f"{key} is {setting} here"
                for key, setting in _owned(s.config.strategy.config).items()
            )
        ),
        lambda s: (
            f"{', '.join(dict.fromkeys(_owned(s.config.strategy.config).values()))} instead, and "
            "leave it out of strategy.config"
        ),
    ),
    Coupling(
        "strategy.config",
        lambda s: bool(_unknown(s.config.strategy.config)),
        lambda s: (
            "strategy.config: DeepSpeed knows no "
            + ", no ".join(_unknown(s.config.strategy.config))
        ),
        lambda s: "a key that it knows, or leave it out of strategy.config",
    ),
)


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _by_pytorch(name: str, *, on_gpu: bool) -> str:
    nearest = PYTORCHS_OWN[name]
    return "fsdp" if nearest == "fsdp_offload" and not on_gpu else nearest


def _owned(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a DeepSpeed config that another setting says, and which setting."""
    owned: dict[str, str] = {}
    for key in _dotted(config, ""):
        for known, setting in DEEPSPEED_KEYS.items():
            if f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}."):
                owned.setdefault(key, setting)
    return owned


def _unknown(config: Mapping[str, Any]) -> list[str]:
    """List the keys that a DeepSpeed config has not, each with what may have been meant."""
    zero = config.get("zero_optimization")
    return [
        *_unknown_of(config, ""),
        *(_unknown_of(zero, "zero_optimization.") if isinstance(zero, Mapping) else ()),
    ]


def _unknown_of(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known = {
        key.removeprefix(prefix).partition(".")[0]
        for key in (*FURTHER_DEEPSPEED_KEYS, *DEEPSPEED_KEYS)
        if key.startswith(prefix)
    }
    for name in sorted(map(str, values.keys() - known)):
        guess = ""
        for near in difflib.get_close_matches(name, sorted(known), n=1):
            setting = DEEPSPEED_KEYS.get(f"{prefix}{near}")
            guess = f" (did you mean {near}{f', which is {setting} here' if setting else ''}?)"
        yield f"{prefix}{name}{guess}"


def _dotted(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
