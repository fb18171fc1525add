"""Turn the facts about a machine into findings: ok, a warning, or a problem that stops a run.

The same facts give the same findings on any machine; only the commands that install packages
depend on how this program was installed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.doctor.facts import Folder, MachineFacts, Package
from app.process.gpus import BUILDS, find_gpu_problems
from common.installation import is_checkout, pip_install
from common.text import counted

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MALICIOUS = {
    "lightning": (("2.6.2", "2.6.3"), "GHSA-w37p-236h-pfx3"),
    "litellm": (("1.82.7", "1.82.8"), "PYSEC-2026-2"),
    "ultralytics": (("8.3.41", "8.3.42", "8.3.45", "8.3.46"), "PYSEC-2024-154"),
}
"""package -> releases that contain malware, and the advisory about them"""
_SHOWN = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "datasets",
    "bitsandbytes",
    "flash-attn",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "liger-kernel",
    "deepspeed",
    "hydra-core",
)
"""packages whose versions are in the table; --json has all of them"""
_MIN_MEMORY_GIB = 2.0
"""free host memory below which a warning is given: PyTorch and the libraries take 0.4 GiB per
process, and the smallest run another half"""
_MIN_SHARED_MEMORY_GIB = 1.0
"""free space of /dev/shm below which a warning is given; Docker's default is 64 MiB"""
_MIN_OPEN_FILES = 1024
"""limit of open files below which a warning is given"""
_MIN_DISK_GIB = 1.0
"""free disk space below which nothing can be saved"""
_LARGE_MODEL_DISK_GIB = {"output.dir": 10.0, "data.cache_dir": 10.0, "hub's cache": 20.0}
"""free disk space below which there is no room for a large model, by folder"""
_MAX_DRIFT_SECONDS = 0.5
"""largest jump of the wall clock during the check"""
_MAX_SKEW_SECONDS = 1.0
"""largest difference between the clocks of two machines"""
_LINK_NAMES = {
    "PIX": "one PCIe bridge",
    "PXB": "PCIe bridges",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe and the links of a NUMA node",
    "SYS": "PCIe and the link between sockets",
}


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    status: str
    found: str
    fix: str = ""
    """what to type if something is wrong"""


def list_rows(
    facts: MachineFacts, *, precision: str = "auto", uses_gpus: bool = True
) -> list[Finding]:
    """List the findings about a machine; `precision`, `uses_gpus`: settings of the run."""
    return [
        *(
            Finding("launcher", PROBLEM, *each.partition("; ")[::2])
            for each in facts.launch_problems
        ),
        *_python(facts),
        *_packages(facts),
        *_gpus(facts, precision, uses_gpus),
        *_links(facts),
        *_memory(facts),
        *(_folder(folder) for folder in facts.folders),
        *_limits(facts),
        *_clock(facts),
        *_hub(facts),
    ]


def _python(facts: MachineFacts) -> Iterator[Finding]:
    if facts.supports_python:
        yield Finding("Python", OK, facts.python)
    else:
        found = f"{facts.python}; this program needs {facts.requires_python}"
        fix = "install it in an environment with Python 3.12"
        yield Finding(
            "Python", PROBLEM, found, "make install PYTHON=python3.12" if is_checkout() else fix
        )


def _packages(facts: MachineFacts) -> Iterator[Finding]:
    for name, version in facts.suspects.items():
        releases, advisory = MALICIOUS[name]
        if version in releases:
            yield Finding(
                name,
                PROBLEM,
                f"{version} is a malicious release ({advisory}): it had your permissions, and may "
                "have read tokens and keys",
                f"pip uninstall {name}; make a new .venv on a clean machine; replace your tokens "
                "and keys",
            )
    if not facts.is_installed:
        yield Finding("packages", PROBLEM, "this program is not installed", "make install")
        return
    bad = list(_bad_packages(facts))
    yield from bad
    bad_names = {row.what for row in bad}
    good = [
        f"{name} {facts.versions[name]}"
        for name in _SHOWN
        if name in facts.versions and name not in bad_names
    ]
    absent = [
        f"{package.name} [{package.extra}]"
        for package in facts.packages
        if package.version is None and package.extra is not None
    ]
    extras = ", ".join(dict.fromkeys(absent))
    fix = f"optional, not installed: {extras}" if extras else ""
    yield Finding("packages", OK, ", ".join(good), fix)


def _bad_packages(facts: MachineFacts) -> Iterator[Finding]:
    failures = facts.imports.failures
    for package in facts.packages:
        name, version = package.name, package.version
        # A wrong version of an optional package fails only when it is used.
        status = WARNING if package.extra is not None else PROBLEM
        if version is None:
            if package.extra is None:
                yield Finding(name, PROBLEM, "not installed", _install_command(package))
        elif not package.is_supported:
            found = f"{version}; this program needs {package.required}"
            yield Finding(name, status, found, _install_command(package))
        elif (failure := failures.get(name)) is not None and (
            name == "torch" or failure != failures.get("torch")  # the same reason is named once
        ):
            fix = f"{pip_install()} --force-reinstall --no-deps {name}"
            if package.extra is not None:
                fix = f"pip uninstall {name}, or {fix}"
            yield Finding(name, status, f"{version} cannot be imported: {failure}", fix)


