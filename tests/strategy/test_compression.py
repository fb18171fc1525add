"""DDP with compressed gradients: in half precision, of low rank, or the largest only (top-k)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from app.assembly.training import build_strategy
from app.strategy.ddp import UNCOMPRESSED_STEPS
from app.strategy.settings import DdpConfig
from tests.ranks import connect, on_ranks
from tests.strategy.fsdp_training import answer_all

pytestmark = pytest.mark.slow

SIZE, RANK, SHARE = 32, 2, 0.02


class Matrix(L.LightningModule):
    """One matrix, whose gradient has full rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.matrix(rows).square().sum()


def gradients(compression: str, bad_step: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's gradients after each backward pass, and those that top-k has not sent yet."""
    config = DdpConfig(compression=compression, powersgd_rank=RANK, topk_share=SHARE)
    strategy: Any = connect(config)
    strategy.model = module = Matrix()
    strategy.configure_ddp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found, unsent = [], []
    for step in range(UNCOMPRESSED_STEPS + 4):
        rows = torch.randn(
            64, SIZE, generator=torch.Generator().manual_seed(9 * step + strategy.global_rank)
        )
        loss = strategy.model(rows) / 64
        (loss * float("nan") if step == bad_step else loss).backward()
        weight = module.matrix.weight
        found.append(weight.grad.clone())
        strategy.clip(optimizer, 1e9)
        residuals = {} if strategy._topk is None else strategy._topk.residuals
        unsent.append(residuals.get(weight, torch.zeros(SIZE**2)).view(SIZE, SIZE))
        optimizer.zero_grad()
    return found, unsent


HALVES = {"bf16": torch.bfloat16, "fp16": torch.half}
BAD = UNCOMPRESSED_STEPS + 1
QUESTIONS: list[tuple[Any, ...]] = [
    *((gradients, compression) for compression in (*HALVES, "powersgd", "topk")),
    *((gradients, compression, BAD) for compression in ("powersgd", "topk")),
]


Answers = dict[tuple[Any, ...], list[Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What both ranks answer to each question, without its function."""
    by_rank = zip(*on_ranks(2, answer_all, QUESTIONS), strict=True)
    return {tuple(args): list(both) for (_, *args), both in zip(QUESTIONS, by_rank, strict=True)}


def whole(step: int) -> Tensor:
    """Return the mean of both ranks' gradients without compression."""
    module = Matrix()
    for rank in range(2):
        rows = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(9 * step + rank))
        (module(rows) / 64 / 2).backward()
    assert module.matrix.weight.grad is not None
    return module.matrix.weight.grad


@pytest.mark.parametrize("compression", HALVES)
def test_gradients_are_sent_in_half_precision(compression: str, answers: Answers) -> None:
    (first, _), (second, _) = answers[compression,]
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, ours.to(HALVES[compression]).float())  # nothing finer came
        torch.testing.assert_close(ours, whole(step), rtol=0.05, atol=0.02)


def test_powersgd_sends_a_low_rank_with_error_feedback(answers: Answers) -> None:
    (first, _), (second, _) = answers["powersgd",]
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(ours, theirs)
        if step < UNCOMPRESSED_STEPS:
            torch.testing.assert_close(ours, whole(step))
        else:
            assert torch.linalg.matrix_rank(ours, rtol=1e-4) <= RANK
    # Step after step the sum of what came nears that of the gradients.
    came = torch.stack(first[UNCOMPRESSED_STEPS:]).sum(0)
    meant = torch.stack([whole(step) for step in range(UNCOMPRESSED_STEPS, len(first))]).sum(0)
    assert (came - meant).norm() < meant.norm()


@pytest.mark.parametrize("compression", ["powersgd", "topk"])
def test_a_resume_tells_whether_the_error_feedback_is_gone(
    compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = DdpConfig(compression=compression)
    strategy = build_strategy(config, accelerator="cpu", num_ranks=2)
    strategy.checkpoint_io = SimpleNamespace(load_checkpoint=lambda _: {})
    with caplog.at_level("INFO"):
        strategy.load_checkpoint("step-2")
    is_told = "RESUME: PowerSGD starts without its error feedback" in caplog.text
    assert is_told == (compression == "powersgd")


def test_topk_sends_the_largest_and_adds_the_rest_later(answers: Answers) -> None:
    (first, unsent), (second, unsent_there) = answers["topk",]
    came = meant = torch.zeros(SIZE, SIZE)
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(ours, theirs)
        assert 0 < ours.count_nonzero() <= 2 * -(-SHARE * SIZE**2 // 1)
        came, meant = came + ours, meant + whole(step)
        torch.testing.assert_close(came + (unsent[step] + unsent_there[step]) / 2, meant)


@pytest.mark.parametrize("compression", ["powersgd", "topk"])
def test_nonfinite_gradients_are_not_fed_back(compression: str, answers: Answers) -> None:
    for found, unsent in answers[compression, BAD]:
        assert not found[BAD].isfinite().all() and not unsent[BAD].any()
        assert all(gradient.isfinite().all() for gradient in found[BAD + 1 :])


def test_state_of_another_strategy_is_not_restored() -> None:
    strategy: Any = build_strategy(DdpConfig(compression="topk"), accelerator="cpu", num_ranks=2)
    module = Matrix()
    strategy._lightning_module = SimpleNamespace(model=module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    weight = module.matrix.weight
    of_local_sgd = {"weight/matrix.weight": torch.ones(SIZE, SIZE), "step/matrix.weight": weight}
    strategy.restore_local_state(optimizer, of_local_sgd)
    assert strategy.local_state(optimizer) == {}
    strategy._topk.residuals[weight] = torch.ones(SIZE**2)
    own = strategy.local_state(optimizer)
    strategy.restore_local_state(optimizer, of_local_sgd | own)
    assert strategy._topk.residuals.keys() == {weight}
    assert torch.equal(strategy._topk.residuals[weight], torch.ones(SIZE**2))
