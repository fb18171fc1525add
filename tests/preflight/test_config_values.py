"""Numbers and keys of config.json that no model can have are refused before weights are read."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, LlamaConfig

from app.model.config_values import check_keys, check_numbers
from app.preflight.base_model import check_config

INF, NAN = float("inf"), float("nan")
POSITIVE = (
    *("rope_theta", "rope_local_base_freq", "compress_rope_theta", "rotary_emb_base"),
    *("partial_rotary_factor", "rotary_pct", "attention_factor", "low_freq_factor", "beta_fast"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "n_head"),
    *("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
)
NOT_NEGATIVE = (
    *("rms_norm_eps", "layer_norm_epsilon", "initializer_range", "attention_dropout", "num_labels"),
    *("num_hidden_layers", "num_local_experts", "resid_pdrop"),
)
BOUNDS = {"time_step_limit": [0.0, INF]}
"""keys with a default that is not finite, in any family of transformers 5.23"""
PLACES = ("{}", "text_config.{}", "rope_parameters.{}", "rope_parameters.full_attention.{}")


def placed(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return {"model_type": "gemma3" if "text_config" in value else "llama"} | value


@pytest.mark.parametrize("place", PLACES)
def test_numbers_that_no_model_has(place: str) -> None:
    for key in (*POSITIVE, *NOT_NEGATIVE):
        for value in (INF, -INF, NAN, -1, *([0] if key in POSITIVE else [])):
            path = place.format(key)
            found = check_config("config.json", placed(path, value))
            assert len(found) == 1, (path, value, found)
            assert found[0].startswith(f"config.json: {path}={value}: expected "), found
    for key, value in {"rope_theta": 1e300, "num_labels": 30_000_000}.items():
        assert check_config("", placed(place.format(key), value))


@pytest.mark.parametrize(
    "path",
    ["rope_scaling.factor", "rope_parameters.short_factor.0", "anything", "text_config.a.b.0"],
)
def test_numbers_that_are_not_finite(path: str) -> None:
    *parents, last = path.split(".")
    value = [NAN] if last == "0" else NAN
    found = check_numbers("config.json", placed(".".join(parents) if last == "0" else path, value))
    assert found == [f"config.json: {path}=nan: expected a number"]
    factors = [
        check_numbers("", {"rope_scaling": {"factor": factor}}) for factor in (0.5, 4, 1e308)
    ]
    assert [len(problems) for problems in factors] == [1, 0, 1]


def defaults() -> dict[str, dict[str, Any]]:
    """Return what each family of transformers would write to config.json."""
    found = {}
    for family, config_class in CONFIG_MAPPING.items():
        try:
            found[family] = config_class().to_dict()
        except Exception:  # noqa: BLE001  some need values
            continue
    return found


@pytest.mark.slow
def test_the_defaults_of_every_family_pass() -> None:
    families = defaults()
    assert len(families) >= 780
    # 16,384 experts are above our limit, and 1200.0 positions are no whole number.
    del families["doge"], families["musicflamingo"]
    for family, values in families.items():
        assert check_numbers(family, json.loads(json.dumps(values, default=str))) == []
        assert check_keys(family, values, CONFIG_MAPPING[family]) == []
    assert check_numbers("", BOUNDS) == []


METHODS = [
    name
    for name in dir(LlamaConfig)
    if not name.startswith("__") and callable(getattr(LlamaConfig, name, None))
]


def test_keys_named_like_methods() -> None:
    assert len(METHODS) >= 40
    for name in (*METHODS, "attribute_map", "sub_configs", "__class__"):
        member = inspect.getattr_static(LlamaConfig, name)
        if inspect.isclass(member):
            continue
        assert f"config.json: {name}=1: this is the name" in str(
            check_keys("config.json", {name: 1}, LlamaConfig)
        ), name
    assert check_keys("", {"save_pretrained": 1}, GenerationConfig)


@pytest.mark.parametrize("key", ["text_config", "decoder", "generator", "text_encoder"])
def test_parts_of_a_single_model(key: str) -> None:
    values = {key: {"vocab_size": 3}}
    assert "single model without parts" in str(check_keys("", values, LlamaConfig))
    assert check_keys("", {"text_config": {}}, CONFIG_MAPPING["gemma3"]) == []
