"""Runs with objective=distill: refusals, ranks, accumulation, a quantized teacher and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import UserError
from tests.conftest import read_column
from tests.in_process import run_command
from tests.reliability.shell import Shell
from tests.runs import check_close
from tests.tiny import TINY_BASE, small_base, small_run, train_into

COLUMNS = ("train/loss", "train/kl", "val/loss", "val/cross_entropy/lists")


def words_of(*words: str) -> list[str]:
    """Return the overrides of a run of a shallow student whose teacher is the whole base."""
    base = [f"model.path={small_base()}", "objective=distill", f"objective.teacher={TINY_BASE}"]
    return small_run(*base, "optimizer.lr=1e-3", "adapter.dropout=0", *words)


@pytest.fixture(scope="module")
def whole(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill") / "whole"
    shell.train_into(folder, *words_of("objective.sft_weight=0.5"))
    return folder


@pytest.mark.slow
def test_the_student_comes_closer_to_its_teacher(whole: Path) -> None:
    kls = read_column(whole, "val/kl")
    assert kls[4] < 0.9 * kls[0]
    losses, entropies = (read_column(whole, f"val/{each}") for each in ("loss", "cross_entropy"))
    assert losses[0] == pytest.approx(kls[0] + 0.5 * entropies[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["trainer.micro_batch_size=2", "trainer.gradient_accumulation_steps=1"],
        *(
            ["trainer.gradient_accumulation_steps=1", "trainer.devices=2", f"strategy={name}"]
            for name in ("fsdp", "zero3")
        ),
        [
            "trainer.gradient_accumulation_steps=1",
            "trainer.devices=2",
            "strategy=fsdp",
            "objective.teacher_logits=cached",
            "objective.teacher_top_k=100000",
        ],
    ],
    ids=["one micro-batch", "fsdp", "zero3", "fsdp, cached"],
)
def test_a_step_is_the_same_however_it_is_split(
    words: list[str], whole: Path, shell: Shell, tmp_path: Path
) -> None:
    shell.train_into(tmp_path / "split", *words_of("objective.sft_weight=0.5", *words))
    check_close(tmp_path / "split", whole, COLUMNS, abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(whole: Path, shell: Shell, tmp_path: Path) -> None:
    words = words_of("objective.sft_weight=0.5", "trainer.checkpoint.every_steps=1", "resume=auto")
    shell.train_into(tmp_path, *words, "faults=[rank_killed@3]", code=-9)
    shell.train_into(tmp_path, *words)
    for column in COLUMNS:
        assert read_column(tmp_path, column)[4] == read_column(whole, column)[4]
    before, after = (
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, tmp_path)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_what_a_teacher_says_is_stored_once_and_trains_as_the_live_one(
    whole: Path, shell: Shell, tmp_path: Path
) -> None:
    stored = ["objective.teacher_logits=cached", "objective.teacher_top_k=100000"]
    stored += ["objective.sft_weight=0.5", f"data.cache_dir={tmp_path / 'cache'}"]
    words = words_of(*stored, "trainer.checkpoint.every_steps=1", "resume=auto")
    said = shell.train_into(tmp_path / "killed", *words, "faults=[rank_killed@3]", code=-9)
    assert "objective.teacher_logits=cached: computed for" in said
    assert "hold 100.00 % of the teacher's probability" in said
    said = shell.train_into(tmp_path / "killed", *words)
    assert "objective.teacher_logits=cached: found in the cache" in said
    check_close(tmp_path / "killed", whole, COLUMNS, abs=1e-5)


@pytest.mark.slow
def test_a_run_is_evaluated_against_its_teacher_which_may_be_quantized(
    whole: Path, shell: Shell, tmp_path: Path
) -> None:
    words = [f"run={whole}", "trainer.precision=fp32", "objective.teacher_quantization=nf4"]
    shell.train_into(tmp_path / "found", *words, module="app.evaluate")
    found = json.loads((tmp_path / "found" / "metrics.json").read_text())
    before, after = found["base/val/kl"], found["tuned/val/kl"]
    assert after < before
    assert after != read_column(whole, "val/kl")[4]
    assert after == pytest.approx(read_column(whole, "val/kl")[4], rel=0.1)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    teacher = shutil.copytree(TINY_BASE, tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"2 of .*tokens differ.*type a teacher of"):
        train_into(tmp_path / "run", *words_of(f"objective.teacher={teacher}"))


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ("adapter", "first, and objective.teacher=MERGED"),
        ("missing", "no such folder"),
        ("empty", "the folder has no config.json"),
    ],
)
def test_a_teacher_without_a_model_is_refused(teacher: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    result = run_command(*words_of(f"objective.teacher={tmp_path / teacher}"))
    assert result.code == 2
    assert f"objective.teacher={tmp_path / teacher}" in result.stderr and said in result.stderr
