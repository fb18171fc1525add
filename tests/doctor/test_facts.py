"""The facts that are read about a machine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

import pytest

from app.doctor import facts
from app.doctor.rows import MALICIOUS

REQUIREMENTS = [
    "torch>=2.10",
    "transformers<6,>=99",
    "a-package-that-is-not-there>=1",
    'bitsandbytes>=0.50; extra == "gpu"',
    'pytest>=8; extra == "dev"',
    'torch>=99; extra == "gpu"',
]


def test_required_versions_are_read_from_the_metadata() -> None:
    torch, transformers, absent, extra = facts.read_packages(REQUIREMENTS)
    assert (torch.version, torch.is_supported) == (importlib.metadata.version("torch"), True)
    assert not transformers.is_supported and transformers.required == "<6,>=99"
    assert absent.version is None and absent.is_supported and absent.extra is None
    assert extra.extra == "gpu"


def test_facts_of_this_machine(tmp_path: Path) -> None:
    folders = {"output.dir": tmp_path / "not" / "yet"}
    found = facts.read_facts(folders, list(MALICIOUS), checks_hub=False, imports=False)
    assert found.is_installed and found.supports_python
    assert found.versions["torch"] == importlib.metadata.version("torch")
    assert 0 < found.memory_left_gib <= found.memory_gib
    assert found.folders[0].free_gib > 0 and not found.folders[0].failure
    assert not (tmp_path / "not").exists()
    assert found.wall > found.newest_file > 0 and abs(found.drift) < 0.5
    assert found.hub.address == ""


def test_without_this_program_and_its_packages_that_is_the_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("packaging", "packaging.specifiers", "packaging.requirements"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(facts, "_PROGRAM", "a-package-that-is-not-there")
    found = facts.read_facts({}, [], checks_hub=False, imports=False)
    assert not found.is_installed and found.versions == {"python": platform.python_version()}


def test_gpus_without_a_driver_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "without").mkdir()
    monkeypatch.setattr(facts, "PCI", tmp_path)
    assert facts.count_pci_gpus() == 1


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tNV18\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\tPHB\t X \tNODE\tSYS\t0-51,104-155\t0\t\tN/A
GPU2\tNV18\tNODE\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_between_gpus_are_read_from_nvidia_smi() -> None:
    assert facts.parse_links(TOPOLOGY) == {"0-1": "PHB", "0-2": "NVLink", "1-2": "NODE"}
    assert facts.parse_links("Failed to initialize NVML: Driver/library version mismatch\n") == {}


def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token_of_anyone")
    hub = facts.read_hub(checks_address=False)
    assert hub.has_token and "not_a_token" not in repr(hub)


def test_a_folder_that_cannot_be_written_to() -> None:
    assert facts.read_folder("output.dir", Path("/proc/there")).failure
    assert facts.read_folder("TMPDIR", Path("/tmp/not/there")).failure == "no such folder"
    file = Path(facts.__file__)
    assert facts.read_folder("output.dir", file / "below").failure


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    sources = {
        "raises": "raise ImportError('undefined symbol: _ZN3c105Error\\nmore')",
        "ends": "import os; os._exit(134)",
        "prints": "print('hello from a package')",
        "sleeps": "import time; time.sleep(600)",
        "last": "",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(facts, "MODULES", {name: name for name in sources})
    return sources


def test_failed_imports_are_reported(modules: dict[str, str]) -> None:
    """One raises, one ends Python, one prints; the packages after them are tried as well."""
    assert facts.try_imports([name for name in modules if name != "sleeps"]).failures == {
        "raises": "ImportError: undefined symbol: _ZN3c105Error",
        "ends": "its import ends Python (exit code 134)",
    }


@pytest.mark.slow
def test_hanging_imports_are_reported(modules: dict[str, str]) -> None:
    found = facts.try_imports(["sleeps", "last"], seconds=3)
    assert found.failures == {"sleeps": "its import takes more than 3 s"}
