"""Compile the layers during the fit, starting before the first validation."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from app.model.compile import CompiledLayers, num_compiled_graphs, recompile_reason

log = logging.getLogger(__name__)

_LAST_COMPILING_STEP = 3
"""step by which every shape and mode has occurred"""


class Compilation(L.Callback):
    """Compile the model's layers, warn of recompilation, and restore the layers at the end."""

    def __init__(self) -> None:
        self.layers: CompiledLayers | None = None
        self.num_compiled_graphs: int | None = None
        self.has_warned = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compile, unless the sanity check before did.

        After the probes of `on_fit_start`, whose inputs have other shapes.
        """
        if self.layers is None:
            self.layers = CompiledLayers(pl_module.model)

    on_sanity_check_start = on_train_start

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Restore the layers if compiling failed; warn once if later steps compile again."""
        if self.layers is None:
            return
        if self.layers.failure is not None:
            self.on_fit_end()
        elif trainer.global_step >= _LAST_COMPILING_STEP:
            self._warn(trainer.global_step)

    def on_fit_end(self, *_: Any) -> None:
        """Restore the layers: the plain model is saved and evaluated."""
        if self.layers is not None:
            self.layers.remove()
            self.layers = None

    on_exception = on_fit_end

    def _warn(self, step: int) -> None:
        now, before = num_compiled_graphs(), self.num_compiled_graphs
        if before is not None and now > before and not self.has_warned:
            self.has_warned = True
            log.warning(
                "compile: layers were recompiled at step %d, although no new shapes were expected "
                "(%s); recompiling delays the step: type trainer.compile=false if it happens again",
                step,
                recompile_reason(now - before),
            )
        self.num_compiled_graphs = now
