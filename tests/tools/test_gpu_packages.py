"""What is installed for a GPU: PyTorch's build by its driver, and packages that have wheels."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from app.process.gpus import Gpu, Machine
from common.installation import ROOT
from tools.gpu_packages import answer, has_gpu

CU126 = "--extra-index-url https://download.pytorch.org/whl/cu126"
NEW = Machine(num_files=1, driver="580.65.06", cuda=(13, 0))
OLD = Machine(num_files=1, driver="535.161.08", cuda=(12, 2))
ANCIENT = Machine(num_files=1, driver="470.82.01", cuda=(11, 4))


@pytest.mark.parametrize(
    ("machine", "index", "said"),
    [
        (NEW, "", "gpu: driver 580.65.06: PyTorch's build cu130 (driver 580 or newer), and the"),
        (OLD, CU126, "gpu: driver 535.161.08: PyTorch's build cu126 (driver 525 or newer)"),
        (ANCIENT, "", "gpu: driver 470.82.01 is too old for PyTorch: update it to 525 or newer"),
    ],
)
def test_pytorchs_build_is_chosen_by_the_driver(machine: Machine, index: str, said: str) -> None:
    assert has_gpu(machine)
    assert answer(machine, "index") == index
    assert answer(machine, "extra") == ",gpu,hybrid"
    assert said in answer(machine, "")


@pytest.mark.parametrize(
    ("capabilities", "extra"),
    [
        ([(9, 0), (9, 0)], ",gpu,hybrid,flash4"),
        ([(9, 0), (8, 0)], ",gpu,hybrid"),
    ],
)
def test_flash_attention_4_is_added_for_gpus_that_pytorch_gives_it(
    capabilities: list[tuple[int, int]], extra: str
) -> None:
    gpus = tuple(Gpu(name="GPU", memory_gib=80, capability=one) for one in capabilities)
    assert answer(replace(NEW, gpus=gpus), "extra") == extra
    assert (
        answer(replace(OLD, gpus=gpus), "extra") == ",gpu,hybrid"
    )  # an older driver may not load what its compiler writes


def test_a_gpu_that_cuda_13_has_left_gets_the_build_for_cuda_12() -> None:
    v100 = Gpu(name="V100", memory_gib=32, capability=(7, 0))
    assert answer(replace(NEW, gpus=(v100,)), "index").endswith("/cu126")


@cache
def has_index() -> bool:
    """Tell whether a package index answers, for a package that every one has."""
    return wheels_of("pip") != ""


def wheels_of(package: str) -> str:
    """Return what the index says of the versions of `package` that have wheels, or nothing."""
    report = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"),
            *("--retries", "0", "--timeout", "15", "--report", "-", package),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return report.stdout if report.returncode == 0 else ""


def extra(name: str) -> list[str]:
    """Return the packages of an extra, as pyproject.toml has them."""
    found = re.search(rf"^{name} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


@pytest.mark.parametrize("name", ["gpu", "hybrid", "flash4"], ids="extra {}".format)
def test_what_is_installed_for_a_gpu_has_wheels(name: str) -> None:
    if not has_index():
        pytest.skip("no package index answers")
    packages = extra(name)
    assert packages
    for package in packages:
        assert ".whl" in wheels_of(package), f"{package} would be compiled"
