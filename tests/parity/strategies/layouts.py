"""Layouts of the same run over ranks, and checks that its results do not change."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.reliability.shell import Shell
from tests.runs import check_same_run, rows_of
from tests.tiny import SAMPLES, save_with_tokenizer, tiny_llama

GLOBAL_BATCH = 8
"""packs per optimizer step, over all ranks"""
LOSS, WEIGHT, NORM = 1e-5, 1e-4, 1e-4
"""tolerances: absolute for losses and weights, relative for gradient norms"""
DONE, NO_ENVIRONMENT, KILLED = 0, 3, -9
"""exit codes"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A strategy and its ranks."""

    strategy: str
    ranks: int = 2
    num_data_ranks: int = 2
    """number of ranks, or tensor-parallel groups, with different data"""
    words: tuple[str, ...] = ()

    @property
    def code_of_a_kill(self) -> int:
        """Return the exit code of a run with a killed rank."""
        return KILLED if self.ranks == 1 else NO_ENVIRONMENT

    def typed(self) -> list[str]:
        return [f"strategy={self.strategy}", f"trainer.devices={self.ranks}", *self.words]


# Otherwise ZeRO-3 does not shard weights as small as these.
SHARDS_ALL = "+strategy.config={zero_optimization: {stage3_param_persistence_threshold: 0}}"
SINGLE = Layout(strategy="single", ranks=1, num_data_ranks=1)
LAYOUTS = {
    layout.strategy: layout
    for layout in (
        Layout(strategy="ddp"),
        Layout(strategy="zero1"),
        Layout(strategy="zero2"),
        Layout(strategy="zero2_offload"),
        Layout(strategy="zero3", words=(SHARDS_ALL,)),
        Layout(strategy="zero3_offload", words=(SHARDS_ALL,)),
        Layout(strategy="zero3_hpz", words=(SHARDS_ALL,)),
        Layout(strategy="fsdp"),
        Layout(strategy="fsdp_grad_op", words=("strategy.sync_each_micro_batch=false",)),
        Layout(strategy="fsdp_hybrid", ranks=4, num_data_ranks=4, words=("strategy.replicas=2",)),
        Layout(strategy="tp", num_data_ranks=1),
        Layout(strategy="fsdp_tp", ranks=4),
    )
}
"""all strategies that run on a CPU and send gradients and weights unrounded"""
STAGES = Layout(strategy="fsdp_pp", num_data_ranks=1)
TOPK = Layout(
    strategy="ddp_compressed", words=("strategy.compression=topk", "strategy.topk_share=0.05")
)

ADAPTERS = {
    "lora": ("adapter=lora", "adapter.dropout=0", "optimizer.lr=1e-3"),
    "dora": ("adapter=lora", "adapter.dropout=0", "adapter.use_dora=true", "optimizer.lr=1e-3"),
    "ia3": ("adapter=ia3", "optimizer.lr=1e-2"),
    "full": ("adapter=full", "optimizer.lr=1e-3"),
    "top layer": ("adapter=freeze", "adapter.layers=top 1", "optimizer.lr=1e-3"),
}
SHAPE = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "initializer_range": 0.05,
}
CLIPPED, NOT_CLIPPED = "trainer.max_grad_norm=0.3", "trainer.max_grad_norm=1e9"
"""limits below and above the gradient norms of all steps"""


def sliced(strategy: str, *, ranks: int = 2, size: int = 2) -> Layout:
    """Return a layout of `ranks`, of which `size` neighbours hold slices of the same rows."""
    whole, words = LAYOUTS[strategy], (f"strategy.context_parallel_size={size}",)
    return replace(whole, ranks=ranks, num_data_ranks=ranks // size, words=(*whole.words, *words))


BASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "deep": {"num_hidden_layers": 3},
    "long": {"max_position_embeddings": 256},
}


