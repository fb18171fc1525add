"""Where Lightning's loops stand after so many steps: counted anew, never read from a file.

Lightning keeps how far each hook of a batch has come, for checkpoints within one. Here a checkpoint
stands between two steps, behind the validation that belongs to the first, so the step says all.
"""

from __future__ import annotations

import copy
from typing import Any


def progress_after(fit_loop: Any, step: int, accumulation: int) -> dict[str, Any]:
    """Return a state for `fit_loop`, a new one, as if `step` steps were done.

    Batches are counted from here on, as the loader does which begins at `step`; only their total,
    by which Lightning validates, is the whole run's.
    """
    state = copy.deepcopy(fit_loop.state_dict())
    num_batches = step * accumulation
    batches = state["epoch_loop.batch_progress"]["total"]
    batches.update(dict.fromkeys(batches, num_batches))
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    steps.update(dict.fromkeys(steps, step))
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    for epochs in (state["epoch_progress"]["total"], state["epoch_progress"]["current"]):
        epochs.update(ready=1, started=1)  # in the middle of the one epoch that a run is to it
    return state
