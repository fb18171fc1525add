"""What is trained, how it dies, and what must then be."""

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
"""about: a run goes over the end of its first epoch"""
ALL_IN_PARTS = "+strategy.config={zero_optimization: {stage3_param_persistence_threshold: 0}}"
"""else ZeRO-3 keeps weights this small whole on every rank"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What is trained, on what, and by how many."""

    adapter: str = "lora"
    ranks: int = 1
    data: str = "packed"
    accumulation: int = 1
    strategy: str = "auto"

    @property
    def name(self) -> str:
        spread = "" if self.strategy == "auto" else f"-{self.strategy}"
        return f"{self.adapter}-{self.ranks}-{self.data}-{self.accumulation}{spread}"

    def words(self, folder: Path, *others: str) -> list[str]:
        """Return the words of its run on what is in `folder`, `others` instead of its own."""
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
            *([ALL_IN_PARTS] if self.strategy == "zero3" else []),
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
    """Put the shipped base into `folder`, with dropout in its attention: `full` has none else."""
    base = folder / "base"
    if base.exists():
        return
    unfinished = shutil.copytree(SAMPLES / "tiny_base", folder / "base.tmp", dirs_exist_ok=True)
    config = json.loads((base.parent / "base.tmp" / "config.json").read_text())
    config["attention_dropout"] = 0.1
    (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(base)


def _first_rows(folder: Path, name: str, number: int) -> Path:
    """Write the first rows of a sample; one of JSON lines is told by its own rows."""
    (source,) = SAMPLES.glob(f"{name}.json*")
    file = folder / "data" / f"{name}-{number}{source.suffix}"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        text = source.read_text(encoding="utf-8")
        rows = text.splitlines() if source.suffix == ".jsonl" else json.loads(text)
        if source.suffix == ".jsonl":
            text = "".join(f"{row}\n" for row in rows[:number])
        else:
            text = json.dumps(rows[:number])
        file.write_text(text, encoding="utf-8")
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """One end of a run before its time, and what must then be."""

    what: str
    """the figure that it counts for"""
    step: int
    code: int
    fault: str | None = None
    """as a person types it; None: `signum` is sent to the process that was typed, in that step"""
    signum: int = 0
    saved: int | None = None
    """step of the checkpoint that must be the newest"""
    says: str = ""
    """must be printed"""
    damages: bool = False
    """whether the newest checkpoint is damaged then"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A run that dies several times and is typed again after each, until it ends by itself."""

    name: str
    variant: Variant
    deaths: Sequence[Death]
    words: Sequence[str] = ()
    """besides the variant's"""
    cold: int | None = None
    """which of its processes is started by the ordinary command line, from 0"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """How many operations on the disk a save is."""

    all: int
    """with the rotation behind it"""
    need_room: int
    """up to its rename"""
