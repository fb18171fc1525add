"""An installed wheel works without the checkout, including conf/, templates and samples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import LONGEST

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "app", "common", "conf", "data_modules")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that no build/ remains in the checkout."""
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
    (built,) = work.glob("*.whl")
    return built


def test_a_wheel_contains_every_file_that_is_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
    for pattern in (
        "app/**/*.jinja",
        "conf/**/*.yaml",
        "data_modules/**/*.jinja",
        "data_modules/samples/tiny_base/*",
        "*/py.typed",
    ):
        needed = {file.relative_to(ROOT).as_posix() for file in ROOT.glob(pattern)}
        assert needed <= held
    assert not [name for name in held if name.startswith(("tests/", "tools/", "benchmarks/"))]


@pytest.mark.slow
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    environment, run = tmp_path / "environment", tmp_path / "run"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=LONGEST)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Use our dependencies; adding their folder to the path does not add an editable install.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    words = ["trainer.max_steps=1", "evaluation.exact_match=false", f"output.dir={run}"]

    def loft(*typed: str) -> str:
        ran = subprocess.run(
            [environment / "bin" / "loft", *typed],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    # The user's own modules of these names; the rank is started in the working folder.
    for name in ("app.py", "data_modules.py"):
        (tmp_path / name).write_text("raise SystemExit('code of the user')")
    printed = loft("train", "+experiment=quickstart", "supervise.max_restarts=1", *words)
    assert f"path: {packages / 'data_modules'}" in (run / "config.yaml").read_text()
    assert printed.splitlines()[-1] == f"run: {run}"
    assert f"  environment/bin/loft evaluate run={run}\n" in printed
    page = loft("train", "--help")
    assert "usage\n  environment/bin/loft train " in page and "README" not in page


def test_an_unknown_verb_is_refused_with_the_nearest() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "app", "trian"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: loft has no verb trian; did you mean train?\n",
    )
