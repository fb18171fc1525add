from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.strategy.mixin import Step
from app.training import prepare


class Ranks(Step):
    """A rank, of which `copies` neighbours compute the same loss."""

    def __init__(self, global_rank: int, copies: int) -> None:
        self.global_rank, self.copies, self.root_device = global_rank, copies, torch.device("cpu")

    @property
    def num_loss_copies(self) -> int:
        return self.copies


def first_number(monkeypatch: pytest.MonkeyPatch, global_rank: int, copies: int) -> float:
    """Return the first random number that a rank draws after its model is prepared."""
    for name in ("verify_attention", "check_head_loss", "check_fp8", "check_same_step"):
        monkeypatch.setattr(prepare, name, lambda *_: None)
    for name in ("quantize_tokens_independently", "reading_first_forward", "hidden_as_logits"):
        monkeypatch.setattr(prepare, name, lambda *_: nullcontext())
    module: Any = SimpleNamespace(
        model=None,
        strategy=Ranks(global_rank, copies),
        backend="sdpa",
        trains_in_fp8=False,
        uses_fused_kernels=False,
        store_references=None,
        probe_micro_batch=None,
        resume=None,
        trainer=SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext)),
    )
    torch.manual_seed(5)
    prepare.prepare_model(module)
    return torch.rand(()).item()


def test_ranks_draw_other_dropout_unless_they_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [first_number(monkeypatch, rank, 1) for rank in (0, 1, 2)]
    assert len(set(drawn)) == 3
    assert [first_number(monkeypatch, rank, 2) for rank in (2, 3)] == [drawn[1], drawn[1]]
