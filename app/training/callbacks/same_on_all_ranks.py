"""Find ranks with different code, settings or files before training starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from common.errors import UserError
from common.installation import ROOT

if TYPE_CHECKING:
    from app.config import TrainConfig

PER_PROCESS = ("output", "supervise", "resume", "resume_allow", "faults")
"""settings of a single process or start of the run, which may differ"""
LOCATIONS = ("path", "tokenizer_path", "chat_template", "cache_dir")
"""settings that may differ between machines: files are compared by content, not by path"""
PACKAGES = ("app", "common", "data_modules", "conf")
"""source folders of this program"""


def program_values(versions: Mapping[str, str]) -> dict[str, Any]:
    """Return code and versions by the names that an error shows; `versions`: of libraries."""
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
    """Return the values that must be the same on all ranks, by the names that an error shows.

    `facts`: those of the run's manifest.
    """
    settings = {
        f"settings of {name}": _without_locations(value)
        for name, value in dataclasses.asdict(config).items()
        if name not in PER_PROCESS
    }
    # `auto` is the same setting on all ranks, but may resolve to different strategies.
    strategy = settings.pop("settings of strategy"), facts["strategy"]
    data = [*facts["data"], *facts["test_data"]]
    return settings | {
        "files of the base model": facts["base"]["weights"] or facts["base"]["path"],
        "rows": [file["sha256"] or file["path"] for file in data],
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
    """Compare rank-invariant values with those of rank 0; UserError if they differ."""

    def __init__(self, values: Mapping[str, Any], program: Mapping[str, Any] | None = None) -> None:
        """`program`: code and versions, compared first because they determine the other values."""
        self.values = values
        self.program = program or {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compare hashes after the ranks have connected and before weights are loaded."""
        if trainer.world_size == 1:
            return
        for values in filter(None, (self.program, self.values)):
            self._compare(trainer, values)

    def _compare(self, trainer: L.Trainer, values: Mapping[str, Any]) -> None:
        hashes = [_hash_of(value) for value in values.values()]
        tensor = torch.tensor(hashes, dtype=torch.int64, device=trainer.strategy.root_device)
        rank0, *others = trainer.strategy.all_gather(tensor).tolist()
        problems = []
        for rank, other in enumerate(others, start=1):
            hashes_by_name = zip(values, rank0, other, strict=True)
            if different := [name for name, first, second in hashes_by_name if first != second]:
                problems.append(
                    f"rank {rank} and rank 0 have different {', '.join(different)}; start all "
                    "ranks with the same command, with the same files on every machine"
                )
        if problems:
            raise UserError(problems)


def _hash_of(value: Any) -> int:
    """Return 63 bits of a hash of `value`."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
