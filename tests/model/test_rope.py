"""Rotary embeddings of all types and families are the same whatever else is in a batch."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from app.model.architecture import context_len, model_class
from app.model.attention.inputs import attention_inputs
from app.model.attention.probes import check_isolation, check_padded_rows
from app.model.description import BaseDescription
from app.model.rope import SCALINGS, extend_context, fix_rope_factors
from common.errors import UserError
from tests.families import tiny_family
from tests.parity.every_family import registry, tiny_config

ORIGINAL, CONTEXT = 16, 64
LENGTHS = {"short": ORIGINAL, "long": ORIGINAL + 25, "context": None}
SMALLEST = ("llama", "phi3", "phimoe", "gemma3_text", "deepseek_v3", "qwen2_vl")
"""families with a rotary embedding of each form: plain, scaled, by layer, complex, multimodal"""


def rope(kind: str, width: int, kept: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of a rope type with different factors for short and long sequences."""
    third = width // 3
    parameters: dict[str, Any] = {
        "mrope_section": [width - 2 * third, third, third], "rope_type": kind, "rope_theta": 100.0,
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "short_factor": [1.0] * width, "long_factor": [3.0] * width,
        "short_mscale": 1.0, "long_mscale": 1.5,
    }  # fmt: skip
    return parameters | {key: kept[key] for key in ("partial_rotary_factor",) if key in kept}


def configured(module: Any, kind: str) -> Any:
    """Return the config of a rotary module with rope type `kind`."""
    config = copy.deepcopy(module.config)
    if isinstance(module.rope_type, dict):
        for layer in module.rope_type:
            width = getattr(module, f"{layer}_inv_freq").numel()
            config.rope_parameters[layer] = rope(kind, width, config.rope_parameters[layer])
    else:
        config.rope_parameters = rope(kind, module.inv_freq.numel(), config.rope_parameters)
    if "original_max_position_embeddings" in vars(config):
        config.original_max_position_embeddings = ORIGINAL
    config.max_position_embeddings = ORIGINAL if kind == "dynamic" else CONTEXT
    return config


def embed(module: Any, positions: list[int]) -> list[torch.Tensor]:
    """Return cosines and sines of the first four positions, of each kind of layer."""
    ids, layers = torch.tensor([positions]), module.rope_type
    takes_layer = "layer_type" in inspect.signature(module.forward).parameters
    found = []
    for options in [{"layer_type": each} for each in layers] if takes_layer else [{}]:
        output = module(torch.zeros(1, len(positions), 32), ids, **options)
        parts = output if isinstance(output, tuple) else (torch.view_as_real(output).flatten(-2),)
        found += [part[..., :4, :].clone() for part in parts]
    return found


ALONE, BESIDE = [0, 1, 2, 3], [0, 1, 2, 3, 0, 1, ORIGINAL + 23, ORIGINAL + 24]


