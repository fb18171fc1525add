from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.config import conf_files
from app.process.errors import UserError
from app.report.sweep_page import TrialView, render_sweep_page
from app.sweep import run_sweep
from app.sweep.results import reasons_for, show_results
from app.sweep.run import _check_search
from app.sweep.trials import LocalJob, Trial
from app.sweep.words import read_words
from tests.door import Answer, ask, make_data, make_model
from tests.sweep.short_trials import short_trials


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "d.jsonl")
    return ["-m", f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


@pytest.fixture
def commands() -> Iterator[list[list[str]]]:
    """Let trials be a short script instead of a training; yields the commands they had."""
    with short_trials() as typed:
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
    assert [trial["objective"] for trial in summary] == [0.25, 0.5, 1.25, 1.5]
    assert sorted(trial["number"] for trial in summary) == [0, 1, 2, 3]
    assert {Path(trial["folder"]).name for trial in summary} == {"0", "1", "2", "3"}
    for fragment in ("adapter.r", "optimizer.lr", "val/loss", "0.2500"):
        assert fragment in answer.printed
    (best,) = re.findall(r"(?m)^best: .*\n  .*\n  python -m app\.train (.*)$", answer.printed)
    assert shlex.split(best) == summary[0]["overrides"]  # a shell takes it as it was meant


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


def test_trials_inherit_nothing_of_a_rank(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    real = subprocess.Popen

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        seen.append(env)
        assert options["start_new_session"]  # Ctrl-C of a terminal comes once, by the sweep
        return real([sys.executable, "-c", "pass"], env=env, **options)

    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with mock.patch("app.sweep.trials.subprocess.Popen", start):
        answer = sweep(*words, "adapter.r=2,4")
    assert answer.code == 0, answer.said
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
    assert [one.values for one in read_words(typed)] == [
        ("4", "8"),
        ("1", "2"),
        ("[1,2]", "[3]"),
        ("'ä.json'", "'b c'"),
        ("x",),
    ]


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("a=interval(0,1)", "0 to 1"),
        ("a=interval(1e-5,1e-3)", "1e-05 to 0.001, log scale"),
        ("a=tag(log, interval(1, 2))", "1 to 2, log scale"),
        ("a=int(interval(4, 64))", "4 to 64, whole numbers"),
    ],
)
def test_an_interval_says_how_it_is_searched(word: str, shown: str) -> None:
    (one,) = read_words([word])
    assert str(one) == shown


def test_the_best_says_why_it_is_and_where_to_look_further() -> None:
    swept = read_words(["optimizer.lr=interval(1e-5,1e-2)", "adapter.r=choice(4,8)"])
    trials = [
        Trial(
            number=number, overrides=[f"optimizer.lr={lr}", "adapter.r=4"], folder="s",
            exit_code=0, seconds=1, objective=loss, error=None, stopped_at=stopped,
        )
        for number, (lr, loss, stopped) in enumerate(
            ((0.009, 0.5, None), (0.001, 0.75, None), (0.1, 0.9, 4))
        )
    ]  # fmt: skip
    first, second = reasons_for(trials[:2], trials, swept)
    assert first.startswith("lowest val/loss (0.5000) of 2 that ran to their end; 1 were stopped")
    assert first.endswith("next 0.7500 with optimizer.lr=0.001")
    assert second.startswith("optimizer.lr=0.009 is at the edge of 1e-05 to 0.01, log scale")
    assert len(list(reasons_for(trials[1:2], trials, swept))) == 1


def test_the_command_of_a_finder_trains_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.max_steps=60", "seed=1", "optimizer.lr=0.003"]
    one = Trial(
        number=0, overrides=words, folder="s", exit_code=0, seconds=1, objective=1.0, error=None
    )
    show_results([one], read_words(["+sweep=find_lr", "seed=1"]), {})
    assert "  python -m app.train seed=1 optimizer.lr=0.003\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("~a=1", "expected key=value"),
        ("a", "expected key=value"),
        ("a=choice()", "nothing is listed"),
        ("a=range(1,1000000000)", "of 1 to 1,000 values"),
        ("a=range(1,inf)", "of 1 to 1,000 values"),
        ("a=range(0,1,1e-300)", "of 1 to 1,000 values"),
        ("a=range(0,8,0)", "of 1 to 1,000 values"),
        ("a=shuffle(range(8,0))", "of 1 to 1,000 values"),
        pytest.param(f"a={','.join(map(str, range(2000)))}", "more than 1,000 values", id="list"),
        ("a=interval(3,1)", "from a lower to a higher number"),
        ("a=interval(1,1)", "from a lower to a higher number"),
        ("a=interval(0,inf)", "both finite"),
        ("a=tag(log, interval(0, 1))", "begins above 0"),
    ],
)
def test_what_cannot_be_tried_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_words([word])


