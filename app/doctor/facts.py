"""What this machine is, read once and judged elsewhere: packages, GPUs, memory, disks, clock, hub.

Imports nothing heavy, and changes nothing but files of its own that it removes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.doctor.imports import MODULES, Imports, try_imports
from app.model.hub import cache_folder, hub_token, is_offline_by_setting, reach_hub
from app.process.gpus import Machine, read_machine
from app.process.launch import read_launch
from app.training.checkpoint.disk import free_bytes
from app.training.machine import GIB, host_memory

PROGRAM = "loft"
SHARED_MEMORY = Path("/dev/shm")
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""vendor of a PCI device, and how the class of a GPU begins"""
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
NVLINK_CAPABILITY = 2
"""of nvmlGpuP2PCapsIndex_t: two GPUs reach each other by NVLink"""
LEVELS = ((10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"))
"""nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`; the last is the slowest"""
TEMPORARY = "TMPDIR"
"""the folder that must be there: programs that do not find it choose others, or fail"""
PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that this program uses, and what is installed of it."""

    name: str
    version: str | None
    """None where it is not installed"""
    required: str = ""
    """versions that this program takes, as in its own metadata"""
    extra: str | None = None
    """the extra that it belongs to; None for one that every run needs"""
    takes: bool = True
    """whether the version is one of those"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder that a run writes to, which need not exist yet."""

    what: str
    path: str
    free_gib: float = 0.0
    failure: str = ""
    """why nothing can be written there"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """The Hugging Face hub, as a run would ask it."""

    has_token: bool = False
    is_offline: bool = False
    """HF_HUB_OFFLINE is set"""
    address: str = ""
    """empty where it was not asked"""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A machine, as far as a run depends on it."""

    host: str
    python: str
    requires_python: str = ""
    takes_python: bool = True
    is_installed: bool = True
    """whether this program's own metadata are there"""
    packages: tuple[Package, ...] = ()
    suspects: dict[str, str] = field(default_factory=dict)
    """installed versions of the packages of which malicious releases are known"""
    imports: Imports = field(default_factory=Imports)
    machine: Machine = field(default_factory=Machine)
    num_pci_gpus: int = 0
    """NVIDIA's GPUs on the PCI bus, with or without a driver"""
    links: dict[str, str] = field(default_factory=dict)
    """'0-1' -> NVLink, or a word of `nvidia-smi topo -m`"""
    memory_gib: float = 0.0
    """of this machine, or of the container that this process is in"""
    memory_left_gib: float = 0.0
    shared_memory_gib: float | None = None
    """room of /dev/shm, None where there is none"""
    folders: tuple[Folder, ...] = ()
    open_files: tuple[int, int] = (0, 0)
    """limits: now, and that a user may set"""
    wall: float = 0.0
    """seconds since 1970"""
    newest_file: float = 0.0
    """when the newest of the packages was installed, by the same clock"""
    drift: float = 0.0
    """seconds by which the wall clock went faster than the monotonic one while this was read"""
    launch_problems: tuple[str, ...] = ()
    hub: Hub = field(default_factory=Hub)

    @property
    def versions(self) -> dict[str, str]:
        """Installed versions by package, Python's among them."""
        found = {one.name: one.version for one in self.packages if one.version is not None}
        return {"python": self.python} | found


def read_facts(
    folders: dict[str, Path], suspects: Sequence[str], *, asks_hub: bool, imports: bool
) -> Facts:
    """Read this machine; takes seconds where `imports` are tried.

    `folders`: those that a run writes to, by what they are; `suspects`: packages to look for.
    """
    started = time.time(), time.monotonic()
    is_installed, packages, (requires_python, takes_python) = (
        True,
        tuple[Package, ...](),
        ("", True),
    )
    try:
        packages = tuple(read_packages(importlib.metadata.requires(PROGRAM) or []))
        requires_python, takes_python = read_python()
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    there = [one.name for one in packages if one.version is not None and one.name in MODULES]
    left, total = host_memory()
    machine = read_machine()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        requires_python=requires_python,
        takes_python=takes_python,
        is_installed=is_installed,
        packages=packages,
        suspects={name: found for name in suspects if (found := version_of(name)) is not None},
        imports=try_imports(there) if imports else Imports(),
        machine=machine,
        num_pci_gpus=count_pci_gpus(),
        links=read_links() if machine.num_files > 1 else {},
        memory_gib=total / GIB,
        memory_left_gib=left / GIB,
        shared_memory_gib=read_shared_memory(),
        folders=tuple(read_folder(what, path) for what, path in folders.items()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        wall=time.time(),
        newest_file=newest_install(packages),
        drift=(time.time() - started[0]) - (time.monotonic() - started[1]),
        launch_problems=read_launch().problems,
        hub=read_hub(asks=asks_hub),
    )


def read_packages(requirements: Sequence[str]) -> Iterator[Package]:
    """Yield the packages that `requirements` name, each once, with what is installed of them."""
    from packaging.requirements import Requirement

    seen = set()
    for one in map(Requirement, requirements):
        text = str(one.marker or "")
        extra = text.partition("extra ==")[2].strip(" '\"") or None
        if one.name in seen or extra == "dev":
            continue
        seen.add(one.name)
        version = version_of(one.name)
        yield Package(
            name=one.name,
            version=version,
            required=str(one.specifier),
            extra=extra,
            takes=version is None or one.specifier.contains(version, prereleases=True),
        )


def read_python() -> tuple[str, bool]:
    """Return the versions of Python that this program takes, and whether this is one."""
    from packaging.specifiers import SpecifierSet

    requires = importlib.metadata.metadata(PROGRAM)["Requires-Python"] or ""
    return requires, SpecifierSet(requires).contains(platform.python_version(), prereleases=True)


def version_of(name: str) -> str | None:
    """Return the installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def newest_install(packages: Sequence[Package]) -> float:
    """Return when the newest of `packages` was installed."""
    times = [0.0]
    for one in packages:
        with suppress(importlib.metadata.PackageNotFoundError, OSError):
            found: Any = importlib.metadata.distribution(one.name)
            times.append(Path(found.locate_file("")).stat().st_mtime)
    return max(times)


def count_pci_gpus() -> int:
    """Count NVIDIA's GPUs on the PCI bus; Linux alone."""
    number = 0
    for device in PCI.glob("*"):
        with suppress(OSError):
            is_nvidia = (device / "vendor").read_text().strip() == NVIDIA
            number += is_nvidia and (device / "class").read_text().startswith(DISPLAY)
    return number


def read_links() -> dict[str, str]:
    """Return how the GPUs of this machine reach each other; nothing where NVML does not say."""
    try:
        library = ctypes.CDLL(MANAGEMENT_LIBRARY)
        return ask_links(library)
    except (OSError, AttributeError):
        return {}


def ask_links(library: Any) -> dict[str, str]:
    """Return the link of each pair of GPUs, numbered as by nvidia-smi, by the NVML in `library`."""
    if library.nvmlInit_v2():
        return {}
    number = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(number))
    handles = [ctypes.c_void_p() for _ in range(number.value)]
    for index, handle in enumerate(handles):
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    found = {}
    for one in range(len(handles)):
        for two in range(one + 1, len(handles)):
            found[f"{one}-{two}"] = _link(library, handles[one], handles[two])
    return found


def _link(library: Any, one: ctypes.c_void_p, two: ctypes.c_void_p) -> str:
    status, level = ctypes.c_uint(1), ctypes.c_uint()
    failed = library.nvmlDeviceGetP2PStatus(one, two, NVLINK_CAPABILITY, ctypes.byref(status))
    if not failed and status.value == 0:
        return "NVLink"
    if library.nvmlDeviceGetTopologyCommonAncestor(one, two, ctypes.byref(level)):
        return "unknown"
    return next((word for number, word in LEVELS if level.value <= number), "SYS")


def read_shared_memory() -> float | None:
    """Return the room that is left in /dev/shm, in GiB."""
    try:
        return free_bytes(SHARED_MEMORY) / GIB if SHARED_MEMORY.is_dir() else None
    except OSError:
        return None


def read_folder(what: str, path: Path) -> Folder:
    """Return the room of the disk of `path`, and why nothing can be written there.

    A file is written for that, into the nearest folder that exists, and removed.
    """
    if what == TEMPORARY and not path.is_dir():
        return Folder(what=what, path=str(path), failure="no such folder")
    try:
        nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(PROBE_BYTES))
        return Folder(what=what, path=str(path), free_gib=free_bytes(path) / GIB)
    except OSError as error:
        return Folder(what=what, path=str(path), failure=error.strerror or str(error))


def read_hub(*, asks: bool) -> Hub:
    """Return whether there is a token, never which; `asks`: also whether the hub can be reached."""
    try:
        has_token = hub_token() is not None
    except OSError:  # a file that may not be read
        has_token = False
    address, failure = reach_hub() if asks else ("", None)
    return Hub(
        has_token=has_token,
        is_offline=is_offline_by_setting(),
        address=address,
        failure=failure,
    )


def folders_of(output: str | None, cache: str) -> dict[str, Path]:
    """Return the folders that a run writes to, by what they are."""
    found = {
        "output.dir": Path(output or "outputs"),
        "data.cache_dir": Path(cache),
        "hub's cache": cache_folder(),
        TEMPORARY: Path(os.environ.get("TMPDIR") or tempfile.gettempdir()),
    }
    return {what: path.expanduser() for what, path in found.items()}
