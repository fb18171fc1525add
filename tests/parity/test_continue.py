"""Continuing from a saved adapter equals an uninterrupted run."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.in_process import run_command
from tests.resumed import go_on
from tests.runs import adapter_of, rows_of
from tests.tiny import NAMES, train_into

pytestmark = pytest.mark.slow

# The optimizer has no state, and each step uses the same two rows: their order may change between
# epochs, but the sum of two gradients does not depend on it.
SETTINGS = [
    "optimizer.beta1=0",
    "optimizer.beta2=0",
    "optimizer.weight_decay=0",
    "optimizer.lr=1e-3",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "packing=none",
    "trainer.micro_batch_size=1",
    "trainer.gradient_accumulation_steps=2",
    "trainer.log_every_steps=1",
    "data.val_set_size=0",
    "logger=csv",
]
ADAPTER = ["adapter=lora", "adapter.dropout=0", "adapter.use_dora=true"]
NEW_TOKENS = "adapter.trainable_tokens=[<|im_end|>]"


def data(folder: Path) -> str:
    """Return two data sets of one row each."""
    datasets = []
    for name in NAMES:
        row = {"instruction": f"Say {name}.", "input": "", "output": f"{name}, twice {name}"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        datasets.append(f"{{path: {folder / name}.jsonl, name: {name}, format: alpaca}}")
    return f"data.datasets=[{', '.join(datasets)}]"


def losses(run: Path) -> list[tuple[str, ...]]:
    """Return the training losses of each step as written in metrics.csv."""
    columns = ("train/loss", *(f"train/loss/{name}" for name in NAMES))
    return [tuple(row[name] for name in columns) for row in rows_of(run) if row["train/loss"]]


def test_two_plus_two_steps_equal_four(tmp_path: Path) -> None:
    settings = [*SETTINGS, *ADAPTER, data(tmp_path)]
    whole = train_into(tmp_path / "whole", *settings, NEW_TOKENS, "trainer.max_steps=4")
    half = train_into(tmp_path / "half", *settings, NEW_TOKENS, "trainer.max_steps=2")
    going_on = ("trainer.max_steps=2", f"adapter.path={half / 'adapter'}")
    rest = train_into(tmp_path / "rest", *settings, *going_on, "trainer.checkpoint.every_steps=1")
    assert len(set(losses(whole))) == 4
    assert losses(half) + losses(rest) == losses(whole)
    expected, found = map(adapter_of, (whole, rest))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    configs = [
        json.loads((r / "adapter" / "adapter_config.json").read_text()) for r in (whole, rest)
    ]
    as_saved = copy.deepcopy(configs[1])
    for config in configs:
        for key in ("target_modules", "feedforward_modules"):
            config[key] = sorted(config.get(key) or [])
    assert configs[0] == configs[1]
    shutil.rmtree(rest / "checkpoints" / "step-2")
    (rest / "metrics.json").unlink()
    shutil.rmtree(rest / "adapter")
    shutil.rmtree(half / "adapter")  # a run keeps what it needs of it
    assert run_command(f"resume={rest}").code == 0
    go_on(rest)
    resumed = adapter_of(rest)
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    assert json.loads((rest / "adapter" / "adapter_config.json").read_text()) == as_saved
