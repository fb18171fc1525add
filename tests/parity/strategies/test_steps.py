"""Every strategy gives the same losses, validations and saved files.

Four steps of the same global batches. `make test` runs some of these tests, `make test-all` more,
`make test-strategies` all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    LAYOUTS,
    NOT_CLIPPED,
    SINGLE,
    TOPK,
    Layout,
    Runs,
    check_same_steps,
)
from tests.tiny import SAMPLES

IN_MAKE_TEST = {("lora", "ddp"), ("lora", "fsdp")}
IN_TEST_ALL = {("lora", "zero3"), ("lora", "fsdp_tp"), ("full", "fsdp"), ("full", "zero2")}
BF16 = 2e-2
"""absolute tolerance of losses of about 6: sums are rounded to 8 bits in another order"""
FP8 = 0.02
"""absolute tolerance of losses of about 6: activations between two values of four bits are rounded
to either"""
COMPRESSED = 2e-3
"""absolute tolerance of losses if only gradients are rounded"""
ROUNDED = ("ddp", "zero2", "zero3", "fsdp", "tp", "fsdp_tp")
strategies = pytest.mark.strategies


def cases(adapter: str) -> list[object]:
    """Return every strategy, marked by the command that runs it."""

    def marks(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
        if case in IN_MAKE_TEST:
            return []
        return [pytest.mark.slow if case in IN_TEST_ALL else strategies]

    return [pytest.param(strategy, marks=marks((adapter, strategy))) for strategy in LAYOUTS]


@pytest.mark.parametrize("strategy", cases("lora"))
def test_lora_accumulated_and_clipped(strategy: str, runs: Runs) -> None:
    runs.check_as_single(LAYOUTS[strategy], *ADAPTERS["lora"], CLIPPED)


@pytest.mark.parametrize("strategy", cases("full"))
def test_full_model_in_one_micro_batch(strategy: str, runs: Runs) -> None:
    runs.check_as_single(LAYOUTS[strategy], *ADAPTERS["full"], CLIPPED, accumulates=False)


@strategies
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize(
    ("adapter", "accumulates"),
    [("lora", False), ("full", True)],
    ids=["lora in one micro-batch", "full accumulated"],
)
def test_without_clipping(adapter: str, accumulates: bool, strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS[adapter], NOT_CLIPPED)
    runs.check_as_single(LAYOUTS[strategy], *words, accumulates=accumulates)


@strategies
@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [
        *(("dora", strategy) for strategy in ("zero2", "zero3", "fsdp", "fsdp_hybrid")),
        *(("ia3", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
        *(("top layer", strategy) for strategy in ("zero2", "zero3", "fsdp", "tp", "fsdp_tp")),
    ],
)
def test_other_adapters(adapter: str, strategy: str, runs: Runs) -> None:
    runs.check_as_single(LAYOUTS[strategy], *ADAPTERS[adapter], CLIPPED)


@strategies
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "fsdp_hybrid", "tp", "fsdp_tp"])
def test_untied_head(strategy: str, runs: Runs) -> None:
    runs.check_as_single(LAYOUTS[strategy], *ADAPTERS["full"], runs.base("untied"))


@strategies
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "fsdp_hybrid"])
def test_nf4_base(strategy: str, runs: Runs) -> None:
    runs.check_as_single(LAYOUTS[strategy], *ADAPTERS["lora"], "quantization=nf4")


@strategies
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "tp"])
def test_recompute(strategy: str, recompute: str, runs: Runs) -> None:
    layout = LAYOUTS[strategy]
    layout = replace(layout, words=(*layout.words, f"recompute={recompute}"))
    runs.check_as_single(layout, *ADAPTERS["lora"])


@strategies
@pytest.mark.parametrize(
    ("words", "names", "loss", "norm"),
    [
        # Sums in another order round some activations to another value of four bits.
        ((*ADAPTERS["lora"], "quantization=fp8"), ("ddp", "zero2", "fsdp"), FP8, 0.02),
        ((*ADAPTERS["full"], "deep", "trainer.precision=fp8"), ("ddp", "fsdp"), FP8, 0.02),
        *(
            ((*ADAPTERS[adapter], f"trainer.precision={precision}"), ROUNDED, BF16, 0.2)
            for adapter in ("lora", "full")
            for precision in ("bf16", "bf16-pure")
        ),
    ],
)
def test_near_within_rounding(
    words: tuple[str, ...], names: tuple[str, ...], loss: float, norm: float, runs: Runs
) -> None:
    typed = [runs.base(word) if word == "deep" else word for word in words]
    for name in names:
        run, reference = (runs.train(layout, *typed) for layout in (LAYOUTS[name], SINGLE))
        check_same_steps(run, reference, loss=loss, norm=norm)


@strategies
@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_gradients_sent_in_16_bits(compression: str, runs: Runs) -> None:
    layout = Layout(strategy="ddp_compressed", words=(f"strategy.compression={compression}",))
    run, reference = (runs.train(each, *ADAPTERS["lora"]) for each in (layout, SINGLE))
    check_same_steps(run, reference, loss=COMPRESSED, norm=1e-2)


@pytest.mark.slow
def test_topk_with_share_1_sends_all_gradients(runs: Runs) -> None:
    layout = replace(TOPK, words=("strategy.compression=topk", "strategy.topk_share=1"))
    runs.check_as_single(layout, *ADAPTERS["lora"], CLIPPED)


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=strategies), pytest.param(4, marks=pytest.mark.slow)]
)
def test_synchronous_steps_of_local_sgd(ranks: int, runs: Runs) -> None:
    layout = Layout(
        strategy="hsdp_local_sgd",
        ranks=ranks,
        num_data_ranks=ranks,
        words=("strategy.replicas=2", "strategy.synchronous_steps=1000"),
    )
    # A typed number of steps that are all synchronous would be refused.
    few = f"data.datasets=[{{path: {SAMPLES / 'orders_test.jsonl'}, name: orders, max_rows: 60}}]"
    words = ("trainer.max_steps=null", "trainer.num_epochs=1", few)
    runs.check_as_single(layout, *ADAPTERS["lora"], CLIPPED, *words)
