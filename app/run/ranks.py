"""Whether a training runs in this process or in ranks that it starts, and how it starts them."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight import requested_devices
from app.preflight.couplings.devices import Devices
from app.process.errors import DONE
from app.process.launch import Launch, is_first_rank, launched_rank, read_launch, run_dir
from app.process.peers import Peers
from app.process.reporting import keep_reason, write_error_file
from app.process.signals import wait_to_be_ended
from app.process.supervisor import CODES_OF_SIGNALS, SuperviseConfig, Supervisor, say
from app.run import NEVER, Run, checkpoints_of, find_newest_good, typed_step
from data_modules import printable

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

RENDEZVOUS_PORT = 29500
"""torchrun's own default"""
MEETING_SECONDS = 600
"""between the first machine's line and the last one's: torchrun's own limit is a minute"""
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""has the ranks meet at a store of their own. With that of its agents torchrun cannot take a
machine back: the agents that stayed do not tell the new one where it is (torch 2.13)"""
REQUEUE_SECONDS = 120.0
"""that the first rank has to write its page, end its loggers and requeue the job"""
FOLDER_OF_ALL = "/shared/runs"
"""stands for a folder that all machines see"""


def check_nodes(config: TrainConfig, words: Sequence[str] | None) -> list[str]:
    """Refuse several machines without torchrun or srun, with the line to type on each of them.

    `words`: of this command line; None for the trials of a sweep.
    """
    nodes = config.trainer.num_nodes
    if nodes == 1 or read_launch().detected_by is not None:
        return []
    if words is None:
        return [
            f"trainer.num_nodes={nodes}: each trial of a sweep runs on one machine; type "
            "trainer.num_nodes=1"
        ]
    per_node = requested_devices(config).ranks_per_node
    typed = list(words)
    if config.output.dir is None:
        typed.append(f"output.dir={FOLDER_OF_ALL}/{config.output.name or 'train'}")
    line = f"{torchrun(nodes, per_node, socket.gethostname())} -m app.train {shlex.join(typed)}"
    return [
        f"trainer.num_nodes={nodes}: ranks on several machines are started by torchrun or srun; "
        f"type on each of the {nodes}, this one ({socket.gethostname()}) being the first: {line}"
    ]


def check_supervise(config: TrainConfig) -> list[str]:
    """List the `supervise` settings that conflict with how this process was started."""
    problems = []
    detected_by = read_launch().detected_by
    if config.supervise.max_restarts and detected_by is not None:
        problems.append(
            f"supervise.max_restarts={config.supervise.max_restarts} is for ranks that this "
            f"command starts on one machine, and {detected_by} is set: something else has started "
            "it; leave it out (torchrun has --max-restarts, with resume=auto and output.dir)"
        )
    if config.supervise.requeue and config.resume == NEVER:
        problems.append(
            "supervise.requeue=true would start the run anew from the queue; type resume=auto"
        )
    if config.supervise.requeue and (step := typed_step(config.resume)) is not None:
        problems.append(
            f"supervise.requeue=true would go back to step {step} each time that the job is run, "
            f"and drop what it has saved since; type resume=auto output.dir={config.output.dir} to "
            "go on from the newest checkpoint, or supervise.requeue=false"
        )
    return problems


def starts_ranks(config: TrainConfig) -> bool:
    """Tell whether this process is to start the ranks and supervise them."""
    if not read_launch().starts_own_ranks:
        return False
    return requested_devices(config).ranks_per_node > 1 or config.supervise.max_restarts > 0


def run_ranks(config: TrainConfig, run: Run, words: Sequence[str]) -> int:
    """Start the ranks of this machine by the `words` of the command line; return the exit code."""
    devices = requested_devices(config)
    superseded = run.superseded_checkpoints()

    def newest_step() -> int:
        if run.superseded_checkpoints() & superseded:  # no rank has started to train
            return run.step
        good, damaged = find_newest_good(run.folder)
        for sentence in damaged:
            say(f"RESUME: {sentence}")
        return 0 if good is None else good.step

    supervisor = Supervisor(
        command=[sys.executable, "-m", "app.train", *words],
        folder=run.folder,
        config=config.supervise,
        step=run.step,
        newest_step=newest_step,
        of_rank=variables_of(devices) if devices.num_ranks > 1 else [{}],
        chooses_port=read_launch().detected_by is None,
    )
    code = supervisor.run()
    if code != DONE and code not in CODES_OF_SIGNALS:  # which the first rank has reported
        say(resume_command())
    return code


def variables_of(devices: Devices) -> list[dict[str, str]]:
    """Return the variables of each rank of this machine, by Lightning's names."""
    return [
        {
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(devices.num_ranks),
        }
        for rank in range(devices.ranks_per_node)
    ]


