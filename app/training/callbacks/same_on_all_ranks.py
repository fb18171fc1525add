"""Find ranks with different code, settings or files before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from app.process.errors import ROOT, UserError

if TYPE_CHECKING:
    from app.config import TrainConfig

PER_PROCESS = ("output", "supervise", "resume", "resume_allow", "faults")
"""settings of one start of a run, not of the run"""
LOCATIONS = ("path", "tokenizer_path", "chat_template", "cache_dir")
"""settings that may differ between machines: files are compared by content, not by path"""
PACKAGES = ("app", "data_modules", "conf")
"""folders of this program"""


def program_values(versions: Mapping[str, str]) -> dict[str, Any]:
    """Return which program this is, by the name that an error gives it; `versions` of libraries."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*")):
            if file.suffix in (".py", ".yaml"):
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return {
        "code (another version of this program, or a file that was edited)": digest.hexdigest(),
        "versions of libraries": dict(versions),
        "versions of Python": platform.python_version(),
    }


def rank_invariant_values(config: TrainConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks, by the name that an error gives it.

    `facts` are those of the run's manifest.
    """
    settings = {
        f"settings of {name}": _without_locations(value)
        for name, value in dataclasses.asdict(config).items()
        if name not in PER_PROCESS
    }
    # `auto` is the same setting on all ranks, and may resolve to another strategy on each.
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


def _without_locations(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_locations(part) for name, part in value.items() if name not in LOCATIONS
        }
    if isinstance(value, list):
        return [_without_locations(part) for part in value]
    return value


class SameOnAllRanks(L.Callback):
    """Compare rank-invariant values with those of rank 0; UserError where they differ."""

    def __init__(self, values: Mapping[str, Any], program: Mapping[str, Any] | None = None) -> None:
        """`program` is compared first, since it decides what the values are."""
        self.values = values
        self.program = program or {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compare hashes once the ranks are connected, and before a weight is read."""
        if trainer.world_size == 1:
            return
        for values in filter(None, (self.program, self.values)):
            self._compare(trainer, values)

    def _compare(self, trainer: L.Trainer, values: Mapping[str, Any]) -> None:
        own = [_hash_of(value) for value in values.values()]
        tensor = torch.tensor(own, dtype=torch.int64, device=trainer.strategy.root_device)
        first, *others = trainer.strategy.all_gather(tensor).tolist()
        problems = []
        for rank, other in enumerate(others, start=1):
            pairs = zip(values, first, other, strict=True)
            if different := [name for name, here, there in pairs if here != there]:
                problems.append(
                    f"rank {rank} and rank 0 have different {', '.join(different)}; start all "
                    "ranks by the same command, with the same files on every machine"
                )
        if problems:
            raise UserError(problems)


def _hash_of(value: Any) -> int:
    """Return 63 bits of a hash of `value`."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
