"""The job files of Kubernetes (JobSet, TrainJob), SkyPilot (a task) and Ray (an environment).

Each number stands once, in the scheduler's own request; the overrides of the run read it back.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.run.job import IMAGE_HOME, LAST_LINES, Job
from app.run.ranks import RENDEZVOUS_PORT, RENDEZVOUS_SECONDS
from app.run.remote import is_url

SHARED = "/shared"
"""where the machines of Kubernetes and SkyPilot mount the volume that all of them share"""
_SECRET = "loft"
"""name of the secret of Kubernetes whose variables the pods get, if there is one"""
SHUTDOWN_SECONDS, GRACE_SECONDS = 170, 200
"""time of the ranks to save after a signal, and of a pod to end, which is longer"""
_MAX_RESTARTS = 3
_CONTAINER = "node"
"""name by which Kubeflow finds the container to which it gives PET_NNODES"""
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
    """Return the pod of each machine of a job on Kubernetes."""
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
    if not is_url(job.folder):
        container["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.volume}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
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
        "min_nodes": job.min_nodes,
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
