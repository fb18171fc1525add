"""A matrix of an adapter that no gradient reaches is named in the first step; an expert is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from app.model.adapter import LoraConfig, adapter_matrices, apply_adapter
from app.strategy.mixin import StrategyMixin
from app.training.callbacks import GradientCheck
from common.errors import TrainingFault, UserError
from tests.families import SHAPE, tiny_family

WITHOUT_VISION = (
    r"(?!(model\.vision_tower)\b).*\.(down_proj|gate_proj|k_proj|o_proj|q_proj|up_proj|v_proj)"
)
SWITCH: dict[str, Any] = dict.fromkeys(("d_model", "d_ff", "d_kv", "num_heads"), 8) | {
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1),
    "num_layers": 2,
    "num_experts": 8,
    "router_jitter_noise": 0.0,
    "decoder_start_token_id": 0,
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


def test_an_unrouted_expert_is_not_an_error() -> None:
    model = lora(tiny_family("switch_transformers", **SWITCH))
    ids = torch.randint(3, 60, (1, 3))
    take_first_step(model, OneRank(), input_ids=ids, labels=ids)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    idle = [w.name for w in adapter_matrices(model) if w.parameter.grad is None]
    assert idle and all(".experts." in name for name in idle)


def test_an_adapter_without_any_gradient_is_a_training_fault() -> None:
    model = lora(tiny_family("llama"))
    for weight in adapter_matrices(model):
        torch.nn.init.zeros_(weight.parameter)
    ids = torch.randint(3, 60, (1, 12))
    with pytest.raises(TrainingFault, match=r"none of the 14 adapted matrices got a gradient"):
        take_first_step(model, OneRank(), input_ids=ids, labels=ids)
