"""Whether a run trains in this process or in ranks that it starts, and how the ranks start."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight import requested_devices
from app.preflight.couplings.devices import Devices
from app.process.launch import (
    Launch,
    is_first_rank,
    launched_rank,
    read_launch,
    resume_words,
    run_dir,
)
from app.process.peers import Peers
from app.process.reporting import save_reason, write_error_file
from app.process.signals import wait_for_termination
from app.process.supervisor import SIGNAL_EXIT_CODES, SuperviseConfig, Supervisor, print_to_stderr
from app.run import NEVER, Run, checkpoints_of, find_newest_good, typed_step
from common.errors import DONE
from common.installation import child_command, module_words, verb_command

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

RENDEZVOUS_PORT = 29500
"""torchrun's default port"""
RENDEZVOUS_SECONDS = 600
"""time between the starts of torchrun on the first and the last machine; its default is 60 s"""
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""makes the ranks use a store separate from that of torchrun's agents. If they share one, a machine
cannot rejoin: the remaining agents do not pass it the store's address (torch 2.13)"""
REQUEUE_SECONDS = 120.0
"""time for the first rank to write the run's page, close its loggers and requeue the job"""
_EXAMPLE_SHARED_FOLDER = "/shared/runs"
"""example, in messages, of a folder that all machines can access"""


def check_nodes(config: TrainConfig, words: Sequence[str] | None) -> list[str]:
    """List the problem of several machines without torchrun or srun, with the command for each.

    `words`: this command line; None for the trials of a sweep.
    """
    nodes = config.trainer.nodes
    if read_launch().detected_by is not None:
        return []
    if words is None:
        return [
            f"trainer.num_nodes={nodes}: each trial of a sweep runs on one machine; type "
            "trainer.num_nodes=1"
        ]
    per_node = requested_devices(config).ranks_per_node
    typed = list(words)
    if config.output.dir is None:
        typed.append(f"output.dir={_EXAMPLE_SHARED_FOLDER}/{config.output.name or 'train'}")
    launcher = _format_torchrun(nodes, per_node, socket.gethostname())
    return [
        f"trainer.num_nodes={nodes}: ranks on several machines are started by torchrun or srun; "
        f"type on each of the {nodes} machines, of which this one ({socket.gethostname()}) is the "
        f"first: {launcher} {module_words('app.train')} {shlex.join(typed)}"
    ]


def check_supervise(config: TrainConfig) -> list[str]:
    """List the `supervise` settings that conflict with how this process was started."""
    problems = []
    detected_by = read_launch().detected_by
    if config.supervise.max_restarts and detected_by is not None:
        problems.append(
            f"supervise.max_restarts={config.supervise.max_restarts} applies to ranks that this "
            f"command starts on one machine, but {detected_by} is set: another launcher started "
            "them; leave it out (torchrun has --max-restarts, with resume=auto and output.dir)"
        )
    if config.supervise.requeue and config.resume == NEVER:
        problems.append(
            "supervise.requeue=true: the requeued job would start from scratch; type resume=auto"
        )
    if config.supervise.requeue and (step := typed_step(config.resume)) is not None:
        problems.append(
            f"supervise.requeue=true would go back to step {step} each time the job is requeued, "
            f"and drop later checkpoints; type resume=auto output.dir={config.output.dir} to "
            "continue from the newest checkpoint, or supervise.requeue=false"
        )
    return problems


def starts_ranks(config: TrainConfig) -> bool:
    """Return whether this process starts and supervises the ranks."""
    if not read_launch().starts_own_ranks:
        return False
    return requested_devices(config).ranks_per_node > 1 or config.supervise.max_restarts > 0


def run_ranks(config: TrainConfig, run: Run, words: Sequence[str]) -> int:
    """Start and supervise this machine's ranks, which get `words` too; return the exit code."""
    devices = requested_devices(config)
    superseded = run.superseded_checkpoints()

    def find_newest_step() -> int:
        if run.superseded_checkpoints() & superseded:  # no rank has started training
            return run.step
        good, problems = find_newest_good(run.folder)
        for problem in problems:
            print_to_stderr(f"RESUME: {problem}")
        return 0 if good is None else good.step

    supervisor = Supervisor(
        command=[*child_command("app.train"), *words],
        folder=run.folder,
        config=config.supervise,
        resume_step=run.step,
        find_newest_step=find_newest_step,
        rank_variables=_rank_variables(devices) if devices.num_ranks > 1 else [{}],
        chooses_port=read_launch().detected_by is None,
    )
    code = supervisor.run()
    if code != DONE and code not in SIGNAL_EXIT_CODES:  # after a signal, rank 0 has printed it
        print_to_stderr(resume_command())
    return code


