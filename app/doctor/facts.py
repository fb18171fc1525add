"""Read the facts about this machine: packages, GPUs, memory, disks, clock and hub.

Imports nothing heavy, and changes nothing except for temporary files that it removes. `rows` rates
the facts. As a program, `python -m app.doctor.facts PACKAGE ...`, it tries to import packages, and
prints a JSON line for each: one that is built for another PyTorch may kill its process.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.model.hub import cache_folder, hub_token, is_offline_by_setting, reach_hub
from app.process.environment import configure_libraries
from app.process.gpus import Machine, read_machine
from app.process.launch import read_launch
from app.training.checkpoint.disk import free_bytes
from app.training.machine import GIB, host_memory
from common.installation import child_command

_PROGRAM = "loft"
_SHARED_MEMORY = Path("/dev/shm")
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor id of NVIDIA, and prefix of the PCI class of GPUs"""
_TEMPORARY = "TMPDIR"
"""name of the only folder that must exist: without it programs use other folders, or fail"""
_PROBE_BYTES = 2**20
"""size of the file that is written to test a folder"""
MODULES = {
    "torch": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "peft": "peft",
    "datasets": "datasets",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "flash-attn": "flash_attn",
    "flash-linear-attention": "fla.ops.gated_delta_rule",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
    "liger-kernel": "liger_kernel",
}
"""module to import for each package that has compiled parts or depends on such a package"""
_IMPORT_SECONDS = 180.0
"""time limit for all imports of a process; they take 20 seconds on two busy cores"""
_TOOL_SECONDS = 30.0
"""time limit for nvidia-smi"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What the installed PyTorch supports on this machine."""

    nccl: str | None = None
    """version of NCCL; None for a build without it"""
    num_gpus: int = 0
    peers: tuple[tuple[int, int], ...] = ()
    """pairs of GPUs of which the first can access the memory of the second"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imports:
    failures: dict[str, str] = field(default_factory=dict)
    """reason of each failed import, by package"""
    torch: Torch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that this program uses, and its installed version."""

    name: str
    version: str | None
    """installed version; None if it is not installed"""
    required: str = ""
    """required versions, from this program's metadata"""
    extra: str | None = None
    """the extra that it belongs to; None for a package that every run needs"""
    is_supported: bool = True
    """whether the installed version is one of the required versions"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder that a run writes to; it need not exist yet."""

    what: str
    path: str
    free_gib: float = 0.0
    failure: str = ""
    """why the folder cannot be written to; empty if it can"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    has_token: bool = False
    is_offline: bool = False
    """whether HF_HUB_OFFLINE is set"""
    address: str = ""
    """address that was tested; empty if none was"""
    failure: str | None = None
    """why the address cannot be reached; None if it can"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """The properties of a machine that matter for a run."""

    host: str
    python: str
    requires_python: str = ""
    supports_python: bool = True
    is_installed: bool = True
    """whether this program itself is installed"""
    packages: tuple[Package, ...] = ()
    suspects: dict[str, str] = field(default_factory=dict)
    """installed versions of packages with known malicious releases"""
    imports: Imports = field(default_factory=Imports)
    machine: Machine = field(default_factory=Machine)
    num_pci_gpus: int = 0
    """number of NVIDIA GPUs on the PCI bus, with or without a driver"""
    links: dict[str, str] = field(default_factory=dict)
    """'0-1' -> NVLink, or a link name of `nvidia-smi topo -m`"""
    memory_gib: float = 0.0
    """memory of this machine, or of the container of this process"""
    memory_left_gib: float = 0.0
    """free memory"""
    shared_memory_gib: float | None = None
    """free space of /dev/shm; None if it does not exist"""
    folders: tuple[Folder, ...] = ()
    open_files: tuple[int, int] = (0, 0)
    """soft and hard limit of open files"""
    wall: float = 0.0
    """wall clock time, in seconds since 1970"""
    newest_file: float = 0.0
    """time at which the newest package was installed, in seconds since 1970"""
    drift: float = 0.0
    """seconds by which the wall clock advanced more than the monotonic clock during the check"""
    launch_problems: tuple[str, ...] = ()
    hub: Hub = field(default_factory=Hub)

    @property
    def versions(self) -> dict[str, str]:
        """Installed versions by package, including Python."""
        packages = {each.name: each.version for each in self.packages if each.version is not None}
        return {"python": self.python} | packages


def read_facts(
    folders: dict[str, Path], suspects: Sequence[str], *, checks_hub: bool, imports: bool
) -> MachineFacts:
    """Read the facts about this machine; takes seconds if `imports` are tried.

    `folders`: folders that a run writes to, by name; `suspects`: names of packages to look for.
    """
    started = time.time(), time.monotonic()
    is_installed, packages = True, tuple[Package, ...]()
    requires_python, supports_python, python = "", True, platform.python_version()
    try:
        packages = tuple(read_packages(importlib.metadata.requires(_PROGRAM) or []))
        requires_python = importlib.metadata.metadata(_PROGRAM)["Requires-Python"] or ""
        supports_python = _supports(requires_python, python)
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    installed = [each.name for each in packages if each.version is not None]
    left, total = host_memory()
    machine = read_machine()
    return MachineFacts(
        host=socket.gethostname(),
        python=python,
        requires_python=requires_python,
        supports_python=supports_python,
        is_installed=is_installed,
        packages=packages,
        suspects={
            name: version for name in suspects if (version := _installed_version(name)) is not None
        },
        imports=try_imports([n for n in installed if n in MODULES]) if imports else Imports(),
        machine=machine,
        num_pci_gpus=count_pci_gpus(),
        links=_read_links() if machine.num_files > 1 else {},
        memory_gib=total / GIB,
        memory_left_gib=left / GIB,
        shared_memory_gib=_read_shared_memory(),
        folders=tuple(read_folder(what, path) for what, path in folders.items()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        wall=time.time(),
        newest_file=_newest_install(packages),
        drift=(time.time() - started[0]) - (time.monotonic() - started[1]),
        launch_problems=read_launch().problems,
        hub=read_hub(checks_address=checks_hub),
    )


def _supports(requires_python: str, python: str) -> bool:
    from packaging.specifiers import SpecifierSet  # which may be missing if this program is

    return SpecifierSet(requires_python).contains(python, prereleases=True)


def try_imports(packages: Sequence[str], *, seconds: float = _IMPORT_SECONDS) -> Imports:
    """Import `packages` in a separate process; if one kills it, continue after it in a new one."""
    waiting, failures, torch = list(packages), dict[str, str](), None
    while waiting:
        code, results = _run_imports([MODULES[name] for name in waiting], seconds)
        for result in results:
            name = waiting.pop(0)
            if result["error"]:
                failures[name] = result["error"]
            if known := result.get("torch"):
                torch = Torch(**known | {"peers": tuple(map(tuple, known["peers"]))})
        if waiting:
            failures[waiting.pop(0)] = (
                f"its import ends Python (exit code {code})"
                if code is not None
                else f"its import takes more than {seconds:.0f} s"
            )
    return Imports(failures=failures, torch=torch)


def _run_imports(modules: Sequence[str], seconds: float) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the exit code, None after a timeout, and the results until then."""
    command = [*child_command("app.doctor.facts"), *modules]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    code: int | None = None
    try:
        done = subprocess.run(
            command, **streams, stdout=subprocess.PIPE, timeout=seconds, check=False
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    return code, [json.loads(line) for line in output.splitlines()]


def _try_import(module: str) -> dict[str, Any]:
    try:
        imported = importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001  whatever a package raises is the result
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}
    return {"error": ""} | ({"torch": _query_torch(imported)} if module == "torch" else {})


