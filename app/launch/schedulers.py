"""The schedulers' job files, and the programs that submit a job, watch it and stop it.

Files of Kubernetes (JobSet, TrainJob), SkyPilot (a task) and Ray (an environment); that of SLURM is
in `run/job.py`. Each number stands once, in the scheduler's own request; the overrides of the run
read it back.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.process.status import STATUS_FILE
from app.run.job import (
    FORGOTTEN,
    IMAGE_HOME,
    JOB_ENDED,
    LAST_LINES,
    SETTLED_POLLS,
    SUBMITTED,
    Job,
    run_scheduler,
    slurm_script,
    submit_job,
)
from app.run.ranks import RENDEZVOUS_PORT, RENDEZVOUS_SECONDS
from app.run.remote import is_store_url
from app.status import fetch_status, read_status
from common.errors import DONE, ENVIRONMENT_ERROR
from common.files import open_no_follow
from common.text import printable

SHARED = "/shared"
"""where the machines of Kubernetes and SkyPilot mount the volume that all of them share"""
_SECRET = "loft"
"""name of the secret of Kubernetes whose variables the pods get, if there is one"""
SHUTDOWN_SECONDS, POD_GRACE_SECONDS = 170, 200
"""time of the ranks to save after a signal, and of a pod to end, which is longer"""
_MAX_RESTARTS = 3
_CONTAINER = "node"
"""name by which Kubeflow finds the container to which it gives PET_NNODES"""
NOT_UPLOADED = (".git", ".venv", "outputs")
"""folders that are not uploaded, wherever they are: Ray is told to exclude them, and SkyPilot
follows .gitignore"""
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
JOB_POLL_SECONDS = 5.0
_COLORS = re.compile(r"\x1b\[[\d;]*m")
"""codes of a terminal, which Ray writes into its log, and SkyPilot around a state"""
ENDED_RUN = re.compile(r"\b(finished|stopped|failed)  step .*exit code (\d+)\s*$", re.MULTILINE)
"""the line of app.status at the end of every job; a scheduler may write the pod before it"""


def kubernetes_file(job: Job) -> str:
    """Return a JobSet, or a TrainJob of Kubeflow after its runtime: a pod a machine.

    All pods are restarted together if one fails, unless the user's input or the training is wrong.
    """
    is_trainjob = job.kind == "TrainJob"
    final = {"containerName": _CONTAINER, "operator": "In", "values": [2, 4]}
    of_pods = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": _pod_spec(job)},
    }
    replicated: dict[str, Any] = {"name": "node"}
    if is_trainjob:  # the operator sets how many
        of_step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
        replicated |= {"template": {"metadata": of_step, "spec": of_pods}}
    else:
        of_pods |= {"completions": 1, "parallelism": 1}
        replicated |= {"replicas": job.nodes, "template": {"spec": of_pods}}
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    rule = {"name": "final", "action": "FailJobSet", **reasons}
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": _MAX_RESTARTS, "rules": [rule]},
        "replicatedJobs": [replicated],
    }
    name = {"metadata": {"name": job.name}}
    if not is_trainjob:
        jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return _yaml(jobset | name | {"spec": spec})
    version = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    runtime = {"mlPolicy": {"torch": {}}, "template": {"spec": spec}}
    reference = {"kind": "TrainingRuntime", "name": job.name}
    train = {"runtimeRef": reference, "trainer": {"numNodes": job.nodes}}
    return _yaml(
        version | {"kind": "TrainingRuntime"} | name | {"spec": runtime},
        version | {"kind": "TrainJob"} | name | {"spec": train},
    )


def _pod_spec(job: Job) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": job.ranks_per_node} if job.card else {}
    config = job.launcher
    requests: dict[str, Any] = {"cpu": config.cpus} if config.cpus else {}
    requests |= {"memory": f"{config.memory_gib}Gi"} if config.memory_gib else {}
    script = _train_script(job, f"{IMAGE_HOME}/.venv/bin", f"{job.name}-node-0-0.{job.name}")
    replicas = "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']"
    variables = [{"name": "NUM_NODES", "valueFrom": {"fieldRef": {"fieldPath": replicas}}}]
    if job.kind == "TrainJob":
        script, variables = f"NUM_NODES=$PET_NNODES\n{script}", []  # the operator sets it
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "workingDir": IMAGE_HOME,
        "command": ["bash", "-c"],
        "args": [script.replace("$(", "$$(")],  # which Kubernetes would replace itself
        "env": variables,
        "envFrom": [{"secretRef": {"name": _SECRET, "optional": True}}],
        "resources": {"requests": requests, "limits": gpus},
        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
    }
    # NCCL and data loaders need more shared memory than a container's default of 64 MiB.
    memory = {"medium": "Memory", "sizeLimit": "64Gi"}
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": memory}]
    if not is_store_url(job.folder):
        container["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.volume}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": POD_GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


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
    volumes = {} if is_store_url(job.folder) else {"volumes": {SHARED: job.volume}}
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
        "min_nodes": job.min_nodes,
        "ranks_per_node": job.ranks_per_node,
        "uses_gpus": job.card is not None,
        "folder": job.folder,
        "max_failures": _MAX_RESTARTS,
    }
    content: dict[str, Any] = {
        "working_dir": ".",
        "excludes": [*NOT_UPLOADED],
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
            *LAST_LINES,
            "",
        ]
    )


def _yaml(*contents: dict[str, Any]) -> str:
    text = yaml.dump_all(
        contents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
    )
    return "# Written by loft launch.\n" + str(text)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, for people to read."""


