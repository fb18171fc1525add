"""`FusedLoraLinear` for a 4-bit matrix; can be imported only if bitsandbytes is installed."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor

from app.model.adapter.fused import Dequantize, LoraGroup, fused_dtype, run_fused
from app.model.quantization import stored_4bit


class FusedLora4bit(peft.tuners.lora.Linear4bit):
    """peft's layer with a fused forward while it trains one plain LoRA on a GPU.

    The matrix is dequantized once in the forward and once in the backward pass.
    """

    group: LoraGroup | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + bias + scale B A x; any other case runs the forward of peft's `Linear`."""
        if not args and not kwargs and _is_faster(self, x):
            if self.group is not None and (computed := self.group.take_output(self, x)) is not None:
                return computed
            if (dtype := fused_dtype(self, x)) is not None:
                if self.group is not None and (joint := self.group.run(self, x, dtype)) is not None:
                    return joint
                return run_fused(self, x, dtype)
        # Not the forward of peft's `Linear4bit`, which copies W x in case it were a view.
        output: Tensor = peft.tuners.lora.Linear.forward(self, x, *args, **kwargs)
        return output

    def stored_weight(self, dtype: torch.dtype) -> tuple[Tensor, Dequantize]:
        """Return the packed weight, and the function that makes the matrix of it."""
        weight, dequantize = stored_4bit(self.base_layer)
        return weight, lambda packed: dequantize(packed).to(dtype)


def _is_faster(layer: torch.nn.Module, x: Tensor) -> bool:
    """Return whether to run fused: for few tokens, bitsandbytes' product on packed weights wins."""
    return x.device.type != "cpu" and layer.training and torch.is_grad_enabled()