def test_a_sweep_file_lists_values(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    file = tmp_path / "sweep" / "mine.yaml"
    start = "# @package _global_\nhydra:\n  sweeper:\n"
    file.write_text(f"{start}    params:\n      adapter.r: 4,8\nsweep:\n  parallel: 2\n")
    parallel, rank = read_words(["+sweep=mine"], tmp_path)
    assert (parallel.key, parallel.values) == ("sweep.parallel", ("2",))
    assert rank.values == ("4", "8")
    assert [one.values for one in read_words(["+sweep=mine", "adapter.r=2"], tmp_path)] == [
        ("2",),
        ("2",),
    ]
    file.write_text(f"{start}    param:\n      adapter.r: 4,8\n")
    with pytest.raises(UserError, match="params"):
        read_words(["+sweep=mine"], tmp_path)
    with pytest.raises(UserError, match="expected one of find_lr, lora_rank"):
        read_words(["+sweep=mine"], conf_files.CONF)


def test_only_train_sweeps() -> None:
    answer = ask("-m", "seed=1,2", verb="evaluate")
    assert answer.code == 2
    assert "evaluate cannot be swept; only train can" in answer.said


def test_the_page_of_a_sweep_holds_text_and_no_markup_of_others() -> None:
    trial = TrialView(
        number=0,
        values={"adapter.r": "4", "model.path": "<script>alert(1)</script>"},
        curve={2: 1.5, 4: float("nan"), 6: 0.5},
        objective=0.5,
        outcome="val/loss 0.5000",
    )
    other = dataclasses.replace(trial, number=1, objective=None, curve={}, outcome="exit code 4")
    page = render_sweep_page("sweep", [trial, other], "val/loss")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<polyline") == 2  # a trial that failed has no line, but a row
    assert "exit code 4" in page
    assert "nan" not in page


URL = "http://me:Zq7password@127.0.0.1:9/{}.jsonl?token=Zq7token0planted"


def test_a_grid_without_an_end_is_refused() -> None:
    swept = read_words(["seed=range(0,1000)", "adapter.r=range(1,20)"])
    (problem,) = _check_search("grid", swept)
    assert problem.startswith("this grid has 19,000 trials, more than 10,000; type sweep.search")
    assert _check_search("optuna", swept) == []


def test_settings_of_a_sweep_mean_nothing_in_one_run() -> None:
    answer = ask("+experiment=quickstart", "sweep.trials=3")
    assert answer.code == 2
    assert "sweep.trials=3: sweep settings have no effect in a single run; add -m" in answer.said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["optimizer.lr=interval(1e-5,1e-3)"], "type sweep.search=optuna"),
        (["adapter.r=2,4", "sweep.trials=3"], "a grid runs every combination"),
        (["adapter.r=2,4", "sweep.prune=median"], "a grid shows every trial whole"),
        (["sweep.search=optuna"], "nothing is searched"),
        (["adapter.r=2,4", "sweep.parallel=1,2"], "one value for the whole sweep"),
        (["adapter.r=2,4", "sweep.search=optua"], "did you mean optuna?"),
        (["adapter.r=interval(1,8)", "sweep.search=optuna"], "adapter.r=1.0: expected"),
        (["resume=nowhere"], "type it alone"),
        (
            [f"data.datasets=choice([{{path: '{URL}'}}],[{{path: 'b'}}])", "sweep.search=optuna"],
            "which Optuna writes into its journal; type sweep.search=grid",
        ),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    words: list[str], commands: list[list[str]], typed: list[str], said: str
) -> None:
    answer = sweep(*words, *typed)
    assert answer.code == 2
    assert said in answer.said
    assert commands == []


