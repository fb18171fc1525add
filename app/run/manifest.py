"""A run's manifest, and the run id that the manifest and the checkpoints carry.

A run's folder may be moved or copied as a whole. A checkpoint that was copied into it from another
run is refused, even where it would fit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.process.gpus import read_machine
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.run_documents import MANIFEST, find_problem
from common.errors import UserError
from common.files import write_atomically
from common.installation import typed_words
from common.redaction import redacted

_LIBRARIES = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "hydra-core",
    "safetensors",
)
MANIFEST_FILE = "manifest.json"
STARTED_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
STARTED = time.strftime(STARTED_FORMAT)
"""start time of the command: the verb imports this module first"""
_ALLOWED_BY = "checkpoint"
"""the word in resume_allow that permits resuming from another run's checkpoint"""


def save_manifest(folder: Path, **facts: Any) -> None:
    """Write manifest.json: `facts`, and the command, versions, machine and git state."""
    manifest = {
        "command": [sys.executable, *typed_words()],
        "started": STARTED,
        "versions": installed_versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "hardware": _describe_hardware(),
        "git": git_state(),
    } | facts
    write_atomically(folder / MANIFEST_FILE, json.dumps(redacted(manifest), indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a run's manifest; UserError, with the key, if it is damaged or of another shape."""
    file = folder / MANIFEST_FILE
    content, problem = find_problem(file, MANIFEST)
    if problem is not None:
        raise UserError(
            f"{problem}; {file} cannot be read, which records what the run was made from; restore "
            "it, or leave resume out and type another output.dir"
        )
    manifest: dict[str, Any] = content
    return manifest


def record_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Add to a run's manifest whose weights are its result, and at which step it ended."""
    manifest = read_manifest(folder) | {"result": dict(result)}
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")


def _describe_hardware() -> dict[str, Any]:
    """Describe the hardware that a run's speed depends on: GPUs, cores, memory, system."""
    machine = read_machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpus": ", ".join(f"{gpu.name} ({gpu.memory_gib:.1f} GiB)" for gpu in machine.gpus) or None,
        "driver": machine.driver,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Return the versions of the libraries that results depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in _LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()


def identity_of(before: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's id, and a hash of its step plan.

    `before`: the manifest of the run that is resumed, empty for a new run.
    """
    plan = [
        facts["seed"],
        [facts["base"][name] for name in ("fingerprint", "weights")],
        [[dataset["sha256"], dataset["rows"]] for dataset in facts["data"]],
        facts.get("tokens_sha256"),
        facts["global_batch"]["packs"],
        facts["total_steps"],
    ]
    return {
        "id": before["run"]["id"] if before else secrets.token_hex(16),
        "plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:32],
    }


def check_run_id(
    checkpoint: Checkpoint,
    run: Path,
    before: Mapping[str, Any],
    *,
    is_typed: bool,
    allow: Sequence[str],
) -> str | None:
    """Raise UserError for a checkpoint that was not saved by the run in folder `run`.

    Returns a note to print if resume_allow waives the check. `before`: the manifest of the run in
    `run`. `is_typed`: whether `resume=` names this checkpoint.
    """
    ours, theirs = before["run"], checkpoint.details["run"]
    plans = [ours["plan"], *(process.get("plan") for process in before.get("earlier", []))]
    if theirs["id"] != ours["id"]:
        why = f"was saved by another run ({_short(theirs)}, this one is {_short(ours)})"
    elif theirs["plan"] not in plans:
        why = "was saved by a copy of this run that was trained on other data or for other steps"
    else:
        return None
    if is_typed and _ALLOWED_BY in allow:
        return f"{checkpoint.folder} {why}, as resume_allow=[{_ALLOWED_BY}] allows"
    words = ",".join([*allow, _ALLOWED_BY])
    raise UserError(
        f"{checkpoint.folder} {why}; move it out of {run} to resume from the run's own, or type "
        f"resume={checkpoint.folder} 'resume_allow=[{words}]' to resume this run from it"
    )


def _short(run: Mapping[str, Any]) -> str:
    return str(run["id"])[:8]
