"""Findings from made-up facts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.doctor.facts import Facts, Folder, Hub, Imports, Package, Torch
from app.doctor.rows import MALICIOUS, OK, PROBLEM, WARNING, Row, compare_machines, list_rows
from app.process.gpus import Machine
from common import installation
from tests.machines import H100, TWO

TORCH = Package(name="torch", version="2.13.0", required=">=2.10")
FLASH = Package(name="flash-attn", version="2.8.3", required=">=2.8", extra="flash2")
GOOD = Facts(
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
SLOW_LINKS = {"0-1": "SYS", "0-2": "NVLink", "1-2": "SYS"}


def torch_of(**changed: Any) -> Package:
    return replace(TORCH, **changed)


def fails(name: str, failure: str) -> Imports:
    return Imports(failures={name: failure}, torch=GOOD.imports.torch)


def folder(what: str, **changed: Any) -> tuple[Folder, ...]:
    return (Folder(what=what, path="/there", **changed),)


BAD: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    "a malicious release": ({"suspects": {"lightning": "2.6.3"}}, "lightning", PROBLEM,
        ("2.6.3 is a malicious release", "GHSA-w37p-236h-pfx3", "pip uninstall lightning")),
    "too old": ({"packages": (torch_of(version="2.4.0", is_supported=False),)}, "torch", PROBLEM,
        ("2.4.0; this program needs >=2.10", "'torch>=2.10'")),
    "not installed": ({"packages": (torch_of(version=None),)}, "torch", PROBLEM, ("not installed",
        "pip install -c constraints.txt 'torch>=2.10'")),
    "cannot be imported": ({"imports": fails("torch",
        "OSError: libcudnn.so.9: cannot open shared object")}, "torch", PROBLEM,
        ("cannot be imported: OSError: libcudnn.so.9", "--force-reinstall")),
    "an extra of another PyTorch": ({"imports": fails("flash-attn",
        "ImportError: undefined symbol: _ZN3c105Error")}, "flash-attn", WARNING,
        ("undefined symbol", "pip uninstall flash-attn, or")),
    "not installed at all": ({"is_installed": False, "packages": ()}, "packages", PROBLEM,
        ("make install",)),
    "Python too old": ({"python": "3.9.2", "supports_python": False}, "Python", PROBLEM, ("3.9.2",
        ">=3.10")),
    "a driver too old": ({"machine": OLD_DRIVER}, "GPUs", PROBLEM,
        ("driver 550.54.15 supports CUDA up to 12.4", "update the driver", "cu126")),
    "no driver": ({"machine": Machine()}, "GPUs", WARNING,
        ("2 NVIDIA GPUs on the PCI bus, but no driver", "driver 580", "--gpus all")),
    "GPUs that PyTorch does not see": ({"imports": Imports(torch=Torch(nccl="2.29.7", num_gpus=0))},
        "GPUs", PROBLEM, ("the driver lists 2, but PyTorch can use 0",)),
    "no peer access": ({"imports": Imports(torch=Torch(nccl="2.29.7", num_gpus=2))}, "peer access",
        WARNING, ("0 of 2 directions", "nvidia-smi topo")),
    "no NCCL for two GPUs": ({"imports": Imports(torch=Torch(num_gpus=2, peers=((0, 1), (1, 0))))},
        "NCCL", PROBLEM, ("not in this build",)),
    "little memory": ({"memory_gib": 2.0, "memory_left_gib": 1.0}, "host memory", WARNING,
        ("1.0 of 2.0 GiB",)),
    "a container's /dev/shm": ({"shared_memory_gib": 0.0625}, "/dev/shm", WARNING, ("64 MiB",
        "--shm-size=8g")),
    "a full disk": ({"folders": folder("output.dir", free_gib=0.2)}, "output.dir", PROBLEM,
        ("0.2 GiB free",)),
    "a small disk for models": ({"folders": folder("hub's cache", free_gib=12.0)}, "hub's cache",
        WARNING, ("12.0 GiB", "export HF_HOME=FOLDER")),
    "a folder that cannot be written to": ({"folders": folder("output.dir",
        failure="Read-only file system")}, "output.dir", PROBLEM,
        ("/there cannot be written to: Read-only file system", "output.dir=FOLDER")),
    "TMPDIR that is not there": ({"folders": folder("TMPDIR", failure="Permission denied")},
        "TMPDIR", WARNING, ("export TMPDIR=",)),
    "few open files": ({"open_files": (256, 4096)}, "open files", WARNING, ("ulimit -n 4096",)),
    "few open files, by the administrator": ({"open_files": (256, 256)}, "open files", WARNING,
        ("limits.conf",)),
    "a clock before the packages": ({"wall": 1.8e9}, "clock", WARNING, ("1,157.4 days before",
        "timedatectl")),
    "a clock that jumps": ({"drift": -3.2}, "clock", WARNING, ("jumped by -3.2 s",)),
    "half of torchrun's variables": (
        {"launch_problems": ("RANK=0 says that ..., but LOCAL_RANK is not set; unset RANK",)},
        "launcher", PROBLEM, ("LOCAL_RANK is not set", "unset RANK")),
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


def test_an_installed_wheel_is_not_told_to_use_files_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    for changed, *_ in BAD.values():
        facts = replace(GOOD, **changed)
        for row in list_rows(facts) if facts.is_installed else []:
            assert not re.search(r"constraints\.txt|make install|pip install -e", row.fix), row
    absent = replace(FLASH, version="2.7", is_supported=False)
    (row,) = (row for row in list_rows(replace(GOOD, packages=(absent,))) if row.status != OK)
    assert row.fix == "pip install 'flash-attn>=2.8'"


def test_every_malicious_release_has_an_advisory() -> None:
    for name, (releases, advisory) in MALICIOUS.items():
        assert advisory.startswith(("GHSA-", "PYSEC-", "CVE-"))
        for release in releases:
            rows = list_rows(replace(GOOD, suspects={name: release}))
            assert [row.what for row in rows if row.status == PROBLEM] == [name]
        assert not [row for row in list_rows(replace(GOOD, suspects={name: "0.1"})) if row.fix]


def test_a_broken_pytorch_is_reported_once() -> None:
    failures = {"torch": "OSError: libcudnn.so.9", "flash-attn": "OSError: libcudnn.so.9"}
    rows = list_rows(replace(GOOD, imports=Imports(failures=failures)))
    assert [row.what for row in rows if "libcudnn" in row.found] == ["torch"]


def test_links_are_grouped_by_kind() -> None:
    assert "pair 0-1 by NVLink" in [row.found for row in list_rows(GOOD)]
    machine = replace(TWO, num_files=3, gpus=(H100,) * 3)
    torch = Torch(nccl="2", num_gpus=3, peers=((0, 1),) * 6)
    three = replace(GOOD, machine=machine, links=SLOW_LINKS, imports=Imports(torch=torch))
    (links,) = (row for row in list_rows(three) if row.what == "links of GPUs")
    assert "2 pairs (0-1, 1-2) by PCIe and the link between sockets" in links.found
    assert "NVLink" in links.fix


def test_gpu_problems_do_not_stop_a_run_on_the_cpu() -> None:
    rows = list_rows(replace(GOOD, machine=OLD_DRIVER), uses_gpus=False)
    assert PROBLEM not in {row.status for row in rows}


def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.doctor.facts import read_hub

    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token_of_anyone")
    hub = read_hub(checks_address=False)
    assert hub.has_token and "not_a_token" not in repr(hub)


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
    assert isinstance(skewed, Row) and skewed.status == WARNING and "90.5 s" in skewed.found
