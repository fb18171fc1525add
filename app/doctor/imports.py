"""Whether the packages can be imported, each tried in another process.

A package of another PyTorch's ABI fails with a name that nobody knows, or kills its process: here
it is one line. Run as `python -m app.doctor.imports MODULE ...`, it prints JSON lines.
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

from app.process.environment import quiet_libraries
from app.process.errors import ROOT

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
"""packages with compiled parts, or on top of such, and what is imported of them"""
SECONDS = 180.0
"""for all of them; 20 on two busy cores"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What the PyTorch that was imported says of itself."""

    nccl: str | None = None
    """version of NCCL, None for a build without"""
    num_gpus: int = 0
    peers: tuple[tuple[int, int], ...] = ()
    """pairs of GPUs of which the first can read the memory of the second"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imports:
    """Why packages cannot be imported, by package, and what PyTorch says."""

    failures: dict[str, str] = field(default_factory=dict)
    torch: Torch | None = None


def try_imports(packages: Sequence[str], *, seconds: float = SECONDS) -> Imports:
    """Import `packages` in another process; after one that ends it go on with the next."""
    waiting, failures, torch = list(packages), dict[str, str](), None
    while waiting:
        code, answers = _run([MODULES[name] for name in waiting], seconds)
        for answer in answers:
            name = waiting.pop(0)
            if answer["error"]:
                failures[name] = answer["error"]
            if answer.get("torch"):
                known: dict[str, Any] = answer["torch"]
                torch = Torch(**known | {"peers": tuple(map(tuple, known["peers"]))})
        if waiting:
            died = f"its import ends Python (exit code {code})"
            failures[waiting.pop(0)] = (
                died if code is not None else f"its import takes more than {seconds:.0f} s"
            )
    return Imports(failures=failures, torch=torch)


def _run(modules: Sequence[str], seconds: float) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the exit code, None where the time was over, and the answers until then."""
    command = [sys.executable, "-m", "app.doctor.imports", *modules]
    # The folder of this program is on no path where it runs from a clone that is not installed.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    code: int | None
    try:
        said, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        code = None
    return code, [json.loads(line) for line in said.splitlines()]


def _answer(module: str) -> dict[str, Any]:
    try:
        imported = import_module(module)
    except BaseException as error:  # noqa: BLE001  whatever a package raises is its answer
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}
    return {"error": ""} | ({"torch": _ask_torch(imported)} if module == "torch" else {})


def _ask_torch(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"nccl": None, "num_gpus": 0, "peers": []}
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.cuda.is_available():
        found["num_gpus"] = number = torch.cuda.device_count()
        pairs = [(one, two) for one in range(number) for two in range(number) if one != two]
        found["peers"] = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return found


if __name__ == "__main__":
    # What packages print goes to stderr: stdout is for the answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet_libraries(offline=True)
    for name in sys.argv[1:]:
        print(json.dumps(_answer(name)), file=answers, flush=True)
