"""Check in a separate process whether packages can be imported.

A package built for another PyTorch fails with an undefined symbol, or kills its process; the result
is one line. As a program, `python -m app.doctor.imports MODULE ...`, it prints JSON lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from app.process.environment import configure_libraries
from common.installation import child_command

MODULES = {
    "torch": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "peft": "peft",
    "datasets": "datasets",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "flash-attn": "flash_attn",
    "liger-kernel": "liger_kernel",
}
"""module to import for each package that has compiled parts or depends on such a package"""
SECONDS = 180.0
"""time limit for all imports of a process; they take 20 seconds on two busy cores"""


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
    """The results of trying to import packages."""

    failures: dict[str, str] = field(default_factory=dict)
    """reason of each failed import, by package"""
    torch: Torch | None = None


def try_imports(packages: Sequence[str], *, seconds: float = SECONDS) -> Imports:
    """Import `packages` in a separate process; if one kills it, continue after it in a new one."""
    waiting, failures, torch = list(packages), dict[str, str](), None
    while waiting:
        code, results = _run([MODULES[name] for name in waiting], seconds)
        for result in results:
            name = waiting.pop(0)
            if result["error"]:
                failures[name] = result["error"]
            if result.get("torch"):
                known: dict[str, Any] = result["torch"]
                torch = Torch(**known | {"peers": tuple(map(tuple, known["peers"]))})
        if waiting:
            failures[waiting.pop(0)] = (
                f"its import ends Python (exit code {code})"
                if code is not None
                else f"its import takes more than {seconds:.0f} s"
            )
    return Imports(failures=failures, torch=torch)


def _run(modules: Sequence[str], seconds: float) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the exit code, None after a timeout, and the results until then."""
    process = subprocess.Popen(
        [*child_command("app.doctor.imports"), *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    return code, [json.loads(line) for line in output.splitlines()]


def _try_import(module: str) -> dict[str, Any]:
    try:
        imported = import_module(module)
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


if __name__ == "__main__":
    # Send the output of packages to stderr: stdout is for the results only.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    configure_libraries(offline=True)
    for name in sys.argv[1:]:
        print(json.dumps(_try_import(name)), file=results, flush=True)
