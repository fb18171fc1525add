"""Which folders are training runs, and which of them is the newest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.config import EvaluateConfig, load_config, save_config
from app.run import find_run
from app.run.folder import is_training
from tests.in_process import make_data, make_model


def finished_run(folder: Path, *, started: str | None, ended: float) -> Path:
    folder.mkdir(parents=True)
    save_config(load_config("train", ["+experiment=quickstart"]), folder / "config.yaml")
    if started is not None:
        (folder / "manifest.json").write_text(json.dumps({"started": started}))
    (folder / "metrics.json").write_text("{}")
    os.utime(folder / "metrics.json", (ended, ended))
    return folder


def test_the_newest_run_is_the_one_that_started_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noon = 1767268800  # 2026-01-01T12:00:00+0000
    outputs = Path("outputs/train")
    finished_run(outputs / "a", started="2026-01-01T10:00:00+0000", ended=noon + 9999)  # copied
    later = finished_run(outputs / "b", started="2026-01-01T12:30:00+0100", ended=noon)
    assert find_run(None) == later
    of_earlier_version = finished_run(outputs / "c", started=None, ended=noon)
    assert find_run(None) == of_earlier_version


@pytest.mark.parametrize("verb", ["train", "preview", "plan"])
def test_the_verb_that_wrote_a_folder_is_recorded(verb: str, tmp_path: Path) -> None:
    words = [f"model.path={make_model(tmp_path / 'model')}"]
    words.append(f"data.datasets=[{{path: {make_data(tmp_path / 'data.jsonl')}}}]")
    file = tmp_path / "config.yaml"
    save_config(load_config(verb, words), file)
    first, *settings = file.read_text().splitlines(keepends=True)
    assert (first, is_training(file)) == (f"# settings of loft {verb}\n", verb == "train")
    file.write_text("".join(settings))  # as earlier versions wrote it
    assert is_training(file) == (verb == "train")
    file.write_text(first + "optimizer: {}\npreview: {}\n")
    assert is_training(file) == (verb == "train")


def test_an_evaluation_is_not_a_training_run(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(EvaluateConfig(), file)
    assert file.read_text().startswith("# settings of loft evaluate\n") and not is_training(file)
