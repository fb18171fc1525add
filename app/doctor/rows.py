"""From facts to rows: what is right, what a person should know, and what would stop a run.

Pure: the same facts give the same rows, whatever machine this is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.doctor.facts import Facts, Folder, Package
from app.process.gpus import BUILDS, judge

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MALICIOUS = {
    "lightning": (("2.6.2", "2.6.3"), "GHSA-w37p-236h-pfx3"),
    "litellm": (("1.82.7", "1.82.8"), "PYSEC-2026-2"),
    "ultralytics": (("8.3.41", "8.3.42", "8.3.45", "8.3.46"), "PYSEC-2024-154"),
}
"""package -> releases that were uploaded with malware, and the advisory that says so"""
SHOWN = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "datasets",
    "bitsandbytes",
    "flash-attn",
    "liger-kernel",
    "deepspeed",
    "hydra-core",
)
"""packages whose versions stand in the table; --json has all"""
LEAST_MEMORY_GIB = 2.0
"""left: PyTorch and the libraries take 0.4 GiB a process, and the smallest run another half"""
SHARED_MEMORY_GIB = 1.0
"""of /dev/shm; Docker gives 64 MiB unless told otherwise"""
OPEN_FILES = 1024
LEAST_DISK_GIB, DISK_GIB = 1.0, {"output.dir": 10.0, "data.cache_dir": 10.0, "hub's cache": 20.0}
"""free: below the first nothing can be saved; below the others a large model has no room"""
DRIFT_SECONDS, SKEW_SECONDS = 0.5, 1.0
"""by which a clock may jump while this looks, and by which those of two machines may differ"""
NVIDIA_WORDS = {
    "PIX": "one PCIe bridge",
    "PXB": "PCIe bridges",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe and the links of a NUMA node",
    "SYS": "PCIe and the link between sockets",
    "unknown": "a link that the driver does not name",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    what: str
    status: str
    found: str
    fix: str = ""
    """what to type, where something is not right"""


def list_rows(facts: Facts, *, precision: str = "auto", uses_gpus: bool = True) -> list[Row]:
    """Judge a machine; `precision`, `uses_gpus`: of the run that it is for."""
    return [
        *_launch(facts),
        *_python(facts),
        *_packages(facts),
        *_gpus(facts, precision, uses_gpus),
        *_links(facts),
        *_memory(facts),
        *(_folder(one) for one in facts.folders),
        *_limits(facts),
        *_clock(facts),
        *_hub(facts),
    ]


def _launch(facts: Facts) -> Iterator[Row]:
    for problem in facts.launch_problems:
        said, _, fix = problem.partition("; ")
        yield Row("launcher", PROBLEM, said, fix)


def _python(facts: Facts) -> Iterator[Row]:
    if facts.takes_python:
        yield Row("Python", OK, facts.python)
    else:
        found = f"{facts.python}; this program takes {facts.requires_python}"
        yield Row("Python", PROBLEM, found, "make install PYTHON=python3.12")


def _packages(facts: Facts) -> Iterator[Row]:
    for name, version in facts.suspects.items():
        releases, advisory = MALICIOUS[name]
        if version in releases:
            yield Row(
                name,
                PROBLEM,
                f"{version} is a malicious release ({advisory}): it ran with your rights, and may "
                "have read tokens and keys",
                f"pip uninstall {name}; make a new .venv on a clean machine; replace your tokens "
                "and keys",
            )
    if not facts.is_installed:
        yield Row("packages", PROBLEM, "this program is not installed", "make install")
        return
    bad = list(_bad_packages(facts))
    yield from bad
    named = {row.what for row in bad}
    good = [f"{name} {facts.versions[name]}" for name in SHOWN if name in facts.versions]
    good = [one for one in good if one.split()[0] not in named]
    absent = [one for one in facts.packages if one.version is None and one.extra is not None]
    extras = ", ".join(dict.fromkeys(f"{one.name} [{one.extra}]" for one in absent))
    yield Row(
        "packages", OK, ", ".join(good), f"not installed, as you need: {extras}" if extras else ""
    )


def _bad_packages(facts: Facts) -> Iterator[Row]:
    for one in facts.packages:
        if one.version is None:
            if one.extra is None:
                yield Row(one.name, PROBLEM, "not installed", _install(one))
        elif not one.takes:
            # An extra's package that is not the right one fails where it is used, and not before.
            status = WARNING if one.extra is not None else PROBLEM
            found = f"{one.version}; this program takes {one.required}"
            yield Row(one.name, status, found, _install(one))
        elif (failure := _import_failure(facts, one.name)) is not None:
            status = WARNING if one.extra is not None else PROBLEM
            fix = f"pip install --force-reinstall --no-deps -c constraints.txt {one.name}"
            if one.extra is not None:
                fix = f"pip uninstall {one.name}, or {fix}"
            yield Row(one.name, status, f"{one.version} cannot be imported: {failure}", fix)


def _import_failure(facts: Facts, name: str) -> str | None:
    """Return why a package cannot be imported; None where it is for PyTorch's own reason."""
    failures = facts.imports.failures
    failure = failures.get(name)
    return None if name != "torch" and failure == failures.get("torch") else failure


