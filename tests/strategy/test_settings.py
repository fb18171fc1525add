"""Effects of strategy settings before weights are read: data ranks and tensor parallel sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from app.model.description import BaseDescription
from app.model.families import FAMILIES
from app.preflight.couplings import devices
from app.preflight.files import check_tensor_parallel
from app.strategy.settings import FsdpConfig, StrategyConfig, layer_plan
from app.training.trainer import TrainerConfig, resolve_environment
from common.errors import UserError
from tests.in_process import make_data, make_model, run_command


@pytest.mark.parametrize(
    ("strategy", "data_ranks", "accumulation"),
    [
        (None, 4, 3),
        (FsdpConfig(replicas=2), 4, 3),
        (FsdpConfig(tensor_parallel_size=2), 2, 6),
        (FsdpConfig(tensor_parallel_size=None), 1, 12),
    ],
)
def test_global_batch_is_divided_over_data_ranks(
    strategy: StrategyConfig | None, data_ranks: int, accumulation: int
) -> None:
    config = TrainerConfig(
        accelerator="cpu", devices=4, micro_batch_size=2, global_batch_size=24, precision="fp32"
    )
    env = resolve_environment(config, strategy)
    assert (env.num_ranks, env.num_data_ranks) == (4, data_ranks)
    assert env.accumulation == accumulation
    assert config.micro_batch_size * accumulation * data_ranks == config.global_batch_size
    split = "(tensor parallel 2)" if data_ranks == 2 else ""
    assert split in str(env)


def test_indivisible_global_batches_are_refused() -> None:
    config = TrainerConfig(accelerator="cpu", devices=4, global_batch_size=6, precision="fp32")
    with pytest.raises(UserError, match=r"x 4 ranks = 4; type .*=4 or 8"):
        resolve_environment(config)
    resolve_environment(config, FsdpConfig(tensor_parallel_size=2))
    with pytest.raises(UserError, match="tensor_parallel_size=3 does not divide 4 ranks"):
        resolve_environment(config, FsdpConfig(tensor_parallel_size=3))


def test_indivisible_tensor_parallel_sizes_are_refused_before_loading(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2)
    data = make_data(tmp_path / "data.jsonl")
    words = [f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "trainer.devices=4"]
    result = run_command(*words, "strategy=tp")
    assert result.code == 2
    assert (
        f"strategy.tensor_parallel_size=4 does not divide the 2 key heads of {model} (2 / 4 leaves "
        "2); type strategy.tensor_parallel_size=2, or strategy=fsdp"
    ) in result.stderr
    assert run_command(*words, "strategy=tp", "strategy.tensor_parallel_size=2").code == 0
    for numbers, message in (
        ({"num_attention_heads": 6}, "the 6 attention heads"),
        ({"num_attention_heads": 8, "intermediate_size": 42}, "the 42 inner features"),
    ):
        base = BaseDescription(name="B", config={"model_type": "llama"} | numbers)
        (problem,) = check_tensor_parallel(4, base)
        assert f"=4 does not divide {message} of B" in problem


def test_families_without_a_tensor_parallel_plan_are_refused() -> None:
    for kind in (kind for kind, family in FAMILIES.items() if family.matrices):
        holder: Any = SimpleNamespace(config=CONFIG_MAPPING[kind]())
        if not FAMILIES[kind].has_tensor_plan:
            assert (
                "there is no tensor parallel plan"
                in check_tensor_parallel(2, BaseDescription(config={"model_type": kind}))[0]
            )
            with pytest.raises(UserError):
                layer_plan(holder)
        else:
            assert layer_plan(holder)
        assert check_tensor_parallel(1, BaseDescription(config={"model_type": kind})) == []


GPUS = {
    "llama70b": 8,
    "llama70b_zero3": 8,
    "llama70b_qlora": 2,
    "llama70b_qlora strategy=single trainer.devices=1": 1,
    "falcon180b": 8,
}


@pytest.mark.parametrize("words", GPUS)
def test_experiments_pass_the_checks_on_their_machine(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_installed", lambda module: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    result = run_command(*f"+experiment={words}".split(), gpus=GPUS[words])
    assert result.code == 0, result.stderr
    assert result.config.model.wrap_class is not None
