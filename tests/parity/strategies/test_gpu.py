"""Two GPUs with NCCL have the losses of one GPU, also for strategies that need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    SHARDS_ALL,
    SINGLE,
    Layout,
    Runs,
    check_same_steps,
)
from tests.reliability.shell import Shell

pytestmark = [pytest.mark.gpu, pytest.mark.strategies]

ON_GPU = {name: layout for name, layout in LAYOUTS.items() if layout.ranks == 2} | {
    "fsdp_offload": Layout(strategy="fsdp_offload"),
    "zeropp": Layout(strategy="zeropp", words=(SHARDS_ALL,)),
}
LOSS = 1e-4
"""absolute tolerance of losses: a GPU sums in another order"""
LOSS_IN_FEW_BITS = 5e-2
"""the same if weights are sent in 8 bits and gradients in 4"""


@pytest.fixture(scope="module")
def runs(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return runs in new processes, since the warm one has imported DeepSpeed for CPUs."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder: Path = tmp_path_factory.mktemp("gpu")
    return Runs(shell, folder, is_warm=False)


@pytest.mark.parametrize("strategy", list(ON_GPU))
def test_two_gpus_train_as_one(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "trainer.accelerator=gpu")
    run, reference = runs.train(ON_GPU[strategy], *words), runs.train(SINGLE, *words)
    loss = LOSS_IN_FEW_BITS if strategy == "zeropp" else LOSS
    check_same_steps(run, reference, loss=loss, norm=10 * loss)
