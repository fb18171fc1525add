"""A global step has the same gradients, however it is split: micro-batches, ranks, packs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.model.attention import attention_implementation
from app.training.objective.objective import DatasetSums, Sft, batch_loss
from data_modules import Batch, DataConfig, DatasetConfig
from tests.batches import open_data
from tests.conftest import TrainRun, read_column
from tests.in_process import run_into
from tests.reliability.shell import Shell
from tests.runs import check_close, metrics_of
from tests.tiny import SAMPLES, small_base, small_run

pytestmark = pytest.mark.slow

SETTINGS = [
    "data.sequence_len=128",
    "adapter.dropout=0",
    "optimizer.lr=1e-3",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "trainer.max_steps=3",
    "logger=csv",
]
OF_ALL_WEIGHTS = [*(word for word in SETTINGS if word != "adapter.dropout=0"), "adapter=full"]
EIGHT_AT_ONCE = ["trainer.micro_batch_size=8", "trainer.gradient_accumulation_steps=1"]
ONE_BY_ONE = ["trainer.micro_batch_size=1", "trainer.gradient_accumulation_steps=8"]
TWO_RANKS = [
    "trainer.micro_batch_size=2",
    "trainer.gradient_accumulation_steps=2",
    "trainer.devices=2",
    "trainer.accelerator=cpu",
]


def first_gradient_norm(folder: Path) -> float:
    return read_column(folder, "train/grad_norm")[1]


def test_a_global_step_is_the_same_in_one_micro_batch_and_in_eight(train_run: TrainRun) -> None:
    """parity/strategies/test_steps.py splits it over ranks."""
    whole, split = (
        train_run(*small_run(*SETTINGS, *words)) for words in (EIGHT_AT_ONCE, ONE_BY_ONE)
    )
    assert first_gradient_norm(split) == pytest.approx(first_gradient_norm(whole), rel=1e-6)
    # The validation loss is a token-weighted mean, however it is split.
    columns = ("train/loss", "train/loss/lists", "train/loss/orders", "val/loss")
    check_close(split, whole, columns, rel=1e-6, abs=0)


def test_ranks_of_a_stream_share_the_weight_of_a_step(shell: Shell, tmp_path: Path) -> None:
    """The first gradient of two ranks equals that of all their documents in one batch."""
    lists = str(SAMPLES / "lists.json")
    words = [
        f"data.datasets=[{{path: {lists}}}]",
        "data.streaming=true",
        "data.val_set_size=0",
        "trainer.max_steps=1",
    ]
    folder = tmp_path / "run"
    shell.train_into(folder, *small_run(*OF_ALL_WEIGHTS, *TWO_RANKS, *words))

    model = AutoModelForCausalLM.from_pretrained(small_base(), dtype=torch.float32)
    model.set_attn_implementation(attention_implementation("sdpa"))
    batches = [batch for rank in range(2) for batch in streamed(lists, rank)]
    weight = sum(batch.step_weight for batch in batches)
    losses = [batch_loss(Sft(), model, batch, "sdpa", DatasetSums(1)) for batch in batches]
    loss = torch.stack(losses).sum() / weight
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert read_column(folder, "train/loss")[1] == pytest.approx(loss.item(), rel=1e-6)
    assert first_gradient_norm(folder) == pytest.approx(norm.item(), rel=1e-6)


def streamed(path: str, rank: int) -> list[Batch]:
    """Return the two micro-batches of the first step of `rank` (of two)."""
    datasets = [DatasetConfig(path=path)]
    data = DataConfig(datasets=datasets, sequence_len=128, streaming=True, val_set_size=0)
    batching = {"micro_batch_size": 2, "accumulation_steps": 2, "num_ranks": 2, "max_steps": 1}
    module = open_data(data, small_base(), rank=rank, **batching)
    return list(itertools.islice(iter(module._stream()), 2))


def test_the_final_loss_of_two_ranks_is_that_of_all_rows(shell: Shell, tmp_path: Path) -> None:
    """Rank 0 measures it after saving has rounded the weights."""
    folder = tmp_path / "full"
    shell.train_into(folder, *small_run(*OF_ALL_WEIGHTS, *TWO_RANKS))
    run_into("evaluate", tmp_path / "again", f"run={folder}")
    closing = metrics_of(folder)
    for name, value in metrics_of(tmp_path / "again").items():
        assert closing[name] == pytest.approx(value, rel=1e-5), name
