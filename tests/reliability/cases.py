"""Training variants, deaths of runs, and the expected state after them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

SAMPLES = ROOT / "data_modules" / "samples"
NUM_STEPS = 12
STEPS_AN_EPOCH = 7
"""approximate steps per epoch, so that a run exceeds its first epoch"""
SHARD_ALL = "+strategy.config={zero_optimization: {stage3_param_persistence_threshold: 0}}"
"""without it, ZeRO-3 does not shard weights as small as these"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Adapter, data, number of ranks and strategy of a run."""

    adapter: str = "lora"
    ranks: int = 1
    data: str = "packed"
    accumulation: int = 1
    strategy: str = "auto"

    @property
    def name(self) -> str:
        suffix = "" if self.strategy == "auto" else f"-{self.strategy}"
        return f"{self.adapter}-{self.ranks}-{self.data}-{self.accumulation}{suffix}"

    def words(self, folder: Path, *others: str) -> list[str]:
        """Return the overrides of its run on the files in `folder`; `others` take precedence."""
        words = [
            f"model.path={folder / 'base'}",
            f"adapter={self.adapter}",
            *(["adapter.dropout=0.1"] if self.adapter == "lora" else []),
            f"data.datasets=[{', '.join(self._datasets(folder))}]",
            *(["data.mixture.weights=rows"] if self.data == "mixture" else []),
            "data.val_set_size=4",
            "data.sequence_len=256",
            f"packing={'none' if self.data == 'padded' else 'multipack'}",
            f"trainer.micro_batch_size={2 if self.data == 'padded' else 1}",
            f"trainer.gradient_accumulation_steps={self.accumulation}",
            f"trainer.devices={self.ranks}",
            "trainer.accelerator=cpu",
            *([f"strategy={self.strategy}"] if self.strategy != "auto" else []),
            *([SHARD_ALL] if self.strategy == "zero3" else []),
            "trainer.precision=fp32",
            f"trainer.max_steps={NUM_STEPS}",
            "trainer.validate_every_steps=5",
            "trainer.checkpoint.every_steps=2",
            "evaluation.exact_match=false",
            "logger=csv",
        ]
        chosen = dict(word.split("=", 1) for word in (*words, *others))
        return [f"{key}={value}" for key, value in chosen.items()]

    def _datasets(self, folder: Path) -> Iterator[str]:
        micro_batches = self.ranks * self.accumulation * STEPS_AN_EPOCH
        rows = {
            "packed": {"lists": 8 * micro_batches},
            "padded": {"lists": 2 * micro_batches},
            "mixture": {
                "lists": 3 * micro_batches,
                "orders": 2 * micro_batches,
                "people": micro_batches,
            },
        }[self.data]
        for name, number in rows.items():
            file = _first_rows(folder, name, number + 4)
            yield f"{{name: {name}, path: {file}, weight: {number / micro_batches}}}"


VARIANTS = [
    Variant(adapter=adapter, ranks=ranks, data=data, accumulation=accumulation)
    for adapter, ranks, data, accumulation in itertools.product(
        ("lora", "full"), (1, 2), ("packed", "padded", "mixture"), (1, 4)
    )
]


def make_base(folder: Path) -> None:
    """Copy the shipped base to `folder` with attention dropout, as `full` has no other dropout."""
    base = folder / "base"
    if base.exists():
        return
    unfinished = shutil.copytree(SAMPLES / "tiny_base", folder / "base.tmp", dirs_exist_ok=True)
    config = json.loads((base.parent / "base.tmp" / "config.json").read_text())
    config["attention_dropout"] = 0.1
    (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(base)


def _first_rows(folder: Path, name: str, number: int) -> Path:
    """Write the first rows of a sample, in its own format (JSON or JSON lines)."""
    (source,) = SAMPLES.glob(f"{name}.json*")
    file = folder / "data" / f"{name}-{number}{source.suffix}"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        text = source.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)[:number]
        first = "".join(lines) if file.suffix == ".jsonl" else json.dumps(json.loads(text)[:number])
        file.write_text(first, encoding="utf-8")
    return file


@dataclass(frozen=True, slots=True)
class Death:
    """One premature end of a run, and the expected state after it."""

    what: str
    """kind of death, which decides the figure that it counts for"""
    step: int
    code: int
    fault: str | None = None
    """fault to inject; None = `signum` is sent to the command's process in that step"""
    signum: int = 0
    saved: int | None = None
    """expected step of the newest checkpoint"""
    says: str = ""
    """expected part of the output"""
    damages: bool = False
    """whether the newest checkpoint is damaged afterwards"""


@dataclass(frozen=True, slots=True)
class Chain:
    """A run that dies several times and is resumed after each death until it finishes."""

    name: str
    variant: Variant
    deaths: Sequence[Death]
    words: Sequence[str] = ()
    """overrides in addition to the variant's"""
    cold: int | None = None
    """index of the process that is started in a new interpreter instead of a fork"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Number of disk operations of a save."""

    all: int
    """operations including the rotation afterwards"""
    need_room: int
    """operations that need disk space, up to the rename"""
