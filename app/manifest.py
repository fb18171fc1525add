"""What a run was made of: enough to say later whether another run is the same."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.errors import UserError
from app.output import write_whole
from data_modules import redacted

LIBRARIES = (
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
STARTED = time.strftime("%Y-%m-%dT%H:%M:%S%z")
"""when the command started: the verb imports this before it does anything"""


def save_manifest(folder: Path, **facts: Any) -> None:
    """Write manifest.json: `facts`, and the command, versions, machine and git state."""
    manifest = {
        "command": [sys.executable, *sys.orig_argv[1:]],
        "started": STARTED,
        "versions": installed_versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git": git_state(),
    } | facts
    write_whole(folder / MANIFEST_FILE, json.dumps(redacted(manifest), indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a run's manifest; UserError where it is not one."""
    file = folder / MANIFEST_FILE
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        manifest["versions"], manifest["base"], manifest["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}), which says what the run is made of; copy it back, "
            "or leave resume out and type another output.dir"
        ) from error
    return manifest


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    return {name: version(name) for name in LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """Return commit and whether files differ from it; None outside a git checkout."""
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
