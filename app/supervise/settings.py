"""When a run is started again, and when a rank that says nothing is taken for dead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SuperviseConfig:
    max_restarts: int = 0
    """times a run that died or hangs is started again, from its newest good checkpoint; on one
    machine (torchrun has --max-restarts)"""
    hang_minutes: float | None = 10.0
    """a rank hangs when it does nothing in the training loop for so long, and for ten times as
    long as ever before, and no other does anything; null = never. Several ranks that this command
    starts are watched always, one where max_restarts is given; ranks of torchrun or srun never"""
    requeue: bool = False
    """put a SLURM job back into its queue after SIGUSR1 (--signal=USR1@120) has let the run save
    itself; with resume=auto it then goes on"""
