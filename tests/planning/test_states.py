"""What the experiments say they need is what the arithmetic says, and so are optimizer states."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.assembly.auto import allocated_states
from app.config import load_config, settings_of
from app.model.adapter import FullConfig
from app.model.build import build_model
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig
from app.planning.advice import MICRO_BATCHES, list_candidates
from app.planning.hardware import HardwareConfig
from app.planning.memory import GIB, GpuMemory, PlannedRun, estimate_gpu_memory, fits
from app.planning.planned import build_planned_run, on_hardware, plan_run
from app.planning.planned_model import build_planned_model, model_from_modules
from app.planning.speed import estimate_speed
from app.planning.states import optimizer_state_bytes, size_for
from app.strategy.settings import DdpConfig, StrategyConfig
from app.training.optimizers import build_optimizer
from tests.conftest import ROOT
from tests.planning.test_planned import STRATEGIES
from tests.tiny import tiny_llama

EXPERIMENTS = sorted(
    file.stem
    for file in (ROOT / "conf" / "experiment").glob("*.yaml")
    if "GPU" in file.read_text().partition("# Results")[0]
)
IN_MAKE_TEST = ("flan_t5_xl", "gpt_oss_20b", "llama70b_zero3", "llama8b_qlora", "llama8b_full")
"""an encoder-decoder, experts, sharded weights, a quantized base, and full fine-tuning"""
NEEDS = re.compile(r"(one|two|\d+) GPUs? of (\d+) GB(?: with (strategy=\w+))?")
TYPED = re.compile(r"app\.train \+experiment=(\w+)((?: +[\w.]+=[\w.]+)*)")
NUMBERS = {"one": 1, "two": 2}
USABLE = 0.93
"""share of GPU memory left by fragmentation"""


def memory_of(name: str, num_gpus: int, card: int, *words: str) -> GpuMemory:
    """Return what an experiment takes of each GPU, with all layers recomputed if that is `auto`."""
    config: Any = load_config("train", [f"+experiment={name}", *words])
    precision = config.trainer.precision
    if config.strategy.name == "auto":
        strategy = StrategyConfig(name="single") if num_gpus == 1 else DdpConfig()
        config = replace(config, strategy=strategy)
    run = build_planned_run(
        config,
        HardwareConfig(memory_gib=card, gpus_per_node=num_gpus),
        build_planned_model(config.model, config.model.architecture, config.adapter, precision),
        precision=precision,
        sequence_len=config.data.sequence_len,
        keeps_scores=config.attention.backend == "eager",
    )
    return estimate_gpu_memory(replace(run, accumulation=8))


CARDS = {24: "rtx4090", 40: "a100_40gb", 48: "l40s", 80: "h100"}
"""cards of the sizes that experiments need"""
TRIED = ("none", "selective", "full")
"""recompute modes; that of offload rests on the host link's rate, which was never measured"""
SHOWS_A_STRATEGY = ("falcon180b", "llama70b_zero3", "llama70b_3d", "llama405b_3d")
"""experiments that show a strategy, as their name or header says, where another one is faster"""
SPLITS_ROWS = ("qwen3_5_9b_256k",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow)
        for name in EXPERIMENTS
    ],
)
def test_an_experiment_fits_the_gpus_that_it_names_and_is_as_fast_as_its_plan_knows(
    name: str,
) -> None:
    """With the same base and adapter, and nothing in host memory, whose links differ widely."""
    header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().partition("# Results")[0]
    needs = NEEDS.findall(" ".join(header.replace("#", " ").split()))
    assert needs, "no card is named"
    for number, card, strategy in needs:
        typed, num_gpus = [strategy] if strategy else [], NUMBERS.get(number) or int(number)
        memory = memory_of(name, num_gpus, int(card), *typed)
        assert memory.total <= USABLE * int(card) * GIB, f"{number} x {card} GB: {memory}"
        if int(card) not in CARDS:
            continue
        nodes = load_config("train", [f"+experiment={name}"]).trainer.num_nodes
        words = f"hardware={nodes}x{num_gpus // nodes}x{CARDS[int(card)]}"
        config: Any = load_config("plan", [f"+experiment={name}", words, *typed])
        hardware, numbers = on_hardware(config, config.hardware), config.model.architecture
        run, _ = plan_run(config, hardware, numbers, strategies=STRATEGIES)
        speed, packs = tokens_per_second(run), run.micro_batch_size * run.accumulation
        others = [
            replace(run, recompute=mode).with_micro_batch(size)
            for mode in TRIED
            for size in MICRO_BATCHES
            if packs % size == 0
        ]
        fitting = [other for other in others if fits(other, estimate_gpu_memory(other))]
        assert speed >= 0.97 * max(map(tokens_per_second, fitting), default=0.0), words
        if strategy or name in SHOWS_A_STRATEGY:
            continue
        speeds = [
            each.speed.tokens_per_second
            for each in list_candidates(config, hardware, numbers, run.model, STRATEGIES)
            if each.fits and each.run.quantization.method == config.quantization.method
            if "offload" not in each.run.strategy.name
            if name not in SPLITS_ROWS or each.run.context_size > 1
        ]
        assert speed >= 0.95 * max(speeds, default=0.0), words


