"""What training asks of a GPU, on a device that is not there: no waits, few bytes, few graphs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.benchmarks.on_fake_device import FEWER, METHODS
from tests.processes import run
from tools.simulate.device import find_obstacle

pytestmark = [pytest.mark.versions, pytest.mark.slow]

BUDGETS_GIB = {
    "lora": 3.7,
    "lora fp8": 3.7,
    "qlora": 3.7,
    "full": 5.0,
    "full fp8": 3.9,
    "selective": 2.3,
}
"""activations of a micro-batch of 8,192 tokens, full 4,096, in four layers of an 8B or `FEWER`"""


@pytest.fixture(scope="module")
def found() -> Any:
    """What `on_fake_device` prints; one process, for it believes in a GPU to its end."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    done = run(sys.executable, "-m", "tests.benchmarks.on_fake_device", timeout=None)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_is_counted_as_by_hand(found: Any) -> None:
    known = found["known"]
    assert known["flops"] == 2 * 256 * 512 * 1024
    assert known["bytes"] == 2 * (256 * 512 + 512 * 1024 + 256 * 1024)
    assert known["in_place"] == 2 * 2 * 256 * 1024  # read and written
    assert known["live"] == [2 * 256 * 1024, 0]
    assert known["syncs"] == [
        "forward: aten._local_scalar_dense.default",
        "forward: aten._to_copy.default",
    ]
    assert known["to_host"] == 1
    assert known["pageable"] == 1  # the other one is page-locked
    assert found["attention"] is None  # a trace leaves that of the next one alone


@pytest.mark.parametrize("method", METHODS)
def test_a_micro_batch_and_its_step_wait_for_nothing_in_their_memory(
    found: Any, method: str
) -> None:
    numbers = found["traced"][method]
    assert numbers["launches"] > 100
    assert (numbers["syncs"], numbers["to_host"], numbers["pageable"]) == (0, 0, 0)
    assert numbers["step/syncs"] == 0
    assert numbers["peak_bytes"] / 2**30 <= BUDGETS_GIB[method]


def test_a_lora_launches_few_kernels(found: Any) -> None:
    # 91 a layer: 11 scales of products were launches of their own.
    assert found["traced"]["lora"]["launches"] <= 91 * FEWER["lora"] + 75


@pytest.mark.parametrize("method", ["lora", "lora fp8", "qlora", "full", "full fp8"])
def test_no_product_is_computed_twice(found: Any, method: str) -> None:
    numbers = found["traced"][method]
    # Below 1: nothing needs the gradient of the first layer's input.
    assert 0.95 < numbers["product_flops"] / numbers["ideal_flops"] < 1.01


def test_transposed_copies_of_weights_in_fp8_are_counted(found: Any) -> None:
    in_fp8, in_bf16 = (found["traced"][method]["weights_bytes"] for method in ("lora fp8", "lora"))
    assert in_fp8 == pytest.approx(in_bf16, rel=1e-3)  # twice one byte, and scales


def test_no_graph_is_compiled_after_the_second_batch(found: Any) -> None:
    graphs = found["graphs"]
    assert graphs[1] > 0
    assert graphs[1:] == [graphs[1]] * 2
