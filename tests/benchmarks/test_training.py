"""Which peers a run of `make bench-peers` takes, and which of their steps it measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks import gpu_ops
from benchmarks.__main__ import NOT_BENCHMARKS
from benchmarks.peers import PACKAGES
from benchmarks.training.__main__ import (
    ASKED,
    DPO_PEERS,
    GROUP,
    HERE,
    PEERS,
    ROWS,
)
from benchmarks.training.task import (
    SEQUENCE_LEN,
    mean_pair_tokens,
    read_pairs,
    steps_sorted_together,
    write_files,
    write_pairs,
)


def test_every_benchmark_measures() -> None:
    named = {file.stem for file in HERE.parent.glob("*.py")} - NOT_BENCHMARKS
    assert {"loop", "loss"} < named
    for name in named:
        assert "\ndef measure()" in (HERE.parent / f"{name}.py").read_text(), name
    assert len({case.name for case in gpu_ops.CASES}) == len(gpu_ops.CASES)


def test_every_peer_has_its_environment_and_script() -> None:
    for environment, script, *_ in (PEERS | ASKED | DPO_PEERS).values():
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


def test_both_documents_of_a_pair_fit_a_pack_and_are_counted_as_they_are_tokenized(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    write_files(tmp_path, 1, num_hidden_layers=1)
    write_pairs(tmp_path, 200)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    lengths = [
        sum(
            len(tokenizer.apply_chat_template(pair["prompt"] + pair[answer])["input_ids"])
            for answer in ("chosen", "rejected")
        )
        for pair in read_pairs(tmp_path)
    ]
    assert max(lengths) <= SEQUENCE_LEN
    assert mean_pair_tokens(tmp_path) == np.mean(lengths)
