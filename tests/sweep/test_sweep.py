from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.sweep import run_sweep
from app.sweep.parameters import parse_parameters, save_words
from app.sweep.trials import LocalJob, Trial, print_results
from common.errors import UserError
from common.installation import verb_command
from tests.in_process import CommandResult, make_words, run_command
from tests.sweep.short_trials import GRID_TRIAL, short_trials
from tests.tiny import SAMPLES


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["-m", *make_words(tmp_path)]


@pytest.fixture
def commands() -> Iterator[list[list[str]]]:
    """Replace the training of each trial by a short script; yield the trials' overrides."""
    with short_trials() as commands:
        yield commands


def sweep(*overrides: str, code: int = 0) -> CommandResult:
    result = run_command(*overrides, sweep=run_sweep)
    assert result.code == code, result.stderr
    return result


def test_every_combination_runs_in_a_process_and_is_listed(
    overrides: list[str], commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", "0")  # which trials do not inherit: `short_trials` checks it
    monkeypatch.setenv("MASTER_PORT", "1234")
    result = sweep(*overrides, "adapter.r=2,4", "optimizer.lr=1e-3,1e-2", "output.name=grid")
    assert len(commands) == 4
    assert all("-m" not in command and "--multirun" not in command for command in commands)
    assert {(c[2], c[3]) for c in commands} == {
        (f"adapter.r={r}", f"optimizer.lr={lr}") for r in (2, 4) for lr in ("0.001", "0.01")
    }
    last = result.stdout.strip().splitlines()[-1]
    folder = Path(last.removeprefix("run: "))
    assert folder.parent == Path("outputs/grid")
    assert folder.name.startswith("sweep-")
    summary = json.loads((tmp_path / folder / "sweep.json").read_text())
    assert [trial["objective"] for trial in summary] == [0.25, 0.5, 1.25, 1.5]
    assert sorted(trial["number"] for trial in summary) == [0, 1, 2, 3]
    assert {Path(trial["folder"]).name for trial in summary} == {"0", "1", "2", "3"}
    for fragment in ("adapter.r", "optimizer.lr", "val/loss", "0.2500"):
        assert fragment in result.stdout
    (best,) = re.findall(r"(?m)^best: .*\n  .*\n  \S*python\S* -m app\.train (.*)$", result.stdout)
    assert shlex.split(best) == summary[0]["overrides"]  # quoted for the shell


def test_trials_that_were_validated_on_different_tokens_are_said_not_to_compare(
    overrides: list[str], tmp_path: Path
) -> None:
    counted = GRID_TRIAL.replace('"val/loss": loss', '"val/tokens/rows": TOKENS, "val/loss": loss')
    for tokens, differs in (("750", False), ('values["adapter.r"] + "00"', True)):
        script = counted.replace("TOKENS", f"float({tokens})")
        with short_trials(script):
            folder = tmp_path / f"differs-{differs}"
            said = sweep(*overrides, "adapter.r=2,4", f"output.dir={folder}").stdout
        note = "not validated on the same tokens (200 to 400), and their val/loss measures"
        assert (note in " ".join(said.split())) is differs


def test_a_failed_trial_does_not_stop_the_others(
    overrides: list[str], commands: list[list[str]]
) -> None:
    result = sweep(*overrides, "adapter.r=8,4", f"output.dir={Path.cwd() / 'my sweep'}", code=4)
    assert len(commands) == 2
    first, second = json.loads(Path("my sweep/sweep.json").read_text())
    assert (first["number"], first["exit_code"], first["objective"]) == (1, 0, 0.25)
    assert (second["number"], second["exit_code"], second["objective"]) == (0, 4, None)
    assert second["error"] == "error: loss is nan at step 3"
    assert "loss is nan" in result.stdout


def test_invalid_overrides_are_refused_before_the_first_trial(
    overrides: list[str], commands: list[list[str]], tmp_path: Path
) -> None:
    result = sweep(
        *overrides, "adapter.rr=4,8", "attention=sdpa,egaer", "optimizer.lr=1e-3,x", code=2
    )
    for fragment in ("adapter.rr=4", "did you mean eager?", "optimizer.lr=x: expected a number"):
        assert fragment in result.stderr
    assert commands == []
    assert not (tmp_path / "outputs").exists()


def test_group_options_can_be_swept(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep("-m", "experiment=llama8b", "adapter.r=4", "adapter=lora", "attention=sdpa,eager")
    assert [command[1:4] for command in commands] == [
        ["adapter.r=4", "adapter=lora", "attention=sdpa"],
        ["adapter.r=4", "adapter=lora", "attention=eager"],
    ]


def test_hydra_sweep_syntax_is_parsed() -> None:
    typed = ["a=range(4,9,4)", "b=choice(1,2)", "c=[1,2],[3]", "d=ä.json,b c", "e=x"]
    assert [parameter.values for parameter in parse_parameters(typed)] == [
        ("4", "8"),
        ("1", "2"),
        ("[1,2]", "[3]"),
        ("'ä.json'", "'b c'"),
        ("x",),
    ]
    (own_file,) = parse_parameters(["mine.yaml"])
    assert (own_file.key, own_file.values) == ("experiment", ("mine.yaml",))
    scales = parse_parameters(["a=interval(0,1)", "b=tag(log, interval(1, 2))"])
    assert [scale.interval and scale.interval.is_log for scale in scales] == [False, True]
    whole, rate = parse_parameters(["a=int(interval(4, 64))", "b=interval(1e-5,1e-2)"])
    assert str(whole) == "4 to 64, whole numbers"
    assert rate.interval is not None
    assert rate.interval.is_edge(0.009) and not rate.interval.is_edge(0.001)


PAIRS = [
    f"data.datasets=[{{path: {SAMPLES / 'pairs.json'}}}]",
    "data.sequence_len=256",
    "adapter.r=4",
]
RATED = """
import json, pathlib, sys
values = dict(word.split("=", 1) for word in sys.argv[1:])
folder, beta = pathlib.Path(values["output.dir"]), float(values["objective.beta"])
folder.mkdir(parents=True)
rows = [f"{step},{beta},{0.4 + beta * step / 10}" for step in (1, 2)]
(folder / "metrics.csv").write_text("\\n".join(["step,val/loss,val/accuracy", *rows]))
(folder / "metrics.json").write_text(json.dumps({"val/loss": beta, "val/accuracy": 0.4 + beta / 5}))
"""


def test_settings_that_rescale_the_loss_are_ranked_by_accuracy(
    overrides: list[str], tmp_path: Path
) -> None:
    words = (*overrides, *PAIRS, "objective=dpo", "objective.beta=0.1,0.5,0.3")
    with short_trials(RATED):
        result = sweep(*words, f"output.dir={tmp_path / 's'}")
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [row["number"] for row in rows] == [1, 2, 0]
    assert {row["metric"] for row in rows} == {"val/accuracy"}
    assert rows[0]["objective"] == pytest.approx(0.5)
    assert "highest val/accuracy (0.5000) of 3 completed trials" in result.stdout


@pytest.mark.parametrize(
    ("words", "compared", "fix"),
    [
        (["objective=dpo,sft"], "dpo by val/accuracy against the base, sft by val/loss", "=dpo"),
        (["objective=simpo,ipo"], "simpo by val/accuracy, ipo by val/accuracy against", "=simpo"),
        (
            ["objective=dpo", "objective.reference=base,none"],
            "dpo by val/accuracy against the base, dpo by val/accuracy",
            ".reference=base",
        ),
    ],
)
def test_objectives_that_measure_otherwise_need_a_sweep_each(
    overrides: list[str], words: list[str], compared: str, fix: str
) -> None:
    result = sweep(*overrides, *PAIRS, *words, code=2)
    assert compared in result.stderr
    assert f"type a sweep for each, as objective{fix}" in result.stderr


def test_such_a_sweep_that_an_earlier_version_started_resumes(
    overrides: list[str], commands: list[list[str]]
) -> None:
    (folder := Path("earlier")).mkdir()
    save_words(folder, [*overrides[1:], *PAIRS, "objective=dpo,orpo"])
    sweep("-m", f"resume={folder}")
    assert len(commands) == 2


def test_the_printed_command_leaves_out_settings_of_the_sweep_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["trainer.max_steps=60", "seed=1", "optimizer.lr=0.003"]
    trial = Trial(
        number=0, overrides=overrides, folder="s", exit_code=0, seconds=1, objective=1.0, error=None
    )
    print_results([trial], parse_parameters(["+sweep=find_lr", "seed=1"]), {})
    command = verb_command("train")
    assert f"  {command} seed=1 optimizer.lr=0.003\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("~a=1", "expected key=value"),
        ("a=choice()", "no values are listed"),
        ("a=range(1,inf)", "with 1 to 1,000 values"),
        ("a=range(0,1,1e-300)", "with 1 to 1,000 values"),
        ("a=range(0,8,0)", "with 1 to 1,000 values"),
        ("a=interval(0,inf)", "both finite"),
        ("a=tag(log, interval(0, 1))", "numbers above 0"),
    ],
)
def test_invalid_values_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_parameters([override])


