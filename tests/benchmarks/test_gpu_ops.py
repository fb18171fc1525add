"""What training asks of a GPU, on a device that is not there: no waits, few bytes, few graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import benchmarks.gpu_ops as bench
from benchmarks.fake_device.trace import extrapolate
from tests.benchmarks.on_fake_device import DEPTHS, FEWER, LAYERS, METHODS
from tools.simulate.device import find_obstacle

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
    return printed()


@pytest.fixture(scope="module")
def found_slowly() -> Any:
    """What it takes longer to find."""
    return printed("slow")


def printed(*words: str) -> Any:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.on_fake_device", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.versions
@pytest.mark.slow
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


@pytest.mark.versions
@pytest.mark.slow
def test_a_trace_leaves_the_attention_of_the_next_one_alone(found: Any) -> None:
    assert found["attention"] is None


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_micro_batch_and_its_step_wait_for_nothing(found: Any, method: str) -> None:
    numbers = found["traced"][method]
    assert numbers["launches"] > 100
    assert (numbers["syncs"], numbers["to_host"], numbers["pageable"]) == (0, 0, 0)
    assert numbers["step/syncs"] == 0


@pytest.mark.versions
@pytest.mark.slow
def test_a_mixture_of_experts_waits_for_nothing_and_computes_nothing_twice(
    found_slowly: Any,
) -> None:
    for method, numbers in found_slowly["mixtures"].items():
        waits = (numbers["syncs"], numbers["to_host"], numbers["pageable"])
        assert waits == (0, 0, 0), method
        if method != "qlora":  # whose experts the ideal does not count
            assert 0.9 < numbers["product_flops"] / numbers["ideal_flops"] < 1.01, method


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_an_objective_with_a_reference_waits_for_nothing(found_slowly: Any, name: str) -> None:
    numbers = found_slowly["objectives"][name]
    assert numbers["product_flops"] > 1.3 * numbers["ideal_flops"]  # the pass of the base
    assert (numbers["syncs"], numbers["to_host"], numbers["pageable"]) == (0, 0, 0)


@pytest.mark.versions
@pytest.mark.slow
def test_a_shipped_experiment_takes_as_many_packs_at_once_as_fit(found_slowly: Any) -> None:
    numbers = found_slowly["as shipped"]
    assert numbers["tokens"] == 2 * bench.SEQUENCE_LEN  # four would be 70 GiB of activations
    assert (numbers["syncs"], numbers["to_host"], numbers["pageable"]) == (0, 0, 0)


@pytest.mark.versions
@pytest.mark.slow
def test_a_lora_launches_few_kernels(found: Any) -> None:
    # 91 a layer: 11 scales of products were launches of their own.
    assert found["traced"]["lora"]["launches"] <= 91 * FEWER["lora"] + 75


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_activations_stay_within_their_budget(found: Any, method: str) -> None:
    assert found["traced"][method]["peak_bytes"] / 2**30 <= BUDGETS_GIB[method]


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "lora fp8", "qlora", "full", "full fp8"])
def test_no_product_is_computed_twice(found: Any, method: str) -> None:
    numbers = found["traced"][method]
    # Below 1: nothing needs the gradient of the first layer's input.
    assert 0.95 < numbers["product_flops"] / numbers["ideal_flops"] < 1.01


@pytest.mark.versions
@pytest.mark.slow
def test_transposed_copies_of_weights_in_fp8_are_counted(found: Any) -> None:
    in_fp8, in_bf16 = (found["traced"][method]["weights_bytes"] for method in ("lora fp8", "lora"))
    assert in_fp8 == pytest.approx(in_bf16, rel=1e-3)  # twice one byte, and scales


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in bench.CASES}) == len(bench.CASES)


@pytest.mark.versions
@pytest.mark.slow
def test_two_depths_tell_a_third_exactly(found: Any) -> None:
    shallow, deep = (
        {**found["traced"][f"full {depth}"], "num_layers": float(depth)} for depth in DEPTHS
    )
    told = extrapolate(shallow, deep, LAYERS)
    traced = {**found["traced"]["full"], "num_layers": LAYERS}
    assert told == pytest.approx(traced, rel=1e-9)


@pytest.mark.versions
@pytest.mark.slow
def test_no_graph_is_compiled_after_the_second_batch(found: Any) -> None:
    graphs = found["graphs"]
    assert graphs[1] > 0
    assert graphs[1:] == [graphs[1]] * 2


def numbers(tokens_per_second: float, gib: float, **other: float) -> dict[str, float]:
    found = {"tokens": 8192.0, "seconds/h100": 8192 / tokens_per_second, "syncs": 0.0}
    found |= {"weights_bytes": 0.0, "gradients_bytes": 0.0, "states_bytes": 0.0, "pageable": 0.0}
    return found | {"peak_bytes": gib * 2**30} | other


def test_the_fastest_that_fits_gives_the_figure() -> None:
    found = {
        "lora, recompute none, ours": numbers(20_000, 79),
        "lora, recompute full, ours": numbers(17_000, 20),
        "qlora, recompute none, ours": numbers(16_000, 40, syncs=2),
        "lora, plain": numbers(8_500, 70),
        "lora, real lengths, recompute none, ours": numbers(18_000, 50),
        "full on eight, recompute none, ours": numbers(11_000, 90),
    }
    figures = {one.figure.removeprefix("gpu_ops/"): one for one in bench.figures_of(found)}
    assert figures["lora_tokens_per_second"].value == pytest.approx(17_000)
    assert figures["lora_tokens_per_second"].ok
    assert figures["lora_real_lengths_tokens_per_second"].value == pytest.approx(18_000)
    assert figures["full_on_eight_tokens_per_second"].value == pytest.approx(11_000)  # sharded
    assert figures["qlora_against_lora"].value == pytest.approx(16 / 17)
    assert not figures["qlora_against_lora"].ok
    assert figures["lora_against_plain"].value == pytest.approx(2)
    assert not figures["lora_activations_gib"].ok
    assert figures["host_syncs_a_micro_batch"].value == 2
    assert not figures["full_tokens_per_second"].ok  # none was traced


def test_the_hosts_time_stands_beside_that_of_a_plain_step() -> None:
    found = {"plain/none": 80.0, "plain/full": 200.0, "ours/none": 90.0, "ours/full": 190.0}
    figures = bench.host_figures(found | {"ours/selective": 260.0})
    assert [(one.value, one.ok) for one in figures] == [(1.125, True), (0.95, True), (1.3, False)]


@pytest.mark.versions
@pytest.mark.slow
def test_the_host_is_measured_by_the_paths_of_a_gpu() -> None:
    found = bench.measure_host()
    assert {"plain/none", "plain/full", "ours/none", "ours/full", "ours/selective"} == found.keys()
    assert all(found.values())


def test_without_a_compiler_it_says_why_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench.measure() == []
    assert capsys.readouterr().out.startswith("gpu_ops: skipped: there is no C++ compiler (g++)")
