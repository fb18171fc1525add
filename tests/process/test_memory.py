"""What a process does on import, which is nothing, and how a training keeps its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

KEEP = """
import ctypes, resource, sys
from pathlib import Path
from app.process import environment as memory
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
memory.DEVICES = Path(sys.argv[1])
end = libc.sbrk(0)
memory.retain_freed_memory()
grown = libc.sbrk(0) - end
for _ in range(3):  # the first one fills the pages
    before = faults()
    blocks = [b"x" * 2**24 for _ in range(8)]
    del blocks
print(grown >> 20, faults() - before)
"""
IMPORT = """
import os, sys, threading
before = dict(os.environ)
import app, app.train
assert dict(os.environ) == before
assert threading.enumerate() == [threading.main_thread()]
assert len(os.listdir("/proc/self/task")) == 1
print(os.getpid(), sys.orig_argv[-1])
"""

ALLOCATOR = """
import os, sys
from pathlib import Path
from app.process import environment, gpus
gpus.DEVICES = Path(sys.argv[1])
environment.configure_libraries(offline=True)
assert "torch" not in sys.modules
print(os.environ.get("PYTORCH_ALLOC_CONF"))
"""
SEGMENTS = """
from app.process.environment import configure_libraries
configure_libraries(offline=True)
import torch
torch.ones(1, device="cuda")
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""


def run(code: str, *words: str, **variables: str) -> str:
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_importing_the_program_changes_nothing() -> None:
    assert run(IMPORT, "word").endswith(" word\n")


def test_freed_memory_is_kept(tmp_path: Path) -> None:
    grown, faults = map(int, run(KEEP, str(tmp_path)).split())
    assert 900 < grown <= 1024  # MiB of addresses
    assert faults < 100  # 128 MiB are 32,768 small pages


@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES", None])
def test_memory_is_left_alone_where_it_is_configured_or_a_gpu_computes(
    variable: str | None, tmp_path: Path
) -> None:
    if variable is None:
        (tmp_path / "nvidia0").touch()
    variables = {} if variable is None else {variable: "131072"}
    assert run(KEEP, str(tmp_path), **variables).startswith("0 ")


def test_a_gpus_allocator_grows_its_segments_unless_it_is_configured(tmp_path: Path) -> None:
    assert run(ALLOCATOR, str(tmp_path)) == "None\n"
    (tmp_path / "nvidia0").touch()
    assert run(ALLOCATOR, str(tmp_path)) == "expandable_segments:True\n"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = run(ALLOCATOR, str(tmp_path), **{name: "max_split_size_mb:512"})
        assert "expandable" not in said


@pytest.mark.gpu
def test_the_segments_of_this_gpu_grow() -> None:
    assert run(SEGMENTS) == "True\n"
