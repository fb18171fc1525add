"""Validation files of one's own: measured, never trained on, compared with the training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import DataError
from data_modules import DataConfig, DatasetConfig
from data_modules.settings import check_datasets
from tests.batches import micro_batches
from tests.data_modules.test_datamodule import build

NUMBERS = ["one", "two", "three", "one two", "two three"]


def write(file: Path, start: int, count: int) -> DatasetConfig:
    rows = [
        {"instruction": f"q {i}", "output": NUMBERS[i % 5]} for i in range(start, start + count)
    ]
    file.write_text(json.dumps(rows))
    return DatasetConfig(path=str(file))


@pytest.fixture
def train(tmp_path: Path) -> DatasetConfig:
    return write(tmp_path / "train.json", 0, 40)


@pytest.fixture
def val(tmp_path: Path) -> DatasetConfig:
    return write(tmp_path / "held.json", 100, 12)


def test_the_rows_of_a_validation_file_are_all_validation(
    train: DatasetConfig, val: DatasetConfig, tokenizer: Any
) -> None:
    module = build([train], tokenizer, data={"val_datasets": [val]})
    assert module.dataset_names == ["train", "held"]
    assert module.trained_names == ["train"]
    assert len(module.train_examples) == 40  # no share is held out
    assert module.train_examples.datasets.tolist() == [0] * 40
    assert module.val_examples.datasets.tolist() == [1] * 12
    assert {example.origin.file for example in module.val_examples} == {val.path}
    trained, held = module.report.datasets
    assert (trained.train_rows, trained.validation_rows) == (40, 0)
    assert (held.train_rows, held.validation_rows, held.key) == (0, 12, "data.val_datasets[0]")
    assert "12 validation, never trained on" in held.line()
    assert "too few" not in " ".join([trained.line(), *module.summary()])
    assert any("data.val_set_size=0.05 is not applied" in line for line in module.summary())
    assert list(module.prompts(3)) == ["held"]
    module.audit.check()
    assert sum(1 for _ in module.val_dataloader()) > 0


def test_max_rows_caps_the_validation_rows_and_batches_stay_the_same(
    train: DatasetConfig, val: DatasetConfig, tokenizer: Any
) -> None:
    val.max_rows = 5
    one = build([train], tokenizer, data={"val_datasets": [val]})
    two = build([train], tokenizer, data={"val_datasets": [val]})
    assert len(one.val_examples) == 5
    assert np.array_equal(one.val_examples.digests, two.val_examples.digests)
    alone = build([train], tokenizer, data={"val_set_size": 0})
    assert np.array_equal(one.train_examples.digests, alone.train_examples.digests)


def test_leaks_into_training_are_told(train: DatasetConfig, tmp_path: Path, tokenizer: Any) -> None:
    leaky = write(tmp_path / "leaky.json", 37, 10)  # 3 rows of the training file
    module = build([train], tokenizer, data={"val_datasets": [leaky]})
    assert len(module.train_examples) == 40
    assert module.audit.datasets[1].repeated == 3
    text = " ".join(module.summary())
    assert "leaky" in text
    assert "are also in the training data" in text


def test_a_stream_leaves_out_validation_rows(
    train: DatasetConfig, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 2)
    leaky = write(tmp_path / "leaky.json", 37, 10)
    module = build(
        [train], tokenizer, data={"val_datasets": [leaky], "streaming": True}, max_steps=3
    )
    assert module.dataset_names == ["train", "leaky"]
    assert module.val_examples.datasets.tolist() == [1] * 10
    module.audit.check()
    held_out = set(module.val_examples.digests.tolist())
    batches = iter(micro_batches(module))
    assert len(held_out) == 10
    assert all(set(next(batches).dataset_ids.flatten().tolist()) <= {0} for _ in range(3))


def test_an_evaluation_needs_no_training_data(val: DatasetConfig, tokenizer: Any) -> None:
    module = build([], tokenizer, data={"val_datasets": [val]})
    assert module.val_examples.datasets.tolist() == [0] * 12


def test_a_validation_file_without_a_usable_row_stops_the_run(
    train: DatasetConfig, tmp_path: Path, tokenizer: Any
) -> None:
    file = tmp_path / "held.json"
    file.write_text(json.dumps([{"instruction": "q " * 200, "output": "one"}]))
    with pytest.raises(DataError, match=r"held.json: no row of 1 is left"):
        build([train], tokenizer, data={"val_datasets": [DatasetConfig(path=str(file))]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": 2.0}, "data.val_datasets[0].weight=2 has no effect"),
        ({"name": "train"}, "name 'train' is already that of data.datasets[0]"),
        ({"name": "a/b"}, "holds a slash"),
        ({"format": "alpca"}, "data.val_datasets[0].format"),
    ],
)
def test_wrong_settings_are_refused_by_their_key(
    change: dict[str, Any], words: str, train: DatasetConfig, val: DatasetConfig
) -> None:
    train.name = "train"
    for name, value in change.items():
        setattr(val, name, value)
    found = check_datasets(DataConfig(datasets=[train], val_datasets=[val]))
    assert any(words in problem for problem in found), found
    assert check_datasets(DataConfig(datasets=[train])) == []


def test_weights_of_test_rows_are_refused(train: DatasetConfig, val: DatasetConfig) -> None:
    val.weight = 0.5
    (problem,) = check_datasets(DataConfig(datasets=[train], test_datasets=[val]))
    assert "data.test_datasets[0].weight=0.5 has no effect: each test row is measured" in problem


def test_a_validation_file_counts_as_validation_without_held_out_rows(val: DatasetConfig) -> None:
    for datasets, size, expected in (([val], 0, True), ([], 0, False), ([], 4, True)):
        config = DataConfig(datasets=[val], val_datasets=datasets, val_set_size=size)
        assert config.has_validation is expected
