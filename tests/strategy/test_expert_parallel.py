"""Ranks that hold different experts of a mixture take the steps of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.model.adapter import FullConfig
from app.model.base import ModelConfig
from app.model.description import BaseDescription
from app.model.quantization import QuantizationConfig
from app.planning.communication import list_collectives
from app.planning.hardware import HardwareConfig
from app.planning.memory import PlannedRun
from app.planning.planned_model import build_planned_model
from app.preflight.files import check_expert_parallel
from app.strategy.settings import FsdpConfig
from app.strategy.tensor_parallel import ExpertParallel
from common.errors import UserError
from tests.model.test_experts import DEEPSEEK, MIXTURES, tiny_mixture
from tests.ranks import on_ranks
from tests.strategy import fsdp_training as fsdp
from tests.strategy.fsdp_training import MIXTURE, difference, model_builder
from tests.tiny import tiny_llama

SPLIT, IN_FOUR = FsdpConfig(expert_parallel_size=2), FsdpConfig(expert_parallel_size=4)
GPT_OSS = {"model_type": "gpt_oss", **MIXTURES["gpt_oss"], "backend": "eager"}  # biases, transposed
SHARED = {"model_type": "deepseek_v3", **DEEPSEEK}  # an expert of all tokens, and a dense layer
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "full", **MIXTURE}, {}),
    ({"kind": "experts", **MIXTURE}, {"clip": 1e9}),
]
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "experts", "recompute": "selective", **MIXTURE}, {"bad_step": 1}),
    ({"kind": "top layer", **MIXTURE}, {}),
    ({"kind": "experts", "busy_experts": 2, **MIXTURE}, {}),  # the second rank gets no tokens
    ({"kind": "experts", **GPT_OSS}, {}),
    ({"kind": "full", "recompute": "full", **SHARED}, {"accumulation": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "config", "cases"),
    [(2, SPLIT, CASES + OTHERS), (4, SPLIT, CASES[:1]), (4, IN_FOUR, CASES)],
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


def planned_tiny(num_ranks: int, recompute: str = "none") -> PlannedRun:
    """Return a plan of a micro-batch of the mixture."""
    numbers = fsdp.ARCHITECTURE | MIXTURE
    base = ModelConfig(from_scratch=True, architecture=numbers)
    return PlannedRun(
        model=build_planned_model(base, numbers, FullConfig(), "fp32"),
        hardware=HardwareConfig(gpus_per_node=num_ranks),
        strategy=SPLIT,
        quantization=QuantizationConfig(),
        recompute=recompute,
        precision="fp32",
        micro_batch_size=fsdp.ROWS,
        sequence_len=fsdp.TOKENS,
        trains_base=True,
    )


@pytest.mark.slow
def test_the_plan_knows_weights_messages_and_bytes() -> None:
    held = planned_tiny(2).size.whole.held
    modes = ("none", "full")
    questions: list[tuple[Any, ...]] = [(fsdp.bytes_of_shards, SPLIT, MIXTURE)]
    questions += [(fsdp.exchanged_by_experts, SPLIT, mode) for mode in modes]
    shards, *others = zip(*on_ranks(2, fsdp.answer_all, questions), strict=True)
    assert list(shards) == [held] * 2
    for mode, ranks in zip(modes, others, strict=True):
        exchange = list_collectives(planned_tiny(2, mode))[-1]
        assert [messages for messages, _ in ranks] == [exchange.times] * 2
        # Whoever sends them: the rows of a message are those of both ranks' tokens and experts.
        assert sum(sent for _, sent in ranks) == 2 * exchange.times * exchange.num_bytes


def test_experts_that_no_rank_has_alone_are_refused() -> None:
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UserError, match="llama models have no fused experts to split; type strat"):
        ExpertParallel(tiny_llama(), group)
    mixture = tiny_mixture("qwen3_moe")
    ExpertParallel(mixture, group)
    mixture.model.layers[0].mlp.experts.norm = torch.nn.LayerNorm(32)
    with pytest.raises(UserError, match="the experts of qwen3_moe models share norm"):
        ExpertParallel(mixture, group)


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
