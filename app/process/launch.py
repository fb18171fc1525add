"""Which of a run's processes this one is, as torchrun, srun or our own launcher tell it.

The only place that reads their variables: a run whose ranks read them differently hangs.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from app.process.heartbeat import PARENT_VARIABLE, PIPE_VARIABLE, has_launcher

RUN_DIR_VARIABLE = "LOFT_RUN_DIR"
"""hands the run's folder to the ranks that are started by the same command line"""
STEP_VARIABLE = "LOFT_RESUME_STEP"
"""hands them the step of the checkpoint that the run goes on from, 0 where it starts anew"""
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
"""what ranks find in their environment, and a run of its own must not inherit"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """One way in which ranks are started, and the variables that come with it."""

    detected_by: str
    ranks: tuple[str, ...]
    """all of them are 0 on the first rank"""
    beside: tuple[str, ...]
    world_size: str | None


WAYS = (
    Launcher(  # srun
        detected_by="SLURM_NTASKS",
        ranks=("SLURM_PROCID",),
        beside=("SLURM_PROCID", "SLURM_LOCALID"),
        world_size="SLURM_NTASKS",
    ),
    Launcher(  # torchrun
        detected_by="RANK",
        ranks=("RANK",),
        beside=("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
    Launcher(  # our own launcher, by Lightning's names
        detected_by="LOCAL_RANK",
        ranks=("NODE_RANK", "LOCAL_RANK"),
        beside=("WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
    Launcher(  # by hand on each machine, where this program starts the ranks
        detected_by="NODE_RANK",
        ranks=("NODE_RANK",),
        beside=("MASTER_ADDR", "MASTER_PORT"),
        world_size=None,
    ),
    Launcher(  # nobody says only this
        detected_by="WORLD_SIZE",
        ranks=("RANK",),
        beside=("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        world_size="WORLD_SIZE",
    ),
)
"""in the order in which Lightning looks for them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the environment says of this process."""

    detected_by: str | None = None
    is_first: bool = True
    num_ranks: int | None = None
    """ranks that were started; None where this program is to start them"""
    problems: tuple[str, ...] = ()


@functools.cache
def read_launch() -> Launch:
    """Read the environment; half a set of variables makes no rank, and is a problem.

    Once, as the process found it: Lightning sets these variables for its children, and removes some
    of them when it has finished.
    """
    way = next((way for way in WAYS if _is_taken(way.detected_by)), None)
    if way is None:
        return Launch()
    problems = _problems_of(way)
    if problems:
        return Launch(detected_by=way.detected_by, problems=tuple(problems))
    return Launch(
        detected_by=way.detected_by,
        is_first=all(int(os.environ[name]) == 0 for name in way.ranks),
        num_ranks=None if way.world_size is None else int(os.environ[way.world_size]),
    )


def _is_taken(detected_by: str) -> bool:
    value = os.environ.get(detected_by)
    if detected_by == "SLURM_NTASKS":
        # A shell on a node has it, and torchrun within srun; Lightning draws the same lines.
        is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
        return value is not None and not is_shell and "TORCHELASTIC_RUN_ID" not in os.environ
    if detected_by == "NODE_RANK":
        return value not in (None, "0") or (value == "0" and "MASTER_ADDR" in os.environ)
    if detected_by == "WORLD_SIZE":
        return value not in (None, "1")
    return value is not None


def _problems_of(way: Launcher) -> list[str]:
    numbers = {way.detected_by, *way.ranks, way.world_size or way.detected_by} & set(os.environ)
    problems = [
        f"{name}={os.environ[name]}: expected a whole number"
        for name in sorted(numbers)
        if not os.environ[name].isdecimal()
    ]
    missing = [name for name in way.beside if name not in os.environ]
    if missing:
        problems.append(
            f"{way.detected_by}={os.environ[way.detected_by]} says that this is one of several "
            f"ranks, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            f"start the ranks with torchrun or srun, or type: unset {way.detected_by}"
        )
    return problems


def is_first_rank() -> bool:
    """Say whether this process speaks for the run; ranks above 0 do not."""
    return read_launch().is_first


_decided: str | None = None
"""the folder that this process has decided on, as it stands in the environment"""


def run_dir() -> Path | None:
    """Return the run's folder that this process or its launcher has decided on; None before.

    Only theirs: a shell, or the process of another run, may have left one in the environment.
    """
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if not folder or not (folder == _decided or has_launcher()):
        return None
    return Path(folder)


def hand_down(folder: Path) -> None:
    """Let this process, and the ranks that it starts, know the run's folder."""
    global _decided
    _decided = os.environ[RUN_DIR_VARIABLE] = str(folder)


def is_child() -> bool:
    """Say whether the run's own launcher started this process, after it had checked everything."""
    return bool(os.environ.get(RUN_DIR_VARIABLE)) and has_launcher()


def is_started_here() -> bool:
    """Say whether this program has started the ranks, or is the only one; not torchrun or srun."""
    return read_launch().detected_by in (None, "LOCAL_RANK")


def is_one_of_several() -> bool:
    """Say whether ranks were started from outside, so that none of them can decide for all."""
    launch = read_launch()
    return launch.detected_by == "NODE_RANK" or (launch.num_ranks or 1) > 1


def check_launch(num_ranks: int | None) -> list[str]:
    """List what is wrong with how this process was started.

    `num_ranks`: what the settings ask for; None for a verb that runs as one process.
    """
    launch = read_launch()
    if launch.problems:
        return list(launch.problems)
    if launch.num_ranks in (None, num_ranks or 1):
        return []
    started = f"{launch.num_ranks} ranks were started (WORLD_SIZE or SLURM_NTASKS)"
    if num_ranks is None:
        return [f"{started}, but this runs as one process; start it without torchrun or srun"]
    return [
        f"{started}, but trainer.devices x trainer.num_nodes is {num_ranks}; {_fitting(launch)}"
    ]


def _fitting(launch: Launch) -> str:
    """Word the settings that fit the ranks that were started."""
    total = launch.num_ranks or 1
    names = ("SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE")
    told = os.environ.get(names[0] if launch.detected_by == "SLURM_NTASKS" else names[1], "")
    per_node = int(told) if told.isdecimal() and int(told) else total
    nodes = f" trainer.num_nodes={total // per_node}" if per_node != total else ""
    return f"type trainer.devices={per_node}{nodes}"


def free_port() -> int:
    """Return a port that the system has found free; another program may take it before us."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