def _block(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else "")


_Dumper.add_representer(str, _block)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """How one launcher is talked to; {name}, {id}, {file} and {log} stand for the job's."""

    write: Callable[[Job], str]
    file: str
    """name of the job file"""
    programs: tuple[str, ...]
    install: str
    """what to type if a program is missing"""
    submit: str
    job_id: re.Pattern[str] | None
    """where the submission prints the job's id; None: the name is the id"""
    state: str
    """command that prints whether the job still runs"""
    ended: str
    """pattern, in what `state` prints, of a job that has ended"""
    succeeded: str
    log: str
    stop: str
    forget: str | None = None
    """command that removes an ended job of this name, whose name could not be used again"""
    shares_folder: bool = False
    """whether the machines see the folders of the machine that submits"""
    uploads: bool = False
    """whether the files of the working folder are sent along"""


SCHEDULERS = {
    "slurm": Scheduler(
        write=slurm_script,
        file="job.sbatch",
        programs=("sbatch", "scontrol", "scancel"),
        install="start it on a login node, where SLURM jobs can be submitted",
        submit="sbatch {file}",
        job_id=SUBMITTED,
        state="scontrol --oneliner show job {id}",
        ended=JOB_ENDED.pattern,
        succeeded="JobState=COMPLETED",
        log="tail --lines=+1 --follow=name --retry {log}",
        stop="scancel {id}",
        shares_folder=True,
    ),
    "kubernetes": Scheduler(
        write=kubernetes_file,
        file="job.yaml",
        programs=("kubectl",),
        install="install kubectl (kubernetes.io/docs/tasks/tools), and JobSet or, for "
        "launch.kind=TrainJob, Kubeflow Trainer 2 in the cluster",
        submit="kubectl apply -f {file}",
        job_id=None,
        # Of a TrainJob, too: it has a JobSet of its name.
        state="kubectl get jobset {name} --output=jsonpath={{.status.terminalState}}",
        ended="^(Completed|Failed)$",
        succeeded="Completed",
        log="kubectl logs --follow --selector=jobset.sigs.k8s.io/jobset-name={name} --prefix "
        "--tail=-1 --max-log-requests=64 --pod-running-timeout=10m",
        stop="kubectl delete -f {file}",
        forget="kubectl delete -f {file} --ignore-not-found",
    ),
    "sky": Scheduler(
        write=sky_file,
        file="job.yaml",
        programs=("sky",),
        install="pip install 'skypilot[aws]' (or gcp, azure, kubernetes), then sky check",
        submit="sky jobs launch --yes --detach-run --name {name} {file}",
        job_id=None,
        state="sky jobs queue",
        # The newest job of this name is the first row that names it.
        ended=r"\A(?:(?! {name} )[\s\S])* {name} .*\b(SUCCEEDED|FAILED\w*|CANCELLED)\b",
        succeeded=r"\A(?:(?! {name} )[\s\S])* {name} .*\bSUCCEEDED\b",
        log="sky jobs logs --name {name}",
        stop="sky jobs cancel --yes --name {name}",
        uploads=True,
    ),
    "ray": Scheduler(
        write=ray_file,
        file="job.yaml",
        programs=("ray",),
        install="pip install 'ray[train]', and set RAY_API_SERVER_ADDRESS=http://HEAD:8265",
        submit="ray job submit --no-wait --working-dir . --runtime-env {file} "
        "-- python -m app.launch.ray_train",
        job_id=re.compile(r"Job '(\S+)' submitted"),
        state="ray job status {id}",
        ended="succeeded|failed|was stopped",
        succeeded="succeeded",
        log="ray job logs --follow {id}",
        stop="ray job stop {id}",
        uploads=True,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job of one scheduler; `id` is None before it is submitted."""

    scheduler: Scheduler
    job: Job
    file: Path
    id: str | None = None

    def command(self, template: str) -> list[str]:
        names = {"name": self.job.name, "id": self.id or self.job.name}
        places = {"file": str(self.file), "log": self.job.log.replace("%j", names["id"])}
        return [word.format(**names, **places) for word in template.split()]

    def show(self, template: str) -> str:
        """Return a command of this job as it is typed."""
        return printable(shlex.join(self.command(template)))


def missing_program(scheduler: Scheduler) -> str | None:
    """Return the scheduler's first program that is not found here; None if all are."""
    return next((name for name in scheduler.programs if shutil.which(name) is None), None)


def submit(submission: Submission, previous: str | None) -> str:
    """Submit a job, after one of its name that has ended is removed; return its id.

    OSError with the scheduler's own words if it refuses, or if the run's job still runs, of which
    `previous` is the id.
    """
    scheduler, earlier = submission.scheduler, replace(submission, id=previous)
    may_run = scheduler.forget if scheduler.job_id is None else previous
    if may_run is not None and run_scheduler(earlier.command(scheduler.state))[0] == DONE:
        if _ended(earlier) is None:
            other = "output.dir" if scheduler.forget is None else "output.name"
            raise OSError(
                f"job {previous or submission.job.name} has not ended: wait for it, or stop it by "
                f"{earlier.show(scheduler.stop)}; another {other} starts a second one"
            )
        if scheduler.forget is not None:
            run_scheduler(submission.command(scheduler.forget))
    command = submission.command(scheduler.submit)
    return submit_job(command, scheduler.job_id) or submission.job.name


def watch(submission: Submission, log: Path) -> tuple[int, str]:
    """Print a job's log until it ends, also to file `log`; return the run's exit code, and a word.

    3 if the job ended without a word of the run: it was killed, or never started.
    """
    ended_polls, ended = 0, None
    with open_no_follow(log, "wb") as written:
        reader = _start_log(submission, written.fileno())
        printed = 0
        try:
            while ended_polls < SETTLED_POLLS:
                time.sleep(JOB_POLL_SECONDS)
                ended = _ended(submission)
                ended_polls = ended_polls + 1 if ended else 0
                if not ended and reader.poll() is not None:  # a pod was started again
                    reader = _start_log(submission, written.fileno())
                printed = _print_from(log, printed)
        finally:
            reader.terminate()
            reader.wait()
    _print_from(log, printed)
    said = ENDED_RUN.findall(log.read_text(encoding="utf-8", errors="replace"))
    if said:
        return int(said[-1][1]), str(said[-1][0])
    folder = submission.job.folder
    if is_store_url(folder) or (
        submission.scheduler.shares_folder and (Path(folder) / STATUS_FILE).exists()
    ):
        # A cancelled job ends before its script asks for it.
        known = fetch_status(folder) if is_store_url(folder) else read_status(Path(folder))
        is_of_job = known["written"] > submission.file.stat().st_mtime
        if is_of_job and known.get("exit_code") is not None:
            return known["exit_code"], known["state"]
    assert ended is not None
    has_succeeded = re.search(_filled(submission, submission.scheduler.succeeded), ended, re.M)
    return (DONE if has_succeeded else ENVIRONMENT_ERROR), ended.splitlines()[-1]


def _ended(submission: Submission) -> str | None:
    """Return what the scheduler says of a job that has ended; None while it may still run."""
    code, output = run_scheduler(submission.command(submission.scheduler.state))
    output = _COLORS.sub("", output)
    is_over = re.search(_filled(submission, submission.scheduler.ended), output, re.MULTILINE)
    if FORGOTTEN in output:
        return FORGOTTEN
    return is_over[0] if code == DONE and is_over else None


def _filled(submission: Submission, pattern: str) -> str:
    name, number = re.escape(submission.job.name), re.escape(submission.id or "")
    return pattern.replace("{name}", name).replace("{id}", number)


def _start_log(submission: Submission, output: int) -> subprocess.Popen[bytes]:
    command = submission.command(submission.scheduler.log)
    return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)


def _print_from(log: Path, start: int) -> int:
    """Print the whole lines of a file from byte `start` on; return where the rest begins."""
    with log.open("rb") as stream:
        stream.seek(start)
        data = stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    text = _COLORS.sub("", whole.decode(errors="replace"))
    sys.stdout.write(printable(text, keep="\n"))
    sys.stdout.flush()
    return start + len(whole)
