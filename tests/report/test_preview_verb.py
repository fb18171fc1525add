"""`python -m app.preview` accepts the settings of training, on any machine, without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from app.config import conf_files, load_config
from app.config.verbs import PreviewConfig
from app.preview import (
    describe_ranks,
    describe_sample,
    describe_stream,
    first_rows_of,
    requested_batching,
    rows_per_dataset,
)
from app.strategy.settings import FsdpConfig, StrategyConfig
from app.training.trainer import TrainerConfig
from data_modules import DataConfig, DatasetConfig
from tests.in_process import CommandResult, make_data, make_model, run_command

IN_MAKE_TEST = ("quickstart", "llama70b_zero3", "flan_t5_xl")


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow)
        for name in conf_files.list_groups(conf_files.CONF)["experiment"]
    ],
)
def test_every_experiment_can_be_previewed(name: str) -> None:
    config = load_config("preview", [f"+experiment={name}", "preview.rows=5"])
    assert isinstance(config, PreviewConfig)
    trained = load_config("train", [f"+experiment={name}"])
    for part in ("model", "data", "packing", "trainer", "seed"):
        assert getattr(config, part) == getattr(trained, part)
    assert config.preview.rows == 5
    assert config.output.name == f"{name}-preview", "separate from the runs of its name"


def test_without_settings_quickstart_is_previewed() -> None:
    result = preview()
    assert result.code == 0, result.stderr
    assert "no settings given: +experiment=quickstart" in result.stderr
    assert result.config.data.datasets[0].name == "lists"


def test_cfg_prints_its_settings() -> None:
    result = preview("model=tiny", "data=skills", "preview.packs=4", "--cfg", "job")
    shown = {"rows": 3, "packs": 4, "tokens": 400, "max_rows": 100_000}
    assert yaml.safe_load(result.stdout)["preview"] == shown
    assert yaml.safe_load(result.stdout)["output"]["name"] == "preview"
    typed = preview("model=tiny", "data=skills", "output.name=mine", "--cfg", "job")
    assert yaml.safe_load(typed.stdout)["output"]["name"] == "mine"


BAD_WORDS = [
    (["preview.row=2"], "unknown key preview.row=2; did you mean preview.rows?"),
    (["preview.rows=0"], "preview.rows=0: expected 1 or more"),
    (["trainer.global_batch_size=3", "trainer.devices=2"], "not a multiple of micro_batch_size 1"),
    (["-m", "preview.rows=2"], "-m: preview cannot be swept; only train can"),
]


@pytest.mark.parametrize(("words", "problem"), BAD_WORDS, ids=[" ".join(w) for w, _ in BAD_WORDS])
def test_invalid_settings_are_refused_as_by_train(words: list[str], problem: str) -> None:
    result = preview("+experiment=quickstart", *words)
    assert result.code == 2, result.stderr
    assert problem in result.stderr
    assert result.config is None


def test_a_preview_needs_only_a_tokenizer(tokenizer_only: Path, data: str) -> None:
    for words in ([f"model.path={tokenizer_only}"], [f"model.tokenizer_path={tokenizer_only}"]):
        result = preview(*words, data)
        assert result.code == 0, result.stderr
        assert run_command(*words, data).code == 2, "training needs a model"
    result = preview("model=llama8b", f"model.tokenizer_path={tokenizer_only}", data)
    assert result.code == 0, result.stderr


def test_tokenizer_problems_are_named(tokenizer_only: Path, data: str) -> None:
    for words, problem in (
        ([], "no tokenizer: type model.path=FOLDER_OR_HUB_ID"),
        ([f"model.tokenizer_path={tokenizer_only}x"], f"did you mean {tokenizer_only}?"),
        ([f"model.path={tokenizer_only.parent / 'd.jsonl'}"], "this is a file"),
    ):
        result = preview(*words, data)
        assert (result.code, problem in result.stderr) == (2, True), result.stderr
    (tokenizer_only / "tokenizer.json").write_text("{")
    assert "tokenizer.json:1:2 invalid JSON" in preview(f"model.path={tokenizer_only}", data).stderr
    (tokenizer_only / "tokenizer.json").unlink()
    assert "no tokenizer found" in preview(f"model.path={tokenizer_only}", data).stderr
    (tokenizer_only / "tokenizer.json").write_text('{"model": {}}')
    (tokenizer_only / "tokenization.py").write_text("raise SystemExit")
    assert "contains its own Python code" in preview(f"model.path={tokenizer_only}", data).stderr


def test_a_known_context_limits_sequence_len(tmp_path: Path, data: str) -> None:
    model = make_model(tmp_path / "model", context=512)
    (model / "model.safetensors").unlink()
    assert preview(f"model.path={model}", data).code == 0, "weights are not needed"
    result = preview(f"model.path={model}", data, "data.sequence_len=513")
    assert result.code == 2
    assert "data.sequence_len=513 exceeds the context length" in result.stderr
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}) + "}")
    assert "config.json:1:" in preview(f"model.path={model}", data).stderr


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


def test_ranks_are_described_by_their_settings() -> None:
    said = describe_ranks(TrainerConfig(), StrategyConfig(), 1)
    assert said.startswith("ranks: 1, assuming 1 device for trainer.devices=auto; type")
    split = FsdpConfig(name="fsdp_tp", tensor_parallel_size=2)
    assert describe_ranks(TrainerConfig(devices=4, num_nodes=2), split, 4) == (
        "ranks: 4, as set (trainer.devices=4, trainer.num_nodes=2; strategy=fsdp_tp: tensor "
        "parallel 2)"
    )


def test_the_first_rows_of_a_stream_are_shown() -> None:
    sets = [DatasetConfig(path="a"), DatasetConfig(path="b", split="test")]
    tests = [DatasetConfig(path="c")]
    typed = DataConfig(datasets=sets, test_datasets=tests, streaming=True, val_set_size=50)
    data = first_rows_of(typed)
    assert [dataset.split for dataset in data.datasets] == ["train[50:2050]", "test[50:2050]"]
    compared = [(dataset.path, dataset.split) for dataset in data.test_datasets]
    assert compared == [("c", "train"), ("a", "train[:50]"), ("b", "test[:50]")]
    assert (data.streaming, data.val_set_size) == (False, 0)
    (said,) = describe_stream(typed)
    assert "only its first 2,000 rows after 50 rows held out for validation were read" in said
    none_out = replace(typed, val_set_size=0, test_datasets=[])
    assert first_rows_of(none_out).test_datasets == []
    assert "only its first 2,000 rows were read" in describe_stream(none_out)[0]
    assert describe_stream(replace(typed, streaming=False)) == []


def test_only_the_first_rows_of_large_data_are_read() -> None:
    sets = [DatasetConfig(path=name) for name in "abcd"]
    assert rows_per_dataset(100_000, DataConfig(datasets=sets)) == 25_000
    assert rows_per_dataset(100, DataConfig(datasets=sets, val_set_size=50)) == 100
    assert rows_per_dataset(None, DataConfig(datasets=sets)) is None
    assert describe_sample({}) == []
    (said,) = describe_sample({"a": 25_000, "b": 5})
    assert "read of a (25,000), b (5);" in said and "preview.max_rows=null reads all" in said