def _install(one: Package) -> str:
    if one.extra is not None:
        return f"pip install -c constraints.txt -e '.[{one.extra}]'"
    return f"pip install -c constraints.txt '{one.name}{one.required}'"


def _gpus(facts: Facts, precision: str, uses_gpus: bool) -> Iterator[Row]:
    machine = facts.machine
    if not machine.num_files:
        if facts.num_pci_gpus:
            number = f"{facts.num_pci_gpus} NVIDIA GPU{'s' * (facts.num_pci_gpus != 1)}"
            yield Row(
                "GPUs",
                WARNING,
                f"{number} on the PCI bus, and no driver: a run would train on the CPU",
                f"install NVIDIA's driver {BUILDS[0][2]} or newer, then make install; in a "
                "container: docker run --gpus all",
            )
        else:
            yield Row("GPUs", OK, "no GPU: runs train on the CPU")
        return
    status = PROBLEM if uses_gpus else WARNING
    for problem in judge(machine, len(machine.gpus), precision):
        said, _, fix = problem.partition("; ")
        yield Row("GPUs", status, said, fix)
    kinds = Counter((gpu.name, round(gpu.memory_gib), gpu.sm) for gpu in machine.gpus)
    for (name, memory, capability), times in kinds.items():
        found = f"{times} x {name}, {memory} GiB, compute capability {capability}"
        yield Row("GPUs", OK, found)
    serves = "" if machine.cuda is None else ", serves CUDA {}.{}".format(*machine.cuda)
    built = "no CUDA" if machine.torch_cuda is None else "CUDA {}.{}".format(*machine.torch_cuda)
    if machine.gpus:
        found = (
            f"{machine.driver or 'of unknown version'}{serves}; PyTorch {machine.torch}: {built}"
        )
        yield Row("driver", OK, found)
    torch = facts.imports.torch
    if torch is not None and torch.num_gpus < len(machine.gpus):
        yield Row(
            "GPUs",
            status,
            f"the driver gives {len(machine.gpus)}, and PyTorch uses {torch.num_gpus} of them",
            'python -c "import torch; torch.cuda.init()" says why',
        )


def _links(facts: Facts) -> Iterator[Row]:
    torch, number = facts.imports.torch, len(facts.machine.gpus)
    if facts.links:
        by_word: dict[str, list[str]] = {}
        for pair, word in facts.links.items():
            by_word.setdefault(word, []).append(pair)
        said = [
            f"{_pairs(pairs, len(facts.links))} by {NVIDIA_WORDS.get(word, word)}"
            for word, pairs in by_word.items()
        ]
        is_fast = list(by_word) == ["NVLink"]
        fix = "" if is_fast else "nvidia-smi topo -m shows which; tensor parallelism wants NVLink"
        yield Row("links of GPUs", OK, "; ".join(said), fix)
    if torch is not None and number > 1 and len(torch.peers) < number * (number - 1):
        # Through host memory, which works and is slow.
        yield Row(
            "peer access",
            WARNING,
            f"{len(torch.peers)} of {number * (number - 1)} directions: the others go through host "
            "memory",
            "nvidia-smi topo -p2p r shows which; in a virtual machine its host decides",
        )
    if torch is not None:
        said_of_nccl = torch.nccl or "not in this build of PyTorch: ranks talk by gloo"
        lacks = torch.nccl is None and number > 1
        yield Row("NCCL", PROBLEM if lacks else OK, said_of_nccl, "make install" if lacks else "")


def _pairs(pairs: Sequence[str], all_of_them: int) -> str:
    if len(pairs) == all_of_them:
        return "all pairs" if all_of_them > 1 else f"pair {pairs[0]}"
    shown = ", ".join(pairs[:4])
    return f"{len(pairs)} pairs ({shown}{', ...' if len(pairs) > 4 else ''})"


