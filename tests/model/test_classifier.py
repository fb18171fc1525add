"""Families of causal models get a head for classes that transformers opens; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from app.model.architecture import hidden_as_logits
from app.model.attention import attention_implementation
from app.model.attention.probes import check_isolation
from app.model.base import ModelConfig, load_base
from common.errors import UserError
from tests.families import tiny_family

SUPPORTED = [
    *("arcee", "exaone4", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("helium", "jamba", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "opt"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "starcoder2"),
]
NO_CLASS = [
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "trocr", "zamba2")
]
OTHER_HEAD = ["bert", "roberta"]
LABELS = ["a", "b", "c"]


def load(folder: Path, name: str, backend: str = "sdpa") -> torch.nn.Module:
    """Load a tiny language model of a family as a classifier."""
    tiny_family(name).save_pretrained(folder)
    config = ModelConfig(path=str(folder), labels=LABELS)
    return load_base(config, attention_implementation(backend), torch.float32)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_saved_classifier_rates_the_last_token_as_transformers_does(
    name: str, tmp_path: Path
) -> None:
    model = load(tmp_path / "base", name)
    with hidden_as_logits(model):
        check_isolation(model, "sdpa", torch.device("cpu"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        own = model.eval()(input_ids=ids, logits_to_keep=1).logits[0, 0]
        model.save_pretrained(tmp_path / "classifier")
        opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
        theirs = opened.eval()(input_ids=ids).logits[0]
    assert list(opened.config.id2label.values()) == LABELS
    assert own.shape == (3,) and (own - theirs).abs().max() <= 1e-5 * own.abs().max().clamp(min=1)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", [*NO_CLASS, *OTHER_HEAD])
def test_a_family_without_such_a_head_is_refused(name: str, tmp_path: Path) -> None:
    said = "one head for a whole text" if name in NO_CLASS else "one linear layer"
    with pytest.raises(UserError, match=said):
        load(tmp_path, name)
