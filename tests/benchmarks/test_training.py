"""Which peers a run of `make bench-peers` takes, and which of their steps it measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.peers import PACKAGES
from benchmarks.training.__main__ import ASKED, GROUP, HERE, PEERS, ROWS, asked_peers
from benchmarks.training.task import steps_sorted_together


def test_only_those_that_are_asked_for_join() -> None:
    assert asked_peers([]) == {}
    assert list(asked_peers(["with=litgpt,torchtune"])) == ["litgpt", "torchtune"]
    assert asked_peers(["with=all"]) == ASKED


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"with=unsloth.*torchtune"):
        asked_peers(["with=unsloth,litgpt"])


def test_every_peer_has_its_environment_and_script() -> None:
    for environment, script, *_ in (PEERS | ASKED).values():
        assert environment in PACKAGES
        assert (HERE / script).exists()


def test_rows_sorted_by_length_are_measured_from_the_longest_to_the_shortest() -> None:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = np.random.default_rng(0).permutation(ROWS).tolist()
    rows_per_step, generator = 21, torch.Generator().manual_seed(0)
    order = get_length_grouped_indices(lengths, rows_per_step, generator=generator)
    taken = [lengths[row] for row in order]
    longer = [row for row in range(1, ROWS) if taken[row] > taken[row - 1]]
    # The longest row of all is moved to the front.
    assert next(row for row in longer if row > 1) == GROUP * rows_per_step
    assert steps_sorted_together(ROWS, rows_per_step) == GROUP