@pytest.mark.parametrize("names", [["a"], ["a", "b"]], ids=["shared", "swept"])
def test_secrets_of_a_sweep_are_nowhere_in_its_folder(
    words: list[str], commands: list[list[str]], names: list[str]
) -> None:
    lists = [f"[{{path: '{URL.format(name)}', format: alpaca}}]" for name in names]
    data = (
        f"data.datasets=choice({','.join(lists)})"
        if len(lists) > 1
        else (f"data.datasets={lists[0]}")
    )
    own = ["adapter.r=2,4", "output.dir=grid"]
    answer = sweep(*words[:2], data, *own)
    assert answer.code == 0, answer.said
    assert "Zq7" not in answer.printed
    assert "Zq7token" in " ".join(commands[0])
    for file in Path("grid").iterdir():
        assert file.is_dir() or "Zq7" not in file.read_text(), file

    Path("grid/sweep.json").unlink()
    answer = sweep("-m", "resume=grid")
    assert (answer.code, "type it again, beside resume=grid: data" in answer.said) == (2, True)
    answer = sweep("-m", "resume=grid", data.replace("alpaca", "chat"))
    assert (answer.code, "expected what the sweep was started with" in answer.said) == (2, True)
    answer = sweep("-m", "resume=grid", data, "seed=3")
    assert (answer.code, "seed: a sweep goes on with its own words" in answer.said) == (2, True)
    answer = sweep("-m", "resume=grid", data)
    assert answer.code == 0, answer.said
    half = len(commands) // 2
    assert [word[:3] for word in commands[:half]] == [word[:3] for word in commands[half:]]


def test_sweeps_of_one_second_have_folders_of_their_own(
    words: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sweep.run.time.strftime", lambda _: "now")
    for name in ("sweep-now", "sweep-now-2"):
        answer = sweep(*words, "adapter.r=2,4")
        assert answer.code == 0, answer.said
        assert answer.printed.endswith(f"run: outputs/train/{name}\n")


def test_an_empty_folder_of_a_sweep_is_refused(words: list[str], commands: list[list[str]]) -> None:
    for typed in ("output.dir=", "output.dir=' '"):
        answer = sweep(*words, "adapter.r=2,4", typed)
        assert (answer.code, "output.dir is empty" in answer.said) == (2, True)
    assert commands == []


def test_a_folder_with_anything_in_it_is_refused(
    words: list[str], commands: list[list[str]]
) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    answer = sweep(*words, "adapter.r=2,4", "output.dir=full")
    assert answer.code == 2
    assert "is not empty" in answer.said
    for where, code, said in (
        ("full/notes.txt", 2, "full/notes.txt: this is a file; type a folder's name"),
        ("full/notes.txt/x", 3, "output.dir=full/notes.txt/x: cannot be written"),
    ):
        answer = sweep(*words, "adapter.r=2,4", f"output.dir={where}")
        assert (answer.code, said in answer.said) == (code, True)
    assert sweep(*words, "adapter.r=2,4", "output.dir=new").code == 0
    answer = sweep(*words, "adapter.r=2,4", "output.dir=new")
    assert answer.code == 2
    assert "holds another sweep" in answer.said
    answer = sweep("-m", "resume=full")
    assert answer.code == 2
    assert "expected the folder of a sweep" in answer.said


def test_trials_at_a_time_have_gpus_of_their_own(
    words: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = LocalJob.__init__

    def note(self: LocalJob, command: list[str], folder: Path, log: Path, gpus: Any) -> None:
        seen.append(gpus)
        real(self, command, folder, log, gpus)

    monkeypatch.setattr(LocalJob, "__init__", note)
    with mock.patch("app.sweep.run.requested_devices") as devices:
        devices.return_value = mock.Mock(on_gpu=True, num_gpus=4)
        answer = sweep(*words, "adapter.r=2,4", "sweep.parallel=2", "trainer.devices=2")
        assert answer.code == 0, answer.said
        assert seen == ["0,1", "2,3"]
        answer = sweep(*words, "adapter.r=2,4", "sweep.parallel=3", "trainer.devices=2")
        assert answer.code == 2
        assert "needs 6 GPUs, 4 are visible; type trainer.devices=1" in answer.said


def test_an_interrupted_sweep_goes_on(words: list[str], tmp_path: Path) -> None:
    """Ctrl-C during the second trial: it is not counted, and run when the sweep goes on."""
    with short_trials(interrupt_at=1):
        answer = sweep(*words, "adapter.r=2,4,16", "output.dir=grid")
    assert answer.code == 130
    assert "interrupted after 1 of 3 trials" in answer.said
    assert "0.5000" in answer.printed
    Path("grid/1").mkdir(exist_ok=True)
    Path("grid/1/config.yaml").touch()  # as a training leaves that has begun
    with short_trials() as commands:
        answer = sweep("-m", "resume=grid")
    assert answer.code == 0, answer.said
    assert [command[-1] == "resume=auto" for command in commands] == [True, False]
    assert [command[2] for command in commands] == ["adapter.r=4", "adapter.r=16"]
    assert [one["number"] for one in json.loads(Path("grid/sweep.json").read_text())] == [2, 1, 0]
