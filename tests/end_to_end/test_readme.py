"""What the README shows exists: commands, files, make targets."""

from __future__ import annotations

import re
import subprocess

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_every_make_target_of_the_readme_exists() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}\s", listed.stdout, re.MULTILINE), target


def test_every_file_of_the_tree_exists() -> None:
    tree = README.split("## The tree")[1].split("##")[0]
    folder = ""
    for line in tree.splitlines():
        match = re.match(r"( {4}| {6})(\S+)", line)
        if match is None:
            continue
        indent, name = match.groups()
        path = name if len(indent) == 4 else folder + name
        folder = name if len(indent) == 4 else folder
        assert (ROOT / path).exists(), path


def test_every_train_command_of_the_readme_composes() -> None:
    from app.config import load_config

    commands = re.findall(r"python -m app\.train (\+experiment=[^#\n]*)", README)
    assert len(commands) >= 3
    for command in commands:
        load_config("train", command.split())
