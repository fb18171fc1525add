"""A plan's steps by the program's own code, beside the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.config.verbs import PlanConfig
from app.plan import plan
from app.planning import simulation
from app.planning.simulation.device import find_obstacle
from app.process.errors import UserError

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


def plan_of(folder: Path, *typed: str) -> dict[str, Any]:
    config = load_config("plan", [*typed, "plan.simulate=true", f"output.dir={folder}"])
    assert isinstance(config, PlanConfig)
    facts: dict[str, Any] = json.loads((plan(config) / "plan.json").read_text())
    return facts


def refused(folder: Path, *typed: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_of(folder, words(LLAMA), *typed)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("strategy=zero3", "strategy=fsdp,"),
        ("strategy=zero2", "strategy=fsdp_grad_op,"),
        ("strategy=ddp_compressed", "strategy=ddp,"),
        ("strategy=fsdp_offload", "strategy=fsdp,"),
        ("strategy=hsdp_local_sgd strategy.outer_momentum=0.3", "strategy=fsdp_hybrid,"),
        ("quantization=int8", "quantization=nf4,"),
        ("trainer.compile=true", "trainer.compile=false,"),
    ],
)
def test_what_cannot_be_simulated_says_what_to_type(
    typed: str, instead: str, tmp_path: Path
) -> None:
    said = refused(tmp_path / "out", *typed.split(), "hardware=2x4xh100", "recompute=none")
    assert said.startswith("plan.simulate=true: ")
    assert instead in said and said.endswith("or leave plan.simulate out: the arithmetic stands")
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "find_obstacle", lambda: "there is no C++ compiler (g++)")
    said = refused(tmp_path, "hardware=h100")
    assert "there is no C++ compiler (g++); install one" in said


@pytest.fixture
def compiler() -> None:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "typed",
    [
        ("strategy=fsdp", "hardware=2x8xh100", "recompute=full"),
        ("strategy=fsdp", "hardware=4xh100", "quantization=nf4", "recompute=none"),
        ("strategy=fsdp_tp", "strategy.tensor_parallel_size=2", "hardware=4xh100", "adapter=full"),
        ("strategy=ddp", "hardware=2xl40s", "recompute=none"),
    ],
    ids=" ".join,
)
def test_steps_of_ranks_that_are_not_there(typed: tuple[str, ...], tmp_path: Path) -> None:
    """The states of a rank to a hundredth; the whole of a model this small more roughly."""
    facts = plan_of(tmp_path, words(LLAMA), *typed, "data.sequence_len=4096")
    found = facts["simulated"]
    traced, said = found["gpu_gib"], found["arithmetic_gib"]
    states = [sum(of.get(part, 0.0) for part in ("weights", "trainable")) for of in (traced, said)]
    assert states[0] == pytest.approx(states[1], rel=0.02)
    assert traced["optimizer"] == pytest.approx(said["optimizer"], rel=0.02)
    assert found["gpu_total_gib"] == pytest.approx(found["arithmetic_total_gib"], rel=0.15)
    if "strategy=fsdp_tp" not in typed:  # whose layers are not fused, and here too small
        assert found["step_seconds"] == pytest.approx(facts["step_seconds"], rel=0.5)
    assert "a simulation without numbers" in (tmp_path / "plan.html").read_text()


SHIPPED = {
    "llama8b": "h100",
    "llama8b_full": "h100",
    "llama8b_qlora": "h100",
    "gpt_oss_20b": "h100",
    "llama70b": "8x8xh100",
}
"""experiments of which formula and steps were seen within 5 % of each other, and no others: those
seen further apart (llama8b_ia3 -6.9 %, quickstart +8.9 %, flan_t5_xl +56 %) and those that were
never simulated stand in benchmarks/results/2026-11-23_plan.md and are not tested here"""


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", SHIPPED)
def test_formula_and_steps_of_a_shipped_experiment_agree(name: str, tmp_path: Path) -> None:
    typed = ["trainer.global_batch_size=64"] if name == "llama70b" else []
    facts = plan_of(tmp_path, f"+experiment={name}", f"hardware={SHIPPED[name]}", *typed)
    assert abs(facts["simulated"]["difference"]) <= 0.05


NOT_SIMULATED = {
    "falcon180b": "8xa100_80gb",
    "llama70b_zero3": "8xh100",
    "qwen3_5_9b_qlora": "h100",
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", NOT_SIMULATED)
def test_shipped_experiments_that_cannot_be_simulated(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the arithmetic stands"):
        plan_of(tmp_path, f"+experiment={name}", f"hardware={NOT_SIMULATED[name]}")
