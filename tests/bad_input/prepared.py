"""Write small data sets, and do with them what a run does before it loads a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules import DataConfig, DatasetConfig, check_datasets
from data_modules.template import ChatTemplate, MaskConfig
from data_modules.tokens.encode import TokenSpec
from data_modules.tokens.prepare import Prepared, hash_of, prepare_dataset


def chat(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    """Make a row of messages."""
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": r, "content": c} for r, c in turns], **columns}


ROWS = [chat(f"what is {i} and {i}?", f"it is {2 * i}") for i in range(12)]
ASKED_ONLY = {"messages": ROWS[0]["messages"][:1]}
LONG = chat("word " * 200, "one")


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def named(file: Path, **settings: Any) -> DatasetConfig:
    """Name a file as a data set."""
    return DatasetConfig(path=str(file), **settings)


def prepare(file: Path, tokenizer: Any, **settings: Any) -> Prepared:
    """Check and prepare one data set, in packs of 512 tokens; raises DataError.

    `dataset` are settings of the data set itself.
    """
    sequence_len = settings.pop("sequence_len", 512)
    data = DataConfig(datasets=[named(file, **settings.pop("dataset", {}))], **settings)
    problems = check_datasets(data)
    if problems:
        raise DataError(problems)
    template = ChatTemplate.resolve(tokenizer, data.chat_template, MaskConfig.of(data))
    spec = TokenSpec(
        config=data,
        template=template,
        sequence_len=sequence_len,
        tokenizer_hash=hash_of(tokenizer),
    )
    return prepare_dataset(data.datasets[0], spec)


def problems_of(file: Path, tokenizer: Any, **settings: Any) -> list[str]:
    """Return what `prepare` complains of, without the file's folder."""
    with pytest.raises(DataError) as caught:
        prepare(file, tokenizer, **settings)
    return [problem.replace(f"{file.parent}/", "") for problem in caught.value.problems]


def quarantined(prepared: Prepared) -> list[dict[str, str]]:
    """Return the rows that were put aside."""
    lines = (prepared.folder / "rejected.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
