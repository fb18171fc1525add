"""A killed run resumes bit for bit under its own strategy, and with equal losses under others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    NO_ENVIRONMENT,
    SINGLE,
    Layout,
    Runs,
    check_same_files,
    check_same_steps,
    sliced,
)
from tests.runs import check_same_run

WITH_DROPOUT = ("adapter=lora", "adapter.dropout=0.1", "optimizer.lr=1e-3")
KINDS = {"lora": WITH_DROPOUT, "full": ADAPTERS["full"]}
STAGES = Layout(strategy="fsdp_pp", num_data_ranks=1)
ALL = LAYOUTS | {
    "single": SINGLE,
    "stages": STAGES,
    "four stages": replace(STAGES, ranks=4, num_data_ranks=2),
    "slices": sliced("ddp"),
    "four slices": sliced("fsdp", ranks=4, size=4),
}
CASES = [
    *(("lora", strategy) for strategy in LAYOUTS),
    *(("full", strategy) for strategy in ("zero2", "zero3", "fsdp", "fsdp_tp")),
]


@pytest.mark.strategies
@pytest.mark.parametrize(("adapter", "strategy"), CASES)
def test_the_same_strategy_resumes_bit_for_bit(adapter: str, strategy: str, runs: Runs) -> None:
    layout = LAYOUTS[strategy]
    reference = runs.train(layout, *KINDS[adapter])
    run = runs.new_folder(f"{strategy}-killed")
    killed = runs.typed(layout, *KINDS[adapter], "resume=auto", "faults=[rank_killed:0@6]")
    runs.shell.train_into(run, *killed, code=NO_ENVIRONMENT)
    runs.shell.train_into(run, *killed)
    check_same_run(run, reference)


@pytest.mark.parametrize(
    ("adapter", "chain"),
    [
        pytest.param(
            "lora",
            ["fsdp", "zero3", "four stages", "single", "four slices", "stages", "slices"],
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(adapter, chain, marks=pytest.mark.strategies)
            for adapter in ("lora", "full")
            for chain in (
                ["fsdp", "zero3", "ddp", "tp", "single", "zero1", "fsdp_hybrid", "zero3_offload"],
                ["zero2_offload", "fsdp_tp", "single", "tp", "ddp", "zero3", "fsdp", "zero2"],
            )
        ),
    ],
)
def test_another_strategy_resumes_with_the_same_losses(
    adapter: str, chain: list[str], runs: Runs
) -> None:
    run = runs.new_folder("chain")
    steps = [8 * number // len(chain) for number in range(1, len(chain))]
    words = (*ADAPTERS[adapter], *runs.long_rows)
    often = (*words, "trainer.checkpoint.every_steps=1", "resume=auto")
    for strategy, step in zip(chain, steps, strict=False):
        layout = ALL[strategy]
        killed = runs.typed(layout, *often, f"faults=[rank_killed:0@{step}]")
        runs.shell.train_into(run, *killed, code=layout.code_of_a_kill)
        assert last_step(run) == step
    runs.shell.train_into(run, *runs.typed(ALL[chain[-1]], *often))
    reference = runs.train(SINGLE, *words)
    check_same_steps(run, reference)
    check_same_files(run, reference)


@pytest.mark.slow
def test_ranks_of_a_group_share_random_state_after_another_strategy(runs: Runs) -> None:
    run = runs.new_folder("groups")
    words = (*WITH_DROPOUT, "trainer.checkpoint.every_steps=1", "resume=auto")
    killed = runs.typed(LAYOUTS["ddp"], *words, "faults=[rank_killed:0@4]")
    runs.shell.train_into(run, *killed, code=NO_ENVIRONMENT)
    runs.shell.train_into(run, *runs.typed(LAYOUTS["tp"], *words))
    last = run / "checkpoints" / "step-8"
    first, second = (json.loads((last / f"random-rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first["torch"] == second["torch"]


def last_step(run: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(folder.name.removeprefix("step-")) for folder in run.glob("checkpoints/step-*"))
