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
STARTED = time.strftime("%Y-%m-%dT%H:%M:%S%z")
"""when the command started: the verb imports this before it does anything"""


def save_manifest(folder: Path, **facts: Any) -> None:
    """Write manifest.json: `facts`, and the command, versions, machine and git state."""
    manifest = {
        "command": [sys.executable, *sys.orig_argv[1:]],
        "started": STARTED,
        "versions": {name: version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git": git_state(),
    } | facts
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


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
