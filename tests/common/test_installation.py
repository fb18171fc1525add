"""The commands in messages work for this installation, as it was started."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.installation import (
    CHILD,
    PACKAGES,
    ROOT,
    SCRIPT_VARIABLE,
    child_command,
    python_command,
    record_script,
    typed_words,
    verb_command,
)
from tests.in_process import run_command


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SCRIPT_VARIABLE, "")
    file = tmp_path / "bin" / "loft"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_a_verb_is_named_as_the_script_started_it(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_script(str(script))
    monkeypatch.setenv("PATH", str(script.parent))
    assert verb_command("train") == "loft train"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert verb_command("train") == f"{script} train"
    monkeypatch.chdir(script.parent.parent)
    assert verb_command("train") == "bin/loft train"


def test_python_is_named_by_its_path_unless_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SCRIPT_VARIABLE, raising=False)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "second" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "second"))
    assert verb_command("train") == "python -m app.train"
    # Another environment is active, whose python is a link to the same file.
    monkeypatch.setenv("PATH", str(tmp_path / "first"))
    assert python_command() == str(tmp_path / "second" / "python")
    monkeypatch.chdir(tmp_path)
    assert python_command() == "second/python"


@pytest.fixture
def own_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules of the user's own that are named as this program's."""
    (tmp_path / "data_modules").mkdir()
    for name in ("app.py", "data_modules/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('code of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(command: list[str], **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_child_runs_this_program_whatever_the_working_folder_holds(
    safe: str, own_app: Path
) -> None:
    said = output_of([*child_command("app.train"), "--version"], PYTHONSAFEPATH=safe)
    assert said.startswith("loft ")


def test_a_child_of_a_checkout_that_is_not_installed_finds_it_first(own_app: Path) -> None:
    printed = output_of([sys.executable, "-S", CHILD, "-u", "-m", "site"])
    path = ast.literal_eval(printed.partition("sys.path = ")[2].partition("]")[0] + "]")
    assert path[0] == str(ROOT) and str(own_app) not in path


def test_every_process_that_is_started_with_a_module_of_this_program_is_a_child() -> None:
    others = {"common/installation.py", "app/process/child.py", "app/config/dispatch.py"}
    others |= {"app/__init__.py"}  # reads how it was started
    others |= {"app/doctor/facts.py"}  # an option of nvidia-smi
    for file in [path for part in PACKAGES for path in ROOT.glob(f"{part}/**/*.py")]:
        if file.relative_to(ROOT).as_posix() not in others:
            assert not any(
                isinstance(node, ast.Constant) and node.value == "-m"
                for node in ast.walk(ast.parse(file.read_text()))
            ), file


def test_names_that_the_working_folder_shadows_are_said_and_what_is_typed_avoids_them(
    own_app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SCRIPT_VARIABLE, raising=False)
    said = run_command("model.path=/nope").stderr
    assert said.startswith(
        "app.py and data_modules/__init__.py in this folder: not of this program, but what"
    )
    assert verb_command("train").endswith(f" {CHILD} -m app.train")
    monkeypatch.setattr(sys, "orig_argv", ["python", CHILD, "-m", "app.train", "seed=1"])
    assert typed_words() == ["-m", "app.train", "seed=1"]
    monkeypatch.chdir(ROOT)
    assert verb_command("train").endswith(" -m app.train") and CHILD not in verb_command("train")


def test_a_package_that_the_working_folder_shadows_in_part_is_named(own_app: Path) -> None:
    (own_app / "app.py").unlink()
    problem = f"finds the package data_modules {own_app}"
    for words in (["-m", "app.train", "--version"], ["-mapp.push", "--help"], ["-m", "app"]):
        ran = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert ran.returncode == 2 and "Traceback" not in ran.stderr
        assert ran.stderr.startswith("error: ") and problem in ran.stderr
    # Of a library or a notebook that imports it, this is an error like any other.
    (own_app / "tool.py").write_text(
        "try:\n    import app\nexcept ImportError as error:\n    print('caught', error)\n"
    )
    for words in (["tool.py"], ["-m", "tool"], ["tool.py", "app.train"]):
        assert f"caught loft needs {ROOT}" in (said := output_of([sys.executable, *words]))
        assert problem in said
