"""Findings from made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.doctor.facts import Folder, Hub, Imports, MachineFacts, Package, Torch
from app.doctor.rows import OK, PROBLEM, WARNING, Finding, compare_machines, list_rows
from tests.machines import H100, TWO

TORCH = Package(name="torch", version="2.13.0", required=">=2.10")
FLASH = Package(name="flash-attn", version="2.8.3", required=">=2.8", extra="flash2")
GOOD = MachineFacts(
    host="node1",
    python="3.11.7",
    requires_python=">=3.10",
    packages=(TORCH, FLASH),
    imports=Imports(torch=Torch(nccl="2.29.7", num_gpus=2, peers=((0, 1), (1, 0)))),
    machine=TWO,
    num_pci_gpus=2,
    links={"0-1": "NVLink"},
    memory_gib=128.0,
    memory_left_gib=100.0,
    shared_memory_gib=64.0,
    folders=(Folder(what="output.dir", path="outputs", free_gib=500.0),),
    open_files=(65536, 65536),
    wall=2.0e9,
    newest_file=1.9e9,
    hub=Hub(has_token=True),
)
OLD_DRIVER = replace(TWO, driver="550.54.15", cuda=(12, 4))


def torch_of(**changed: Any) -> Package:
    return replace(TORCH, **changed)


def fails(name: str, failure: str) -> Imports:
    return Imports(failures={name: failure}, torch=GOOD.imports.torch)


def folder(what: str, **changed: Any) -> tuple[Folder, ...]:
    return (Folder(what=what, path="/there", **changed),)


BAD: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    "a malicious release": ({"suspects": {"lightning": "2.6.3"}}, "lightning", PROBLEM,
        ("2.6.3 is a malicious release", "GHSA-w37p-236h-pfx3", "pip uninstall lightning")),
    "not installed": ({"packages": (torch_of(version=None),)}, "torch", PROBLEM, ("not installed",
        "pip install -c constraints.txt 'torch>=2.10'")),
    "cannot be imported": ({"imports": fails("torch",
        "OSError: libcudnn.so.9: cannot open shared object")}, "torch", PROBLEM,
        ("cannot be imported: OSError: libcudnn.so.9", "--force-reinstall")),
    "a driver too old": ({"machine": OLD_DRIVER}, "GPUs", PROBLEM,
        ("driver 550.54.15 supports CUDA up to 12.4", "update the driver", "cu126")),
    "GPUs that PyTorch does not see": ({"imports": Imports(torch=Torch(nccl="2.29.7", num_gpus=0))},
        "GPUs", PROBLEM, ("the driver lists 2, but PyTorch can use 0",)),
    "no peer access": ({"imports": Imports(torch=Torch(nccl="2.29.7", num_gpus=2))}, "peer access",
        WARNING, ("0 of 2 directions", "nvidia-smi topo")),
    "a container's /dev/shm": ({"shared_memory_gib": 0.0625}, "/dev/shm", WARNING, ("64 MiB",
        "--shm-size=8g")),
    "a folder that cannot be written to": ({"folders": folder("output.dir",
        failure="Read-only file system")}, "output.dir", PROBLEM,
        ("/there cannot be written to: Read-only file system", "output.dir=FOLDER")),
    "a full disk": ({"folders": folder("output.dir", free_gib=0.2)}, "output.dir", PROBLEM,
        ("0.2 GiB free",)),
    "a clock before the packages": ({"wall": 1.8e9}, "clock", WARNING, ("1,157.4 days before",
        "timedatectl")),
    "a clock that jumps": ({"drift": -3.2}, "clock", WARNING, ("jumped by -3.2 s",)),
    "few open files": ({"open_files": (256, 4096)}, "open files", WARNING, ("ulimit -n 4096",)),
    "no network": ({"hub": Hub(address="huggingface.co:443", failure="no answer within 2.5 s")},
        "network", PROBLEM, ("huggingface.co:443 cannot be reached", "HF_ENDPOINT")),
}  # fmt: skip


def test_a_good_machine_has_no_warning() -> None:
    rows = list_rows(GOOD)
    assert {row.status for row in rows} == {OK}
    findings = "\n".join(row.found for row in rows)
    for word in ("3.11.7", "torch 2.13.0", "2 x NVIDIA H100", "9.0", "580.65.06", "2.29.7"):
        assert word in findings


@pytest.mark.parametrize("case", BAD)
def test_problems_are_reported_with_a_fix(case: str) -> None:
    changed, what, status, words = BAD[case]
    rows = [row for row in list_rows(replace(GOOD, **changed)) if row.status != OK]
    named = [row for row in rows if row.what == what]
    assert [row.status for row in named] == [status], rows
    assert named[0].fix
    for word in words:
        assert word in f"{named[0].found} {named[0].fix}"


def test_gpu_problems_do_not_stop_a_run_on_the_cpu() -> None:
    rows = list_rows(replace(GOOD, machine=OLD_DRIVER), uses_gpus=False)
    assert PROBLEM not in {row.status for row in rows}


def test_machines_that_differ() -> None:
    other = replace(GOOD, host="node2", packages=(torch_of(version="2.12.0"), FLASH))
    (row,) = compare_machines([GOOD, GOOD, other])
    assert row.status == PROBLEM
    assert row.found == "node1 and node2 differ: torch 2.13.0 and 2.12.0"
    unlike = replace(GOOD, host="node2", machine=replace(TWO, gpus=(H100,)))
    (row,) = compare_machines([GOOD, unlike])
    assert row.status == WARNING and row.found.startswith("node1 has ") and "node2" in row.found
    assert compare_machines([GOOD, GOOD], [0.0, 0.2]) == []
    (skewed,) = compare_machines([GOOD, GOOD], [0.0, -90.5])
    assert isinstance(skewed, Finding) and skewed.status == WARNING and "90.5 s" in skewed.found
