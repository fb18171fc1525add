"""Adapters, quantization, recompute and precision give the same results under all strategies."""

from __future__ import annotations

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    LAYOUTS,
    SINGLE,
    Layout,
    Runs,
    check_same_results,
    check_same_steps,
)

pytestmark = pytest.mark.strategies

OTHER_ADAPTERS = [
    *(("dora", strategy) for strategy in ("zero2", "zero3", "fsdp", "fsdp_hybrid")),
    *(("ia3", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
    *(("top layer", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
]
BF16 = 2e-2
"""absolute tolerance of losses of about 6: sums are rounded to 8 bits in another order"""
FP8 = 0.02
"""absolute tolerance of losses of about 6: activations between two values of four bits are rounded
to either"""
COMPRESSED = 2e-3
"""absolute tolerance of losses if only gradients are rounded"""


@pytest.mark.parametrize(("adapter", "strategy"), OTHER_ADAPTERS)
def test_other_adapters(adapter: str, strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS[adapter], CLIPPED)
    check_same_results(runs.train(LAYOUTS[strategy], *words), runs.train(SINGLE, *words))


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "fsdp_hybrid", "tp", "fsdp_tp"])
def test_untied_head(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["full"], f"model.path={runs.bases['untied']}")
    check_same_results(runs.train(LAYOUTS[strategy], *words), runs.train(SINGLE, *words))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "fsdp_hybrid"])
def test_nf4_base(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "quantization=nf4")
    check_same_results(runs.train(LAYOUTS[strategy], *words), runs.train(SINGLE, *words))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_fp8_base(strategy: str, runs: Runs) -> None:
    """Sums in another order round some activations to another value of four bits."""
    words = (*ADAPTERS["lora"], "quantization=fp8")
    run, reference = (runs.train(layout, *words) for layout in (LAYOUTS[strategy], SINGLE))
    check_same_steps(run, reference, loss=FP8, norm=0.02)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_layers_that_train_in_fp8(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["full"], f"model.path={runs.bases['deep']}", "trainer.precision=fp8")
    run, reference = (runs.train(layout, *words) for layout in (LAYOUTS[strategy], SINGLE))
    check_same_steps(run, reference, loss=FP8, norm=0.02)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "tp"])
def test_recompute(strategy: str, recompute: str, runs: Runs) -> None:
    words = ADAPTERS["lora"]
    run = runs.train(LAYOUTS[strategy], *words, f"recompute={recompute}")
    check_same_results(run, runs.train(SINGLE, *words))


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "tp", "fsdp_tp"])
def test_bf16_within_rounding(strategy: str, adapter: str, precision: str, runs: Runs) -> None:
    words = (*ADAPTERS[adapter], f"trainer.precision={precision}")
    run, reference = (runs.train(layout, *words) for layout in (LAYOUTS[strategy], SINGLE))
    check_same_steps(run, reference, loss=BF16, norm=0.2)


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_gradients_sent_in_16_bits(compression: str, runs: Runs) -> None:
    layout = Layout(strategy="ddp_compressed", words=(f"strategy.compression={compression}",))
    words = ADAPTERS["lora"]
    check_same_steps(
        runs.train(layout, *words), runs.train(SINGLE, *words), loss=COMPRESSED, norm=1e-2
    )
