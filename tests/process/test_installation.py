"""The commands in messages work for this installation, as it was started."""

import sys
from pathlib import Path

import pytest

from app.process import installation
from app.process.installation import (
    SCRIPT_VARIABLE,
    install_extra,
    pip_install,
    python_command,
    record_script,
    verb_command,
)


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


def test_commands_are_named_where_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SCRIPT_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert verb_command("preview") == f"{tmp_path}/bin/python -m app.preview"


def test_what_an_extra_installs_needs_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_extra("sweep") == "pip install -e '.[sweep]'"
    assert pip_install() == "pip install -c constraints.txt"
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    assert install_extra("sweep") == "pip install 'optuna<6,>=5'"
    assert install_extra("wandb") == "pip install 'wandb>=0.21'"
    assert pip_install() == "pip install"
