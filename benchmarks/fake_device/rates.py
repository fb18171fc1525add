"""The assumed rates of a GPU, and the time of counted kernels at these rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.simulate.counting import Kernel

HALF = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Rates of large kernels, without the host's time to launch them."""

    name: str
    products: float
    """FLOP/s of matrix products in half precision"""
    products_fp8: float
    products_fp32: float
    attention: float
    """FLOP/s of FlashAttention 2, causal, forward and backward"""
    attention_4: float
    """FLOP/s of FlashAttention 4, if the run uses it"""
    dense_attention: float
    """FLOP/s of `scaled_dot_product_attention`, causal; on Hopper it runs cuDNN's kernel"""
    bandwidth: float
    """bytes/s of memory-bound kernels"""
    source: str

    def seconds(self, kernel: Kernel) -> float:
        """Return the time of one launch: the larger of its compute time and its memory time."""
        if kernel.kind == "attention":
            rate = self._attention_rate(kernel.name)
        else:
            rates = {FP8: self.products_fp8, **dict.fromkeys(HALF, self.products)}
            rate = rates.get(kernel.dtype, self.products_fp32)
        return max(kernel.flops / rate, kernel.num_bytes / self.bandwidth)

    def _attention_rate(self, name: str) -> float:
        if name.startswith("_scaled_dot_product"):
            return self.dense_attention
        return self.attention_4 if name.endswith(" 4") else self.attention


GPUS = {
    "h100": Gpu(
        name="H100 SXM",
        products=715e12,
        products_fp8=1150e12,
        products_fp32=50e12,
        attention=238e12,
        attention_4=443e12,
        dense_attention=443e12,
        bandwidth=2.3e12,
        source=(
            "measured in LoRA and full steps of an 8B model on one H100 (2026-11-27): products, "
            "cuDNN's attention and memory-bound kernels; FlashAttention 2 as on the H200, and "
            "FlashAttention 4, which did not run there, as cuDNN's; products in FP8 by the lower "
            "of the published 1,150 to 1,250 TFLOP/s"
        ),
    ),
    "h200": Gpu(
        name="H200",
        products=735e12,
        products_fp8=1150e12,
        products_fp32=50e12,
        attention=238e12,
        attention_4=443e12,
        dense_attention=443e12,
        bandwidth=3.3e12,
        source=(
            "measured in LoRA steps of an 8B model on one H200 (2026-11-26): products, "
            "FlashAttention 2 and memory-bound kernels; cuDNN's attention and products in FP8 as "
            "on the H100, and FlashAttention 4, which did not run there, as cuDNN's"
        ),
    ),
}