def _query_torch(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"nccl": None, "num_gpus": 0, "peers": []}
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.cuda.is_available():
        found["num_gpus"] = number = torch.cuda.device_count()
        pairs = [(one, two) for one in range(number) for two in range(number) if one != two]
        found["peers"] = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return found


def read_packages(requirements: Sequence[str]) -> Iterator[Package]:
    """Yield each package in `requirements` once, with its installed version."""
    from packaging.requirements import Requirement

    seen = set()
    for requirement in map(Requirement, requirements):
        name, specifier = requirement.name, requirement.specifier
        extra = str(requirement.marker or "").partition("extra ==")[2].strip(" '\"") or None
        if name in seen or extra == "dev":
            continue
        seen.add(name)
        version = _installed_version(name)
        yield Package(
            name=name,
            version=version,
            required=str(specifier),
            extra=extra,
            is_supported=version is None or specifier.contains(version, prereleases=True),
        )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _newest_install(packages: Sequence[Package]) -> float:
    times = [0.0]
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError, OSError):
            distribution: Any = importlib.metadata.distribution(package.name)
            times.append(Path(distribution.locate_file("")).stat().st_mtime)
    return max(times)


def count_pci_gpus() -> int:
    """Count the NVIDIA GPUs on the PCI bus; Linux only."""
    number = 0
    for device in PCI.glob("*"):
        with suppress(OSError):
            is_nvidia = (device / "vendor").read_text().strip() == NVIDIA
            number += is_nvidia and (device / "class").read_text().startswith(DISPLAY)
    return number