class Runs:
    """Runs of app.train, each trained once."""

    def __init__(self, shell: Shell, folder: Path, *, is_warm: bool = True) -> None:
        self.shell, self.folder, self.is_warm = shell, folder, is_warm
        self._done: dict[tuple[str, ...], Path] = {}

    def base(self, name: str) -> str:
        """Return the override of a random base, which is saved if it was not before."""
        folder = self.folder / name
        if not folder.exists():
            save_with_tokenizer(tiny_llama(**SHAPE, **BASES[name]), folder)
        return f"model.path={folder}"

    def long_rows(self) -> tuple[str, str]:
        """Return base and length of rows that are long enough for four ranks."""
        return self.base("long"), "data.sequence_len=256"

    def train(self, layout: Layout, *words: str, accumulates: bool = True) -> Path:
        """Train with `words` to the end, if that was not done before; return the run's folder."""
        typed = tuple(self.typed(layout, *words, accumulates=accumulates))
        if typed not in self._done:
            run = self.new_folder(layout.strategy)
            self.shell.train_into(run, *typed, is_warm=self.is_warm)
            self._done[typed] = run
        return self._done[typed]

    def check_as_single(self, layout: Layout, *words: str, accumulates: bool = True) -> None:
        """Check that a run has the steps, metrics and saved files of one process."""
        run = self.train(layout, *words, accumulates=accumulates)
        check_same_results(run, self.train(SINGLE, *words))

    def kill_and_resume(self, layout: Layout, *words: str, rank: int = 0) -> str:
        """Return the last output of a run with a killed rank, which ends bit for bit as without."""
        run = self.new_folder(f"{layout.strategy}-killed")
        killed = self.typed(layout, *words, "resume=auto", f"faults=[rank_killed:{rank}@3]")
        self.shell.train_into(run, *killed, code=layout.code_of_a_kill)
        output = self.shell.train_into(run, *killed)
        check_same_run(run, self.train(layout, *words))
        return output

    def new_folder(self, name: str) -> Path:
        """Return a new folder for a run; its log is written next to it."""
        folder = self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return folder / "run"

    def typed(self, layout: Layout, *words: str, accumulates: bool = True) -> list[str]:
        """Return the overrides of a run of four steps; later ones replace earlier ones."""
        micro = GLOBAL_BATCH // layout.num_data_ranks
        if accumulates:  # with another number of micro-batches than SINGLE
            micro = 2 if layout is SINGLE else micro // 2
        typed = [
            self.base("tied"),
            f"data.datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}},"
            f" {{path: {SAMPLES / 'orders_test.jsonl'}, name: orders}}]",
            "data.val_set_size=7",  # not divisible by the number of ranks
            "data.sequence_len=96",
            f"trainer.micro_batch_size={micro}",
            f"trainer.global_batch_size={GLOBAL_BATCH}",
            "trainer.max_steps=4",
            "trainer.validate_every_steps=2",
            "trainer.checkpoint.every_steps=2",
            "trainer.precision=fp32",
            "trainer.accelerator=cpu",
            "evaluation.exact_match=false",
            "evaluation.max_new_tokens=4",
            "logger=csv",
            *layout.typed(),
        ]
        chosen = dict(word.split("=", 1) for word in (*typed, *words))
        return [f"{key}={value}" for key, value in chosen.items()]


def check_same_results(run: Path, reference: Path) -> None:
    """Check that two runs have the same steps, metrics and saved files."""
    check_same_steps(run, reference)
    check_same_files(run, reference)


def check_same_steps(run: Path, reference: Path, *, loss: float = LOSS, norm: float = NORM) -> None:
    """Check every number of metrics.csv, including validations."""
    ours, expected = rows_of(run), rows_of(reference)
    assert [row["step"] for row in ours] == [row["step"] for row in expected]
    for row, other in zip(ours, expected, strict=True):
        assert row.keys() == other.keys()
        for key in row:
            where = (row["step"], key)
            if row[key] == other[key]:
                continue
            assert "loss" in key or key == "train/grad_norm", where
            near = {"abs": loss, "rel": 0} if "loss" in key else {"rel": norm}
            assert float(row[key]) == pytest.approx(float(other[key]), **near), where


def check_same_files(run: Path, reference: Path) -> None:
    """Check that the saved models have the same files and, up to rounding, tensors."""
    saved, expected = (
        next(folder.glob("*/*model.safetensors")).parent for folder in (run, reference)
    )
    assert saved.name == expected.name
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in saved.iterdir()) == names
    for name in names:
        if name.endswith("config.json"):
            assert json.loads((saved / name).read_text()) == json.loads(
                (expected / name).read_text()
            )
        elif name.endswith(".safetensors"):
            _check_same_tensors(saved / name, expected / name)


def _check_same_tensors(file: Path, other: Path) -> None:
    with safe_open(file, "pt") as ours, safe_open(other, "pt") as theirs:
        assert ours.metadata() == theirs.metadata()
        assert list(ours.keys()) == list(theirs.keys())
        for name in ours.keys():  # noqa: SIM118 - no dictionary
            tensor, expected = ours.get_tensor(name), theirs.get_tensor(name)
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape, name
            torch.testing.assert_close(tensor, expected, rtol=0, atol=WEIGHT, msg=name)
