"""Python environments of the peers that we compare with, separate from ours.

They are in `.venv-peers/` and are created once, with pinned versions. Nothing is measured here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".venv-peers"
PACKAGES = {
    # torch is installed first and alone, so that the other packages use this build.
    "trl": (
        ("torch==2.13.0",),
        (
            "torch==2.13.0",
            "trl==1.16.0",
            "datasets==5.2.0",
            "transformers==5.23.0",
            "peft==0.21.2",
        ),
    ),
    # The newest torchao no longer has what torchtune imports.
    "torchtune": (
        ("torch==2.13.0",),
        ("torch==2.13.0", "torchtune==0.6.1", "torchao==0.11.0", "datasets==5.2.0"),
    ),
    "litgpt": (
        ("torch==2.13.0",),
        ("torch==2.13.0", "litgpt==0.5.13", "lightning==2.6.6"),
    ),
    # LLaMA-Factory asks for torchaudio, which does not load beside a torch for CPUs, and for a web
    # page: it goes in last and alone, after what its training needs.
    "llamafactory": (
        ("torch==2.13.0",),
        (
            "torch==2.13.0",
            "transformers==5.6.0",
            "datasets==4.0.0",
            "accelerate==1.11.0",
            "peft==0.18.1",
            "trl==0.24.0",
            "torchdata==0.11.0",
            "einops",
            "fire",
            "hf-transfer",
            "omegaconf",
            "pandas",
            "protobuf",
            "scipy",
            "sentencepiece",
            "tiktoken",
            "tyro<0.9",
        ),
        ("--no-deps", "llamafactory==0.9.5"),
    ),
    "lm_eval": (
        ("torch==2.13.0",),
        ("torch==2.13.0", "transformers==5.23.0", "accelerate", "lm_eval==0.4.13"),
    ),
    # It pins nearly all that it needs, 4 GB with what only a GPU uses.
    "axolotl": (("torch==2.13.0",), ("torch==2.13.0", "axolotl==0.19.0")),
}
"""environment -> groups of packages, installed one after the other"""


def peer_python(name: str) -> Path:
    """Return the python of environment `name` of PACKAGES; makes it when it is not complete.

    Raises SystemExit with pip's words when something cannot be installed.
    """
    folder, groups = FOLDER / name, PACKAGES[name]
    python, stamp = folder / "bin" / "python", folder / "complete.txt"
    wanted = "\n".join(" ".join(group) for group in groups)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {', '.join(groups[-1])} into {folder.name}: a few minutes", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    for group in groups:
        _run(str(python), "-m", "pip", "install", "--quiet", *group)
    # Written last, so that an interrupted install is repeated by the next call.
    stamp.write_text(wanted)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
