"""A sweep: trials of a grid or a search, each in a process of its own, compared at the end.

A process of its own, because Lightning starts further ranks by the same command line, and because
what one trial leaves in memory must not reach the next.
"""

from app.sweep.run import run_sweep

__all__ = ["run_sweep"]
