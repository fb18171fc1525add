"""The ordinary command, killed and typed again: on one rank, on two, and on another number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runs import check_same_run, rows_of
from tests.tiny import small_run

RUN = (
    "trainer.max_steps=8",
    "trainer.validate_every_steps=3",
    "trainer.checkpoint.every_steps=2",
    "evaluation.exact_match=false",
    "adapter.dropout=0.1",
    "logger=csv",
)
KILLED = -9


def type_train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Type the command; returns how it ended."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LOFT_R")
    }
    command = [sys.executable, "-m", "app.train", *small_run(*RUN, *words), f"output.dir={folder}"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def train_to_its_end(folder: Path, *words: str) -> Path:
    done = type_train(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_a_killed_command_typed_again_ends_as_if_it_had_run_through(tmp_path: Path) -> None:
    whole = train_to_its_end(tmp_path / "whole")
    words = ("resume=auto", "faults=[rank_killed@5,ckpt:after_marker@6]")
    for _ in range(2):
        assert type_train(tmp_path / "run", *words).returncode == KILLED
    check_same_run(train_to_its_end(tmp_path / "run", *words), whole)


@pytest.mark.slow
def test_two_ranks_go_on_as_two_ranks_that_ran_through(tmp_path: Path) -> None:
    ranks = ("trainer.devices=2", "trainer.accelerator=cpu")
    whole = train_to_its_end(tmp_path / "whole", *ranks)
    words = (*ranks, "resume=auto", "faults=[rank_killed:0@3,rank_killed:1@5]")
    for _ in range(2):
        assert type_train(tmp_path / "run", *words).returncode != 0
    check_same_run(train_to_its_end(tmp_path / "run", *words), whole)


@pytest.mark.slow
def test_three_ranks_add_their_gradients_in_the_same_order_again(tmp_path: Path) -> None:
    # Two ranks' parts are the same sum in either order; a rank this high fills several buckets.
    words = ("trainer.devices=3", "trainer.accelerator=cpu", "adapter.r=64", "optimizer.lr=1e-2")
    whole = train_to_its_end(tmp_path / "whole", *words)
    killed = (*words, "resume=auto", "faults=[rank_killed:0@5]")
    assert type_train(tmp_path / "run", *killed).returncode != 0
    check_same_run(train_to_its_end(tmp_path / "run", *killed), whole)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2], ids=["one rank, then two", "two ranks, then one"])
def test_another_number_of_ranks_takes_the_same_steps(tmp_path: Path, first: int) -> None:
    words = ("adapter.dropout=0", "trainer.accelerator=cpu")
    of_ranks = {
        ranks: (f"trainer.devices={ranks}", f"trainer.gradient_accumulation_steps={4 // ranks}")
        for ranks in (1, 2)
    }
    before, after = of_ranks[first], of_ranks[3 - first]
    whole = rows_of(train_to_its_end(tmp_path / "whole", *words, *before))
    killed = type_train(tmp_path / "run", *words, *before, "faults=[rank_killed@5]")
    assert killed.returncode != 0
    resumed = rows_of(train_to_its_end(tmp_path / "run", *words, *after, "resume=must"))
    assert [row["step"] for row in resumed] == [row["step"] for row in whole]
    for row, expected in zip(resumed, whole, strict=True):
        for key in row:
            if "/tokens/" in key:
                assert row[key] == expected[key], (row["step"], key)
            elif row[key] and not key.startswith("speed/"):
                assert float(row[key]) == pytest.approx(float(expected[key]), rel=1e-5), key
