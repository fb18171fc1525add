"""Folders of killed and finished runs, for tests of the checks before a resume (no torch)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config import load_config, load_run_config, save_config
from app.preflight import describe_base, requested_devices
from app.run import Run, compare_existing, describe_global_batch, open_run
from app.run.manifest import save_manifest
from app.train import train
from app.training.checkpoint.documents import MODEL, OPTIMIZER, TRAINING, random_state_name
from app.training.checkpoint.store import CheckpointStore
from tests.in_process import as_new_process

RANDOM_STATE = {
    "python": [3, list(random.Random(0).getstate()[1]), None],
    "numpy": ["MT19937", list(range(624)), 624, 0, 0.0],
    "torch": base64.b64encode(bytes(5056)).decode(),
}


IDENTITY = {"id": "a" * 32, "plan": "b" * 32}


def open_typed(*typed: str) -> Run:
    """Open the run of a command line, as the verb does."""
    config = load_config("train", typed)
    return open_run(config, compare_existing(config, load_run_config))


def start(*typed: str) -> Run:
    """Open the run as if in a new process."""
    with as_new_process():
        return open_typed(*typed)


def go_on(run: Path, *typed: str) -> Path:
    """Resume a run in this process, and train it to its end."""
    with as_new_process():
        train(load_config("train", [f"resume={run}", *typed]))
    return run


def make_run(
    folder: Path,
    *words: str,
    steps: Sequence[int] = (2, 4),
    finished: bool = False,
    **facts: Any,
) -> Path:
    """Write a run of `words` with checkpoints of `steps`; `facts` update its manifest."""
    config = load_config("train", [*words, f"output.dir={folder}"])
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    datasets = config.data.datasets
    known = {
        "base": describe_base(config.model),
        "data": [
            {"name": Path(one.path).stem, "path": one.path, "sha256": f"{index}" * 64, "rows": 1000}
            for index, one in enumerate(datasets)
        ],
        "precision": "fp32",
        "global_batch": describe_global_batch(config.trainer, requested_devices(config).num_ranks),
        "total_steps": 4,
        "template_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "tokens_sha256": "c" * 64,
        "run": IDENTITY,
    }
    save_manifest(folder, **known | facts)
    store = CheckpointStore(folder / "checkpoints", keep_last=9)
    for step in steps:
        save_step(store, step)
    if finished:
        (folder / "metrics.json").write_text('{"val/loss": 1.5}\n')
    return folder


def save_step(store: CheckpointStore, step: int) -> None:
    """Save a complete checkpoint of one rank without weights."""
    store.begin(step)
    for name in (MODEL, OPTIMIZER):
        store.add_tensors(step, name, {})
    store.add_document(step, random_state_name(0), RANDOM_STATE)
    store.add_document(step, TRAINING, training_document(step))
    details = {"num_ranks": 1, "num_data_ranks": 1, "total_steps": max(step, 4), "run": IDENTITY}
    store.commit(step, details=details)


def training_document(step: int) -> dict[str, Any]:
    """Return the counters of a run without a validation."""
    return {
        "step": step,
        "optimizer": {"class": "AdamW", "numbers": {}}
        | {name: [] for name in ("groups", "on_host", "without_state")},
        "curves": {
            "dataset_names": ["one"],
            "latest": {"train/loss": 2.5},
            "latest_step": step,
            "validations": [],
            "validated_step": -1,
            "trained_tokens": [10.0 * step],
            "num_tokens": 20 * step,
            "train_seconds": 0.5,
            "skipped_steps": 0,
            "row_losses": [[], []],
            "monitored": [],
            "best": [],
            "num_worse": 0,
        },
        "owes_validation": False,
        "lightning": {"callbacks": {}},
    }


def entry_of(file: Path) -> dict[str, Any]:
    """Return what a manifest says of a file."""
    content = file.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}


def write_manifest(folder: Path, content: bytes) -> None:
    """Write a manifest and a marker that fits it, as an attacker would."""
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_text(f"{hashlib.sha256(content).hexdigest()}\n")


def seal(folder: Path) -> None:
    """Rewrite the manifest and marker of a checkpoint to match its files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: entry_of(folder / name) for name in manifest["files"]}
    write_manifest(folder, json.dumps(manifest).encode())


def damage(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_all(run: Path) -> None:
    """Damage every checkpoint of a run."""
    for file in run.glob("checkpoints/*/training.json"):
        damage(file)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below `folder`."""
    return {
        os.path.relpath(file, folder): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
