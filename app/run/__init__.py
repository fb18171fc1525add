"""What a run's folder is, and resuming it: which run, from which checkpoint, and what changed.

`folder` makes and describes it, `find` finds it again, `changes` and `global_batch` compare it with
what was typed now, `lock` keeps a second process away, `start` opens it for the verb. No torch.
"""

from app.run.changes import ALLOWED, TRUST_KEYS
from app.run.find import AUTO, MUST, NEVER, checkpoints_of, find_run, find_run_to_resume, typed_step
from app.run.global_batch import describe_global_batch
from app.run.start import Run, check_resume, find_newest_good, open_run

__all__ = [
    "ALLOWED",
    "AUTO",
    "MUST",
    "NEVER",
    "TRUST_KEYS",
    "Run",
    "check_resume",
    "checkpoints_of",
    "describe_global_batch",
    "find_newest_good",
    "find_run",
    "find_run_to_resume",
    "open_run",
    "typed_step",
]