def test_a_sweep_file_lists_values(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    file = tmp_path / "sweep" / "mine.yaml"
    start = "# @package _global_\nhydra:\n  sweeper:\n"
    file.write_text(f"{start}    params:\n      adapter.r: 4,8\nsweep:\n  parallel: 2\n")
    parallel, rank = parse_parameters(["+sweep=mine"], tmp_path)
    assert (parallel.key, parallel.values) == ("sweep.parallel", ("2",))
    assert rank.values == ("4", "8")
    both = parse_parameters(["+sweep=mine", "adapter.r=2"], tmp_path)
    assert [parameter.values for parameter in both] == [("2",), ("2",)]
    file.write_text(f"{start}    param:\n      adapter.r: 4,8\n")
    with pytest.raises(UserError, match="params"):
        parse_parameters(["+sweep=mine"], tmp_path)
    file.write_text("hydra: {sweeper: {params: {adapter.r: '4,8'}}}\n")
    with pytest.raises(UserError, match=r"mine.yaml:1: the first line must be"):
        parse_parameters(["+sweep=mine"], tmp_path)


URL = "http://me:Zq7password@127.0.0.1:9/{}.jsonl?token=Zq7token0planted"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["optimizer.lr=interval(1e-5,1e-3)"], "use sweep.search=optuna"),
        (["sweep.search=optuna"], "no parameter to search"),
        (["adapter.r=2,4", "sweep.parallel=1,2"], "one value for the whole sweep"),
        (["adapter.r=2,4", "sweep.search=optua"], "did you mean optuna?"),
        (["adapter.r=interval(1,8)", "sweep.search=optuna"], "adapter.r=1.0: expected"),
        (["resume=nowhere"], "use resume=FOLDER without others"),
        (["seed=range(0,1000)", "adapter.r=range(1,20)"], "this grid has 19,000 trials, more than"),
        (
            [f"data.datasets=choice([{{path: '{URL}'}}],[{{path: 'b'}}])", "sweep.search=optuna"],
            "which Optuna writes to its journal; use sweep.search=grid",
        ),
    ],
)
def test_an_invalid_search_is_refused(
    overrides: list[str], commands: list[list[str]], typed: list[str], message: str
) -> None:
    result = sweep(*overrides, *typed, code=2)
    assert message in result.stderr
    assert commands == []


