"""A wheel of the sdist works without the checkout, including conf/, templates and samples."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import run

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "app", "common", "conf", "data_modules")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from a copy, so that no build/ remains in the checkout, and a wheel of it."""
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
    build = f"from setuptools.build_meta import *; build_sdist({str(work)!r})"
    run(sys.executable, "-c", build, cwd=source, check=True)
    (sdist,) = work.glob("*.tar.gz")
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--quiet")
    run(*command, "--no-build-isolation", "--wheel-dir", work, sdist, check=True)
    (built,) = work.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_contains_every_file_that_is_read(wheel: Path) -> None:
    """And the script of its own name, which `pipx run` takes."""
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
        (script,) = [name for name in held if name.endswith("/entry_points.txt")]
        assert "loft = app.__main__:main" in packed.read(script).decode().splitlines()
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


def test_the_changelog_has_the_version_once() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert (ROOT / "CHANGELOG.md").read_text().count(f"\n## {version}") == 1


@pytest.mark.slow
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "run"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*command, "--no-deps", "--no-index", wheel, check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Use our dependencies; adding their folder to the path does not add an editable install.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    words = ["trainer.max_steps=1", "evaluation.exact_match=false", f"output.dir={folder}"]

    # The user's own packages of these names; the rank is started in the working folder.
    for name in ("app", "common", "conf", "data_modules", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('code of the user')")
    (tmp_path / "conf" / "train.yaml").write_text("someone: [else")
    words += ["+experiment=quickstart", "supervise.max_restarts=1"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = run(environment / "bin" / "loft", "train", *words, cwd=tmp_path, env=variables)
    assert ran.returncode == 0, ran.stderr
    assert f"path: {packages / 'data_modules'}" in (folder / "config.yaml").read_text()
    assert ran.stdout.splitlines()[-1] == f"run: {folder}"
    assert f"  environment/bin/loft evaluate run={folder}\n" in ran.stdout


def test_an_unknown_verb_is_refused_with_the_nearest() -> None:
    ran = run(sys.executable, "-m", "app", "trian")
    said = "error: loft has no verb trian; did you mean train?\n"
    assert (ran.returncode, ran.stderr) == (2, said)
