"""What trains, what is frozen and how precisely: the same under every strategy that takes it."""

from __future__ import annotations

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    LAYOUTS,
    SINGLE,
    Layout,
    Runs,
    check_alike,
    check_same_steps,
)

pytestmark = pytest.mark.strategies

OTHER_ADAPTERS = [
    *(("dora", strategy) for strategy in ("zero2", "zero3", "fsdp", "fsdp_hybrid")),
    *(("ia3", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
    *(("top layer", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
]
BF16 = 2e-2
"""how far losses of about 6 may be apart where sums are rounded to 8 bits in another order"""
COMPRESSED = 2e-3
"""how far they may be apart where gradients alone are rounded"""


@pytest.mark.parametrize(("adapter", "strategy"), OTHER_ADAPTERS)
def test_other_adapters(adapter: str, strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS[adapter], CLIPPED)
    check_alike(runs.of(LAYOUTS[strategy], *words), runs.of(SINGLE, *words))


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "fsdp_hybrid", "tp", "fsdp_tp"])
def test_a_head_of_its_own(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["full"], f"model.path={runs.bases['untied']}")
    check_alike(runs.of(LAYOUTS[strategy], *words), runs.of(SINGLE, *words))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "fsdp_hybrid"])
def test_a_base_in_four_bits(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "quantization=nf4")
    check_alike(runs.of(LAYOUTS[strategy], *words), runs.of(SINGLE, *words))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "tp"])
def test_layers_that_are_computed_twice(strategy: str, recompute: str, runs: Runs) -> None:
    words = ADAPTERS["lora"]
    run = runs.of(LAYOUTS[strategy], *words, f"recompute={recompute}")
    check_alike(run, runs.of(SINGLE, *words))


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "tp", "fsdp_tp"])
def test_in_bf16_as_near_as_its_digits_are(
    strategy: str, adapter: str, precision: str, runs: Runs
) -> None:
    words = (*ADAPTERS[adapter], f"trainer.precision={precision}")
    run, whole = (runs.of(layout, *words) for layout in (LAYOUTS[strategy], SINGLE))
    check_same_steps(run, whole, loss=BF16, norm=0.2)


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_gradients_that_travel_in_half_the_bytes(compression: str, runs: Runs) -> None:
    layout = Layout(strategy="ddp_compressed", words=(f"strategy.compression={compression}",))
    words = ADAPTERS["lora"]
    check_same_steps(runs.of(layout, *words), runs.of(SINGLE, *words), loss=COMPRESSED, norm=1e-2)
