"""The job file of each launcher: a batch script, a JobSet, a SkyPilot task, an environment of Ray.

Each number stands once, in the scheduler's own request; the overrides of the run read it back.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from app.run.ranks import RENDEZVOUS_PORT, RENDEZVOUS_SECONDS
from app.run.remote import is_url
from app.status import NO_NEWS, RUNNING
from common.installation import child_command

if TYPE_CHECKING:
    from app.config.verbs import LauncherConfig

IMAGE_HOME = "/loft"
"""the checkout in an image, with its environment in .venv"""
SHARED = "/shared"
"""where the machines of Kubernetes and SkyPilot mount the volume that all of them share"""
SHUTDOWN_SECONDS, GRACE_SECONDS = 170, 200
"""time of the ranks to save after a signal, and of a pod to end, which is longer"""
SIGNAL_SECONDS = 180
"""time before the limit of a SLURM job at which its ranks are told to save"""
_CPUS_PER_RANK = 8
_MAX_RESTARTS = 3
RAY_VARIABLE = "LOFT_RAY_JOB"
"""variable in which the driver on Ray finds what to train"""
_CLOUD_NAMES = {
    "a100_40gb": "A100",
    "a100_80gb": "A100-80GB",
    "v100_32gb": "V100-32GB",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
}
"""option of conf/hardware -> SkyPilot's name of the card, if it is not the same in capitals"""
_LAST_LINES = (
    "said=$?",
    f'case "$said" in 0|{RUNNING}|{NO_NEWS}) said=${{code:-0}};; esac',
    'exit "$said"',
)
"""after app.status: a job ends with the exit code of its run, if that has ended"""
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run on a cluster."""

    name: str
    folder: str
    """the run's folder, as the machines of the cluster see it, or its URL"""
    here: Path
    """folder of the job's files on the machine that submits it"""
    words: Sequence[str]
    """overrides of the run, without devices, nodes and folder"""
    nodes: int
    ranks_per_node: int
    card: str | None
    """option of conf/hardware; None for a run on CPUs"""
    launcher: LauncherConfig
    image: str | None = None
    volume: str = "shared"

    @property
    def train_words(self) -> str:
        """The overrides that stand in every job, quoted for a shell."""
        return shlex.join([*self.words, f"output.dir={self.folder}"])


def job_name(name: str) -> str:
    """Return the name of a run as a DNS label: letters, digits and dashes, at most 40."""
    return _NOT_IN_NAMES.sub("-", name.lower()).strip("-")[:40].strip("-") or "train"


def slurm_script(job: Job) -> str:
    """Return the batch script of a job: one task a rank; it saves and requeues at its limit."""
    config, gpus = job.launcher, job.ranks_per_node if job.card else None
    options: dict[str, Any] = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": gpus,
        "cpus-per-task": config.cpus or _CPUS_PER_RANK,
        "mem": None if config.memory_gib is None else f"{config.memory_gib}G",
        "time": config.minutes,
        "partition": config.partition,
        "account": config.account,
        "signal": f"USR1@{SIGNAL_SECONDS}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": job.here / "slurm-%j.txt",
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
        "",
        "# A failed rank ends the others. Since 22.05 srun does not inherit --cpus-per-task.",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\',
        f"    {_verb_words(job, 'train')} {job.train_words} \\",
        '    trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" \\',
        "    supervise.requeue=true",
        "code=$?",
        # Its own code: that of srun may be of the ranks that were ended with the one that failed.
        "srun --nodes=1 --ntasks=1 "
        f"{_verb_words(job, 'status')} {shlex.quote(f'run={job.folder}')}",
        *_LAST_LINES,
    ]
    return "\n".join(lines) + "\n"


def _verb_words(job: Job, verb: str) -> str:
    """Return what srun gets before the overrides: the container of pyxis or apptainer, the verb."""
    if job.image is None:
        return shlex.join(child_command(f"app.{verb}"))
    loft, cwd = f"{IMAGE_HOME}/.venv/bin/loft {verb}", str(Path.cwd())
    folders = [cwd] if is_url(job.folder) else [cwd, job.folder]
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


