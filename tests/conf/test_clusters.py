"""Cluster files are valid for their schedulers and start ranks that our checks accept."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import app
from app.config import load_config
from app.preflight import requested_devices
from app.process.launch import RANK_VARIABLES
from app.run.ranks import RENDEZVOUS_SECONDS
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "clusters"
NODES, GPUS = 2, 8
READ_TIMEOUT = f"--rdzv-conf=read_timeout={RENDEZVOUS_SECONDS}"


def check_train(words: list[str]) -> None:
    """Check that these overrides start a resumable run on two nodes."""
    config = load_config("train", words)
    assert requested_devices(config).num_ranks == NODES * GPUS
    assert config.trainer.num_nodes == NODES
    assert config.resume == "auto" and config.output.dir is not None


def check_torchrun(line: str, **given: str) -> None:
    """Check a command line with torchrun's parser; `given` are its options from PET_ variables."""
    from torch.distributed.run import get_args_parser

    words = shlex.split(line.replace("\\\n", " "))
    words = words[1:] if words[0] == "exec" else words
    assert Path(words[0]).name == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert options.module and options.training_script == "app.train"
    given = {"nnodes": options.nnodes, "nproc_per_node": options.nproc_per_node} | given
    assert given == {"nnodes": str(NODES), "nproc_per_node": str(GPUS)}
    check_train(options.training_script_args)


def read_yaml(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def check_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """Check the requirements of each pod; return its container."""
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/shared"]
    assert container["command"] == ["bash", "-c"]
    subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)
    # No environment is active in an image.
    assert container["workingDir"] and container["args"][0].startswith("exec .venv/bin/torchrun ")
    return container


def test_the_jobset_starts_torchrun_on_two_pods() -> None:
    job = read_yaml("jobset.yaml")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == NODES
    assert spec["completionMode"] == "Indexed"
    container = check_pod(spec["template"]["spec"])
    (line,) = container["args"]
    check_torchrun(line)
    # JobSet's names: <set>-<job>-<its number>-<pod>.<set>
    name = job["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-{replicated['name']}-0-0.{name}:29500" in line
    assert READ_TIMEOUT in line
    (seconds,) = re.findall(r"--shutdown-timeout=(\d+)", line)
    assert int(seconds) < spec["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_pytorchjob_configures_torchrun_by_variables() -> None:
    job = read_yaml("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    workers = spec["pytorchReplicaSpecs"]["Worker"]
    elastic = spec["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == workers["replicas"] == NODES
    (setting,) = elastic["rdzvConf"]
    assert f"{setting['key']}={setting['value']}" in READ_TIMEOUT
    pod = workers["template"]["spec"]
    container = check_pod(pod)
    assert container["name"] == "pytorch"  # required by the operator
    check_torchrun(container["args"][0], nnodes=str(NODES), nproc_per_node=spec["nprocPerNode"])
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_skypilot_starts_torchrun_on_each_machine() -> None:
    task = read_yaml("skypilot.yaml")
    assert task["num_nodes"] == NODES
    assert task["resources"]["accelerators"].endswith(f":{GPUS}")
    assert "/shared" in task["volumes"]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
    # The variables that SkyPilot sets, and a fake torchrun that prints its arguments.
    shell = "torchrun() { printf '%q ' torchrun \"$@\"; }\n" + task["run"].replace(".venv/bin/", "")
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": str(NODES)}
    variables["SKYPILOT_NUM_GPUS_PER_NODE"] = str(GPUS)
    done = subprocess.run(
        ["bash", "-c", shell], env=variables, capture_output=True, text=True, check=True
    )
    assert "--rdzv-endpoint=10.0.0.1:29500" in done.stdout
    assert READ_TIMEOUT in done.stdout
    check_torchrun(done.stdout)


def test_the_batch_script_requests_its_resources() -> None:
    file = FOLDER / "slurm.sbatch"
    text = file.read_text()
    subprocess.run(["bash", "-n", str(file)], check=True)
    requested = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert requested["nodes"] == str(NODES)
    assert requested["ntasks-per-node"] == requested["gpus-per-node"] == str(GPUS)
    assert requested["signal"].startswith("USR1@") and "requeue" in requested
    line = re.sub(r"\\\n", " ", text[text.index("\nsrun ") :]).strip()
    words = shlex.split(line)
    assert "--cpus-per-task=$SLURM_CPUS_PER_TASK" in words  # srun does not inherit it
    start = words.index("app.train")
    assert words[start - 2 : start] == ["python", "-m"]
    check_train(words[start + 1 :])
    assert load_config("train", words[start + 1 :]).supervise.requeue


def test_ray_calls_the_train_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of Ray, which is not installed."""
    options_of_ray: dict[str, Any] = {}

    class TorchTrainer:
        def __init__(self, function: Any, **options: Any) -> None:
            options_of_ray.update(options, function=function)

        def fit(self) -> None:
            options_of_ray["function"](options_of_ray["train_loop_config"])

    train, torch = ModuleType("ray.train"), ModuleType("ray.train.torch")
    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(train, name, SimpleNamespace)
    torch.TorchTrainer = TorchTrainer  # type: ignore[attr-defined]
    for module in (ModuleType("ray"), train, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    trained: list[Any] = []
    monkeypatch.setattr(app, "train", trained.append, raising=False)
    runpy.run_path(str(FOLDER / "ray_train.py"), run_name="__main__")
    (config,) = trained
    assert requested_devices(config).num_ranks == options_of_ray["scaling_config"].num_workers
    assert config.resume == "auto" and config.output.dir is not None
    assert options_of_ray["run_config"].failure_config.max_failures > 0
    # Ray Train sets the variables by which a rank is detected.
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= set(RANK_VARIABLES)
