"""Runs with objective=dpo: refusals, ranks, accumulation, packing and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import read_column
from tests.in_process import run_command
from tests.reliability.person import Person
from tests.tiny import SAMPLES

PAIRS = str(SAMPLES / "pairs.json")
BASE = [
    "objective=dpo",
    f"data.datasets=[{{path: {PAIRS}}}]",
    f"model.path={SAMPLES / 'tiny_base'}",
    "trainer.accelerator=cpu",
    "logger=csv",
]
RUN = [
    *BASE,
    "data.sequence_len=256",
    "data.val_set_size=20",
    "adapter.dropout=0",
    "optimizer.lr=1e-3",
    "trainer.max_steps=3",
    "trainer.precision=fp32",
]
ONE = ["trainer.micro_batch_size=4", "trainer.gradient_accumulation_steps=1"]
FIGURES = ("loss", "loss/pairs", "accuracy", "margin/pairs", "chosen_log_prob/pairs")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter=full"], "adapter=full changes the base itself"),
        (["adapter.init=pissa"], "type adapter.init=default"),
        (["trainer.compile=true"], "type trainer.compile=false"),
        (["data.train_on_inputs=true"], "type data.train_on_inputs=false"),
        (["data.on_long=split"], "type data.on_long=drop"),
        ([f"data.datasets=[{{path: {PAIRS}, format: alpaca}}]"], "or objective=sft"),
        ([f"data.datasets={SAMPLES / 'lists.json'}"], "missing 'chosen'"),
        (["objective=sft"], "objective=dpo"),
        (["objective=sft", f"data.datasets=[{{path: {PAIRS}, format: preference}}]"], "single"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(words: list[str], said: str) -> None:
    result = run_command(*BASE, *words)
    assert result.code == 2 and said in result.stderr


@pytest.fixture(scope="module")
def whole(person: Person, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo") / "whole"
    person.train_into(folder, *RUN, *ONE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["trainer.micro_batch_size=1", "trainer.gradient_accumulation_steps=4"],
        ["trainer.micro_batch_size=2", "trainer.devices=2", "strategy=ddp"],
        ["trainer.micro_batch_size=2", "trainer.devices=2", "strategy=fsdp"],
    ],
    ids=["accumulated", "ddp", "fsdp"],
)
def test_a_step_is_the_same_however_it_is_split(
    words: list[str], whole: Path, person: Person, tmp_path: Path
) -> None:
    split = tmp_path / "split"
    person.train_into(split, *RUN, *ONE, *words)
    for phase in ("train", "val"):
        for figure in FIGURES:
            expected = read_column(whole, f"{phase}/{figure}")
            ours = read_column(split, f"{phase}/{figure}")
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5), figure
    assert read_column(whole, "train/loss")[1] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_objectives_without_a_reference_train_all_weights(
    objective: str, person: Person, tmp_path: Path
) -> None:
    words = [word for word in RUN if word != "adapter.dropout=0"]
    person.train_into(tmp_path, *words, *ONE, f"objective={objective}", "adapter=full")
    losses = read_column(tmp_path, "val/loss")
    assert losses[3] < losses[0]


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(whole: Path, person: Person, tmp_path: Path) -> None:
    cut, words = tmp_path / "cut", [*RUN, *ONE, "trainer.checkpoint.every_steps=1", "resume=auto"]
    person.train_into(cut, *words, "faults=[rank_killed@3]", code=-9)
    person.train_into(cut, *words)
    for column in ("train/loss", "train/margin", "val/loss", "val/accuracy"):
        assert read_column(cut, column)[3] == read_column(whole, column)[3]
    before, after = (
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, cut)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
