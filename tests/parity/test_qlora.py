"""A quantized base computes the same as its dequantized weights, forward and backward.

The reference is a plain fp32 model with the weights that bitsandbytes dequantizes, and the same
adapter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor

from app.model.adapter import AdapterConfig, Ia3Config, LoraConfig, apply_adapter
from app.model.quantization import stored_quantization
from tests.tiny import built, random_ids, tiny_llama

ADAPTERS = {
    "lora": LoraConfig(dropout=0.0),
    "dora": LoraConfig(dropout=0.0, use_dora=True),
    "ia3": Ia3Config(),
}
EXACT = 2e-6
"""tolerance relative to the norm: both in fp32, sums in another order"""
BF16 = 3e-2
"""relative tolerance: bf16 has 8 bits of mantissa, and two layers round about twenty times"""
INT8 = 5e-2
"""relative tolerance: LLM.int8() rounds each token's activations to 8 bits"""


def dequantize(layer: torch.nn.Module) -> Tensor:
    weight = layer.weight
    if isinstance(weight, bnb.nn.Params4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    scales = layer.state.SCB if weight.SCB is None else weight.SCB
    return bnb.functional.int8_vectorwise_dequant(weight.data, scales)


def pair(folder: Path, method: str, adapter: AdapterConfig, precision: str) -> tuple[Any, Any]:
    """Return a quantized base and its dequantized copy, with the same trained adapter."""
    plain = tiny_llama(hidden_size=64, intermediate_size=128)
    plain.save_pretrained(folder)
    model = built(folder, method, precision, adapter)
    base = model.get_base_model()
    assert stored_quantization(base.config) is not None
    for name, module in base.named_modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            twin = plain.get_submodule(name.replace(".base_layer", ""))
            assert twin.weight.shape == (module.out_features, module.in_features)
            twin.weight.data = dequantize(module)
    for mine, theirs in ((base.model.norm, plain.model.norm), (base.lm_head, plain.lm_head)):
        theirs.weight.data = mine.weight.data.float()
    reference = apply_adapter(plain, copy.deepcopy(adapter), half_precision=False)
    torch.manual_seed(1)
    ours = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            if "magnitude" not in name:
                mean = float("ia3" in name)
                torch.nn.init.normal_(parameter, mean, 0.1)
            ours[name].data = parameter.data.clone()
    return model, reference


def logits_and_gradients(model: Any, precision: str) -> tuple[Tensor, dict[str, Tensor]]:
    ids = random_ids(3, 24)
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.requires_grad}
    return output.logits.detach().float(), gradients


def validate(model: Any, precision: str) -> Tensor:
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits = [model(input_ids=random_ids(3, 24)).logits.float() for _ in range(2)]
    assert torch.equal(*logits)
    return logits[0]


def assert_near(ours: Tensor, reference: Tensor, tolerance: float, name: str = "") -> None:
    difference = (ours - reference).norm() / reference.norm()
    assert difference < tolerance, f"{name}: {difference:.2g}"


@pytest.mark.parametrize(
    ("method", "adapter", "precision"),
    [
        ("nf4", "lora", "fp32"),
        ("nf4", "dora", "bf16"),
        ("nf4", "ia3", "fp32"),
        ("int8", "dora", "fp32"),
        ("int8", "ia3", "bf16"),
    ],
)
def test_a_step_equals_that_of_the_dequantized_weights(
    tmp_path: Path, method: str, adapter: str, precision: str
) -> None:
    tolerance = EXACT if precision == "fp32" else BF16
    model, reference = pair(tmp_path, method, ADAPTERS[adapter], precision)
    expected, expected_gradients = logits_and_gradients(reference, "fp32")
    for _ in range(2):
        logits, gradients = logits_and_gradients(model, precision)
        assert_near(logits, expected, tolerance, "logits")
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            assert gradient.any(), name
            assert_near(gradients[name], gradient, 3 * tolerance, name)
        in_eval = tolerance if method == "nf4" else max(INT8, tolerance)
        assert_near(validate(model, precision), expected, in_eval, "validation")
