"""Run folders and resuming: which run, from which checkpoint, and which settings have changed.

`folder` creates, checks and locks run folders, `find` locates existing runs, `manifest` records
what a run was made from and compares it with the current settings, `start` opens a run, and `ranks`
executes it in the ranks of a verb. Importing this package does not import torch.
"""

from app.run.find import AUTO, NEVER, checkpoints_of, find_run, find_run_to_resume, typed_step
from app.run.manifest import ALLOWED, describe_global_batch, global_batch_of
from app.run.start import ExistingRun, Run, compare_existing, find_newest_good, open_run
