"""What is read of transformers' source is what transformers does, for every model type."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from app.model import config_values
from app.model.config_values import check_type, is_number


def written_configs() -> Iterator[tuple[str, type[PreTrainedConfig], dict[str, Any]]]:
    """Yield model type, class and config.json of all types of transformers that can be written."""
    for model_type in CONFIG_MAPPING:
        try:
            values = CONFIG_MAPPING[model_type]().to_dict()
        except (StrictDataclassError, ValueError):  # two need values
            continue
        yield model_type, CONFIG_MAPPING[model_type], {**values, "model_type": model_type}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.slow
@pytest.mark.versions
def test_every_model_type_is_read_as_its_class_says() -> None:
    read = 0
    for model_type, config_class, values in written_configs():
        assert check_type("", values) == [], model_type
        source = config_values._config_source(model_type)
        if source is None:
            continue
        read += 1
        class_name, fields, _ = source
        assert class_name == config_class.__name__
        for key, annotation in fields.items():
            if is_number(key, annotation):
                assert f"{key}='3': expected a number" in str(check_type("", values | {key: "3"}))
                with pytest.raises((TypeError, ValueError, ImportError, StrictDataclassError)):
                    config_class.from_dict({key: "3"})
    assert read >= 400


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"model_type": "llamma"}, "does not know its model_type 'llamma'; install a newer"),
        ({"model_type": "../auto"}, "does not know its model_type '../auto'"),
        ({"text_config": {"a": 1}}, "text_config={'a': 1}: LlamaConfig describes a single model"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4': expected a number (int)"),
        ({"head_dim": [8]}, "head_dim=[8]: expected a number (int | None)"),
        ({"rms_norm_eps": {}}, "rms_norm_eps={}: expected a number (float)"),
    ],
)
def test_what_is_refused(numbers: dict[str, Any], problem: str) -> None:
    (found,) = check_type("config.json", {"model_type": "llama"} | numbers)
    assert found.startswith("config.json: ") and problem in found


@pytest.mark.parametrize(
    "numbers",
    [
        {"head_dim": None, "hidden_act": "silu", "rope_parameters": {}, "text_config": None},
        {"model_type": "llamma", "auto_map": {"AutoConfig": "own.Config"}, "text_config": {}},
        {"model_type": 3},
        {"model_type": "gemma3", "text_config": {}},
        {"model_type": "gpt-sw3", "n_head": "4"},  # GPT2Config, which names another type
    ],
)
def test_what_only_the_library_can_tell(numbers: dict[str, Any]) -> None:
    assert check_type("", {"model_type": "llama"} | numbers) == []
