"""Ranks that hold stages of a model take the steps of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.description import BaseDescription
from app.preflight.files import check_pipeline
from app.strategy.settings import PIPELINED, DdpConfig, PipelineConfig, cut_layers
from tests.ranks import on_ranks
from tests.strategy.pipeline_training import (
    FAMILIES,
    LLAMA,
    Case,
    train_alone,
    train_cases,
)

CASES: list[Case] = [
    *((family, "full", "none") for family in FAMILIES),
    *(("llama", "lora", mode) for mode in ("offload", "selective")),
    ("qwen3", "lora", "none"),
    ("llama", "top layers", "none"),
    ("llama", "dora", "none"),
    ("mistral", "nf4", "full"),
]
FEW: list[Case] = [
    ("llama", "full", "none"),
    ("tied", "full", "none"),
    ("mistral", "lora", "full"),
    ("llama", "top layers", "none"),
]
MICRO_BATCHES = 4
Found = list[dict[str, Any]]


def trained(
    config: PipelineConfig, cases: list[Case], num_ranks: int = 2, bound: float = 2e-4
) -> list[Found]:
    """Return what each rank has found in each case, after checks that hold for all layouts.

    `bound`: of weights after two steps, whose rounding decides where gradients are nearly zero.
    """
    count = MICRO_BATCHES * num_ranks // config.pipeline_parallel_size
    by_rank = on_ranks(num_ranks, train_cases, config, [(case, count) for case in cases])
    torch.set_num_threads(1)
    found = list(map(list, zip(*by_rank, strict=True)))
    for case, ranks in zip(cases, found, strict=True):
        alone = train_alone(case, count)
        ranks.append(alone)
        for rank in ranks[:-1]:
            assert rank["norms"] == pytest.approx(alone["norms"], rel=5e-6), case
            assert rank["weights"].keys() == alone["weights"].keys(), case
            assert worst(rank["weights"], alone["weights"]) < bound, case
            assert worst(rank["states"], alone["states"]) < bound, case
            assert worst({"": rank["logits"]}, {"": alone["logits"]}) < bound, case
            assert rank["validation"] == pytest.approx(alone["validation"], rel=1e-5), case
        assert ranks[-2]["losses"] == pytest.approx(alone["losses"], rel=1e-6), case
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of tensors, as a share of the tensor's largest."""
    return max(
        ((found[name] - each).abs().max() / each.abs().max().clamp(1e-9)).item()
        for name, each in expected.items()
    )


def gradients(ranks: Found) -> dict[str, Tensor]:
    """Return the gradients of all stages; those of a weight of two stages are summed."""
    total: dict[str, Tensor] = {}
    for rank in ranks[:-1]:
        for name, each in rank["gradients"].items():
            total[name] = total[name] + each if name in total else each
    return total


def check_bit_equal(cases: list[Case], found: list[Found], stages_per_rank: int) -> None:
    """Check losses and gradients of pipelines of two ranks, and their passes."""
    for case, ranks in zip(cases, found, strict=True):
        *stages, alone = ranks
        assert stages[-1]["losses"][0] == alone["losses"][0], case
        torch.testing.assert_close(stages[-1]["sums"], alone["sums"], rtol=1e-6, atol=0)
        assert gradients(ranks).keys() == alone["gradients"].keys(), case
        is_tied = case[0] in ("tied", "gemma3", "gpt2") and case[1] == "full"
        difference = worst(gradients(ranks), alone["gradients"])
        assert difference < 1e-6 if is_tied else difference == 0, case
        for rank in stages:
            assert rank["calls"] == stages_per_rank * 2 * MICRO_BATCHES + 1, case


REST = [case for case in CASES if case not in FEW]
INTERLEAVED: list[Case] = [
    *FEW[1:],
    ("gemma3", "full", "none"),
    ("llama", "lora", "offload"),
    ("mistral", "nf4", "full"),
]


