"""Rows that do not go with an objective end a run with exit code 2, their place, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import small_run

Rows = list[dict[str, Any]]


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


CLASSES = [
    *("objective=classify", "model.labels=[a,b,c]"),
    *("data.val_datasets=[{path: VALIDATED}]", "data.val_set_size=0"),
]
CASES: dict[str, tuple[list[str], Rows, list[str]]] = {
    "a pair without a difference": (
        ["objective=dpo"],
        [{"prompt": f"Say {n}.", "chosen": f"{n}", "rejected": f"{n}"} for n in range(3)],
        ["no row of 3 is left", "rows.jsonl:1", "equal answers: give such rows an answer"],
    ),
    "verdicts of one kind": (
        ["objective=kto"],
        [{"prompt": f"Say {n}.", "completion": f"{n}", "label": 1} for n in range(9)],
        ["have the label true", "add rows with the label false, or type objective=sft"],
    ),
    "a class of validation rows only": (
        CLASSES,
        [{"text": f"Text {n}.", "label": "ab"[n % 2]} for n in range(9)],
        ["validation rows have the label c, and no row to train on has: add such rows"],
    ),
    "preferences with objective=sft": (
        ["objective=sft"],
        [{"prompt": "Say 1.", "chosen": "1", "rejected": "2"}],
        ["rows.jsonl:1", "type objective=dpo", "columns: {completion: chosen}"],
    ),
    "answers with objective=dpo": (
        ["objective=dpo"],
        [{"instruction": "Say 1.", "output": "1"}],
        ["rows.jsonl:1 missing 'chosen'", "type objective=sft"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_that_do_not_go_with_an_objective_are_refused(
    name: str, tmp_path: Path, type_verb: Callable[..., tuple[int, str]]
) -> None:
    words, rows, said = CASES[name]
    file, validated = tmp_path / "rows.jsonl", tmp_path / "validated.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    validated.write_text(json.dumps({"text": "Another text.", "label": "c"}))
    words = [word.replace("VALIDATED", str(validated)) for word in words]
    common = [f"data.datasets=[{{path: {file}}}]", f"output.dir={tmp_path / 'run'}"]
    code, stderr = type_verb("train", *small_run(*words, *common))
    assert code == 2
    assert [text for text in said if text not in stderr] == []
