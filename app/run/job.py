"""A run as a job of a cluster, and the batch script of SLURM that runs it.

`loft launch` and the trials of a sweep write the same script.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.status import NO_NEWS, RUNNING
from app.run.remote import is_store_url
from common.errors import DONE
from common.installation import child_command
from common.redaction import redact

if TYPE_CHECKING:
    from app.config.verbs import LauncherConfig

IMAGE_HOME = "/loft"
"""the checkout in an image, with its environment in .venv"""
SIGNAL_SECONDS = 180
"""time before the limit of a SLURM job at which its ranks are told to save"""
_CPUS_PER_RANK = 8
LAST_LINES = (
    "said=$?",
    f'case "$said" in 0|{RUNNING}|{NO_NEWS}) said=${{code:-0}};; esac',
    'exit "$said"',
)
"""after app.status: a job ends with the exit code of its run, if that has ended"""
SUBMITTED = re.compile(r"Submitted batch job (\d+)")
"""what sbatch prints"""
JOB_ENDED = re.compile(
    "JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_ME|BOOT_FAIL|DEADLINE)"
)
"""what scontrol prints of a job that has ended; sacct would need a database"""
SETTLED_POLLS = 2
"""polls in a row that must see the end of a job, which may be about to be requeued"""
FORGOTTEN = "Invalid job id"
"""what scontrol prints of a job that ended minutes ago"""
_SLURM_NAME = re.compile(r"[\w.,:@+-]+")
"""names that sbatch reads as one word: a line break would begin a line of the job's script"""
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    name: str
    folder: str
    """the run's folder, as the machines of the cluster see it, or its URL"""
    log: str
    """file that SLURM writes the output to; %j = id of the job"""
    words: Sequence[str]
    """overrides of the run, without devices, nodes and folder"""
    nodes: int
    ranks_per_node: int
    card: str | None
    """option of conf/hardware; None for a run on CPUs"""
    launcher: LauncherConfig
    image: str | None = None
    mounts: Sequence[str] = ()
    """of SLURM: files and folders outside of the current one that an image has to see"""
    volume: str = "shared"
    kind: str = "JobSet"
    """of Kubernetes: JobSet or TrainJob"""
    min_nodes: int | None = None
    """of SLURM and Ray: fewest nodes that the job runs on; None for `nodes`"""

    @property
    def train_words(self) -> str:
        """The overrides that stand in every job, quoted for a shell."""
        return shlex.join([*self.words, f"output.dir={self.folder}"])


def job_name(name: str) -> str:
    """Return the name of a run as a DNS label: letters, digits and dashes, at most 40."""
    return _NOT_IN_NAMES.sub("-", name.lower()).strip("-")[:40].strip("-") or "train"


def check_names(config: LauncherConfig) -> list[str]:
    """List the names of SLURM that cannot be written into a job's script."""
    names = {"partition": config.partition, "account": config.account}
    return [
        f"launcher.{key}={name!r}: expected a name of SLURM: letters, digits, and any of _.,:@+-"
        for key, name in names.items()
        if name is not None and not _SLURM_NAME.fullmatch(name)
    ]


def slurm_script(job: Job) -> str:
    """Return the batch script of a job: one task a rank; it saves and requeues at its limit."""
    config, ranks = job.launcher, job.ranks_per_node
    gpus, cpus = ranks if job.card else None, config.cpus or _CPUS_PER_RANK
    size: dict[str, Any] = {"nodes": job.nodes, "ntasks-per-node": ranks, "cpus-per-task": cpus}
    nodes, variables = '"$SLURM_JOB_NUM_NODES"', []
    if job.min_nodes is not None:
        # A job with a number of tasks is started again only on as many nodes as it had.
        size = {"nodes": f"{job.min_nodes}-{job.nodes}", "mincpus": ranks * cpus}
        variables = [f"export SLURM_NTASKS_PER_NODE={ranks} SLURM_CPUS_PER_TASK={cpus}"]
        nodes = "auto"
    options: dict[str, Any] = {
        "job-name": job.name,
        **size,
        "gpus-per-node": gpus if config.gpus is None else config.gpus or None,
        "mem": None if config.memory_gib is None else f"{config.memory_gib}G",
        "time": config.minutes,
        "partition": config.partition,
        "account": config.account,
        "signal": f"USR1@{SIGNAL_SECONDS}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": job.log,
    }
    requests = [
        f"#SBATCH --{key}={shlex.quote(str(value))}"
        for key, value in options.items()
        if value is not None
    ]
    lines = [
        "#!/bin/bash",
        f"# Before its time limit the job saves a checkpoint ({SIGNAL_SECONDS} s are left) and",
        "# requeues itself; after a preemption or the loss of a node SLURM does. It then resumes.",
        *requests,
        "#SBATCH --requeue",
        "",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node",
        "export MASTER_ADDR MASTER_PORT",
        *variables,
        "",
        "# A failed rank ends the others. Since 22.05 srun does not inherit --cpus-per-task.",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\',
        f"    {_verb_words(job, 'train')} {job.train_words} \\",
        f'    trainer.num_nodes={nodes} trainer.devices="$SLURM_NTASKS_PER_NODE" \\',
        "    supervise.requeue=true",
        "code=$?",
        # Its own code: that of srun may be of the ranks that were ended with the one that failed.
        "srun --nodes=1 --ntasks=1 "
        f"{_verb_words(job, 'status')} {shlex.quote(f'run={job.folder}')}",
        *LAST_LINES,
    ]
    return "\n".join(lines) + "\n"


def _verb_words(job: Job, verb: str) -> str:
    """Return what srun gets before the overrides: the container of pyxis or apptainer, the verb."""
    if job.image is None:
        return shlex.join(child_command(f"app.{verb}"))
    loft, cwd = f"{IMAGE_HOME}/.venv/bin/loft {verb}", str(Path.cwd())
    folders = [cwd, *([] if is_store_url(job.folder) else [job.folder]), *job.mounts]
    if job.image.startswith("docker://") or job.image.endswith(".sif"):
        bind = shlex.join(["--bind", ",".join(folders), "--pwd", cwd, job.image])
        return f"apptainer exec {'--nv ' if job.card else ''}{bind} {loft}"
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    options = [
        f"--container-image={job.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={cwd}",
    ]
    return f"{shlex.join(options)} {loft}"


def submit_job(command: Sequence[str], job_id: re.Pattern[str] | None) -> str:
    """Submit a job by a scheduler's program; return the id that `job_id` finds, "" without one.

    OSError with the scheduler's own words if it refuses.
    """
    code, output = run_scheduler(command)
    if code != DONE:
        raise OSError(f"{command[0]} ended with {code}: {redact(output.strip())}")
    if job_id is None:
        return ""
    if (found := job_id.search(output)) is None:
        raise OSError(f"{command[0]} printed no id of a job: {redact(output.strip())}")
    return found[1]


def run_scheduler(command: Sequence[str]) -> tuple[int, str]:
    """Run a scheduler's program; return its exit code and all that it prints."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
