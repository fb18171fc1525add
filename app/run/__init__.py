"""What a run's folder is, and resuming it: which run, from which checkpoint, and what changed.

`folder` makes, describes and locks it, `find` finds it again, `changes` compares it with what was
typed now, `start` opens it for the verb, in whose ranks `ranks` runs it. No torch.
"""

from app.run.changes import ALLOWED, describe_global_batch, global_batch_of
from app.run.find import AUTO, MUST, NEVER, checkpoints_of, find_run, find_run_to_resume, typed_step
from app.run.start import ExistingRun, Run, compare_existing, find_newest_good, open_run

__all__ = [
    "ALLOWED",
    "AUTO",
    "MUST",
    "NEVER",
    "ExistingRun",
    "Run",
    "checkpoints_of",
    "compare_existing",
    "describe_global_batch",
    "find_newest_good",
    "find_run",
    "find_run_to_resume",
    "global_batch_of",
    "open_run",
    "typed_step",
]