def test_secrets_are_not_written_to_the_sweep_folder(
    overrides: list[str], commands: list[list[str]]
) -> None:
    lists = [f"[{{path: '{URL.format(name)}', format: alpaca}}]" for name in "ab"]
    data = f"data.datasets=choice({','.join(lists)})"
    own = ["adapter.r=2,4", "output.dir=grid"]
    result = sweep(*overrides[:2], data, *own)
    assert "Zq7" not in result.stdout
    assert "Zq7token" in " ".join(commands[0])
    for file in Path("grid").iterdir():
        assert file.is_dir() or "Zq7" not in file.read_text(), file

    Path("grid/sweep.json").unlink()
    for typed, message in (
        ([], "add it again next to resume=grid: data"),
        ([data.replace("alpaca", "chat")], "expected the value with which the sweep was started"),
        ([data, "seed=3"], "seed: a resumed sweep keeps its overrides"),
    ):
        result = sweep("-m", "resume=grid", *typed, code=2)
        assert message in result.stderr
    result = sweep("-m", "resume=grid", data)
    half = len(commands) // 2
    assert [word[:3] for word in commands[:half]] == [word[:3] for word in commands[half:]]


def test_sweeps_started_in_the_same_second_get_different_folders(
    overrides: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.run.folder.time.strftime", lambda _: "now")
    for name in ("sweep-now", "sweep-now_1"):
        result = sweep(*overrides, "adapter.r=2,4")
        assert result.stdout.endswith(f"run: outputs/train/{name}\n")


def test_a_folder_that_is_not_empty_is_refused(
    overrides: list[str], commands: list[list[str]]
) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    result = sweep(*overrides, "adapter.r=2,4", "output.dir=full", code=2)
    assert "output.dir=full holds files that do not belong to a run: notes.txt" in result.stderr
    sweep(*overrides, "adapter.r=2,4", "output.dir=new")
    result = sweep(*overrides, "adapter.r=2,4", "output.dir=new", code=2)
    assert "contains another sweep" in result.stderr
    result = sweep("-m", "resume=full", code=2)
    assert "expected the folder of a sweep" in result.stderr


def test_parallel_trials_get_separate_gpus(
    overrides: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = LocalJob.__init__

    def note(self: LocalJob, command: list[str], folder: Path, log: Path, gpus: Any) -> None:
        seen.append(gpus)
        real(self, command, folder, log, gpus)

    monkeypatch.setattr(LocalJob, "__init__", note)
    with mock.patch("app.sweep.run.requested_devices") as devices:
        devices.return_value = mock.Mock(on_gpu=True, num_gpus=4)
        result = sweep(*overrides, "adapter.r=2,4", "sweep.parallel=2", "trainer.devices=2")
        assert seen == ["0,1", "2,3"]
        result = sweep(*overrides, "adapter.r=2,4", "sweep.parallel=3", "trainer.devices=2", code=2)
        assert "needs 6 GPUs, but 4 are visible; use trainer.devices=1" in result.stderr


def test_an_interrupted_sweep_resumes(overrides: list[str], tmp_path: Path) -> None:
    """Ctrl-C during the second trial: it is not counted, and it runs when the sweep resumes."""
    with short_trials(interrupt_at=1):
        result = sweep(*overrides, "adapter.r=2,4,16", "output.dir=grid", code=130)
    assert "interrupted after 1 of 3 trials" in result.stderr
    assert "0.5000" in result.stdout
    Path("grid/1").mkdir(exist_ok=True)
    Path("grid/1/config.yaml").touch()  # as left by a run that has started
    with short_trials() as commands:
        result = sweep("-m", "resume=grid")
    assert [command[-1] == "resume=auto" for command in commands] == [True, False]
    assert [command[2] for command in commands] == ["adapter.r=4", "adapter.r=16"]
    trials = json.loads(Path("grid/sweep.json").read_text())
    assert [trial["number"] for trial in trials] == [2, 1, 0]
