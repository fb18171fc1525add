"""Which process of a run this one is, by the variables of torchrun, srun or our own launcher.

The only place that reads them: a run whose ranks read them differently hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

RUN_DIR_VARIABLE = "LOFT_RUN_DIR"
"""passes the run's folder to the ranks that are started by the same command line"""
STEP_VARIABLE = "LOFT_RESUME_STEP"
"""passes them the step of the checkpoint to resume from, 0 for a new run"""
PIPE_VARIABLE = "LOFT_HEARTBEAT"
"""passes a rank its end of the heartbeat pipe"""
PARENT_VARIABLE = "LOFT_PARENT"
"""passes a child the id of the process that it must not outlive"""
PR_SET_PDEATHSIG = 1
VARIABLES_OF_A_RANK = (
    RUN_DIR_VARIABLE,
    STEP_VARIABLE,
    PIPE_VARIABLE,
    PARENT_VARIABLE,
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""set for ranks; a run of its own must not inherit them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """One way to start ranks, and the variables that it sets."""

    detected_by: str
    ranks: tuple[str, ...]
    """variables that are all 0 on the first rank"""
    required: tuple[str, ...]
    """variables that it sets too"""
    world_size: str


LAUNCHERS = (
    Launcher(  # srun
        detected_by="SLURM_NTASKS",
        ranks=("SLURM_PROCID",),
        required=("SLURM_PROCID", "SLURM_LOCALID"),
        world_size="SLURM_NTASKS",
    ),
    Launcher(  # torchrun
        detected_by="RANK",
        ranks=("RANK",),
        required=("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
    Launcher(  # our own launcher, by Lightning's names
        detected_by="LOCAL_RANK",
        ranks=("NODE_RANK", "LOCAL_RANK"),
        required=("WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
    Launcher(  # no launcher sets only this
        detected_by="WORLD_SIZE",
        ranks=("RANK",),
        required=("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
)
"""in the order in which Lightning detects them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How this process was started, as its environment says."""

    has_parent: bool = False
    """whether a process of this program started this one, as a rank or as a trial of a sweep"""
    is_child: bool = False
    """whether it is a rank that our own launcher started, after all checks had passed"""
    detected_by: str | None = None
    """the variable by which the launcher was detected"""
    is_first: bool = True
    is_first_here: bool = True
    """whether it is the first rank of its machine"""
    num_ranks: int | None = None
    """ranks that were started; None where this program is to start them"""
    ranks_here: int | None = None
    """those of this machine, where the launcher says it"""
    first_address: str | None = None
    """the machine at which the ranks meet, as the launcher calls it"""
    problems: tuple[str, ...] = ()

    @property
    def starts_own_ranks(self) -> bool:
        """Whether this program is to start the ranks of this machine."""
        return not self.is_child and self.detected_by is None

    @property
    def is_started_here(self) -> bool:
        """Whether this program started the ranks, or is the only one; not torchrun or srun."""
        return self.detected_by in (None, "LOCAL_RANK")

    @property
    def is_one_of_several(self) -> bool:
        """Whether ranks were started from outside, so that none of them can decide for all."""
        return (self.num_ranks or 1) > 1


@functools.cache
def read_launch() -> Launch:
    """Read the environment; an incomplete set of variables makes no rank, and is a problem.

    Once, as the process found it: Lightning sets these variables for its children, and removes some
    of them when it has finished; `live_with_parent` removes the parent's.
    """
    has_parent = os.environ.get(PARENT_VARIABLE) == str(os.getppid())
    is_child = has_parent and bool(os.environ.get(RUN_DIR_VARIABLE))
    launcher = next((one for one in LAUNCHERS if _is_detected(one.detected_by)), None)
    if launcher is None:
        return Launch(has_parent=has_parent, is_child=is_child)
    problems = tuple(_problems_of(launcher))
    names, world_size = launcher.ranks, launcher.world_size
    is_slurm = launcher.detected_by == "SLURM_NTASKS"
    local = "SLURM_LOCALID" if is_slurm else "LOCAL_RANK"
    per_node = os.environ.get("SLURM_NTASKS_PER_NODE" if is_slurm else "LOCAL_WORLD_SIZE", "")
    return Launch(
        has_parent=has_parent,
        is_child=is_child,
        detected_by=launcher.detected_by,
        is_first=bool(problems) or all(int(os.environ[name]) == 0 for name in names),
        is_first_here=bool(problems) or os.environ.get(local, "0") == "0",
        num_ranks=None if problems else int(os.environ[world_size]),
        first_address=os.environ.get("MASTER_ADDR"),
        ranks_here=int(per_node) if per_node.isdecimal() and int(per_node) else None,
        problems=problems,
    )


def _is_detected(detected_by: str) -> bool:
    value = os.environ.get(detected_by)
    if detected_by == "SLURM_NTASKS":
        # Also set in a shell on a node, and under torchrun within srun; Lightning's own rules.
        is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
        return value is not None and not is_shell and "TORCHELASTIC_RUN_ID" not in os.environ
    if detected_by == "WORLD_SIZE":
        return value not in (None, "1")
    return value is not None


def _problems_of(launcher: Launcher) -> list[str]:
    detected_by = launcher.detected_by
    numbers = {detected_by, *launcher.ranks, launcher.world_size} & set(os.environ)
    problems = [
        f"{name}={os.environ[name]}: expected a whole number"
        for name in sorted(numbers)
        if not os.environ[name].isdecimal()
    ]
    missing = [name for name in launcher.required if name not in os.environ]
    if missing:
        problems.append(
            f"{detected_by}={os.environ[detected_by]} says that this is one of several "
            f"ranks, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            f"start the ranks with torchrun or srun, or type: unset {detected_by}"
        )
    return problems


def launched_rank() -> int:
    """Return the rank that torchrun or srun has given this process; 0 for a single one."""
    launched_by_slurm = read_launch().detected_by == "SLURM_NTASKS"
    return int(os.environ.get("SLURM_PROCID" if launched_by_slurm else "RANK", "0"))


def is_first_rank() -> bool:
    """Say whether this process speaks for the run; ranks above 0 do not."""
    return read_launch().is_first


def is_first_here() -> bool:
    """Say whether this process is the first rank of its machine."""
    return read_launch().is_first_here


def local_rank() -> int:
    """Return the number of this process among the ranks of its machine; 0 for a single one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_child() -> bool:
    """Say whether our own launcher started this process, after it had checked everything."""
    return read_launch().is_child


def live_with_parent() -> None:
    """Have this process killed when the process that started it ends."""
    read_launch()
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended in the meantime
        os._exit(128 + signal.SIGKILL)


_decided: str | None = None
"""the folder that this process has decided on, as in the environment"""


def run_dir() -> Path | None:
    """Return the run's folder that this process or its launcher has decided on; None before.

    Only theirs: a shell, or the process of another run, may have left one in the environment.
    """
    folder = os.environ.get(RUN_DIR_VARIABLE)
    is_known = folder == _decided or read_launch().has_parent
    return Path(folder) if folder and is_known else None


def set_run_dir(folder: Path) -> None:
    """Set the run's folder for this process and the ranks that it starts."""
    global _decided
    _decided = os.environ[RUN_DIR_VARIABLE] = str(folder)


def check_launch(num_ranks: int | None, ranks_per_node: int | None = None) -> list[str]:
    """List what is wrong with how this process was started.

    `num_ranks`, `ranks_per_node`: what the settings ask for; None for a verb that runs as one
    process.
    """
    launch = read_launch()
    if launch.problems:
        return list(launch.problems)
    if launch.is_one_of_several and (unequal := _unequal_nodes(launch, ranks_per_node)):
        return [unequal]
    if launch.num_ranks in (None, num_ranks or 1):
        return []
    were = "rank was" if launch.num_ranks == 1 else "ranks were"
    started = f"{launch.num_ranks} {were} started (WORLD_SIZE or SLURM_NTASKS)"
    if num_ranks is None:
        return [f"{started}, but this runs as one process; start it without torchrun or srun"]
    return [
        f"{started}, but trainer.devices x trainer.num_nodes is {num_ranks}; {_fitting(launch)}"
    ]


def _unequal_nodes(launch: Launch, ranks_per_node: int | None) -> str | None:
    """Return what is wrong where machines have not started as many ranks each, None if they have.

    `ranks_per_node`: what the settings ask for.
    """
    total, here = launch.num_ranks or 1, launch.ranks_here
    if launch.detected_by == "SLURM_NTASKS" and here is None:
        return (
            f"SLURM_NTASKS={total}, and SLURM_NTASKS_PER_NODE is not set: every node needs as many "
            f"ranks; type --ntasks-per-node={ranks_per_node or total} instead of --ntasks"
        )
    if here is not None and total % here:
        return (
            f"{here} ranks were started on this machine, of {total}: every machine needs as many; "
            "type the same --nproc-per-node (--ntasks-per-node) on each"
        )
    return None


def _fitting(launch: Launch) -> str:
    """Return the settings to type for the ranks that were started."""
    total = launch.num_ranks or 1
    per_node = launch.ranks_here or total
    nodes = f" trainer.num_nodes={total // per_node}" if per_node != total else ""
    typed = f"type trainer.devices={per_node}{nodes}"
    if launch.detected_by == "SLURM_NTASKS" and total == 1:
        typed += ", or unset SLURM_NTASKS in a shell of a job, to have the ranks started from there"
    return typed


def is_loopback(host: str) -> bool:
    """Tell whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def free_port() -> int:
    """Return a port that is free now; another program may take it before us."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