def _rank_variables(devices: Devices) -> list[dict[str, str]]:
    return [
        {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(devices.num_ranks)}
        for rank in range(devices.ranks_per_node)
    ]


def run_shares(verb: str, folder: Path, devices: Devices, words: Sequence[str]) -> int:
    """Start ranks that each do a share of a `verb` without training steps; return the exit code."""
    return Supervisor(
        command=[*child_command(f"app.{verb}"), *words],
        folder=folder,
        config=SuperviseConfig(),
        resume_step=0,
        find_newest_step=lambda: 0,
        rank_variables=_rank_variables(devices),
    ).run()


def resume_command() -> str:
    """Return the command that resumes this process's run, or that there is no checkpoint yet."""
    folder, cwd = run_dir(), Path.cwd()
    if folder is None or not checkpoints_of(folder).checkpoints():
        return "no checkpoint has been saved yet"
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    return f"to resume: {_train_command(read_launch())} {resume_words(shown)}"


def _train_command(launch: Launch) -> str:
    if launch.starts_own_ranks or launch.is_started_here:
        return verb_command("train")
    num_ranks = launch.num_ranks or 1
    per_node = launch.num_local_ranks or num_ranks
    nodes = launch.num_nodes
    if launch.detected_by == "SLURM_NTASKS":
        return f"srun --nodes={nodes} --ntasks-per-node={per_node} {verb_command('train')}"
    first = launch.first_address or socket.gethostname()
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    torchrun = _format_torchrun(nodes, per_node, first, max_restarts=restarts)
    return f"{torchrun} {module_words('app.train')}"


def _format_torchrun(
    num_nodes: int, per_node: int, first_host: str, *, max_restarts: int = 0
) -> str:
    words = ["torchrun", f"--nnodes={num_nodes}", f"--nproc-per-node={per_node}"]
    if max_restarts:
        words.append(f"--max-restarts={max_restarts}")
    if num_nodes > 1:
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first_host}:{RENDEZVOUS_PORT}"]
        words.append(f"--rdzv-conf=read_timeout={RENDEZVOUS_SECONDS}")
    if num_nodes > 1 and max_restarts:
        words.insert(0, f"{OWN_STORE_VARIABLE}=1")
    return shlex.join(words)


def build_peers(run: Run, num_ranks: int) -> Peers:
    """Build the peer-to-peer checks of a run that torchrun or srun has started."""
    minutes = run.typed_config.supervise.hang_minutes
    has_several_machines = read_launch().num_nodes > 1
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    is_warned = restarts and has_several_machines and OWN_STORE_VARIABLE not in os.environ
    if is_warned and is_first_rank():
        log.warning(
            "a lost machine can only rejoin under torchrun --max-restarts with %s=1 in the "
            "environment of every torchrun",
            OWN_STORE_VARIABLE,
        )

    def save_error(message: str) -> None:
        write_error_file(message)
        save_reason(message)

    return Peers(
        rank=launched_rank(),
        num_ranks=num_ranks,
        run_folder=run.folder,
        hang_seconds=None if minutes is None else 60 * minutes,
        resume_command=resume_command,
        save_reason=save_error,
    )


def requeue(config: SuperviseConfig) -> None:
    """Requeue this SLURM job from the first rank, if `supervise.requeue` is set.

    The other ranks wait for it: srun ends the whole job step as soon as one of them ends.
    """
    if not config.requeue:
        return
    if not is_first_rank():
        if not read_launch().is_started_here:
            wait_for_termination(REQUEUE_SECONDS)
        return
    job = os.environ.get("SLURM_JOB_ID")
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    scontrol = shutil.which("scontrol")
    if job is None or scontrol is None:
        missing = "SLURM_JOB_ID is not set" if job is None else "scontrol was not found"
        return print_to_stderr(f"supervise.requeue: not requeued: {missing}")
    done = subprocess.run(
        [scontrol, "requeue", job], capture_output=True, text=True, timeout=60, check=False
    )
    outcome = "requeued" if done.returncode == 0 else f"not requeued: {done.stderr.strip()}"
    print_to_stderr(f"supervise.requeue: job {job} {outcome}")