def _read_links() -> dict[str, str]:
    """Return the links between the GPUs of this machine; empty without nvidia-smi."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_links(done.stdout)


def parse_links(matrix: str) -> dict[str, str]:
    """Return the link of each pair of GPUs in the table of `nvidia-smi topo -m`."""
    rows = [line.split()[1:] for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    return {
        f"{first}-{second}": "NVLink" if re.match(r"NV\d", link) else link
        for first, second in itertools.combinations(range(len(rows)), 2)
        for link in rows[first][second : second + 1]
    }


def _read_shared_memory() -> float | None:
    try:
        return free_bytes(_SHARED_MEMORY) / GIB if _SHARED_MEMORY.is_dir() else None
    except OSError:
        return None


def read_folder(what: str, path: Path) -> Folder:
    """Return the free disk space of `path`, or why it cannot be written to.

    Tested with a temporary file in the nearest existing folder.
    """
    if what == _TEMPORARY and not path.is_dir():
        return Folder(what=what, path=str(path), failure="no such folder")
    try:
        nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(_PROBE_BYTES))
        return Folder(what=what, path=str(path), free_gib=free_bytes(path) / GIB)
    except OSError as error:
        return Folder(what=what, path=str(path), failure=error.strerror or str(error))


def read_hub(*, checks_address: bool) -> Hub:
    """Return whether there is a token (never the token itself) and whether the hub responds.

    The hub is contacted only if `checks_address`.
    """
    try:
        has_token = hub_token() is not None
    except OSError:  # its file cannot be read
        has_token = False
    address, failure = reach_hub() if checks_address else ("", None)
    return Hub(
        has_token=has_token, is_offline=is_offline_by_setting(), address=address, failure=failure
    )


def run_folders(output: str | None, cache: str) -> dict[str, Path]:
    """Return the folders that a run writes to, by name."""
    folders = {
        "output.dir": Path(output or "outputs"),
        "data.cache_dir": Path(cache),
        "hub's cache": cache_folder(),
        _TEMPORARY: Path(os.environ.get("TMPDIR") or tempfile.gettempdir()),
    }
    return {what: path.expanduser() for what, path in folders.items()}


if __name__ == "__main__":
    # Send the output of packages to stderr: stdout is for the results only.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    configure_libraries(offline=True)
    for name in sys.argv[1:]:
        print(json.dumps(_try_import(name)), file=results, flush=True)