def kubernetes_file(job: Job) -> str:
    """Return a JobSet: a pod a machine, restarted together unless the user's input is wrong."""
    gpus = {"nvidia.com/gpu": job.ranks_per_node} if job.card else {}
    config = job.launcher
    requests: dict[str, Any] = {"cpu": config.cpus} if config.cpus else {}
    requests |= {"memory": f"{config.memory_gib}Gi"} if config.memory_gib else {}
    replicas = "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']"
    script = _train_script(job, f"{IMAGE_HOME}/.venv/bin", f"{job.name}-node-0-0.{job.name}")
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "workingDir": IMAGE_HOME,
        "command": ["bash", "-c"],
        "args": [script.replace("$(", "$$(")],  # which Kubernetes would replace itself
        "env": [
            {"name": "NUM_NODES", "valueFrom": {"fieldRef": {"fieldPath": replicas}}},
        ],
        "resources": {"requests": requests, "limits": gpus},
        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
    }
    # NCCL and data loaders need more shared memory than a container's default of 64 MiB.
    memory = {"medium": "Memory", "sizeLimit": "64Gi"}
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": memory}]
    if not is_url(job.folder):
        container["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.volume}})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    final = {"containerName": "train", "operator": "In", "values": [2, 4]}
    of_pod = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "completions": 1,
        "parallelism": 1,
        "template": {"spec": pod},
    }
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    rule = {"name": "final", "action": "FailJobSet", **reasons}
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": _MAX_RESTARTS, "rules": [rule]},
        "replicatedJobs": [
            {"name": "node", "replicas": job.nodes, "template": {"spec": of_pod}},
        ],
    }
    content = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": spec,
    }
    return _yaml(content)


def sky_file(job: Job) -> str:
    """Return a managed job of SkyPilot, which starts its machines again after a preemption."""
    config, resources = job.launcher, dict[str, Any]()
    if job.card:
        name = _CLOUD_NAMES.get(job.card, job.card.upper())
        resources["accelerators"] = f"{name}:{job.ranks_per_node}"
    if config.cpus:
        resources["cpus"] = f"{config.cpus}+"
    if config.memory_gib:
        resources["memory"] = f"{config.memory_gib}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image.removeprefix('docker://')}"
    home = f"{IMAGE_HOME}/" if job.image else ""
    first = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    volumes = {} if is_url(job.folder) else {"volumes": {SHARED: job.volume}}
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "workdir": ".",
        **volumes,
        "setup": "true\n" if job.image else "make install\n",
        "run": f"NUM_NODES=$SKYPILOT_NUM_NODES\n{_train_script(job, f'{home}.venv/bin', first)}",
    }
    return _yaml(task)


def ray_file(job: Job) -> str:
    """Return a runtime environment of Ray, in which the driver finds what to train."""
    what = {
        "words": [*job.words, f"output.dir={job.folder}"],
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "uses_gpus": job.card is not None,
        "folder": job.folder,
        "max_failures": _MAX_RESTARTS,
    }
    content: dict[str, Any] = {
        "working_dir": ".",
        "excludes": [".git", ".venv", "outputs"],
        "env_vars": {RAY_VARIABLE: json.dumps(what)},
    }
    if job.image:
        content["image_uri"] = job.image
    return _yaml(content)


def _train_script(job: Job, programs: str, first: str) -> str:
    """Return a shell script that starts the ranks and ends with the exit code of the run itself.

    torchrun, which several machines need, ends with 1 whatever has failed. `programs`: folder of
    the environment's programs; `first`: address of the first machine.
    """
    ranks = "gpu" if job.card else str(job.ranks_per_node)
    devices = "auto" if job.card else "$RANKS"
    starter = [f"{programs}/python \\"]
    if job.nodes > 1:
        starter = [
            f'{programs}/torchrun --nnodes="$NUM_NODES" --nproc-per-node="$RANKS" \\',
            f"    --shutdown-timeout={SHUTDOWN_SECONDS} --rdzv-backend=c10d \\",
            f"    --rdzv-endpoint={first}:{RENDEZVOUS_PORT} \\",
            f"    --rdzv-conf=read_timeout={RENDEZVOUS_SECONDS} \\",
        ]
    return "\n".join(
        [
            f"RANKS={ranks}",
            """trap 'kill -TERM "$child"' TERM INT""",
            *starter,
            f"    -m app.train {job.train_words} \\",
            f'    trainer.num_nodes="$NUM_NODES" trainer.devices={devices} &',
            "child=$!",
            # A signal ends `wait` before torchrun has ended.
            'until wait "$child"; do code=$?; kill -0 "$child" 2>/dev/null || break; code=0; done',
            f"{programs}/python -m app.status {shlex.quote(f'run={job.folder}')}",
            *_LAST_LINES,
            "",
        ]
    )


def _yaml(content: dict[str, Any]) -> str:
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "# Written by loft launch.\n" + str(text)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, for people to read."""


def _block(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else "")


_Dumper.add_representer(str, _block)
