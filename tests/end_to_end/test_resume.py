"""Killed runs of several ranks resumed by the same command.

One process: training/checkpoint/test_resume.py, and killed at any time reliability/test_chaos.py.
Another number of ranks: parity/strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import RUN
from tests.reliability.shell import Shell
from tests.runs import check_same_run
from tests.tiny import small_run

pytestmark = pytest.mark.slow
DONE, NO_ENVIRONMENT = 0, 3
"""exit codes"""


Train = Callable[..., Path]


@pytest.fixture
def train(shell: Shell, tmp_path: Path) -> Train:
    """Run the command, which must end with `code`; return the run's folder."""

    def type_train(name: str, *words: str, ranks: int = 1, code: int = DONE) -> Path:
        run = tmp_path / name
        where = (f"trainer.devices={ranks}", "trainer.accelerator=cpu")
        shell.train_into(run, *small_run(*RUN, *where, *words), code=code)
        return run

    return type_train


def test_two_resumed_ranks_equal_two_uninterrupted_ones(train: Train) -> None:
    words = ("resume=auto", "faults=[rank_killed:0@3,rank_killed:1@5]")
    for _ in range(2):
        train("run", *words, ranks=2, code=NO_ENVIRONMENT)
    check_same_run(train("run", *words, ranks=2), train("whole", ranks=2))


def test_three_resumed_ranks_reduce_gradients_in_the_same_order(train: Train) -> None:
    # The sum of two gradients is the same in either order; LoRA of rank 64 fills several buckets.
    words = ("adapter.r=64", "optimizer.lr=1e-2")
    killed = (*words, "resume=auto", "faults=[rank_killed:0@5]")
    train("run", *killed, ranks=3, code=NO_ENVIRONMENT)
    check_same_run(train("run", *killed, ranks=3), train("whole", *words, ranks=3))
