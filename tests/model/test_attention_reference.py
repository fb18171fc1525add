"""The start-up comparison with eager attention finds masks that a backend loses, in every dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BartForCausalLM, BlenderbotForCausalLM

from app.model.attention import attend, attention_implementation, inputs
from app.model.attention.attend import MaskRule, build_mask_rule
from app.model.attention.backends import ModelOnDevice, support_error
from app.model.attention.inputs import attention_inputs
from app.model.attention.probes import check_against_eager, check_isolation
from tests.families import tiny_family
from tests.parity.test_attention_families import SHAPE, build
from tests.tiny import save_with_tokenizer, tiny_bart, train_into

WINDOWED = ["llama4_text", "phimoe", "mistral", "gemma3_text", "gemma3"]
NUMBERED = "compute positions from the start of the row, .* packing=none"
WRONG = "than for the same document alone with their own eager attention"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replace the function that builds mask rules for transformers."""
    return lambda function: monkeypatch.setattr(attend, "build_mask_rule", function)


def no_rule(**_: Any) -> None:
    return None


def shifted(**options: Any) -> MaskRule | None:
    """A window or chunk that starts a token later."""
    rule = build_mask_rule(**options)
    if rule is None:
        return None
    return MaskRule(lambda row, head, q, k: rule.function(row, head, q + 1, k), rule.size)


@pytest.mark.parametrize(
    ("family", "dtype", "is_packed"),
    [
        *itertools.product(WINDOWED, [torch.bfloat16], [True]),
        ("llama4_text", torch.float32, True),
        ("mistral", torch.float16, False),
    ],
)
def test_correct_windows_pass(family: str, dtype: torch.dtype, is_packed: bool) -> None:
    model = build(family, "sdpa", long=True).to(dtype)
    check_against_eager(model, "sdpa", is_packed=is_packed)
    model.set_attn_implementation("eager")
    check_against_eager(model, "eager", is_packed=is_packed)


@pytest.mark.parametrize(
    ("lost", "family", "dtype", "is_packed"),
    [
        *itertools.product([no_rule, shifted], WINDOWED[:2], [torch.bfloat16], [True]),
        (shifted, "phimoe", torch.float32, True),
        (shifted, "llama4_text", torch.float16, False),
    ],
)
def test_a_lost_window_is_found(
    lost: Callable[..., Any],
    family: str,
    dtype: torch.dtype,
    is_packed: bool,
    plant: Callable[[Callable[..., Any]], None],
) -> None:
    plant(lost)
    model = build(family, "sdpa", long=True).to(dtype)
    with pytest.raises(ValueError, match=f"{WRONG} .* type attention=eager"):
        check_against_eager(model, "sdpa", is_packed=is_packed)


def test_the_probe_restores_windows_and_chunks() -> None:
    model = build("llama4_text", "sdpa", long=True)
    check_against_eager(model, "sdpa", is_packed=True)
    assert model.config.attention_chunk_size == 8192
    assert model.config._attn_implementation == attention_implementation("sdpa")
    windowed = build("gemma3", "sdpa", long=True)
    check_against_eager(windowed, "sdpa", is_packed=True)
    layers = windowed.model.language_model.layers
    assert [layer.self_attn.sliding_window for layer in layers] == [4096, None]
    assert windowed.config.text_config.sliding_window == 4096


@pytest.mark.parametrize("family", ["doge", "deepseek_v32"])
def test_models_that_read_masks_need_eager(family: str) -> None:
    model = build(family)
    reason = support_error("sdpa", ModelOnDevice(model.config, "cpu", "fp32"))
    assert reason is not None and "select what they attend to" in reason
    model.set_attn_implementation(attention_implementation("sdpa"))
    with pytest.raises(ValueError, match=r"attention=sdpa.* masks? .* type attention=eager"):
        check_against_eager(model, "sdpa", is_packed=True)


@pytest.mark.parametrize(
    ("model_class", "backend"), [(BartForCausalLM, "sdpa"), (BlenderbotForCausalLM, "eager")]
)
def test_a_decoder_that_computes_positions_is_never_packed(
    model_class: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = tiny_bart().config.to_dict() | {"is_encoder_decoder": False, "is_decoder": True}
    kind = {BartForCausalLM: "bart", BlenderbotForCausalLM: "blenderbot"}[model_class]
    numbers.pop("model_type")
    config = AutoConfig.for_model(kind, **numbers)
    config._attn_implementation = attention_implementation(backend)
    torch.manual_seed(0)
    model = model_class(config).eval()
    ids = torch.arange(3, 12).unsqueeze(0)
    with pytest.raises(ValueError, match=NUMBERED):
        attention_inputs(model, backend, [[4, 5]], ids)
    with pytest.raises(ValueError, match=NUMBERED):
        check_isolation(model, backend)
    check_against_eager(model, backend, is_packed=False)
    # Also found in a model type that is not listed.
    monkeypatch.setattr(inputs, "packing_error", lambda numbers: None)
    with pytest.raises(ValueError, match=f"in a pack {WRONG} .* type packing=none"):
        check_against_eager(model, backend, is_packed=True)


def test_models_compute_the_positions_of_single_documents() -> None:
    """RoBERTa's positions start after that of its pad token."""
    model = tiny_family("roberta").eval()
    model.set_attn_implementation(attention_implementation("sdpa"))
    check_against_eager(model, "sdpa", is_packed=False)
    with pytest.raises(ValueError, match="roberta models compute positions"):
        check_against_eager(model, "sdpa", is_packed=True)


def test_a_run_is_refused_before_its_first_step(
    plant: Callable[[Callable[..., Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPE, "vocab_size", 768)
    monkeypatch.setitem(SHAPE, "max_position_embeddings", 512)
    base = save_with_tokenizer(build("phimoe"), tmp_path / "base")
    plant(no_rule)
    with pytest.raises(ValueError, match=f"{WRONG} .* type attention=eager"):
        train_into(tmp_path / "run", f"model.path={base}", "packing=none", "adapter=full")