def _install_command(package: Package) -> str:
    if package.extra is not None and is_checkout():
        return f"{pip_install()} -e '.[{package.extra}]'"
    return f"{pip_install()} '{package.name}{package.required}'"


def _gpus(facts: MachineFacts, precision: str, uses_gpus: bool) -> Iterator[Finding]:
    machine = facts.machine
    if not machine.num_files:
        if facts.num_pci_gpus:
            number = counted(facts.num_pci_gpus, "NVIDIA GPU")
            yield Finding(
                "GPUs",
                WARNING,
                f"{number} on the PCI bus, but no driver: a run would use the CPU",
                f"install NVIDIA's driver {BUILDS[0][2]} or newer"
                f"{', then make install' * is_checkout()}; in a container: docker run --gpus all",
            )
        else:
            yield Finding("GPUs", OK, "no GPU: runs use the CPU")
        return
    status = PROBLEM if uses_gpus else WARNING
    for problem in find_gpu_problems(machine, len(machine.gpus), precision):
        yield Finding("GPUs", status, *problem.partition("; ")[::2])
    kinds = Counter((gpu.name, round(gpu.memory_gib), gpu.sm) for gpu in machine.gpus)
    for (name, memory, capability), count in kinds.items():
        found = f"{count} x {name}, {memory} GiB, compute capability {capability}"
        yield Finding("GPUs", OK, found)
    supports = "" if machine.cuda is None else ", supports CUDA {}.{}".format(*machine.cuda)
    built = "no CUDA" if machine.torch_cuda is None else "CUDA {}.{}".format(*machine.torch_cuda)
    if machine.gpus:
        driver = machine.driver or "unknown version"
        yield Finding("driver", OK, f"{driver}{supports}; PyTorch {machine.torch} with {built}")
    torch = facts.imports.torch
    if torch is not None and torch.num_gpus < len(machine.gpus):
        yield Finding(
            "GPUs",
            status,
            f"the driver lists {len(machine.gpus)}, but PyTorch can use {torch.num_gpus} of them",
            'python -c "import torch; torch.cuda.init()" shows the reason',
        )


def _links(facts: MachineFacts) -> Iterator[Finding]:
    torch, number = facts.imports.torch, len(facts.machine.gpus)
    if facts.links:
        pairs_by_link: dict[str, list[str]] = {}
        for pair, link in facts.links.items():
            pairs_by_link.setdefault(link, []).append(pair)
        found = [
            f"{_describe_pairs(pairs, len(facts.links))} by {_LINK_NAMES.get(link, link)}"
            for link, pairs in pairs_by_link.items()
        ]
        is_fast = list(pairs_by_link) == ["NVLink"]
        fix = "" if is_fast else "nvidia-smi topo -m shows which; tensor parallelism needs NVLink"
        yield Finding("links of GPUs", OK, "; ".join(found), fix)
    if torch is not None and number > 1 and len(torch.peers) < number * (number - 1):
        # Traffic through host memory works, but is slow.
        yield Finding(
            "peer access",
            WARNING,
            f"{len(torch.peers)} of {number * (number - 1)} directions: the others go through host "
            "memory",
            "nvidia-smi topo -p2p r shows which; in a virtual machine, its host must allow it",
        )
    if torch is not None:
        nccl = torch.nccl or "not in this build of PyTorch: ranks communicate by gloo"
        is_missing = torch.nccl is None and number > 1
        install = "make install" if is_checkout() else "pip install --force-reinstall torch"
        status, fix = (PROBLEM, install) if is_missing else (OK, "")
        yield Finding("NCCL", status, nccl, fix)


def _describe_pairs(pairs: Sequence[str], num_pairs: int) -> str:
    if len(pairs) == num_pairs:
        return "all pairs" if num_pairs > 1 else f"pair {pairs[0]}"
    shown = ", ".join(pairs[:4])
    return f"{len(pairs)} pairs ({shown}{', ...' if len(pairs) > 4 else ''})"


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    found = f"{facts.memory_left_gib:.1f} of {facts.memory_gib:.1f} GiB are free"
    is_enough = facts.memory_left_gib >= _MIN_MEMORY_GIB
    fix = "end other programs, or give the container more (docker run --memory=16g)"
    yield Finding("host memory", OK if is_enough else WARNING, found, "" if is_enough else fix)
    shared = facts.shared_memory_gib
    if shared is None:
        return
    is_enough = shared >= _MIN_SHARED_MEMORY_GIB
    found = f"{shared:.1f} GiB are free" if is_enough else f"{shared * 1024:.0f} MiB are free"
    fix = (
        "docker run --shm-size=8g (or --ipc=host); or run without it by data.num_workers=0 and "
        "NCCL_SHM_DISABLE=1"
    )
    yield Finding("/dev/shm", OK if is_enough else WARNING, found, "" if is_enough else fix)