def run_shares(verb: str, folder: Path, devices: Devices, words: Sequence[str]) -> int:
    """Start ranks that each do a share of a verb without steps; return the exit code."""
    return Supervisor(
        command=[sys.executable, "-m", f"app.{verb}", *words],
        folder=folder,
        config=SuperviseConfig(),
        step=0,
        newest_step=lambda: 0,
        of_rank=variables_of(devices),
    ).run()


def resume_command() -> str:
    """Return the command that resumes this process's run, if it has saved anything."""
    folder, here = run_dir(), Path.cwd()
    if folder is None or not checkpoints_of(folder).checkpoints():
        return "nothing is saved yet"
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    by = _start_of_ranks(read_launch())
    return f"to resume: {by} -m app.train resume={shlex.quote(printable(str(shown)))}"


def _start_of_ranks(launch: Launch) -> str:
    """Return what starts the ranks again that run now, up to `-m`."""
    if launch.starts_own_ranks or launch.is_started_here:
        return "python"
    num_ranks = launch.num_ranks or 1
    per_node = launch.ranks_here or num_ranks
    nodes = num_ranks // per_node
    if launch.detected_by == "SLURM_NTASKS":
        return f"srun --nodes={nodes} --ntasks-per-node={per_node} python"
    first = launch.first_address or socket.gethostname()
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return torchrun(nodes, per_node, first, max_restarts=restarts)


def torchrun(num_nodes: int, per_node: int, first: str, *, max_restarts: int = 0) -> str:
    """Return the torchrun that starts ranks on each machine, up to `-m`; `first` is one of them."""
    words = ["torchrun", f"--nnodes={num_nodes}", f"--nproc-per-node={per_node}"]
    if max_restarts:
        words.append(f"--max-restarts={max_restarts}")
    if num_nodes > 1:
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{RENDEZVOUS_PORT}"]
        words.append(f"--rdzv-conf=read_timeout={MEETING_SECONDS}")
    if num_nodes > 1 and max_restarts:
        words.insert(0, f"{OWN_STORE_VARIABLE}=1")
    return shlex.join(words)


def watch_ranks(run: Run, num_ranks: int) -> Peers:
    """Return the ranks of a run that torchrun or srun has started, to be watched from this one."""
    minutes = run.config.supervise.hang_minutes
    is_one_machine = read_launch().ranks_here in (None, num_ranks)
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    is_told = is_first_rank() and not is_one_machine
    if restarts and is_told and OWN_STORE_VARIABLE not in os.environ:
        log.warning(
            "a machine that is lost can only come back under torchrun --max-restarts with %s=1 in "
            "the environment of every torchrun",
            OWN_STORE_VARIABLE,
        )

    def save_reason(message: str) -> None:
        write_error_file(message)
        keep_reason(message)

    return Peers(
        rank=launched_rank(),
        num_ranks=num_ranks,
        run_folder=run.folder,
        hang_seconds=None if minutes is None else 60 * minutes,
        resume_command=resume_command,
        save_reason=save_reason,
    )


def requeue(config: SuperviseConfig) -> None:
    """Requeue this SLURM job if `supervise.requeue` says so, on the first rank.

    The others wait for it: srun ends the whole step when the first of them ends.
    """
    if not config.requeue:
        return
    if not is_first_rank():
        if not read_launch().is_started_here:
            wait_to_be_ended(REQUEUE_SECONDS)
        return
    job = os.environ.get("SLURM_JOB_ID")
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    scontrol = shutil.which("scontrol")
    if job is None or scontrol is None:
        missing = "SLURM_JOB_ID is not set" if job is None else "there is no scontrol"
        return say(f"supervise.requeue: not requeued: {missing}")
    done = subprocess.run(
        [scontrol, "requeue", job], capture_output=True, text=True, timeout=60, check=False
    )
    outcome = (
        "put back into the queue" if done.returncode == 0 else f"failed: {done.stderr.strip()}"
    )
    say(f"supervise.requeue: job {job} {outcome}")
