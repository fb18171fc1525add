from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.config import conf_files
from app.process.errors import UserError
from app.sweep import Trial, read_overrides, run_sweep, run_trial, values_of
from tests.door import Answer, ask, make_data, make_model

TRIAL = """
import json, os, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
print("environment", sorted({"LOCAL_RANK", "RANK", "LOFT_RUN_DIR"} & set(os.environ)))
if words["adapter.r"] == "8":
    print("error: loss is nan at step 3\\n  a hint", file=sys.stderr)
    sys.exit(4)
folder = pathlib.Path(words["output.dir"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
loss = 1 / float(words["adapter.r"])
(folder / "metrics.json").write_text(json.dumps({"val/loss": loss}))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "d.jsonl")
    return ["-m", f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


@pytest.fixture
def commands() -> Iterator[list[list[str]]]:
    """Let trials be a short script instead of a training; yields the commands they had."""
    typed: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[:3] == [sys.executable, "-m", "app.train"]
        typed.append(command[3:])
        return real([sys.executable, "-c", TRIAL, *command[3:]], **options)

    with mock.patch("app.sweep.subprocess.Popen", start):
        yield typed


def sweep(*words: str) -> Answer:
    return ask(*words, sweep=run_sweep)


def test_every_combination_is_a_process_and_a_row(
    words: list[str], commands: list[list[str]], tmp_path: Path
) -> None:
    answer = sweep(*words, "adapter.r=2,4", "optimizer.lr=1e-3,1e-2", "output.name=grid")
    assert answer.code == 0, answer.said
    assert len(commands) == 4
    assert all("-m" not in command and "--multirun" not in command for command in commands)
    assert {(c[2], c[3]) for c in commands} == {
        (f"adapter.r={r}", f"optimizer.lr={lr}") for r in (2, 4) for lr in ("0.001", "0.01")
    }
    last = answer.printed.strip().splitlines()[-1]
    folder = Path(last.removeprefix("run: "))
    assert folder.parent == Path("outputs/grid")
    assert folder.name.startswith("sweep-")
    summary = json.loads((tmp_path / folder / "sweep.json").read_text())
    assert [trial["objective"] for trial in summary] == [0.25, 0.25, 0.5, 0.5]
    assert sorted(trial["number"] for trial in summary) == [0, 1, 2, 3]
    assert {Path(trial["folder"]).name for trial in summary} == {"0", "1", "2", "3"}
    for fragment in ("adapter.r", "optimizer.lr", "val/loss", "0.2500"):
        assert fragment in answer.printed


def test_a_failed_trial_does_not_stop_the_others(
    words: list[str], commands: list[list[str]]
) -> None:
    answer = sweep(*words, "adapter.r=8,4", f"output.dir={Path.cwd() / 'here now'}")
    assert answer.code == 4
    assert len(commands) == 2
    first, second = json.loads(Path("here now/sweep.json").read_text())
    assert (first["number"], first["exit_code"], first["objective"]) == (1, 0, 0.25)
    assert (second["number"], second["exit_code"], second["objective"]) == (0, 4, None)
    assert second["error"] == "error: loss is nan at step 3"
    assert "loss is nan" in answer.printed


def test_an_interrupted_sweep_shows_what_it_has(
    words: list[str], commands: list[list[str]]
) -> None:
    real = run_trial

    def interrupt(number: int, *rest: Any) -> Trial:
        if number == 1:
            raise KeyboardInterrupt
        return real(number, *rest)

    with mock.patch("app.sweep.run_trial", interrupt):
        answer = sweep(*words, "adapter.r=2,4,16")
    assert answer.code == 130
    assert len(commands) == 1
    assert "interrupted after 1 trials" in answer.said
    assert "0.5000" in answer.printed


def test_trials_inherit_nothing_of_a_rank(
    words: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    real = subprocess.Popen

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        seen.append(env)
        return real([sys.executable, "-c", "pass"], env=env, **options)

    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with mock.patch("app.sweep.subprocess.Popen", start):
        sweep(*words, "adapter.r=2,4")
    assert len(seen) == 2
    for environment in seen:
        assert not {"NODE_RANK", "MASTER_PORT", "LOFT_RUN_DIR"} & set(environment)


def test_bad_words_are_refused_before_the_first_trial(
    words: list[str], commands: list[list[str]], tmp_path: Path
) -> None:
    answer = sweep(*words, "adapter.rr=4,8", "attention=sdpa,egaer", "optimizer.lr=1e-3,x", "oops")
    assert answer.code == 2
    assert "oops: expected key=value" in answer.said
    answer = sweep(*words, "adapter.rr=4,8", "attention=sdpa,egaer", "optimizer.lr=1e-3,x")
    assert answer.code == 2
    for fragment in ("adapter.rr=4", "did you mean eager?", "optimizer.lr=x: expected a number"):
        assert fragment in answer.said
    assert commands == []
    assert not (tmp_path / "outputs").exists()


def test_options_may_be_swept_with_settings_of_one_of_them(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = sweep(
        "-m", "experiment=llama8b", "adapter.r=4", "adapter=lora", "attention=sdpa,eager"
    )
    assert answer.code == 0, answer.said
    assert [command[1:4] for command in commands] == [
        ["adapter.r=4", "adapter=lora", "attention=sdpa"],
        ["adapter.r=4", "adapter=lora", "attention=eager"],
    ]


def test_hydras_lists_are_understood() -> None:
    typed = ["a=range(4,9,4)", "b=choice(1,2)", "c=[1,2],[3]", "d=ä.json,b c", "e=x"]
    assert [values_of(override) for override in read_overrides(typed)] == [
        ["4", "8"],
        ["1", "2"],
        ["[1,2]", "[3]"],
        ["'ä.json'", "'b c'"],
        ["x"],
    ]


@pytest.mark.parametrize("word", ["a=interval(0,1)", "~a=1", "a"])
def test_what_cannot_be_tried_one_by_one_is_refused(word: str) -> None:
    with pytest.raises(UserError):
        read_overrides([word])


def test_a_sweep_file_lists_values(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    file = tmp_path / "sweep" / "mine.yaml"
    start = "# @package _global_\nhydra:\n  sweeper:\n"
    file.write_text(f"{start}    params:\n      adapter.r: 4,8\n")
    (override,) = read_overrides(["+sweep=mine"], tmp_path)
    assert values_of(override) == ["4", "8"]
    file.write_text(f"{start}    param:\n      adapter.r: 4,8\n")
    with pytest.raises(UserError, match="params"):
        read_overrides(["+sweep=mine"], tmp_path)
    with pytest.raises(UserError, match="there are lora_rank"):
        read_overrides(["+sweep=mine"], conf_files.CONF)


def test_only_train_sweeps() -> None:
    answer = ask("-m", "seed=1,2", verb="evaluate")
    assert answer.code == 2
    assert "sweeps are for train" in answer.said


def test_a_trial_that_is_interrupted_has_the_time_to_save_itself(tmp_path: Path) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"step 1\n"
        raise KeyboardInterrupt

    process = mock.MagicMock(stderr=interrupted())
    process.__enter__.return_value = process
    process.__exit__.return_value = False
    started = mock.patch("app.sweep.subprocess.Popen", return_value=process)
    with started, pytest.raises(KeyboardInterrupt):
        run_trial(1, [], tmp_path)
    process.wait.assert_called_once_with()
