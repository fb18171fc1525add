"""An 8B model with random weights, created on the device: no files, no copy on the host."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.task import Task


def make_base(task: Task, implementation: str, dtype: Any, quantization: str) -> Any:
    """Create the base, in nf4 or fp8 if so; each weight is drawn on the device, in `dtype`."""
    import torch

    from app.model.base import ModelConfig, load_base
    from app.model.fp8 import quantize_to_fp8

    config = ModelConfig(from_scratch=True, architecture=task.shape)
    with torch.device(task.device):
        model = load_base(config, implementation, dtype)
    if quantization == "nf4":
        quantize(model, dtype)
    elif quantization == "fp8":
        quantize_to_fp8(model, dtype)
    return model


def quantize(model: Any, dtype: Any) -> None:
    """Replace all linear layers but the head by nf4 ones, as when loading from files."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    from app.model.quantization import QuantizationConfig, prepare_quantized, quantization_settings

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not torch.nn.Linear or child is head:
                continue
            layer = Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                quant_storage=dtype,
                device="meta",
            )
            weight = Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", quant_storage=dtype
            )
            layer.weight = weight.to(child.weight.device)
            setattr(module, name, layer)
    # peft and our code recognize a quantized model by these two attributes.
    nf4 = QuantizationConfig(method="nf4")
    model.config.quantization_config = quantization_settings(nf4, dtype)
    model.is_loaded_in_4bit = True
    prepare_quantized(model, nf4, dtype)
