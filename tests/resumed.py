"""Runs that were killed or have finished, as far as going on with them is decided without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config import load_config, save_config
from app.manifest import save_manifest
from app.preflight import describe_base, num_ranks
from app.resume import describe_global_batch
from app.training.checkpoint.store import CheckpointStore


def make_run(
    folder: Path,
    *words: str,
    steps: Sequence[int] = (2, 4),
    finished: bool = False,
    **facts: Any,
) -> Path:
    """Leave a run of `words` with checkpoints of `steps`; `facts` replace its manifest's."""
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
        "global_batch": describe_global_batch(config.trainer, num_ranks(config) or 1),
        "total_steps": 4,
        "template_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "tokens_sha256": "c" * 64,
    }
    save_manifest(folder, **known | facts)
    store = CheckpointStore(folder / "checkpoints", keep_last=9)
    for step in steps:
        store.begin(step)
        store.add_document(step, "training", {"step": step})
        store.commit(step)
    if finished:
        (folder / "metrics.json").write_text('{"val/loss": 1.5}\n')
    return folder


def damage(file: Path) -> None:
    """Turn one bit in the middle of a file."""
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
