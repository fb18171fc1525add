"""Whether a training runs in this process or in ranks that it starts, and how it starts them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight import requested_devices
from app.preflight.couplings.devices import Devices
from app.process.errors import DONE
from app.process.launch import is_first_rank, read_launch, run_dir
from app.process.supervisor import CODES_OF_SIGNALS, SuperviseConfig, Supervisor, say
from app.run import NEVER, Run, checkpoints_of, find_newest_good, typed_step
from data_modules import printable

if TYPE_CHECKING:
    from app.config import TrainConfig


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
            "NODE_RANK": os.environ.get("NODE_RANK", "0"),
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
    launch = read_launch()
    by = "python" if launch.starts_own_ranks or launch.is_started_here else "torchrun ..."
    return f"to resume: {by} -m app.train resume={shlex.quote(printable(str(shown)))}"


def requeue(config: SuperviseConfig) -> None:
    """Requeue this SLURM job if `supervise.requeue` says so; on the first rank."""
    if not config.requeue or not is_first_rank():
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
