"""Which rank of a run this process is, from the variables of torchrun, srun or the supervisor.

The only module that reads these variables: ranks that interpret them differently would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.text import printable

_RUN_DIR_VARIABLE = "LOFT_RUN_DIR"
"""variable with the run's folder, for the ranks started by this process"""
STEP_VARIABLE = "LOFT_RESUME_STEP"
"""variable with the step of the checkpoint that the ranks resume from, 0 for a new run"""
PIPE_VARIABLE = "LOFT_HEARTBEAT"
"""variable with the file descriptor of a rank's end of the heartbeat pipe"""
PARENT_VARIABLE = "LOFT_PARENT"
"""variable with the id of the parent process, which the child must not outlive"""
_PR_SET_PDEATHSIG = 1
"""option of prctl: the signal that a process gets when its parent ends"""
RANK_VARIABLES = (
    _RUN_DIR_VARIABLE,
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
"""variables set for ranks, which a separate run must not inherit"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """A launcher of ranks, and the variables that it sets."""

    detected_by: str
    """variable whose presence identifies the launcher"""
    ranks: tuple[str, ...]
    """variables that are all 0 on the first rank"""
    required: tuple[str, ...]
    """other variables that the launcher always sets"""
    world_size: str = "WORLD_SIZE"
    """variable with the number of ranks"""


_LAUNCHERS = (
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
    ),
    Launcher(  # the supervisor, with Lightning's names
        detected_by="LOCAL_RANK",
        ranks=("NODE_RANK", "LOCAL_RANK"),
        required=("WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Launcher(  # no launcher sets only this variable: reports the missing ones
        detected_by="WORLD_SIZE",
        ranks=("RANK",),
        required=("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
)
"""launchers in the order in which Lightning detects them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How this process was started, according to its environment."""

    has_parent: bool = False
    """whether this program started the process, as a rank or as a trial of a sweep"""
    is_child: bool = False
    """whether the process is a rank that the supervisor started after all checks had passed"""
    detected_by: str | None = None
    """variable by which the launcher was detected; None without a launcher"""
    is_first: bool = True
    """whether the process is rank 0"""
    is_first_on_machine: bool = True
    """whether the process is the first rank of its machine"""
    num_ranks: int | None = None
    """number of ranks that were started; None if this program starts them"""
    num_local_ranks: int | None = None
    """number of ranks on this machine; None if the launcher does not set it"""
    first_address: str | None = None
    """address of rank 0's machine, as the launcher sets it"""
    problems: tuple[str, ...] = ()
    """what is wrong with the launcher's variables"""

    @property
    def num_nodes(self) -> int:
        """Machines on which ranks were started, the same number on each."""
        total = self.num_ranks or 1
        # A step of one task in a SLURM job of more has SLURM_NTASKS_PER_NODE of the job.
        return max(1, total // (self.num_local_ranks or total))

    @property
    def starts_own_ranks(self) -> bool:
        """Whether this process starts the ranks of this machine."""
        return not self.is_child and self.detected_by is None

    @property
    def is_started_here(self) -> bool:
        """Whether this program, not torchrun or srun, started the ranks or is the only process."""
        return self.detected_by in (None, "LOCAL_RANK")

    @property
    def is_one_of_several(self) -> bool:
        """Whether this process is one of several ranks, none of which can decide for all."""
        return (self.num_ranks or 1) > 1


@functools.cache
def read_launch() -> Launch:
    """Read the environment; an incomplete set of a launcher's variables is a problem.

    The environment is read once, as it was at the start: Lightning sets these variables for its
    children and removes some at its end, and `exit_with_parent` removes that of the parent.
    """
    has_parent = os.environ.get(PARENT_VARIABLE) == str(os.getppid())
    is_child = has_parent and bool(os.environ.get(_RUN_DIR_VARIABLE))
    detected = (launcher for launcher in _LAUNCHERS if _is_detected(launcher.detected_by))
    launcher = next(detected, None)
    if launcher is None:
        return Launch(has_parent=has_parent, is_child=is_child)
    problems = tuple(_check_variables(launcher))
    names, world_size = launcher.ranks, launcher.world_size
    is_slurm = launcher.detected_by == "SLURM_NTASKS"
    local = "SLURM_LOCALID" if is_slurm else "LOCAL_RANK"
    per_node = os.environ.get("SLURM_NTASKS_PER_NODE" if is_slurm else "LOCAL_WORLD_SIZE", "")
    return Launch(
        has_parent=has_parent,
        is_child=is_child,
        detected_by=launcher.detected_by,
        is_first=bool(problems) or all(int(os.environ[name]) == 0 for name in names),
        is_first_on_machine=bool(problems) or os.environ.get(local, "0") == "0",
        num_ranks=None if problems else int(os.environ[world_size]),
        first_address=os.environ.get("MASTER_ADDR"),
        num_local_ranks=int(per_node) if per_node.isdecimal() and int(per_node) else None,
        problems=problems,
    )


def _is_detected(detected_by: str) -> bool:
    value = os.environ.get(detected_by)
    if detected_by == "SLURM_NTASKS":
        # Also set in a shell on a node, and under torchrun within srun; the rules are Lightning's.
        is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
        return value is not None and not is_shell and "TORCHELASTIC_RUN_ID" not in os.environ
    if detected_by == "WORLD_SIZE":
        return value not in (None, "1")
    return value is not None


def _check_variables(launcher: Launcher) -> list[str]:
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
            f"{detected_by}={os.environ[detected_by]} marks this process as one of several ranks, "
            f"but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start the "
            f"ranks with torchrun or srun, or type: unset {detected_by}"
        )
    return problems


def launched_rank() -> int:
    """Return the rank that torchrun or srun gave this process; 0 for a single process."""
    launched_by_slurm = read_launch().detected_by == "SLURM_NTASKS"
    return int(os.environ.get("SLURM_PROCID" if launched_by_slurm else "RANK", "0"))


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which prints and writes for the run."""
    return read_launch().is_first


def is_first_on_machine() -> bool:
    return read_launch().is_first_on_machine


def local_rank() -> int:
    """Return the rank of this process on its machine; 0 for a single process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_child() -> bool:
    """Return whether the supervisor started this process, after all checks had passed."""
    return read_launch().is_child


def child_environment() -> dict[str, str]:
    """Return the environment of a child that is no rank, and that `exit_with_parent` ends."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return kept | {PARENT_VARIABLE: str(os.getpid())}


def exit_with_parent() -> None:
    """Make the kernel kill this process when the process that started it ends."""
    read_launch()
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent has ended in the meantime
        os._exit(128 + signal.SIGKILL)


_own_run_dir: str | None = None
"""run folder set by this process"""


def run_dir() -> Path | None:
    """Return the run's folder as set by this process or its parent; None if it is not set yet.

    The variable may also come from a shell or another run, in which case it is ignored.
    """
    folder = os.environ.get(_RUN_DIR_VARIABLE)
    is_own = folder == _own_run_dir or read_launch().has_parent
    return Path(folder) if folder and is_own else None


def set_run_dir(folder: Path) -> None:
    """Set the run's folder for this process and the ranks that it starts."""
    global _own_run_dir
    _own_run_dir = os.environ[_RUN_DIR_VARIABLE] = str(folder)


_typed_again: list[str] = []
"""settings of this process's run that a resumed run never takes from its folder"""


def set_typed_again(words: Iterable[str]) -> None:
    """Set the words that commands which resume this process's run must repeat."""
    _typed_again[:] = words


def resume_words(folder: Path) -> str:
    """Return the words that resume this process's run in `folder`, quoted for a shell."""
    return quote_words(f"resume={folder}", *_typed_again)


def quote_words(*words: str) -> str:
    """Return overrides as a person types them in a shell, without control characters."""
    return shlex.join(map(printable, words))


def check_launch(num_ranks: int | None, ranks_per_node: int | None = None) -> list[str]:
    """List what is wrong with how this process was started.

    `num_ranks`, `ranks_per_node`: as the settings request; None for a verb that runs in one
    process.
    """
    launch = read_launch()
    if launch.problems:
        return list(launch.problems)
    if launch.is_one_of_several and (problem := _check_equal_nodes(launch, ranks_per_node)):
        return [problem]
    if launch.num_ranks in (None, num_ranks or 1):
        return []
    were = "rank was" if launch.num_ranks == 1 else "ranks were"
    started = f"{launch.num_ranks} {were} started (WORLD_SIZE or SLURM_NTASKS)"
    if num_ranks is None:
        return [
            f"{started}, but this command runs in one process; start it without torchrun or srun"
        ]
    per_node = launch.num_local_ranks or launch.num_ranks
    nodes = f" trainer.num_nodes={launch.num_nodes}" if launch.num_nodes > 1 else ""
    typed = f"type trainer.devices={per_node}{nodes}"
    if launch.detected_by == "SLURM_NTASKS" and launch.num_ranks == 1:
        typed += ", or, in a shell of a job, unset SLURM_NTASKS: this command then starts the ranks"
    return [f"{started}, but trainer.devices x trainer.num_nodes is {num_ranks}; {typed}"]


def _check_equal_nodes(launch: Launch, ranks_per_node: int | None) -> str | None:
    total, here = launch.num_ranks or 1, launch.num_local_ranks
    if launch.detected_by == "SLURM_NTASKS" and here is None:
        return (
            f"SLURM_NTASKS={total}, but SLURM_NTASKS_PER_NODE is not set: all nodes need the same "
            f"number of ranks; type --ntasks-per-node={ranks_per_node or total} instead of --ntasks"
        )
    if here is not None and total % here:
        return (
            f"{here} of {total} ranks were started on this machine: all machines need the same "
            "number; type the same --nproc-per-node (--ntasks-per-node) on each"
        )
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only be reached from this machine."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def free_port() -> int:
    """Return a port that is free now; another program may take it at any time.

    Not one of those from which Linux takes ports for connections (32768 to 60999): ranks listen
    seconds later.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
