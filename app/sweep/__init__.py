"""Sweeps: the trials of a grid or a search, each in a separate process, compared at the end.

Trials need separate processes because Lightning starts further ranks with the same command line,
and because the memory of one trial must not affect the next.
"""

from app.sweep.run import run_sweep

__all__ = ["run_sweep"]
