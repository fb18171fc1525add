"""Check in the first optimizer step that every adapter matrix gets a gradient."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.model.adapter import TrainableWeight, adapter_matrices
from app.model.patterns import pattern_without
from common.errors import TrainingFault, UserError

NUMBER = re.compile(r"\d+")


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
        check_gradients(weights, [count > 0 for count in counts])


def _record(is_reached: Tensor, gradient: Tensor) -> None:
    is_reached += gradient.detach().any().to(is_reached.device)


def check_gradients(weights: list[TrainableWeight], is_reached: list[bool]) -> None:
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
