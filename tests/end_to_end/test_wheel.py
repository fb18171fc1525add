"""What `pip install .` leaves works without the checkout: conf/, templates and samples included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import LONGEST

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "app", "conf", "data_modules")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, built from a copy so that no build/ stays behind."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--quiet"]
    command += ["--no-build-isolation", "--wheel-dir", str(work), str(source)]
    subprocess.run(command, check=True, timeout=LONGEST, capture_output=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(work / "installed")
    return work / "installed"


def test_a_wheel_holds_every_file_that_the_program_reads(installed: Path) -> None:
    for pattern in (
        "conf/**/*.yaml",
        "data_modules/**/*.jinja",
        "data_modules/samples/tiny_base/*",
    ):
        needed = {file.relative_to(ROOT) for file in ROOT.glob(pattern)}
        assert needed and needed <= {file.relative_to(installed) for file in installed.rglob("*")}


@pytest.mark.slow
def test_a_wheel_trains_on_what_ships(installed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["trainer.max_steps=1", "evaluation.exact_match=false", f"output.dir={run}"]
    ran = subprocess.run(
        [sys.executable, "-m", "app.train", "+experiment=quickstart", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},  # comes before the checkout's packages
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"path: {installed / 'data_modules'}" in (run / "config.yaml").read_text()
