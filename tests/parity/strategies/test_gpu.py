"""On two GPUs, by NCCL: the same losses, those of one GPU; with what the CPU refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    SINGLE,
    SPREADS_ALL,
    Layout,
    Runs,
    check_same_steps,
)
from tests.reliability.person import Person

pytestmark = [pytest.mark.gpu, pytest.mark.strategies]

ON_GPU = {name: layout for name, layout in LAYOUTS.items() if layout.ranks == 2} | {
    "fsdp_offload": Layout(strategy="fsdp_offload"),
    "zeropp": Layout(strategy="zeropp", words=(SPREADS_ALL,)),
}
LOSS = 1e-4
"""how far losses may be apart: a GPU adds in other orders"""
LOSS_IN_FEW_BITS = 5e-2
"""where weights travel in 8 bits and gradients in 4"""


@pytest.fixture(scope="module")
def runs(person: Person, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of processes of their own: the warm one has taken DeepSpeed for a CPU."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder: Path = tmp_path_factory.mktemp("gpu")
    return Runs(person, folder, is_warm=False)


@pytest.mark.parametrize("strategy", list(ON_GPU))
def test_two_gpus_train_as_one(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "trainer.accelerator=gpu")
    run, whole = runs.of(ON_GPU[strategy], *words), runs.of(SINGLE, *words)
    loss = LOSS_IN_FEW_BITS if strategy == "zeropp" else LOSS
    check_same_steps(run, whole, loss=loss, norm=10 * loss)
