"""The assumed rates of a GPU, and the time of counted kernels at these rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.planning.simulation.counting import Kernel

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Rates of large kernels, without the host's time to launch them."""

    name: str
    products: float
    """FLOP/s of matrix products in half precision"""
    products_fp32: float
    attention: float
    """FLOP/s of FlashAttention 2, causal, forward and backward"""
    attention_4: float
    """FLOP/s of FlashAttention 4, if the run uses it"""
    bandwidth: float
    """bytes/s of memory-bound kernels"""
    source: str

    def seconds(self, kernel: Kernel) -> float:
        """Return the time of one launch: the larger of its compute time and its memory time."""
        if kernel.kind == "attention":
            rate = self.attention_4 if kernel.name.endswith(" 4") else self.attention
        else:
            rate = self.products if kernel.dtype in HALF else self.products_fp32
        return max(kernel.flops / rate, kernel.num_bytes / self.bandwidth)


GPUS = {
    "h100": Gpu(
        name="H100 SXM",
        products=700e12,
        products_fp32=50e12,
        attention=330e12,
        attention_4=495e12,
        bandwidth=2.6e12,
        source=(
            "assumed: 71 % of the datasheet's 989 TFLOPS, a third of them in FlashAttention 2 "
            "(arXiv 2407.08608 gives 35 %), 1.5 times as much in FlashAttention 4 where it is "
            "taken (the least that the paper has for 3), 78 % of the datasheet's 3.35 TB/s"
        ),
    ),
    "h200": Gpu(
        name="H200",
        products=788e12,
        products_fp32=50e12,
        attention=330e12,
        attention_4=495e12,
        bandwidth=4.3e12,
        source="788 TFLOPS of products and 4.3 TB/s were measured on one H200; the rest as H100",
    ),
}