def tokens_per_second(run: PlannedRun) -> float:
    return estimate_speed(run).tokens_per_second


def test_what_the_page_on_gpus_types_fits_on_one_large_card() -> None:
    typed = [
        (name, words.split())
        for name, words in TYPED.findall((ROOT / "docs/gpu.md").read_text())
        if name.startswith("llama8b")
    ]
    assert len(typed) >= 2
    for name, words in typed:
        memory = memory_of(name, 1, 80, *(word for word in words if word.startswith("adapter=")))
        assert memory.total <= USABLE * 80 * GIB, f"{name} {words}: {memory}"


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_families_that_name_no_feed_forward_are_measured(family: str) -> None:
    words = ["data=skills", f"model.architecture={{model_type: {family}}}", "adapter=full"]
    config = load_config("train", [*words, "model.from_scratch=true", "model.path=null"])
    built = build_model(
        *(config.model, QuantizationConfig(), "eager", config.adapter, RecomputeConfig(), "fp32"),
        on_meta=True,
    )
    model = model_from_modules(family, built, {})
    assert model is not None
    assert model.widths.feed_forward == 4 * model.widths.hidden
    assert model.count(trained=True) == sum(weight.numel() for weight in built.parameters())


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [
        ("adamw", True),
        ("adamw8bit", False),
        ("muon", True),
        ("muon", False),
        ("schedule_free", False),
    ],
)
def test_the_states_of_an_optimizer_are_those_that_it_allocates(name: str, is_tied: bool) -> None:
    model = tiny_llama(
        vocab_size=2048, hidden_size=128, intermediate_size=512, tie_word_embeddings=is_tied
    )
    config = settings_of("optimizer", name)
    optimizer = build_optimizer(model, config, FullConfig(), lr=1e-3, fused=False)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    getattr(optimizer, "train", lambda: None)()
    optimizer.step()
    parts = getattr(optimizer, "parts", (optimizer,))  # of Muon and AdamW
    states = {
        value.data_ptr(): value.nbytes
        for part in parts
        for state in part.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    planned = model_from_modules("", model, {})
    assert planned is not None
    single, none = StrategyConfig(name="single"), QuantizationConfig()
    size = size_for(planned, "fp32", none, single, num_ranks=1, num_nodes=1)
    # Not estimated: scales of 8-bit blocks, and fp32 moments of weights below 4,096 elements.
    assert optimizer_state_bytes(size, name) == pytest.approx(sum(states.values()), rel=0.03)
    assert allocated_states(model, name) == optimizer_state_bytes(size, name)
