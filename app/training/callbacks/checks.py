"""Checks of a run at its start: equal values on all ranks, a gradient for every adapter matrix."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from app.model.adapter import TrainableWeight, adapter_matrices
from app.model.patterns import pattern_without
from common.errors import TrainingFault, UserError
from common.installation import ROOT

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

_PER_PROCESS = ("output", "supervise", "resume", "resume_allow", "faults")
"""settings of a single process or start of the run, which may differ"""
_LOCATIONS = ("path", "tokenizer_path", "chat_template", "cache_dir")
"""settings that may differ between machines: files are compared by content, not by path"""
PACKAGES = ("app", "common", "data_modules", "conf")
"""source folders of this program"""
NUMBER = re.compile(r"\d+")


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
        if name not in _PER_PROCESS
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
            name: _without_locations(part) for name, part in value.items() if name not in _LOCATIONS
        }
    if isinstance(value, list):
        return [_without_locations(part) for part in value]
    return value


class SameOnAllRanks(L.Callback):
    """Compare rank-invariant values with those of rank 0; UserError if they differ."""

    def __init__(self, values: Mapping[str, Any], program: Mapping[str, Any]) -> None:
        """`program`: code and versions, compared first because they determine the other values."""
        self.values, self.program = values, program

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compare hashes after the ranks have connected and before weights are loaded."""
        for values in (self.program, self.values):
            if different := _different(trainer, values):
                raise UserError(
                    [
                        f"rank {rank} and rank 0 have different {', '.join(names)}; start all "
                        "ranks with the same command, with the same files on every machine"
                        for rank, names in different.items()
                    ]
                )
        gpu = _gpu_of(trainer.strategy.root_device)
        ranks = ", ".join(map(str, _different(trainer, {"GPU": gpu})))
        if ranks and trainer.is_global_zero:
            log.warning(
                "ranks %s have another GPU than rank 0 (%s): the slowest, and the one with least "
                "memory, limit all",
                *(ranks, gpu),
            )


def _gpu_of(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _different(trainer: L.Trainer, values: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the names of the values that are not those of rank 0, by the ranks that have them."""
    hashes = [_hash_of(value) for value in values.values()]
    tensor = torch.tensor(hashes, dtype=torch.int64, device=trainer.strategy.root_device)
    rank0, *others = trainer.strategy.all_gather(tensor).tolist()
    different = {
        rank: [name for name, first, own in zip(values, rank0, other, strict=True) if first != own]
        for rank, other in enumerate(others, start=1)
    }
    return {rank: names for rank, names in different.items() if names}


def _hash_of(value: Any) -> int:
    """Return 63 bits of a hash of `value`."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class GradientCheck(L.Callback):
    """Stop a run whose first optimizer step leaves an adapter matrix without a gradient.

    Such a matrix, for example in a vision tower of a model trained on text, would be saved
    untrained. The experts of a layer count as one: the tokens of a step need not reach all of them.
    """

    def __init__(self) -> None:
        self._weights: list[TrainableWeight] = []
        self._is_reached: list[Tensor] = []
        """one per weight: whether hooks have received a nonzero gradient"""
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Register hooks if the strategy does not keep gradients with their weights."""
        self._weights = adapter_matrices(pl_module.model)
        device = trainer.strategy.root_device
        self._is_reached = [torch.zeros((), device=device) for _ in self._weights]
        if pl_module.strategy.keeps_gradients:
            return
        for weight, is_reached in zip(self._weights, self._is_reached, strict=True):
            hook = weight.parameter.register_hook(partial(_record, is_reached))
            self._hooks.append(hook)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the first step; UserError on all ranks, with the target_modules to type."""
        if not self._weights:
            return
        for hook in self._hooks:
            hook.remove()
        strategy: Any = trainer.strategy
        if strategy.keeps_gradients:
            for weight, is_reached in zip(self._weights, self._is_reached, strict=True):
                if (gradient := strategy.gradient(weight.parameter)) is not None:
                    _record(is_reached, gradient)
        counts = strategy.reduce(torch.stack(self._is_reached), reduce_op="sum").tolist()
        weights, self._weights, self._is_reached = self._weights, [], []
        _check_gradients(weights, [count > 0 for count in counts])


def _record(is_reached: Tensor, gradient: Tensor) -> None:
    is_reached += gradient.detach().any().to(is_reached.device)


def _check_gradients(weights: list[TrainableWeight], is_reached: list[bool]) -> None:
    """Raise UserError naming the matrices without a gradient; TrainingFault if none has one."""
    places = {_place(w) for w, reached in zip(weights, is_reached, strict=True) if reached}
    without = [weight for weight in weights if _place(weight) not in places]
    if not without:
        return
    if not places:
        raise TrainingFault(
            f"step 1: none of the {_num_modules(weights)} adapted matrices got a gradient: the "
            "loss of this step does not depend on the adapter; check the trained tokens (python "
            "-m app.preview) and adapter.alpha"
        )
    names = list(dict.fromkeys(weight.module for weight in without))
    reached = {weight.module for weight in weights} - set(names)
    pattern = pattern_without(sorted(reached), names)
    fix = (
        f"adapter.target_modules='{pattern}'" if pattern else "adapter.target_modules without them"
    )
    raise UserError(
        f"step 1: {len(names)} of {_num_modules(weights)} adapted matrices got no gradient, "
        f"the first is {names[0]}: the training data does not pass through them, and they would be "
        f"saved untrained; type {fix}"
    )


def _place(weight: TrainableWeight) -> str:
    """Return a module's name with * for the numbers of experts."""
    place, expert, inside = weight.module.partition("expert")
    return place + expert + NUMBER.sub("*", inside)


def _num_modules(weights: list[TrainableWeight]) -> int:
    return len({weight.module for weight in weights})
