"""The PyTorchJob of docs/clusters is valid and starts ranks that our checks accept."""

from __future__ import annotations

import shlex
import subprocess

import yaml  # type: ignore[import-untyped]

from app.config import load_config
from app.preflight import requested_devices
from app.run.ranks import RENDEZVOUS_SECONDS
from tests.conftest import ROOT

NODES, GPUS = 2, 8


def test_the_pytorchjob_configures_torchrun_by_variables() -> None:
    from torch.distributed.run import get_args_parser

    job = yaml.safe_load((ROOT / "docs" / "clusters" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    workers, elastic = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == workers["replicas"] == NODES
    assert job["spec"]["nprocPerNode"] == str(GPUS)
    assert elastic["rdzvConf"] == [{"key": "read_timeout", "value": str(RENDEZVOUS_SECONDS)}]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # required by the operator
    assert container["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/shared"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    (script,) = container["args"]
    assert container["command"] == ["bash", "-c"] and container["workingDir"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    words = shlex.split(script.replace("\\\n", " "))
    assert words[:2] == ["exec", ".venv/bin/torchrun"]  # no environment is active in an image
    options = get_args_parser().parse_args(words[2:])
    assert options.module and options.training_script == "app.train"
    config = load_config("train", options.training_script_args)
    assert requested_devices(config).num_ranks == NODES * GPUS
    assert config.resume == "auto" and config.output.dir is not None
