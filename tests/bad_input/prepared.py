"""Write small data sets, and do with them what a run does before it loads a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules import DataConfig, DatasetConfig, check_datasets
from data_modules.tokens.prepare import Prepared
from tests.data_modules.conftest import prepare as prepare_dataset


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
    """Check and prepare one data set, in packs of 512 tokens; raises DataError."""
    if problems := check_datasets(DataConfig(datasets=[named(file)], **settings)):
        raise DataError(problems)
    template = settings.get("chat_template")
    return prepare_dataset(named(file), tokenizer, 512, template=template, **settings)


def problems_of(file: Path, tokenizer: Any, **settings: Any) -> list[str]:
    """Return what `prepare` complains of, without the file's folder."""
    with pytest.raises(DataError) as caught:
        prepare(file, tokenizer, **settings)
    return [problem.replace(f"{file.parent}/", "") for problem in caught.value.problems]


def quarantined(prepared: Prepared) -> list[dict[str, str]]:
    """Return the rows that were put aside."""
    lines = (prepared.folder / "rejected.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
