"""Rows on what is trained: the base and its code, the bits that it is held in, the adapter."""

from __future__ import annotations

import re
from pathlib import Path

from app.preflight.couplings.situation import Coupling, Situation
from app.strategy.settings import FsdpConfig, ZeroConfig

COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE = ("full", "freeze")
"""adapters that train weights of the base"""
CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that take what they start from out of the base's weights"""

MODEL_ROWS = (
    Coupling(
        "model.path model.tokenizer_path model.revision model.trust_remote_code",
        lambda s: (
            s.config.model.trust_remote_code
            and not COMMIT.fullmatch(s.config.model.revision or "")
            and any(
                path is not None and not Path(path).is_dir()
                for path in (s.config.model.path, s.config.model.tokenizer_path)
            )
        ),
        lambda s: "model.trust_remote_code=true runs whatever stands on the hub that day",
        lambda s: "model.revision=COMMIT beside it (40 hex digits; branches and tags move)",
    ),
    Coupling(
        "quantization.method adapter.name",
        lambda s: s.config.quantization.method != "none" and s.config.adapter.name in WHOLE,
        lambda s: (
            f"quantization={s.config.quantization.method} freezes the weights in few bits, but "
            f"adapter={s.config.adapter.name} trains them"
        ),
        lambda s: "quantization=none, or adapter=lora",
    ),
    Coupling(
        "quantization.method model.from_scratch",
        lambda s: s.config.quantization.method != "none" and s.config.model.from_scratch,
        lambda s: (
            f"quantization={s.config.quantization.method} freezes the weights in few bits, but "
            "model.from_scratch=true starts from random ones, which have to be trained"
        ),
        lambda s: "quantization=none",
    ),
    Coupling(
        "adapter.lora_plus_weight_decay adapter.lora_plus_ratio",
        lambda s: (
            s.config.adapter.lora_plus_weight_decay is not None
            and s.config.adapter.lora_plus_ratio is None
        ),
        lambda s: "adapter.lora_plus_weight_decay means nothing without adapter.lora_plus_ratio",
        lambda s: "adapter.lora_plus_ratio=16 beside it, or optimizer.weight_decay",
    ),
    Coupling(
        "adapter.init adapter.use_dora",
        lambda s: s.config.adapter.init in CHANGE_BASE and s.config.adapter.use_dora,
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            "adapter.use_dora=true learns the magnitudes of weights that are whole"
        ),
        lambda s: "adapter.init=default, or adapter.use_dora=false",
    ),
    Coupling(
        "adapter.init strategy.name",
        lambda s: s.config.adapter.init in CHANGE_BASE and _spreads_weights(s),
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            "is saved for the base as it was, which is read again and compared: strategy="
            f"{s.config.strategy.name} leaves no rank room for that"
        ),
        lambda s: "adapter.init=default, or strategy=ddp",
    ),
    Coupling(
        "adapter.init quantization.method",
        lambda s: s.config.adapter.init in CHANGE_BASE and s.config.quantization.method != "none",
        lambda s: (
            f"adapter.init={s.config.adapter.init} takes its start out of the base's weights, and "
            f"weights of quantization={s.config.quantization.method} cannot hold what is left"
        ),
        lambda s: "adapter.init=default, or quantization=none",
    ),
    Coupling(
        "adapter.name model.added_tokens",
        lambda s: s.config.adapter.name == "ia3" and bool(s.config.model.added_tokens),
        lambda s: (
            f"model.added_tokens={s.config.model.added_tokens} need rows that train, and "
            "adapter=ia3 trains vectors alone"
        ),
        lambda s: "adapter=lora or adapter=full",
    ),
    Coupling(
        "model.from_scratch adapter.name",
        lambda s: s.config.model.from_scratch and s.config.adapter.name != "full",
        lambda s: (
            f"model.from_scratch=true with adapter={s.config.adapter.name}: small matrices beside "
            "random frozen weights learn nothing"
        ),
        lambda s: "adapter=full",
    ),
)


def _spreads_weights(situation: Situation) -> bool:
    config = situation.config.strategy
    return isinstance(config, FsdpConfig) or (isinstance(config, ZeroConfig) and config.stage == 3)
