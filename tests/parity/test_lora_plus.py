"""LoRA+ compared with the optimizer that peft builds for it."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from peft.optimizers import create_loraplus_optimizer

from app.model.adapter import LoraConfig
from app.training.optimizers import AdamWConfig, build_optimizer
from tests.tiny import random_ids, tiny_llama

LR, RATIO = 1e-3, 16.0


def adapted() -> Any:
    model = tiny_llama()
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear")
    )


def pairs(model: Any, weight_decay: float) -> tuple[Any, Any, Any]:
    """Return our optimizer for `model`, a copy of the model, and peft's optimizer for the copy."""
    other = copy.deepcopy(model)
    ours = build_optimizer(
        model,
        AdamWConfig(weight_decay=weight_decay),
        LoraConfig(lora_plus_ratio=RATIO),
        lr=LR,
        fused=False,
    )
    theirs = create_loraplus_optimizer(
        other,
        torch.optim.AdamW,
        lr=LR,
        loraplus_lr_ratio=RATIO,
        loraplus_weight_decay=weight_decay,
        eps=1e-8,
        betas=(0.9, 0.999),
    )
    return ours, theirs, other


def test_ten_steps_equal_the_reference() -> None:
    model, ids = adapted(), random_ids(2, 16)
    ours, theirs, other = pairs(model, 0.1)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(10):
        for each, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    reference = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, reference[name]), name
            assert not torch.equal(parameter, start[name]), name