def _folder(folder: Folder) -> Finding:
    fixes = {
        "output.dir": "type output.dir=FOLDER on a disk with free space",
        "data.cache_dir": "type data.cache_dir=FOLDER on a disk with free space",
        "hub's cache": "export HF_HOME=FOLDER on a disk with free space",
        "TMPDIR": "export TMPDIR=FOLDER on a disk with free space",
    }
    what, fix = folder.what, fixes[folder.what]
    if folder.failure:
        # The hub's cache is needed only for models of the hub; no run requires TMPDIR itself.
        status = PROBLEM if what in ("output.dir", "data.cache_dir") else WARNING
        return Finding(what, status, f"{folder.path} cannot be written to: {folder.failure}", fix)
    found = f"{folder.path}: {folder.free_gib:,.1f} GiB free"
    if folder.free_gib < _MIN_DISK_GIB:
        return Finding(what, PROBLEM if what == "output.dir" else WARNING, found, fix)
    if folder.free_gib < _LARGE_MODEL_DISK_GIB.get(what, 0.0):
        return Finding(what, WARNING, found, f"for a large model: {fix}")
    return Finding(what, OK, found)


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    soft, hard = facts.open_files
    unlimited = soft < 0  # RLIM_INFINITY
    if unlimited or soft >= _MIN_OPEN_FILES:
        yield Finding("open files", OK, "unlimited" if unlimited else f"{soft:,}")
        return
    allowed = math.inf if hard < 0 else hard
    fix = "ulimit -n 65536" if allowed >= 65536 else f"ulimit -n {hard}"
    if allowed <= soft:
        fix = "ask the administrator for more (nofile in limits.conf; docker run --ulimit nofile=)"
    yield Finding(
        "open files", WARNING, f"at most {soft:,}: data loaders and ranks may need more", fix
    )


def _clock(facts: MachineFacts) -> Iterator[Finding]:
    fix = "set it: timedatectl set-ntp true"
    if facts.wall < facts.newest_file - _MAX_SKEW_SECONDS:
        days = (facts.newest_file - facts.wall) / 86400
        found = f"{days:,.1f} days before the packages were installed: certificates will be refused"
        yield Finding("clock", WARNING, found, fix)
    elif abs(facts.drift) > _MAX_DRIFT_SECONDS:
        found = f"the wall clock jumped by {facts.drift:+.1f} s during this check"
        yield Finding("clock", WARNING, found, f"{fix}; a run's durations use the monotonic clock")
    else:
        yield Finding("clock", OK, "steady")


def _hub(facts: MachineFacts) -> Iterator[Finding]:
    hub = facts.hub
    token = "token found" if hub.has_token else "no token: only public models and data"
    fix = "" if hub.has_token else "hf auth login, for gated or private models and data"
    if hub.is_offline:
        token, fix = f"offline by HF_HUB_OFFLINE; {token}", "unset HF_HUB_OFFLINE to download"
    yield Finding("hub", OK, token, fix)
    if hub.address and hub.failure is not None:
        found = f"{hub.address} cannot be reached: {hub.failure}"
        fix = "model.path=FOLDER of a local copy; or set HF_ENDPOINT or HTTPS_PROXY"
        yield Finding("network", PROBLEM, found, fix)
    elif hub.address:
        yield Finding("network", OK, f"{hub.address} responds")


def compare_machines(
    all_facts: Sequence[MachineFacts], skews: Sequence[float] = ()
) -> list[Finding]:
    """List differences between the machines of a run.

    `skews`: seconds by which each rank's clock is behind that of rank 0.
    """
    rows, first = [], all_facts[0]
    for other in all_facts[1:]:
        differing = sorted(
            name
            for name in {*first.versions, *other.versions}
            if first.versions.get(name) != other.versions.get(name)
        )
        if differing:
            listed = ", ".join(
                f"{name} {first.versions.get(name, 'none')} and {other.versions.get(name, 'none')}"
                for name in differing[:4]
            )
            found = f"{first.host} and {other.host} differ: {listed}"
            rows.append(Finding("versions", PROBLEM, found, "install the same versions on both"))
        gpus, others = (
            ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in facts.machine.gpus)
            for facts in (first, other)
        )
        if gpus != others:
            found = f"{first.host} has {gpus or 'none'}, {other.host} has {others or 'none'}"
            fix = "use equal machines: the slowest GPU, and the one with least memory, limit all"
            rows.append(Finding("GPUs", WARNING, found, fix))
    skew = max(map(abs, skews), default=0.0)
    if skew > _MAX_SKEW_SECONDS:
        found = f"the clocks of two ranks differ by {skew:,.1f} s"
        rows.append(Finding("clocks", WARNING, found, "set them: timedatectl set-ntp true"))
    return rows
