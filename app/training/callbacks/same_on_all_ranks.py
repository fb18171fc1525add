"""Ranks that were told different things, or see different files: found before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from app.process.errors import UserError

OF_A_START = ("output", "supervise", "resume", "resume_allow", "faults")
"""settings that say where and how one start of a run goes"""
PLACES = ("path", "tokenizer_path", "chat_template", "cache_dir")
"""settings that may differ between machines: what is there is compared, not where it is"""


def told(config: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks must have been told alike, by the words for it.

    `config`: the settings of a training; `facts`: what its manifest says of them.
    """
    settings = {
        f"settings of {name}": _without_places(value)
        for name, value in dataclasses.asdict(config).items()
        if name not in OF_A_START
    }
    # `auto` is the same setting wherever it is typed, and may come to something else there.
    strategy = settings.pop("settings of strategy"), facts["strategy"]
    data = [*facts["data"], *facts["test_data"]]
    return settings | {
        "files of the base model": facts["base"]["weights"] or facts["base"]["path"],
        "rows": [one["sha256"] or one["path"] for one in data],
        "tokens": facts.get("tokens_sha256"),
        "tokenizer files": facts["tokenizer_sha256"],
        "chat template": facts["template_sha256"],
        "plan of steps": [facts[name] for name in ("total_steps", "global_batch")],
        "precision": facts["precision"],
        "strategy": strategy,
    }


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_places(part) for name, part in value.items() if name not in PLACES}
    if isinstance(value, list):
        return [_without_places(part) for part in value]
    return value


class SameOnAllRanks(L.Callback):
    """Compare what was told to each rank with what the first one was told; UserError."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compare hashes once the ranks can talk to each other, and before a weight is read."""
        if trainer.world_size == 1:
            return
        own = [_number_of(value) for value in self.parts.values()]
        tensor = torch.tensor(own, dtype=torch.int64, device=trainer.strategy.root_device)
        first, *others = trainer.strategy.all_gather(tensor).tolist()
        problems = []
        for rank, other in enumerate(others, start=1):
            pairs = zip(self.parts, first, other, strict=True)
            if different := [name for name, here, there in pairs if here != there]:
                problems.append(
                    f"rank {rank} and rank 0 have different {', '.join(different)}; start all "
                    "ranks by the same command, with the same files on every machine"
                )
        if problems:
            raise UserError(problems)


def _number_of(value: Any) -> int:
    """Return 63 bits of a hash of `value`."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
