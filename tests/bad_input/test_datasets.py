"""Data sets that only tokenizing shows to be wrong: their warnings, and what stops the run.

Each has a twin that differs in the mistake alone and passes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules import DataConfig, DatasetConfig, check_datasets
from data_modules.datamodule import FinetuneDataModule
from tests.bad_input.prepared import ASKED_ONLY, LONG, ROWS, chat, named, write
from tests.conftest import TrainRun, read_column
from tests.data_modules.test_datamodule import build as build_module
from tests.in_process import make_data


def build(*files: Path | DatasetConfig, tokenizer: Any, **data: Any) -> FinetuneDataModule:
    datasets = [one if isinstance(one, DatasetConfig) else named(one) for one in files]
    settings = {"sequence_len": 64, **data}
    if problems := check_datasets(DataConfig(datasets=datasets, **settings)):
        raise DataError(problems)
    module = build_module(datasets, tokenizer, data=settings, model={"context_len": 1024})
    module.audit.check()
    return module


def problems_of(folder: Path, *files: Path | DatasetConfig, **settings: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        build(*files, **settings)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def said(module: FinetuneDataModule) -> str:
    return "\n".join([*module.report.lines(), *module.audit.full_lines()])


def test_rows_with_nothing_to_learn(tmp_path: Path, base: Any) -> None:
    file = write(tmp_path / "d.jsonl", [*ROWS, ASKED_ONLY, ASKED_ONLY])
    module = build(file, tokenizer=base)
    assert f"left out, first {file}:13, {file}:14" in (said(module))
    (problem,) = problems_of(tmp_path, file, tokenizer=base, max_dropped_share=0.1)
    assert problem.startswith("d.jsonl: 2 of 14 rows are dropped (14.3 %), data.max_dropped_share")
    assert "2 have nothing to train on (d.jsonl:13, d.jsonl:14: no answer" in problem
    assert build(file, tokenizer=base, max_dropped_share=0.2)
    (problem,) = problems_of(tmp_path, write(file, [ASKED_ONLY]), tokenizer=base)
    assert problem.startswith("d.jsonl: no row of 1 is left: ")
    assert "nothing to train on" not in said(build(write(file, ROWS), tokenizer=base))


def test_answers_that_are_cut_away(tmp_path: Path, base: Any) -> None:
    file = write(tmp_path / "d.jsonl", [LONG, LONG])
    settings = {"tokenizer": base, "on_long": "truncate_right"}
    (problem,) = problems_of(tmp_path, file, **settings)
    tokens = int(re.findall(r"data.sequence_len=(\d+)", problem)[0])
    assert f"2 were cut (the longest, d.jsonl:1, has {tokens:,} tokens" in problem
    assert build(file, **settings, sequence_len=tokens)
    # Beside good rows it is no error, and said with the longest row.
    text = said(build(write(file, [*ROWS, LONG]), **settings))
    assert f"longest rows, in tokens: {file}:13 {tokens:,}," in text
    assert "1 of 13 rows have nothing to train on" in text and f"left out, first {file}:13" in text
    with pytest.raises(DataError, match=f"sequence_len={tokens}"):
        build(write(file, [LONG]), **{**settings, "on_long": "drop"})


def test_weights_of_zero(tmp_path: Path, base: Any) -> None:
    rows = [{**row, "weight": 0} for row in ROWS]
    good, bad = write(tmp_path / "good.jsonl", ROWS), write(tmp_path / "bad.jsonl", rows)
    (problem,) = problems_of(tmp_path, good, bad, tokenizer=base)
    assert problem.startswith("bad.jsonl: no row of 12 is left: 0 are longer than 64 tokens, 12")
    assert "(bad.jsonl:1, bad.jsonl:2, " in problem and "weight 0" in problem
    # One such row is left out and counted.
    module = build(good, write(bad, [rows[0], *ROWS[1:]]), tokenizer=base)
    assert f"are left out, first {bad}:1" in said(module)


def test_one_of_several_data_sets_is_empty(tmp_path: Path, base: Any) -> None:
    good, long = write(tmp_path / "good.jsonl", ROWS), write(tmp_path / "long.jsonl", [LONG] * 3)
    asked = write(tmp_path / "asked.jsonl", [ASKED_ONLY])
    problems = problems_of(tmp_path, good, long, asked, tokenizer=base)
    assert [problem[:38] for problem in problems] == [
        "long.jsonl: no row of 3 is left: 3 are",
        "asked.jsonl: no row of 1 is left: 0 ar",
    ]
    assert "(the longest, long.jsonl:1, has " in problems[0]
    assert build(good, write(long, [LONG, ROWS[0]]), tokenizer=base)


def test_a_run_quarantines_bad_rows_and_trains_on_the_rest(
    tmp_path: Path, train_run: TrainRun
) -> None:
    file = write(tmp_path / "d.jsonl", [*ROWS[:4], {"id": 7}, *ROWS[4:]])
    with file.open("a") as stream:
        stream.write("{no\n" + json.dumps(chat("q", "<|im_end|>")) + "\n")
    other = make_data(tmp_path / "lists.jsonl", 8)
    folder = train_run(
        "model=tiny",
        f"data.datasets=[{{path: {file}, name: mine}}, {{path: {other}}}]",
        "data.on_bad_row=quarantine",
        "data.control_tokens=error",
        "trainer.max_steps=2",
        "trainer.global_batch_size=2",
        "data.sequence_len=64",
    )
    aside = [json.loads(row) for row in (folder / "quarantine/mine.jsonl").open()]
    assert [row["origin"] for row in aside] == [f"{file}:{line}" for line in (5, 14, 15)]
    for row, told, text in zip(
        aside,
        ("missing 'messages'", "invalid JSON", "control token `<|im_end|>`"),
        ('{"id": 7}', "{no", json.dumps(chat("q", "<|im_end|>"))),
        strict=True,
    ):
        assert row["problem"].startswith(row["origin"]) and told in row["problem"]
        assert row["row"] == text
    assert not (folder / "quarantine/lists.jsonl").exists()
    assert read_column(folder, "train/loss")
    assert {"audit.json", "audit.txt", "mixture.json"} <= {file.name for file in folder.iterdir()}
    notes = json.loads((folder / "manifest.json").read_text())["data"]
    assert [(note["rows"], note["rejected"]) for note in notes] == [(12, 3), (8, 0)]
