"""`python -m app.preview` accepts the settings of training, on any machine, without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.preview import first_rows_of, requested_batching, rows_per_dataset
from app.strategy.settings import FsdpConfig, StrategyConfig
from app.training.trainer import TrainerConfig
from data_modules import DataConfig, DatasetConfig
from tests.in_process import CommandResult, make_data, make_model, run_command


def preview(*words: str, gpus: int = 0, environment: dict[str, str] | None = None) -> CommandResult:
    return run_command(*words, verb="preview", gpus=gpus, environment=environment)


@pytest.fixture
def tokenizer_only(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture
def data(tmp_path: Path) -> str:
    return f"data.datasets=[{{path: {make_data(tmp_path / 'd.jsonl')}}}]"


def test_without_settings_quickstart_is_previewed() -> None:
    result = preview()
    assert result.code == 0, result.stderr
    assert "no settings given: +experiment=quickstart" in result.stderr
    assert result.config.data.datasets[0].name == "lists"


def test_tokenizer_problems_are_named(tokenizer_only: Path, data: str) -> None:
    words = (f"model.path={tokenizer_only}", data)
    assert "no tokenizer: type model.path=FOLDER_OR_HUB_ID" in preview(data).stderr
    (tokenizer_only / "tokenization.py").write_text("raise SystemExit")
    assert "contains its own Python code" in preview(*words).stderr
    (tokenizer_only / "tokenizer.json").unlink()
    assert "no tokenizer found" in preview(*words).stderr


def test_a_known_context_limits_sequence_len(tmp_path: Path, data: str) -> None:
    model = make_model(tmp_path / "model", context=512)
    (model / "model.safetensors").unlink()
    assert preview(f"model.path={model}", data).code == 0, "weights are not needed"
    result = preview(f"model.path={model}", data, "data.sequence_len=513")
    assert result.code == 2
    assert "data.sequence_len=513 exceeds the context length" in result.stderr


def test_a_run_for_another_machine_can_be_previewed() -> None:
    words = ["+experiment=quickstart", "trainer.accelerator=gpu", "trainer.devices=8"]
    words += ["trainer.precision=fp16", "attention=flash2"]
    assert run_command(*words).code == 2
    for gpus in (0, 1):
        result = preview(*words, gpus=gpus)
        assert result.code == 0, result.stderr
    result = preview("+experiment=quickstart", "strategy=single", "trainer.devices=2")
    assert result.code == 2, "impossible on any machine"
    assert "strategy=ddp" in result.stderr
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}
    result = preview("+experiment=quickstart", environment=ranks | {"MASTER_PORT": "1"})
    assert result.code == 2
    assert "this command runs in one process" in result.stderr


def test_steps_are_planned_for_the_configured_ranks() -> None:
    auto = StrategyConfig()
    assert requested_batching(TrainerConfig(), auto) == (1, 8)
    assert requested_batching(TrainerConfig(devices=4, num_nodes=2), auto) == (8, 8)
    typed = TrainerConfig(devices=4, micro_batch_size=2, global_batch_size=24)
    assert requested_batching(typed, auto) == (4, 3)
    assert requested_batching(typed, FsdpConfig(tensor_parallel_size=2)) == (2, 6)
    assert requested_batching(typed, FsdpConfig(tensor_parallel_size=None)) == (1, 12)
    assert requested_batching(TrainerConfig(), FsdpConfig(tensor_parallel_size=2)) == (1, 8)


def test_the_first_rows_of_a_stream_are_shown() -> None:
    sets = [DatasetConfig(path="a"), DatasetConfig(path="b", split="test")]
    tests = [DatasetConfig(path="c")]
    typed = DataConfig(datasets=sets, test_datasets=tests, streaming=True, val_set_size=50)
    data = first_rows_of(typed)
    assert [dataset.split for dataset in data.datasets] == ["train[50:2050]", "test[50:2050]"]
    compared = [(dataset.path, dataset.split) for dataset in data.test_datasets]
    assert compared == [("c", "train"), ("a", "train[:50]"), ("b", "test[:50]")]
    assert (data.streaming, data.val_set_size) == (False, 0)
    none_out = replace(typed, val_set_size=0, test_datasets=[])
    assert first_rows_of(none_out).test_datasets == []


def test_only_the_first_rows_of_large_data_are_read() -> None:
    sets = [DatasetConfig(path=name) for name in "abcd"]
    assert rows_per_dataset(100_000, DataConfig(datasets=sets)) == 25_000
    assert rows_per_dataset(100, DataConfig(datasets=sets, val_set_size=50)) == 100
    assert rows_per_dataset(None, DataConfig(datasets=sets)) is None
