"""Compiled layers while a run trains: from before the first validation to the end of the fit."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from app.model.compile import CompiledLayers, num_compiled, why_compiled

log = logging.getLogger(__name__)

LAST_COMPILING_STEP = 3
"""after it every shape and every mode has been seen"""


class Compilation(L.Callback):
    """Compile the model's layers, watch that they stay compiled, and turn them back at the end."""

    def __init__(self) -> None:
        self.layers: CompiledLayers | None = None
        self.num_compiled: int | None = None
        self.is_said = False

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compile, behind the probes of `on_fit_start`, which run eight tokens."""
        self._compile(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compile where there was no validation before."""
        self._compile(pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Give up what failed, and say once what is compiled again after the third step."""
        if self.layers is None:
            return
        if self.layers.failure is not None:
            self._remove()
        elif trainer.global_step >= LAST_COMPILING_STEP:
            self._watch(trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Turn back: what is saved and asked is the plain model."""
        self._remove()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Turn back as well where the fit breaks off."""
        self._remove()

    def _compile(self, pl_module: Any) -> None:
        if self.layers is None:
            self.layers = CompiledLayers(pl_module.model)

    def _remove(self) -> None:
        if self.layers is not None:
            self.layers.remove()
            self.layers = None

    def _watch(self, step: int) -> None:
        now, before = num_compiled(), self.num_compiled
        if before is not None and now > before and not self.is_said:
            self.is_said = True
            log.warning(
                "compile: layers were compiled again at step %d, after which nothing new should "
                "come (%s); such steps wait for it: type trainer.compile=false if it goes on",
                step,
                why_compiled(now - before),
            )
        self.num_compiled = now
