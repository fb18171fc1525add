"""Ranks that hold different experts of a mixture take the steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.adapter import FullConfig
from app.model.base import ModelConfig
from app.model.description import BaseDescription
from app.model.quantization import QuantizationConfig
from app.planning.planned_model import build_planned_model
from app.planning.states import size_for
from app.preflight.files import check_expert_parallel
from app.strategy.settings import FsdpConfig
from tests.model.test_experts import DEEPSEEK, MIXTURES
from tests.ranks import on_ranks
from tests.strategy import fsdp_training as fsdp
from tests.strategy.fsdp_training import MIXTURE, model_builder

SPLIT, IN_FOUR = FsdpConfig(expert_parallel_size=2), FsdpConfig(expert_parallel_size=4)
GPT_OSS = {"model_type": "gpt_oss", **MIXTURES["gpt_oss"], "backend": "eager"}  # biases, transposed
SHARED = {"model_type": "deepseek_v3", **DEEPSEEK}  # an expert of all tokens, and a dense layer
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "full", **MIXTURE}, {}),
    ({"kind": "experts", **MIXTURE}, {"clip": 1e9}),
]
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "full", "recompute": "full", **MIXTURE}, {"accumulation": 1}),
    ({"kind": "experts", "recompute": "selective", **MIXTURE}, {"bad_step": 1}),
    ({"kind": "top layer", **MIXTURE}, {}),
    ({"kind": "lora", **MIXTURE}, {}),  # frozen experts
    ({"kind": "full", **GPT_OSS}, {}),
    ({"kind": "experts", **GPT_OSS}, {}),
    ({"kind": "full", **SHARED}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "config", "cases"),
    [(2, SPLIT, CASES + OTHERS), (4, SPLIT, CASES), (4, IN_FOUR, CASES)],
    ids=["2", "2 x 2", "4"],
)
def test_ranks_train_as_one(num_ranks: int, config: FsdpConfig, cases: list[Any]) -> None:
    answers = on_ranks(num_ranks, fsdp.train_cases, [(config, *case) for case in cases])
    for number, (made, how) in enumerate(cases):
        alone = fsdp.train(model_builder(**made)(), **how)
        for answer in answers:
            found = answer[number]
            for key in ("losses", "norms", "validations"):
                assert found[key] == pytest.approx(alone[key], rel=2e-6, nan_ok=True), (made, key)
            assert difference(found["gradients"], alone["gradients"]) < 2e-6, made
            assert difference(found["weights"], alone["weights"]) < 1e-6, made


@pytest.mark.slow
def test_each_rank_holds_the_bytes_of_the_plan() -> None:
    numbers = fsdp.ARCHITECTURE | MIXTURE
    base = ModelConfig(from_scratch=True, architecture=numbers)
    model = build_planned_model(base, numbers, FullConfig(), "fp32")
    size = size_for(model, "fp32", QuantizationConfig(), SPLIT, num_ranks=4, num_nodes=1)
    assert on_ranks(4, fsdp.bytes_of_shards, SPLIT, MIXTURE) == [size.whole.held] * 4


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"model_type": "llama"}, "and B (llama) has none; type strategy.expert_parallel_size=1"),
        ({"model_type": "m", "num_experts": 1}, "has none"),
        ({"model_type": "m", "num_local_experts": 9},
         "does not divide the 9 experts of B (9 / 2 leaves 1); type strategy.expert_parallel_size="
         "1 or 3 or 9"),
        ({"model_type": "m", "text_config": {"n_routed_experts": 6}}, ""),
        ({}, ""),  # nothing is known before the files are read
    ],
)  # fmt: skip
def test_bases_whose_experts_cannot_be_split(numbers: dict[str, Any], problem: str) -> None:
    found = check_expert_parallel(2, BaseDescription(name="B", config=numbers))
    assert len(found) == bool(problem)
    assert problem in "".join(found)
    assert check_expert_parallel(1, BaseDescription(name="B", config=numbers)) == []


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors, as a share of their norm."""
    assert found.keys() == wanted.keys()
    norm = torch.nn.utils.get_total_norm
    apart = norm([found[name] - value for name, value in wanted.items()])
    return float(apart / norm(list(wanted.values())))
