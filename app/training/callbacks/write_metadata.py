"""When a run's folder becomes that of the process that goes on with it: once it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L


class WriteMetadata(L.Callback):
    """Call `take_over` on the first rank: before a new run, and when a resumed one trains.

    Until then the folder is left as the run before has left it: this one may yet fail.
    """

    def __init__(self, take_over: Callable[[], None], *, is_resumed: bool) -> None:
        self.take_over = take_over
        self.waits = is_resumed
        self.is_done = False

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Take a new run's folder."""
        if not self.waits:
            self._take_over(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take a resumed run's folder: all is loaded and agreed."""
        self._take_over(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take the folder of a run that had no step left."""
        self._take_over(trainer)

    def _take_over(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not self.is_done:
            self.take_over()
        self.is_done = True