def _memory(facts: Facts) -> Iterator[Row]:
    found = f"{facts.memory_left_gib:.1f} of {facts.memory_gib:.1f} GiB are left"
    is_enough = facts.memory_left_gib >= LEAST_MEMORY_GIB
    fix = "end other programs, or give the container more (docker run --memory=16g)"
    yield Row("host memory", OK if is_enough else WARNING, found, "" if is_enough else fix)
    shared = facts.shared_memory_gib
    if shared is None:
        return
    is_enough = shared >= SHARED_MEMORY_GIB
    found = f"{shared:.1f} GiB are left" if is_enough else f"{shared * 1024:.0f} MiB are left"
    fix = (
        "docker run --shm-size=8g (or --ipc=host); else data.num_workers=0 and "
        "NCCL_SHM_DISABLE=1 do without"
    )
    yield Row("/dev/shm", OK if is_enough else WARNING, found, "" if is_enough else fix)


def _folder(folder: Folder) -> Row:
    fixes = {
        "output.dir": "type output.dir=FOLDER of a disk with room",
        "data.cache_dir": "type data.cache_dir=FOLDER of a disk with room",
        "hub's cache": "export HF_HOME=FOLDER of a disk with room",
        "TMPDIR": "export TMPDIR=FOLDER of a disk with room",
    }
    what, fix = folder.what, fixes[folder.what]
    if folder.failure:
        # The hub's cache is for models of the hub, and no run asks for TMPDIR itself.
        status = PROBLEM if what in ("output.dir", "data.cache_dir") else WARNING
        return Row(what, status, f"{folder.path} cannot be written to: {folder.failure}", fix)
    found = f"{folder.path}: {folder.free_gib:,.1f} GiB free"
    if folder.free_gib < LEAST_DISK_GIB:
        return Row(what, PROBLEM if what == "output.dir" else WARNING, found, fix)
    if folder.free_gib < DISK_GIB.get(what, 0.0):
        return Row(what, WARNING, found, f"for a large model: {fix}")
    return Row(what, OK, found)


def _limits(facts: Facts) -> Iterator[Row]:
    soft, hard = facts.open_files
    unlimited = soft < 0  # RLIM_INFINITY
    if unlimited or soft >= OPEN_FILES:
        yield Row("open files", OK, "unlimited" if unlimited else f"{soft:,}")
        return
    may = math.inf if hard < 0 else hard
    fix = "ulimit -n 65536" if may >= 65536 else f"ulimit -n {hard}"
    if may <= soft:
        fix = "ask the administrator for more (nofile in limits.conf; docker run --ulimit nofile=)"
    yield Row("open files", WARNING, f"{soft:,}: loaders and ranks may run out of them", fix)


def _clock(facts: Facts) -> Iterator[Row]:
    fix = "set it: timedatectl set-ntp true"
    if facts.wall < facts.newest_file - SKEW_SECONDS:
        days = (facts.newest_file - facts.wall) / 86400
        said = f"{days:,.1f} days before the packages were installed: certificates will be refused"
        yield Row("clock", WARNING, said, fix)
    elif abs(facts.drift) > DRIFT_SECONDS:
        said = f"the wall clock jumped by {facts.drift:+.1f} s while this looked"
        yield Row("clock", WARNING, said, f"{fix}; durations of a run are by the monotonic one")
    else:
        yield Row("clock", OK, "steady")


def _hub(facts: Facts) -> Iterator[Row]:
    hub = facts.hub
    token = "token found" if hub.has_token else "no token: public models and data alone"
    fix = "" if hub.has_token else "hf auth login, for what is gated or private"
    if hub.is_offline:
        token, fix = f"offline by HF_HUB_OFFLINE; {token}", "unset HF_HUB_OFFLINE to fetch"
    yield Row("hub", OK, token, fix)
    if hub.address and hub.failure is not None:
        found = f"{hub.address} cannot be reached: {hub.failure}"
        yield Row(
            "network", PROBLEM, found, "model.path=FOLDER of a copy; HF_ENDPOINT or HTTPS_PROXY"
        )
    elif hub.address:
        yield Row("network", OK, f"{hub.address} answers")


def compare_machines(all_facts: Sequence[Facts], skews: Sequence[float] = ()) -> list[Row]:
    """List how the machines of a run differ; `skews`: seconds of each clock behind rank 0's."""
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
            rows.append(Row("versions", PROBLEM, found, "install the same constraints.txt on both"))
    skew = max(map(abs, skews), default=0.0)
    if skew > SKEW_SECONDS:
        found = f"those of two ranks differ by {skew:,.1f} s"
        rows.append(Row("clocks", WARNING, found, "set them: timedatectl set-ntp true"))
    return rows
