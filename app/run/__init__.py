"""Going on with a run: which one and from where, who else is at work on it, what changed since.

`which` finds the run, `changes` compares it with what was typed now, `lock` keeps a second process
away, `start` puts it together for the verb. Needs no torch, and changes nothing of a run.
"""

from app.run.changes import ALLOWED, describe_global_batch
from app.run.find import AUTO, MUST, NEVER, checkpoints_of, find_run_to_resume, typed_step
from app.run.start import Start, check_resume, find_newest_good, start_run

__all__ = [
    "ALLOWED",
    "AUTO",
    "MUST",
    "NEVER",
    "Start",
    "check_resume",
    "checkpoints_of",
    "describe_global_batch",
    "find_newest_good",
    "find_run_to_resume",
    "start_run",
    "typed_step",
]
