"""A matrix of an adapter that no gradient reaches is named in the first step; an expert is not."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MllamaForConditionalGeneration,
)

from app.model.adapter import LoraConfig, adapter_matrices, apply_adapter
from app.model.layers import pattern_without
from app.strategy.mixin import StrategyMixin
from app.training.callbacks import GradientCheck
from common.errors import TrainingFault, UserError
from tests.conftest import TrainRun
from tests.families import SHAPE, tiny_family
from tests.parity.every_family import tiny_config
from tests.tiny import save_with_tokenizer, small_run

WITHOUT_VISION = (
    r"(?!(model\.vision_tower)\b).*\.(down_proj|gate_proj|k_proj|o_proj|q_proj|up_proj|v_proj)"
)
ROUTED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "switch_transformers": {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_heads": 4,
        "num_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 8,
        "router_jitter_noise": 0.0,
        "decoder_start_token_id": 0,
    },
}


class OneRank(StrategyMixin):
    root_device = torch.device("cpu")

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return tensor


class Engine(OneRank):
    """Takes gradients away as they come."""

    keeps_gradients = False


def gemma3(**numbers: Any) -> Gemma3ForConditionalGeneration:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=SHAPE | numbers, vision_config=vision, mm_tokens_per_image=4, pad_token_id=0
    )
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config)


def take_first_step(model: Any, strategy: StrategyMixin, **inputs: Any) -> None:
    """Go forward and backward, and be judged as before an optimizer's step."""
    trainer: Any = SimpleNamespace(strategy=strategy)
    module = SimpleNamespace(model=model, strategy=strategy)
    check = GradientCheck()
    check.on_train_start(trainer, module)
    for _ in range(2):
        model.train()(use_cache=False, **inputs).loss.backward()
        if not strategy.keeps_gradients:
            model.zero_grad()
    check.on_before_optimizer_step(trainer, module, None)  # type: ignore[arg-type]
    model.zero_grad()
    check.on_before_optimizer_step(trainer, module, None)  # type: ignore[arg-type]  a later step


def lora(model: Any, targets: Any = "all-linear") -> Any:
    config = LoraConfig(r=2, dropout=0.0, target_modules=targets)
    return apply_adapter(model, config, half_precision=False)


@pytest.mark.parametrize("strategy", [OneRank(), Engine()])
def test_modules_without_gradient_are_named_with_the_fix(strategy: StrategyMixin) -> None:
    ids = torch.randint(3, 60, (1, 12))
    with pytest.raises(UserError) as error:
        take_first_step(lora(gemma3()), strategy, input_ids=ids, labels=ids)
    message = str(error.value)
    assert "step 1: 15 of 29 adapted matrices got no gradient" in message
    assert "model.vision_tower." in message
    assert message.endswith(f"type adapter.target_modules='{WITHOUT_VISION}'")
    take_first_step(lora(gemma3(), WITHOUT_VISION), strategy, input_ids=ids, labels=ids)


@pytest.mark.parametrize("family", list(ROUTED))
def test_an_unrouted_expert_is_not_an_error(family: str) -> None:
    model = lora(tiny_family(family, **ROUTED[family]))
    ids = torch.randint(3, 60, (1, 3))
    take_first_step(model, OneRank(), input_ids=ids, labels=ids)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    idle = [w.name for w in adapter_matrices(model) if w.parameter.grad is None]
    assert bool(idle) == (family == "switch_transformers")
    assert all(".experts." in name for name in idle)


def test_a_module_of_a_list_that_no_token_reaches_is_named() -> None:
    """A hybrid layer of Zamba 2 has adapters for each such layer, and runs its own alone."""
    ids = torch.randint(3, 60, (1, 12))
    every = r".*shared_transformer.*"
    with pytest.raises(UserError, match=r"16 of 44 .*the first is \S+adapter_list\.1\.0:"):
        take_first_step(lora(tiny_family("zamba2"), every), OneRank(), input_ids=ids, labels=ids)
    take_first_step(lora(tiny_family("zamba2")), OneRank(), input_ids=ids, labels=ids)


def test_an_adapter_without_any_gradient_is_a_training_fault() -> None:
    model = lora(tiny_family("llama"))
    for weight in adapter_matrices(model):
        torch.nn.init.zeros_(weight.parameter)
    ids = torch.randint(3, 60, (1, 12))
    with pytest.raises(TrainingFault, match=r"none of the 14 adapted matrices got a gradient"):
        take_first_step(model, OneRank(), input_ids=ids, labels=ids)


LAYERS = [f"model.layers.{n}.self_attn.{end}" for n in range(12) for end in ("q_proj", "k_proj")]


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (LAYERS[3::2], r"(?!(model\.layers\.1\.self_attn\.k_proj|"),
        (LAYERS[1::2], r"(?!(model\.layers\.\d+\.self_attn\.k_proj)\b).*\.(q_proj)"),
        (LAYERS[2:4], r"(?!(model\.layers\.1)\b).*\.(k_proj|q_proj)"),
        (["model.audio.a", "model.vision.b"], r"(?!(model\.audio|model\.vision)\b).*\."),
    ],
)
def test_the_suggested_pattern_excludes_the_named_modules(
    left_out: list[str], expected: str
) -> None:
    kept = [name for name in LAYERS if name not in left_out]
    pattern = pattern_without(kept, left_out)
    if len(left_out) > 8 and kept[1] == LAYERS[1]:
        assert pattern is None
        return
    assert pattern is not None and pattern.startswith(expected)
    assert [name for name in (*kept, *left_out) if re.fullmatch(pattern, name)] == kept


def test_the_suggested_fix_trains(train_run: TrainRun, tmp_path: Path) -> None:
    """Llama 3.2 Vision: its cross-attention is a part of the language model, for images alone."""
    config = tiny_config("mllama")
    text = config.text_config
    text.vocab_size, text.num_hidden_layers, text.cross_attention_layers = 768, 3, [1]
    text.max_position_embeddings = 256
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(config)
    base = save_with_tokenizer(model, tmp_path / "b")
    words = small_run(
        f"model.path={base}", "trainer.max_steps=2", "adapter.r=4", "evaluation.exact_match=false"
    )
    with pytest.raises(UserError) as error:
        train_run(*words)
    assert "model.language_model.layers.1.cross_attn." in str(error.value)
    typed = str(error.value).rpartition("type ")[2].replace("'", "")
    assert (train_run(*words, typed) / "adapter" / "adapter_model.safetensors").exists()
