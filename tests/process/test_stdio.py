"""Printing goes on when nobody reads it any more, and nothing is printed into another file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SCRIPT = """
import os, sys
from app.process.environment import protect_streams
protect_streams()
file = open(sys.argv[1], "w")
for line in range(5000):
    print("a line that fills the pipe", line)
    print("ä", file=sys.stderr)
os.write(1, b"printed by a library\\n")
file.write("whole")
"""


def test_a_reader_that_leaves_disturbs_nothing(tmp_path: Path) -> None:
    script = f"set -o pipefail; {sys.executable} -c '{SCRIPT}' '{tmp_path}/file' 2>&- | head -2"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "a line that fills the pipe 0"
    assert done.stderr == ""
    assert (tmp_path / "file").read_text() == "whole"


def test_a_closed_output_is_not_the_next_file_that_is_opened(tmp_path: Path) -> None:
    script = f"{sys.executable} -c '{SCRIPT}' '{tmp_path}/file' >&- 2>&- <&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "whole"


def test_a_full_disk_behind_the_output_disturbs_nothing(tmp_path: Path) -> None:
    script = f"{sys.executable} -c '{SCRIPT}' '{tmp_path}/file' > /dev/full 2>&1"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, check=False)
    assert done.returncode == 0
