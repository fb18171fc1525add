"""LoRA beside a matrix in 4 bits as one step; imported only where bitsandbytes has such layers."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor

from app.model.adapter.fused import LoraGroup, Read, fused_dtype, run_fused
from app.model.quantization import stored_4bit


class FusedLora4bit(peft.tuners.lora.Linear4bit):
    """peft's own layer, with another forward while it trains one plain LoRA on a GPU.

    The matrix is dequantized once forward and once backward, and LoRA's products are added to the
    matrix's own.
    """

    group: LoraGroup | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the matrix's output with the adapter's added; in every other case peft's own."""
        if not args and not kwargs and _is_faster(self, x):
            if self.group is not None and (waiting := self.group.waiting(self, x)) is not None:
                return waiting
            if (dtype := fused_dtype(self, x)) is not None:
                if self.group is not None and (joint := self.group.run(self, x, dtype)) is not None:
                    return joint
                return run_fused(self, x, dtype)
        # Not that of peft's 4-bit layer: it copies the matrix's output, in case of a view.
        output: Tensor = peft.tuners.lora.Linear.forward(self, x, *args, **kwargs)
        return output

    def stored(self, dtype: torch.dtype) -> tuple[Tensor, Read]:
        """Return the packed weight, and what gives its matrix in `dtype`."""
        weight, dequantize = stored_4bit(self.base_layer)
        return weight, lambda packed: dequantize(packed).to(dtype)


def _is_faster(layer: torch.nn.Module, x: Tensor) -> bool:
    """Whether to dequantize: bitsandbytes' own product reads fewer bytes for a few tokens."""
    return x.device.type != "cpu" and layer.training and torch.is_grad_enabled()
