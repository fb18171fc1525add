"""Simulated steps of the program's own code, compared with the estimates."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest

from app.config import load_config
from app.config.verbs import PlanConfig
from app.planning.memory import GpuMemory, PlannedRun, estimate_gpu_memory, usable_bytes
from app.planning.planned import on_hardware, plan_run, read_config_json
from app.planning.planned_model import build_planned_model
from tests.planning.test_planned import STRATEGIES
from tools import simulate as simulation
from tools.simulate.__main__ import compare
from tools.simulate.device import find_obstacle


@pytest.fixture
def compiler() -> None:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.fixture
def one_process(
    compiler: None, process: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate everything in one process: installing the fake GPU in a new one takes 10 s."""
    monkeypatch.setattr(simulation, "ProcessPoolExecutor", lambda *_, **__: nullcontext(process))


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("objective", ["dpo", "simpo", "kto"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_simulated_steps_of_pairs_and_verdicts(objective: str, mode: str) -> None:
    typed = (f"objective={objective}", f"recompute={mode}", "data.sequence_len=4096")
    found = compare("model=llama1b", "hardware=h100", "trainer.micro_batch_size=2", *typed)
    assert found["difference"] == pytest.approx(0, abs=0.05)
    assert found["step_difference"] == pytest.approx(0, abs=0.05)


SMALLEST = {"quickstart": "h100", "dpo_quickstart": "h100", "tiny_long": "2xh100"}
SHIPPED = {
    "tiny_base": "h100",
    "llama8b": "h100",
    "llama8b_128k": "8xh100",
    "llama8b_dora": "h100",
    "llama8b_dpo": "h100",
    "llama8b_full": "h100",
    "llama8b_ia3": "h100",
    "llama8b_qlora": "h100",
    "mistral7b": "h100",
    "qwen7b": "h100",
    "qwen7b_kto": "h100",
    "gemma4_12b": "h100",
    "gpt_oss_20b": "h100",
    "qwen3_30b_a3b": "h100",
    "flan_t5_xl": "h100",
    "llama70b": "8x8xh100",
    "llama70b_qlora": "2xa100_80gb",
}
"""shipped experiments that are simulated: all but the smallest and those in NOT_SIMULATED"""
PERIODS = {"flan_t5_xl": 2, "gemma4_12b": 6, "gpt_oss_20b": 2}
"""number of layers after which the kinds of layers repeat, if they differ"""


def depths_of(period: int) -> tuple[int, int]:
    """Return few layers, the first of which differ in what they need, and a period more."""
    few = max(2, period)
    return few, few + period


WITHIN = 0.025
PARTS = (
    ("weights", "trainable"),
    ("optimizer",),
    ("gathered",),
    ("activations", "gradients", "loss"),
)
"""groups of parts that a simulation can tell apart"""


def plan_shipped(name: str) -> tuple[PlanConfig, PlannedRun]:
    words = [f"+experiment={name}", f"hardware={SHIPPED[name]}"]
    words += ["trainer.global_batch_size=64"] if name == "llama70b" else []
    config = load_config("plan", words)
    assert isinstance(config, PlanConfig)
    hardware, numbers = on_hardware(config, config.hardware), read_config_json(config.model)
    return config, plan_run(config, hardware, numbers, strategies=STRATEGIES)[0]


def with_layers(config: PlanConfig, run: PlannedRun, number: int) -> tuple[PlanConfig, PlannedRun]:
    """Return a run with fewer layers and the choices that were made for all of them."""
    names = {"t5": ("num_layers", "num_decoder_layers"), "gpt2": ("n_layer",)}
    names["bart"] = ("encoder_layers", "decoder_layers")
    of_type = names.get(run.model.widths.model_type, ("num_hidden_layers",))
    numbers = dict.fromkeys(of_type, number // 2 if run.model.is_pair else number)
    architecture = config.model.architecture | numbers
    config = replace(config, model=replace(config.model, architecture=architecture))
    model = build_planned_model(config.model, architecture, config.adapter, run.precision)
    return config, replace(run, model=model)


def allocated(memory: GpuMemory) -> float:
    return memory.total - memory.overhead


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", SHIPPED)
def test_estimates_and_simulation_of_experiments_agree(name: str) -> None:
    """All of its layers by the steps of a few, to which each more adds the same.

    `python -m tools.simulate +experiment=NAME` simulates all of them, in minutes.
    """
    config, run = plan_shipped(name)
    period = PERIODS.get(name, 1)
    few, more = depths_of(period)
    if (run.recompute_layers or 0) >= few:  # the layers after them would not add the same
        run = replace(run, recompute_layers=None)
    while True:
        planned = [with_layers(config, run, depth) for depth in (few, more)]
        estimated = [estimate_gpu_memory(each) for _, each in planned]
        if {each.moment for each in estimated} == {estimate_gpu_memory(run).moment}:
            break
        # Few layers save so little that memory peaks at another moment than in the full model.
        few, more = few + period, more + period
        assert more <= run.model.num_layers
    steps = [simulation.simulate(*each) for each in planned]
    assert steps[0].phase == steps[1].phase
    of_layer = (steps[1].total - steps[0].total) / period
    assert (allocated(estimated[1]) - allocated(estimated[0])) / period == pytest.approx(
        of_layer, rel=WITHIN
    )
    found = steps[1].total + of_layer * (run.model.num_layers - more)
    assert allocated(estimate_gpu_memory(run)) == pytest.approx(found, rel=WITHIN)


FAMILIES = {
    "bart_large": {},
    "bloom7b": {},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "falcon40b": {},
    "falcon7b": {},
    "gemma2_2b": {},
    "gemma4_26b_a4b": {},
    "gpt2_xl": {},
    "llama4_scout": {},
    "phi2": {},
    "phi4_mini": {},
}
"""architectures of model types without a shipped experiment"""
ROPE_PERIODS = {"bart_large": 2, "gemma2_2b": 2, "gemma4_26b_a4b": 6, "llama4_scout": 4}


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", FAMILIES)
def test_estimates_and_simulation_of_families_agree(name: str) -> None:
    """With LoRA and without recompute, so that layers save as much as possible."""
    length = 512 if name in ("bart_large", "gpt2_xl") else 2048
    words = [f"model={name}", "data=dolly", "hardware=h100", "strategy=single", "recompute=none"]
    words += [f"data.sequence_len={length}", "trainer.micro_batch_size=4"]
    config = load_config("plan", words)
    assert isinstance(config, PlanConfig)
    model = replace(config.model, architecture=config.model.architecture | FAMILIES[name])
    config = replace(config, model=model)
    numbers = read_config_json(model)
    run = plan_run(config, config.hardware, numbers, strategies=STRATEGIES)[0]
    assert run.model.widths.is_compared
    period = ROPE_PERIODS.get(name, 1)
    few, more = depths_of(period)
    planned = [with_layers(config, run, depth) for depth in (few, more)]
    steps = [simulation.simulate(*each) for each in planned]
    estimated = [allocated(estimate_gpu_memory(each)) for _, each in planned]
    of_layer = (steps[1].total - steps[0].total) / period
    assert (estimated[1] - estimated[0]) / period == pytest.approx(of_layer, rel=WITHIN)
    found = steps[1].total + of_layer * (run.model.num_layers - more)
    assert allocated(estimate_gpu_memory(run)) == pytest.approx(found, rel=WITHIN)


LLAMA_70B = "+experiment=llama70b trainer.global_batch_size=64 recompute=full"


def long(tokens: int) -> str:
    return f"data.sequence_len={tokens} model.architecture.max_position_embeddings={tokens}"


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "typed",
    [
        f"{LLAMA_70B} strategy=fsdp hardware=8xh100",
        f"{LLAMA_70B} strategy=fsdp hardware=8x8xh100",
        # With kernels, four layers take as much with the head's weights as in their backward pass.
        f"{LLAMA_70B} strategy=fsdp_tp strategy.tensor_parallel_size=8 hardware=8x8xh100 "
        "trainer.kernels=torch",
        f"+experiment=llama8b_128k recompute=full hardware=8xh100 {long(2**19)}",
        f"+experiment=llama8b_qlora recompute=offload hardware=h100 {long(350 * 2**10)}",
        # Eight ranks cannot share 28 heads, and gather keys.
        "model=qwen7b data=dolly strategy=fsdp strategy.context_parallel_size=8 recompute=full "
        f"trainer.micro_batch_size=1 hardware=8xh100 {long(2**17)}",
    ],
)
def test_estimates_and_simulation_of_parts_agree(typed: str) -> None:
    """Within 5 % of each part, or 1.2 % of the total for small parts."""
    config = load_config("plan", typed.split())
    assert isinstance(config, PlanConfig)
    hardware, numbers = on_hardware(config, config.hardware), read_config_json(config.model)
    run = plan_run(config, hardware, numbers, strategies=STRATEGIES)[0]
    assert estimate_gpu_memory(run).total < usable_bytes(run.hardware)
    config, run = with_layers(config, run, 4)
    estimated, steps = estimate_gpu_memory(run), simulation.simulate(config, run)
    for names in PARTS:
        expected, traced = (
            sum(parts.get(name, 0) for name in names) for parts in (estimated.parts, steps.parts)
        )
        assert expected == pytest.approx(traced, rel=0.05, abs=0.012 * steps.total), names


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", SMALLEST)
def test_estimates_and_simulation_of_all_layers_agree(name: str) -> None:
    found = compare(f"+experiment={name}", f"hardware={SMALLEST[name]}")
    assert abs(found["difference"]) <= WITHIN