@pytest.mark.parametrize(
    "cases", [pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=pytest.mark.slow)]
)
def test_stages_give_the_loss_and_gradients_of_one_process_to_the_last_bit(
    cases: list[Case],
) -> None:
    found = trained(PipelineConfig(pipeline_parallel_size=2), cases)
    check_bit_equal(cases, found, 1)
    for case, (first, last, alone) in zip(cases, found, strict=True):
        # Each micro-batch on its way keeps its tables of angles: Gemma 3 has two of them.
        assert first["peak"] <= alone["peak"] * (1.01 if case[0] == "gemma3" else 1), case
        if case[2] == "none" and "top" not in case[1]:  # else the head's own are what is left
            assert last["peak"] <= 0.55 * alone["peak"], case
        assert first["left"] == last["left"] == 0, case


def test_interleaved_stages_are_equal_to_the_last_bit() -> None:
    config = PipelineConfig(pipeline_parallel_size=2, schedule="interleaved", stages_per_rank=2)
    check_bit_equal(INTERLEAVED, trained(config, INTERLEAVED), 2)


def test_four_stages_hold_fewer_activations_each() -> None:
    (ranks,) = trained(PipelineConfig(pipeline_parallel_size=4), FEW[:1], 4)
    peaks = [rank["peak"] / ranks[-1]["peak"] for rank in ranks[:-1]]
    assert worst(gradients(ranks), ranks[-1]["gradients"]) == 0
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.3


def test_sharded_stages() -> None:
    config, cases = PipelineConfig(pipeline_parallel_size=2, schedule="interleaved"), FEW[1:3]
    for case, ranks in zip(cases, trained(config, cases, 4), strict=True):
        of_replica = [*ranks[:-1:2], ranks[-1]]
        assert worst(gradients(of_replica), ranks[-1]["gradients"]) < 2e-6, case


def check_split(cases: list[Case], num_ranks: int) -> None:
    """Check gradients after the ranks that split matrices have summed theirs."""
    config = PipelineConfig(pipeline_parallel_size=2, tensor_parallel_size=2)
    for case, ranks in zip(cases, trained(config, cases, num_ranks, 5e-4), strict=True):
        clipped = {name: each for rank in ranks[:-1] for name, each in rank["clipped"].items()}
        assert worst(clipped, ranks[-1]["clipped"]) < 5e-6, case


def test_split_matrices_inside_stages() -> None:
    check_split([("tied", "lora", "selective")], 4)


@pytest.mark.slow
def test_three_dimensions() -> None:
    check_split([("qwen3", "full", "full")], 8)


def test_stages_cost_nearly_the_same() -> None:
    sizes = ((2, 2), (7, 3), (32, 4), (80, 16))
    for (layers, stages), head in itertools.product(sizes, (0.0, 1.0, 3.0, 40.0)):
        costs = [1.0] * (layers - 1) + [1.0 + head]
        bounds = cut_layers(costs, stages)
        assert [first for first, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == layers and all(first < stop for first, stop in bounds)
        # No cut can be better: by it, stages of a smaller cost would be more than there are.
        slowest = max(sum(costs[first:stop]) for first, stop in bounds)
        needed, total = 1, 0.0
        for cost in costs:
            needed, total = (needed, total + cost) if total + cost < slowest else (needed + 1, cost)
        assert needed > stages or slowest == costs[-1]


def test_bases_whose_layers_cannot_be_divided_are_refused() -> None:
    config = PipelineConfig(schedule="interleaved", stages_per_rank=3)
    base = BaseDescription(name="base", config=LLAMA)
    (problem,) = check_pipeline(config, base)
    assert "has 6 stages, and base only 4 layers; type strategy.pipeline" in problem
    assert check_pipeline(PipelineConfig(), base) == check_pipeline(DdpConfig(), base) == []
    for kind in ("t5", "qwen3_moe"):
        other = BaseDescription(name="base", config=LLAMA | {"model_type": kind})
        (problem,) = check_pipeline(config, other)
        assert f"stages of {kind} models are not tested yet" in problem
        assert problem.endswith("type strategy=fsdp")
    assert {numbers["model_type"] for numbers in FAMILIES.values()} == set(PIPELINED)
