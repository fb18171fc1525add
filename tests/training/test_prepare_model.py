from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.training import prepare


def first_number(monkeypatch: pytest.MonkeyPatch, data_rank: int) -> float:
    """Return the first random number that a rank draws after its model is prepared."""
    for name in ("verify_attention", "check_head_loss", "check_same_step"):
        monkeypatch.setattr(prepare, name, lambda *_: None)
    for name in ("quantize_tokens_independently", "reading_first_forward"):
        monkeypatch.setattr(prepare, name, lambda *_: nullcontext())
    module: Any = SimpleNamespace(
        model=None,
        strategy=SimpleNamespace(root_device=torch.device("cpu"), data_rank=data_rank),
        backend="sdpa",
        uses_fused_kernels=False,
        probe_micro_batch=None,
        resume=None,
        trainer=SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext)),
    )
    torch.manual_seed(5)
    prepare.prepare_model(module)
    return torch.rand(()).item()


def test_ranks_draw_other_dropout_unless_they_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [first_number(monkeypatch, data_rank) for data_rank in (0, 1, 2, 1)]
    assert len(set(drawn)) == 3 and drawn[1] == drawn[3]
