"""The PyTorchJob is valid and starts ranks that our checks accept; pages are short."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config import load_config
from app.launch.schedulers import SCHEDULERS
from app.preflight import requested_devices
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


def test_a_page_of_a_launcher_fits_on_two_screens() -> None:
    pages = [FOLDER.with_suffix(".md"), *FOLDER.glob("*.md")]
    assert len(pages) > len(SCHEDULERS)
    assert {page.stem for page in pages} >= set(SCHEDULERS)
    assert not [page for page in pages if len(page.read_text().splitlines()) > 60]
