"""Estimates of the tokens of an epoch: from the cache, from the first rows, or unknown."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules import DataConfig, DatasetConfig, EpochTokens, estimate_epoch
from data_modules.tokens.prepare import SAMPLE_BYTES
from tests.data_modules.conftest import prepare

LENGTH = 1024


def write_rows(file: Path, number: int, *, indent: int | None = None) -> Path:
    rows = [{"instruction": f"count to {n % 9}", "output": "one two " * 8} for n in range(number)]
    if file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=indent))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def estimate(config: DataConfig, tokenizer: str = "x", length: int = LENGTH) -> EpochTokens:
    return estimate_epoch(
        config, sequence_len=length, tokenizer=tokenizer, count_tokens=count_words
    )


def settings(file: Path, cache: Path, **data: Any) -> DataConfig:
    given = {"val_set_size": 0, "cache_dir": str(cache)} | data
    return DataConfig(datasets=[DatasetConfig(path=str(file))], **given)


@pytest.mark.parametrize(("name", "indent"), [("d.jsonl", None), ("d.json", 2)])
def test_a_large_file_is_extrapolated_from_its_first_rows(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    config = settings(write_rows(tmp_path / name, 20_000, indent=indent), tmp_path)
    assert (tmp_path / name).stat().st_size > 3 * SAMPLE_BYTES
    small = settings(write_rows(tmp_path / f"small_{name}", 1000, indent=indent), tmp_path)
    whole, epoch = estimate(small), estimate(config)
    assert whole.how == "all 1,000 rows"
    assert epoch.tokens == pytest.approx(20 * whole.tokens, rel=0.01)
    assert epoch.how.startswith("the first ") and " of about " in epoch.how


@pytest.mark.parametrize(("name", "indent"), [("d.jsonl", None), ("d.json", 8)])
def test_a_partly_sampled_row_is_not_counted_as_read(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    long = [{"instruction": "count", "output": "\u4e00 two " * 35_000} for _ in range(10)]
    text = [json.dumps(row, ensure_ascii=False) for row in long]
    file = tmp_path / name
    assert SAMPLE_BYTES / 2 < len(text[0].encode()) < SAMPLE_BYTES
    if file.suffix == ".json":
        file.write_text(json.dumps(long, indent=indent, ensure_ascii=False), encoding="utf-8")
    else:
        file.write_text("\n".join(text) + "\n", encoding="utf-8")
    epoch = estimate(settings(file, tmp_path), length=10**6)
    of_row = 70_000 + 1 + 1 + 2 * 5  # its words, a last token, and what a template writes
    assert epoch.tokens == pytest.approx(10 * of_row, rel=0.01)


def test_only_trained_tokens_are_counted(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "d.jsonl", 100)
    config = settings(file, tmp_path)
    tokens = estimate(config).tokens
    assert estimate(replace(config, val_set_size=0.25)).tokens == round(0.75 * tokens)
    assert estimate(replace(config, val_set_size=10)).tokens == round(0.9 * tokens)
    capped = DatasetConfig(path=str(file), max_rows=20, weight=2.0)
    assert estimate(replace(config, datasets=[capped])).tokens == round(0.4 * tokens)
    assert estimate(config, length=8).tokens == 0  # longer ones are dropped
    assert estimate(replace(config, on_long="truncate_right"), length=8).tokens == 800
    assert estimate(replace(config, on_long="split"), length=8).tokens == tokens


def test_cached_sizes_are_exact_until_the_file_or_settings_change(
    tmp_path: Path, tokenizer: Any
) -> None:
    file = write_rows(tmp_path / "d.jsonl", 50)
    config = settings(file, tmp_path / "cache")
    given = {"val_set_size": 0, "cache_dir": config.cache_dir}
    prepared = prepare(config.datasets[0], tokenizer, LENGTH, name="base", **given)
    cached = estimate(config, "base")
    assert cached.tokens == int(prepared.store.lengths.sum())
    assert cached.how == "50 rows tokenized in the cache"
    of_other = [
        estimate(config, "another base"),
        estimate(config, "base", length=512),
        estimate(replace(config, on_long="split"), "base"),
    ]
    assert {each.how for each in of_other} == {"all 50 rows"}
    counts = prepared.folder / "counts.json"
    whole = counts.read_text()
    counts.write_text(whole.replace('"tokens": ', '"tokens": 1'))
    assert estimate(config, "base").how == "all 50 rows"
    counts.write_text(whole)
    os.utime(file, (time.time() + 60,) * 2)
    assert estimate(config, "base").how == "all 50 rows"


def test_unavailable_data_is_named(tmp_path: Path) -> None:
    def refusal(*datasets: DatasetConfig, **data: Any) -> str:
        with pytest.raises(DataError) as caught:
            estimate(DataConfig(datasets=list(datasets), cache_dir=str(tmp_path), **data))
        return str(caught.value)

    assert refusal() == "no data set is named"
    hub = DatasetConfig(path="databricks/databricks-dolly-15k")
    assert refusal(hub) == f"{hub.path} is not in the cache of tokenized data"
    assert "the length of a stream is unknown" in refusal(hub, streaming=True)
    assert "no_such" in refusal(DatasetConfig(path=str(tmp_path / "no_such.jsonl")))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    assert "broken.jsonl" in refusal(DatasetConfig(path=str(broken)))
