"""Simulated steps of the program's own code, compared with the estimates."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import conf_files, load_config
from app.config.verbs import PlanConfig
from app.planning.memory import GpuMemory, PlannedRun, estimate_gpu_memory, usable_bytes
from app.planning.planned import on_hardware, plan_run, read_config_json
from app.planning.planned_model import build_planned_model
from common.errors import UserError
from tests.planning.test_planned import STRATEGIES
from tools import simulate as simulation
from tools.simulate import device
from tools.simulate.__main__ import compare
from tools.simulate.device import find_obstacle

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}


def words(numbers: dict[str, Any]) -> str:
    return (
        f"model.architecture={{{', '.join(f'{key}: {value}' for key, value in numbers.items())}}}"
    )


def refused(*typed: str) -> str:
    with pytest.raises(UserError) as caught:
        compare(words(LLAMA), *typed)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("strategy=zero3", "strategy=fsdp"),
        ("strategy=zero2", "strategy=fsdp_grad_op"),
        ("strategy=ddp_compressed", "strategy=ddp"),
        ("strategy=fsdp_offload", "strategy=fsdp"),
        ("strategy=fsdp strategy.offload_optimizer=disk", "strategy.offload_optimizer=none"),
        ("strategy=hsdp_local_sgd strategy.outer_momentum=0.3", "strategy=fsdp_hybrid"),
        ("quantization=int8", "quantization=nf4"),
        ("trainer.compile=true", "trainer.compile=false"),
        ("objective=reward model.labels=[reward]", "objective=sft"),
        ("objective=dpo objective.reference=cached", "objective.reference=none"),
    ],
)
def test_runs_that_cannot_be_simulated_are_refused_with_a_fix(typed: str, instead: str) -> None:
    assert instead in refused(*typed.split(), "hardware=2x4xh100", "recompute=none")


def test_layers_in_files_cannot_be_simulated() -> None:
    assert "type model.stream=host" in refused("model.stream=disk", "hardware=h100")


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    message = refused("hardware=h100")
    assert "there is no C++ compiler (g++); install one" in message


def test_a_pytorch_for_cuda_is_reported_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has registered a device of its own, and a second one would end the process."""
    library = tmp_path / "lib" / "libtorch_cuda.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(device, "_torch_folder", lambda: tmp_path)
    message = refused("hardware=h100")
    assert "this PyTorch is built for CUDA" in message and "CPU build" in message


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


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "typed",
    [
        ("strategy=fsdp", "hardware=2x8xh100", "recompute=full"),
        ("strategy=fsdp", "hardware=4xh100", "quantization=nf4", "recompute=none"),
        ("strategy=fsdp_tp", "strategy.tensor_parallel_size=2", "hardware=4xh100", "adapter=full"),
        ("strategy=ddp", "hardware=2xl40s", "recompute=none"),
        ("strategy=single", "hardware=h100", "recompute=full", "model.stream=host"),
    ],
    ids=" ".join,
)
def test_simulated_steps_on_fake_ranks(typed: tuple[str, ...]) -> None:
    """States agree within 2 %; the total of a model this small within 15 %."""
    found = compare(words(LLAMA), *typed, "data.sequence_len=4096")
    traced, estimated = found["gpu_gib"], found["arithmetic_gib"]
    states = [
        sum(of.get(part, 0.0) for part in ("weights", "trainable")) for of in (traced, estimated)
    ]
    assert states[0] == pytest.approx(states[1], rel=0.02)
    assert traced["optimizer"] == pytest.approx(estimated["optimizer"], rel=0.02)
    assert found["gpu_total_gib"] == pytest.approx(found["arithmetic_total_gib"], rel=0.15)
    if "strategy=fsdp_tp" not in typed:  # unfused layers, which are too small here
        assert abs(found["step_difference"]) <= 0.5


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_grouped_query_attention_saves_no_fp32_scores() -> None:
    """FlashAttention does not support fp32, and other CUDA kernels no grouped-query attention."""
    typed = ("hardware=h100", "trainer.precision=fp32", "recompute=none", "adapter=full")
    found = compare(words(LLAMA), *typed, "data.sequence_len=4096")
    assert abs(found["difference"]) <= 0.05


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_gradients_at_a_peak_in_the_backward_pass() -> None:
    """With a wide feed-forward, whose backward pass starts when the head has its gradient."""
    wide = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 512}
    numbers = LLAMA | wide | {"num_attention_heads": 2, "num_key_value_heads": 2}
    typed = ("adapter=full", "trainer.precision=bf16-pure", "recompute=none", "hardware=h100")
    batch = ("trainer.micro_batch_size=4", "trainer.gradient_accumulation_steps=1")
    found = compare(words(numbers), *typed, *batch, "data.sequence_len=4096")
    assert found["phase"] == "backward"
    assert found["gpu_gib"]["gradients"] * 2**30 >= 2 * 512 * 64


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


def test_every_shipped_experiment_is_simulated_or_refused() -> None:
    assert set(conf_files.list_groups(conf_files.CONF)["experiment"]) == {
        *SMALLEST,
        *SHIPPED,
        *NOT_SIMULATED,
    }


NOT_SIMULATED = {
    "classify_tiny": "h100",
    "falcon180b": "8xa100_80gb",
    "llama405b_3d": "4x8xh100",
    "llama70b_3d": "8xh100",
    "llama70b_zero3": "8xh100",
    "qwen1_5b_distill": "h100",
    "qwen3_5_9b_256k": "8xh100",
    "qwen3_5_9b_qlora": "h100",
    "reward_1b": "h100",
}
"""experiments that cannot be simulated: DeepSpeed needs real ranks, hybrids need their kernels, and
a simulated micro-batch has no labels of classes, no teacher and no stages"""


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", NOT_SIMULATED)
def test_shipped_experiments_that_cannot_be_simulated(name: str) -> None:
    with pytest.raises(UserError):
        compare(f"+experiment={name}", f"hardware={NOT_SIMULATED[name]}")
