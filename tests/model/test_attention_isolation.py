"""The start-up probe finds leaks between documents in every dtype, without false alarms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations import flex_attention

from app.model import cpu
from app.model.attention import attention_implementation, inputs
from app.model.attention.probes import check_isolation
from tests.model.test_attention_flex import flex_substitute
from tests.model.test_attention_varlen import varlen_2_13
from tests.tiny import TINY_BASE, tiny_llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["sdpa", "matmul", "eager", "varlen", "flex"]
LEAKS = {"all": [[8]], "one token": [[5, 3]], "another token": [[3, 5]]}
"""document lengths passed to the attention instead of two documents of four tokens each"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend; GPU kernels are replaced by substitutes, and `matmul` is a path of sdpa."""
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", flex_substitute)
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_2_13)
    if request.param == "sdpa":
        monkeypatch.setattr(cpu, "attends_faster", lambda *_: False)
    return "sdpa" if request.param == "matmul" else request.param


def base(backend: str, dtype: torch.dtype) -> Any:
    name = attention_implementation(backend)
    return AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=dtype, attn_implementation=name)


def plant(leak: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass the document lengths `leak` to the attention instead of those of the batch."""

    def with_leak(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _, *rest, **options: function(leak, *rest, **options)

    for name in ("group_documents", "block_mask", "place_documents", "_dense_mask"):
        monkeypatch.setattr(inputs, name, with_leak(getattr(inputs, name)))


def check_that_only_a_leak_is_found(model: Any, leak: str, patch: pytest.MonkeyPatch) -> None:
    check_isolation(model, "sdpa")
    plant(LEAKS[leak], patch)
    with pytest.raises(ValueError, match="see each other"):
        check_isolation(model, "sdpa")


def test_isolated_documents_pass(backend: str) -> None:
    for dtype in DTYPES:
        check_isolation(base(backend, dtype), backend)


@pytest.mark.parametrize(
    ("leak", "dtype"), [*zip(LEAKS, DTYPES, strict=True), ("one token", torch.float32)]
)
def test_a_leak_is_found(
    backend: str, dtype: torch.dtype, leak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base(backend, dtype)
    plant(LEAKS[leak], monkeypatch)
    with pytest.raises(ValueError, match=r"see each other .* its own change.* packing=none"):
        check_isolation(model, backend)


def test_a_leak_in_one_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base("sdpa", torch.bfloat16)
    last = model.model.layers[-1].self_attn
    plain = last.forward
    monkeypatch.setattr(last, "forward", lambda **rest: plain(**rest | {"documents": None}))
    with pytest.raises(ValueError, match="see each other"):
        check_isolation(model, "sdpa")


@pytest.mark.parametrize("offset", [-60.0, 60.0])
def test_an_offset_of_all_logits_changes_nothing(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base("sdpa", torch.bfloat16)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size).bfloat16()
    head.weight = model.lm_head.weight
    torch.nn.init.constant_(head.bias, offset)
    model.lm_head = head
    check_that_only_a_leak_is_found(model, "all", monkeypatch)


def test_rounding_in_experts_is_not_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny_llama().config.to_dict() | {"num_local_experts": 4}
    torch.manual_seed(0)
    config = MixtralConfig(**shape, attn_implementation=attention_implementation("sdpa"))
    model = MixtralForCausalLM(config).bfloat16()
    check_that_only_a_leak_is_found(model, "all", monkeypatch)


def test_a_faint_leak_is_found() -> None:
    """It moves the logits by 4e-4 of their spread, which is less than two kernels may differ by."""
    model = base("sdpa", torch.float32)
    mixed = partial(torch.roll, shifts=4, dims=1)
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: out + 5e-4 * mixed(out))
    with pytest.raises(ValueError, match="see each other"):
        check_isolation(model, "sdpa")


def test_the_rounding_limit_follows_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base("sdpa", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_that_only_a_leak_is_found(model, "one token", monkeypatch)


def test_a_probe_without_effect_raises() -> None:
    model = base("sdpa", torch.float32)
    torch.nn.init.zeros_(model.model.norm.weight)
    with pytest.raises(ValueError, match="saw no effect of its own edit"):
        check_isolation(model, "sdpa")
