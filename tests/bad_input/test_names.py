"""Escape sequences in the names of files, data sets, columns and folders: shown, never obeyed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.config import run_verb
from app.preview import preview
from app.train import train
from tests.in_process import make_model, run_command
from tests.tiny import TINY_BASE, small_run

EVIL = "x\x1b]0;owned\x07\x1b[2J\u202egnp\u2066\x9b31m"
RAW = ["\x1b", "\x07", "\u202e", "\u2066", "\x9b", "\r"]


def check_shown(*texts: str) -> None:
    for text in texts:
        found = [letter for letter in RAW if letter in text]
        assert not found, f"{found!r} in {text!r}"
    assert any("\\x1b]0;owned\\x07" in text for text in texts)


def rows(file: Path, *columns: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [dict.fromkeys(columns, f"word {number}") for number in range(40)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("verb", ["train", "preview"])
def test_names_are_shown_and_not_obeyed(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows(tmp_path / f"{EVIL}.jsonl", "instruction", "output")
    folder = tmp_path / f"run-{EVIL}"
    chosen = dict(word.split("=", 1) for word in small_run("trainer.max_steps=1"))
    chosen["data.datasets"] = f'[{{path: "{file}"}}, {{path: "{file}", name: "n{EVIL}"}}]'
    words = [f"{key}={value}" for key, value in chosen.items()]
    code = run_verb(
        verb,
        {"train": train, "preview": preview}[verb],
        words=[*words, f"output.dir={folder}", "logger=csv"],
    )
    for name in ("LOFT_RUN_DIR", "LOFT_RESUME_STEP"):
        os.environ.pop(name, None)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    check_shown(shown.out, shown.err)
    names = {"train": ["audit.txt", "mixture.json", "metrics.csv"], "preview": ["preview.html"]}
    texts = [(folder / name).read_text(encoding="utf-8") for name in names[verb]]
    for text in texts:
        assert not [letter for letter in RAW[:-1] if letter in text]


def test_errors_show_them_too(tmp_path: Path) -> None:
    file = rows(tmp_path / f"{EVIL}.jsonl", f"col{EVIL}", "other")
    model = make_model(tmp_path / f"model-{EVIL}", oops=1)
    (model / "tokenizer.json").unlink()
    for words in (
        [f"model.path={TINY_BASE}", f'data.datasets=[{{path: "{file}"}}]'],
        [f"model.path={TINY_BASE}", f'data.datasets=[{{path: "{tmp_path / EVIL}.csv"}}]'],
        [f"model.path={model}", f'data.datasets=[{{path: "{file}"}}]'],
        [f'"{EVIL}"=1', "data=skills"],
        [f"optimizer.{EVIL}=1"],
        [f"resume=/nowhere/{EVIL}"],
        [f"output.dir={file}", "model=tiny", "data=skills"],
    ):
        result = run_command(*words)
        assert result.code == 2, words
        check_shown(result.stderr)
    result = run_command("--cfg", "job", "model=tiny", f'data.datasets=[{{path: "{file}"}}]')
    assert result.code == 0, result.stderr
    assert not [letter for letter in RAW if letter in result.stdout]
