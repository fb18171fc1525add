"""The GPU kernels: in bf16 they differ from eager fp32 no more than eager bf16 does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig

from app.model.attention import AttentionConfig, attention_implementation, choose_backend
from app.model.attention.backends import ModelOnDevice, find_package_problem, support_error
from app.model.attention.probes import check_isolation
from tests.model.test_attention_varlen import PACKED, PADDED, latent, mistral, run
from tests.tiny import tiny_llama, train_into

pytestmark = pytest.mark.gpu

BACKENDS = ["sdpa", "varlen", "flex", "flash2", "flash3"]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
FACTOR = 2.0
"""allowed ratio of the error to that of eager bf16, for another order of additions"""


def llama(**numbers: Any) -> Any:
    return tiny_llama(**(WIDE | numbers))


def windowed() -> Any:
    return mistral(**WIDE)


def sinks() -> Any:
    """A model with attention sinks, half of whose layers have a window."""
    shape = tiny_llama().config.to_dict() | WIDE | {"model_type": "granite_swa"}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(shape | kinds | {"num_hidden_layers": 2}))
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model


def skip_unless_here(backend: str, model: Any) -> None:
    situation = ModelOnDevice(model.config, "gpu", "bf16")
    if reason := support_error(backend, situation) or find_package_problem(backend):
        pytest.skip(reason)


Run = tuple[torch.Tensor, list[torch.Tensor]]


def assert_rounds_alike(ours: Run, plain: Run, exact: Run) -> None:
    """Compare logits and every gradient with those of fp32, relative to their norm."""
    parts = ([logits, *gradients] for logits, gradients in (ours, plain, exact))
    for one, other, right in zip(*parts, strict=True):
        found, allowed = ((part.float() - right).norm() / right.norm() for part in (one, other))
        assert found <= FACTOR * allowed + 1e-3


@pytest.mark.parametrize("lengths", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("make", [llama, windowed, latent, sinks])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_gradients_round_as_eager_does(
    backend: str, make: Callable[[], Any], lengths: list[list[int]]
) -> None:
    model = make().to("cuda")
    skip_unless_here(backend, model)
    half = copy.deepcopy(model).bfloat16()
    exact, plain = run(model, "eager", lengths), run(half, "eager", lengths)
    ours = run(half, backend, lengths)
    assert_rounds_alike(ours, plain, exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_do_not_see_each_other(backend: str) -> None:
    model = llama().to("cuda", torch.bfloat16)
    skip_unless_here(backend, model)
    model.set_attn_implementation(attention_implementation(backend))
    check_isolation(model, backend)


def test_documents_of_a_falcon_do_not_see_each_other() -> None:
    config = FalconConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_kv_heads=2, new_decoder_architecture=True, initializer_range=0.05,
    )  # fmt: skip
    if fault := find_package_problem("flash2"):
        pytest.skip(fault)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="flash_attention_2", dtype=torch.bfloat16
    )
    check_isolation(model.to("cuda").eval(), "flash2")


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_fp32_weights_compute_in_half_precision_under_autocast(backend: str) -> None:
    model = llama().to("cuda")
    skip_unless_here(backend, model)
    exact = run(model, "eager", PACKED)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        plain, ours = run(model, "eager", PACKED), run(model, backend, PACKED)
    assert_rounds_alike(ours, plain, exact)


def test_the_backend_of_auto_keeps_documents_apart() -> None:
    model = llama().to("cuda", torch.bfloat16)
    chosen = choose_backend(AttentionConfig(), model.config, "gpu", "bf16")
    model.set_attn_implementation(attention_implementation(chosen.backend))
    check_isolation(model, chosen.backend)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert chosen.backend in ("flash3", "flash2", "varlen"), str(chosen)


def test_a_run_learns_as_with_sdpa(tmp_path: Path) -> None:
    words = ["trainer.precision=bf16", "trainer.accelerator=gpu", "trainer.devices=1"]
    losses = []
    for backend in ("sdpa", "varlen"):
        folder = train_into(tmp_path / backend, *words, f"attention={backend}")
        losses.append(json.loads((folder / "metrics.json").read_text())["tuned/val/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
