"""How a frozen base is kept in four or eight bits: what of the model's rooms knows bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import transformers

METHODS = ("none", "nf4", "int8")


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    method: str = "none"
    """none, nf4 (QLoRA, 4 bits a weight, arXiv 2305.14314) or int8 (LLM.int8(), 2208.07339)"""
    double_quant: bool = True
    """nf4: quantize the scales as well (0.4 bits a weight less)"""


def quantization_settings(
    config: QuantizationConfig, dtype: torch.dtype
) -> transformers.BitsAndBytesConfig | None:
    """Return what the loader is told; `dtype` is that of the weights that stay as they are."""
    import transformers

    if config.method == "none":
        return None
    if config.method == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Stored in the type of the other weights, so that a strategy can shard both in one tensor.
        bnb_4bit_quant_storage=dtype,
    )


def prepare_quantized(model: torch.nn.Module) -> None:
    """Make a quantized base fit to be trained on; changes nothing where nothing is quantized."""
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # After a forward in eval mode the weights would be repacked for inference on the CPU,
            # and every gradient after that would be lost without a word (bitsandbytes 0.50).
            module.support_avx512bf16_for_cpu = False
    model.requires_grad_(False)
