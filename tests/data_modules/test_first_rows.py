"""A preview reads only the first rows and reports it, or reads all rows on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError, Origin
from data_modules import DataConfig, DatasetConfig, check_datasets
from data_modules.source import Limits, opening, read_chunks
from data_modules.tokens.encode import BadRows, FirstRows, Rejected
from data_modules.tokens.prepare import Prepared
from tests.data_modules.conftest import prepare
from tests.data_modules.test_datamodule import build


def write(file: Path, num_rows: int) -> Path:
    """Write short rows."""
    file.write_text("".join(f'{{"text": "row {number} of many"}}\n' for number in range(num_rows)))
    return file


def prepare_file(file: Path, tokenizer: Any, first_rows: int | None, **settings: Any) -> Prepared:
    config, cache = DatasetConfig(path=str(file)), str(file.parent / "cache")
    return prepare(config, tokenizer, 64, first_rows=first_rows, cache_dir=cache, **settings)


def test_the_limit_is_the_number_of_rows_read(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", 1000)
    file = write(tmp_path / "d.jsonl", 500)
    part = prepare_file(file, tokenizer, 100)
    assert (part.counts.rows, part.is_cut) == (100, True)
    assert part.store.lines.tolist() == list(range(1, 101))
    every = prepare_file(file, tokenizer, None)
    assert (every.counts.rows, every.is_cut) == (500, False)
    assert every.store.digests[:100].tolist() == part.store.digests.tolist()
    # Neither is taken for the other, and as many rows as there are is all of them.
    assert prepare_file(file, tokenizer, 100).counts.rows == 100
    exact = prepare_file(file, tokenizer, 500)
    assert (exact.counts.rows, exact.is_cut) == (500, False)


@pytest.mark.parametrize(
    ("first_rows", "line"), [(60, "d: the first 60 rows"), (None, "d: 200 rows")]
)
def test_the_report_is_marked_as_partial(
    first_rows: int | None, line: str, tmp_path: Path, tokenizer: Any
) -> None:
    file = write(tmp_path / "d.jsonl", 200)
    data = {"cache_dir": str(tmp_path / "cache")}
    module = build([DatasetConfig(path=str(file))], tokenizer, data=data, first_rows=first_rows)
    (report,) = module.report.datasets
    assert report.line().startswith(line) and report.is_cut == (first_rows is not None)
    assert report.rows == len(module.train_examples) + len(module.val_examples)


def test_the_rest_of_the_file_is_not_opened(tmp_path: Path) -> None:
    class Counted:
        num_read = 0

        def __iter__(self) -> Any:
            for chunk in read_chunks(str(file)):
                self.num_read += 1
                yield chunk

    file = write(tmp_path / "d.jsonl", 200_000)
    counted = Counted()
    first = FirstRows(iter(counted), 10)
    assert sum(chunk.count() for chunk in first) == 10
    assert first.is_cut and counted.num_read == 1


def test_too_many_rows_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "d.jsonl", 50)
    with pytest.raises(DataError) as caught:
        prepare_file(file, tokenizer, None, limits=Limits(rows=49))
    assert caught.value.problems == [
        f"{file}: has more than 49 rows (data.limits.rows); raise it if the data is right, "
        "or use a part of it: data.datasets[].split=train[:10%]"
    ]
    assert prepare_file(file, tokenizer, None, limits=Limits(rows=50)).counts.rows == 50


@pytest.mark.parametrize("how", [{"on_bad_row": "quarantine"}, {"drop_empty": True}, {}])
def test_bad_rows_are_counted_and_not_held(how: dict[str, Any]) -> None:
    bad = BadRows(DataConfig(**how))
    for number in range(1, 10_001):
        is_empty = "drop_empty" in how
        columns = None if is_empty else ("a", "b") if number % 2 else (f"c{number}",)
        bad.add(Rejected(Origin("d", number), f"d:{number} bad", "x" * 100, columns, is_empty))
    held = [len(value) for value in vars(bad).values() if isinstance(value, (list, dict))]
    assert max(held) <= 20
    assert bad.num_kept + bad.num_empty == (0 if not how else 10_000)
    if not how:
        with pytest.raises(DataError) as caught:
            bad.raise_if_any()
        assert len(caught.value.problems) == 20


def test_many_data_sets_of_one_name_are_named_quickly() -> None:
    from data_modules.tokens.datasets import dataset_names

    names = dataset_names([DatasetConfig(path=f"{n}/train.jsonl") for n in range(20_000)])
    assert names[:3] == ["train", "train-2", "train-3"] and len(set(names)) == 20_000


def test_changed_limits_are_applied_with_quarantine(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "d.jsonl"
    deep = "[" * 30 + "]" * 30
    file.write_text('{"text": "one"}\n{"text": "two", "x": ' + deep + "}\n")
    assert check_datasets(DataConfig(datasets=[DatasetConfig(path=str(file))])) == []
    low = Limits(nesting=10)
    assert prepare_file(file, tokenizer, None, on_bad_row="quarantine").counts.kept == 2
    again = prepare_file(file, tokenizer, None, on_bad_row="quarantine", limits=low)
    assert (again.counts.kept, again.counts.rejected) == (1, 1)