def cases(family: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each rope type with each kind of rotary module of a family, if they go together."""
    with torch.device("meta"):
        model = model_class(tiny_config(family)).from_config(tiny_config(family))
    modules = {type(m): m for m in model.modules() if vars(m).get("rope_type") is not None}
    for module in modules.values():
        for kind in ROPE_INIT_FUNCTIONS:
            config = configured(module, kind)
            try:
                type(module)(config)
            except (ZeroDivisionError, RuntimeError):
                continue  # too narrow at this size, or of several widths
            yield kind, type(module), config


def check_family(family: str) -> int:
    """Check every rope type of a family; return how many were tried."""
    count = 0
    for kind, rotary, config in cases(family):
        count += 1
        for name, num_tokens in LENGTHS.items():
            module = rotary(config)
            fix_rope_factors(torch.nn.ModuleList([module]), num_tokens)  # type: ignore[arg-type]
            alone, beside = embed(module, ALONE), embed(module, BESIDE)
            case = f"{family} {kind} {name}"
            assert all(map(torch.equal, alone, beside)), case
            # The choice is that of transformers for a single document of this length.
            reference = embed(rotary(config), ALONE if name == "short" else BESIDE)
            if kind != "dynamic" or name == "short":
                assert all(map(torch.equal, alone, reference)), case
    return count


@pytest.mark.parametrize("family", SMALLEST)
def test_neighbours_do_not_change_a_document(family: str) -> None:
    assert check_family(family) >= len(ROPE_INIT_FUNCTIONS)


@pytest.mark.versions
@pytest.mark.slow
def test_all_families() -> None:
    counts = {}
    for family in registry():
        try:
            counts[family] = check_family(family)
        except (ValueError, UserError, StrictDataclassError):  # not a language model of text
            continue
    assert sum(map(bool, counts.values())) >= 130
    assert sum(counts.values()) >= 700


def tiny_longrope(family: str) -> Any:
    """Build a tiny model whose long factors differ, as transformers reads it."""
    width = tiny_family(family).config.head_dim // 2
    parameters: Any = rope("longrope", width, {})
    if family == "gemma3_text":
        parameters = {"full_attention": parameters, "sliding_attention": dict(parameters)}
    options = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return tiny_family(family, rope_parameters=parameters, **options)


@pytest.mark.parametrize(
    ("family", "check"),
    [
        ("phi3", check_isolation),
        ("llama", check_padded_rows),
        ("gemma3_text", check_isolation),
        ("phimoe", check_padded_rows),
    ],
)
def test_the_probe_at_the_start_sees_it(family: str, check: Any) -> None:
    model = tiny_longrope(family)
    with pytest.raises(UserError, match=r"another one in its batch is long.*packing=none"):
        check(model, "eager")
    fix_rope_factors(model, 2 * ORIGINAL)
    check(model, "eager")


@pytest.mark.parametrize("num_tokens", [ORIGINAL, CONTEXT])
def test_packed_documents_have_the_logits_of_each_alone(num_tokens: int) -> None:
    model = tiny_longrope("phi3").eval()
    fix_rope_factors(model, num_tokens)
    ids = torch.randint(3, 64, (1, 40))
    positions = torch.cat([torch.arange(10), torch.arange(30)])[None]
    inputs = attention_inputs(model, "eager", [[10, 30]], ids)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, **inputs).logits[0]
        padded = model(input_ids=ids).logits[0, :10]
        alone = model(input_ids=ids[:, :10]).logits[0]
    torch.testing.assert_close(packed[:10], alone)
    torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *(("llama", each) for each in sorted(SCALINGS.keys() - {"dynamic"})),
        ("qwen3", "yarn"),
        ("gemma3_text", "yarn"),
        ("gemma3_text", "linear"),
    ],
)
def test_a_longer_context_is_that_of_transformers(family: str, scaling: str) -> None:
    extended, by_hand = (tiny_config(family) for _ in range(2))
    original = extended.max_position_embeddings
    extend_context(extended, 4 * original, scaling)
    own = by_hand.rope_parameters.get("full_attention", by_hand.rope_parameters)
    own |= {"rope_type": scaling, "factor": 4.0, "original_max_position_embeddings": original}
    own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    by_hand.max_position_embeddings = 4 * original
    plain = tiny_config(family)
    logits = []
    for config in (extended, by_hand, plain):
        torch.manual_seed(0)
        model = model_class(config).from_config(config).eval()
        ids = torch.arange(24).unsqueeze(0) % config.vocab_size
        logits.append(model(input_ids=ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dynamic_factors_are_those_of_the_longest_sequence(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    longest = 4 * config.max_position_embeddings
    extend_context(config, longest, "dynamic")
    config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert context_len(config) == BaseDescription(config=read).context_len == longest
    own, reference = (model_class(config).from_config(config).eval() for _ in range(2))
    reference.load_state_dict(own.state_dict())
    fix_rope_factors(own, None)
    ids = torch.arange(24).unsqueeze(0)
    at_end = torch.arange(longest - 24, longest).unsqueeze(0)
    found = [model(input_ids=ids, position_ids=at_end).logits for model in (own, reference)]
    torch.testing.assert_close(*found)
    # transformers scales no text that is as short as this one.
    assert not torch.equal(own(input_ids=ids).logits, reference(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gpt2", {}, "no rotary embedding"),
        ("t5", {}, "no rotary embedding"),
        ("llama", {"max_position_embeddings": 4096}, "has a context of 4096 tokens; leave it out"),
        ("phi3", {}, None),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            r"scaled already \(linear, factor 2.0",
        ),
    ],
)
def test_a_context_that_cannot_be_extended_is_refused(
    family: str, change: dict[str, Any], said: str | None
) -> None:
    config = tiny_config(family)
    for name, value in change.items():
        setattr(config, name, value)
    if said is None:
        extend_context(config, 4096, "yarn")
        assert config.max_position_embeddings == 4096
        return
    with pytest.raises(UserError, match=said):
        extend_context(config, 4096, "yarn")
