"""Runs where little is as usual: paths, streams, home and scratch folder, what has started them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.run.ranks import check_supervise
from app.training.checkpoint.store import CheckpointStore
from tests.door import ask, make_data, make_model
from tests.processes import LONGEST, start_train, type_train
from tests.resumed import make_run
from tests.runs import rows_of
from tests.tiny import SAMPLES, TINY_BASE


@pytest.mark.slow
def test_odd_paths_and_nothing_around_them(tmp_path: Path) -> None:
    # Spaces, brackets and letters of other scripts in every path; no home, no scratch folder, no
    # terminal, the C locale, and a reader of the output that has left.
    odd = tmp_path / "ein Ordner [ü], 模型"
    odd.mkdir()
    shutil.copytree(TINY_BASE, odd / "bäse")
    shutil.copy(SAMPLES / "lists_test.json", odd / "dätä = 1.json")
    words = (
        f"model.path={odd / 'bäse'}",
        f"data.datasets=[{{path: '{odd / 'dätä = 1.json'}'}}]",
        "trainer.max_steps=4",
        "faults=[sigterm@2]",
    )
    bare = {
        "HOME": None,
        "TMPDIR": str(tmp_path / "gone"),
        "LC_ALL": "C",
        "LANG": None,
        "LOFT_DATA_CACHE": str(odd / "cäche"),
    }
    run = odd / "rün 1"
    code, _, said = type_train(run, *words, environment=bare)
    assert code == 143, said
    assert "Traceback" not in said
    assert [one.step for one in CheckpointStore(run / "checkpoints").checkpoints()] == [2]
    process = start_train(f"resume={run}", environment=bare)
    assert process.stdout is not None
    process.stdout.close()  # as `| head` does
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(timeout=LONGEST) == 0, said
    assert said == ""
    assert [row["step"] for row in rows_of(run) if row["train/loss"]] == ["1", "2", "3", "4"]
    assert json.loads((run / "metrics.json").read_text())["val/loss"] > 0


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("supervise.max_restarts=-1", "supervise.max_restarts=-1: expected 0 or more"),
        ("supervise.hang_minutes=0", "supervise.hang_minutes=0.0: expected above 0"),
        ("supervise.requeue=true", "type resume=auto"),
        ("supervise.max_restart=1", "did you mean supervise.max_restarts?"),
        ("faults=[sigtem@3]", "did you mean sigterm?"),
        ("faults=[worker_killed@3]", "data.num_workers=0; type data.num_workers=1"),
    ],
)
def test_settings_that_do_not_go(tmp_path: Path, word: str, problem: str) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    answer = ask(f"model.path={model}", f"data.datasets=[{{path: {data}}}]", word)
    assert answer.code == 2
    assert problem in answer.said


def test_a_job_that_goes_back_is_not_requeued(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    run = make_run(tmp_path / "run", f"model.path={model}", f"data.datasets=[{{path: {data}}}]")
    back = f"resume={run / 'checkpoints' / 'step-2'}"
    answer = ask(back, "supervise.requeue=true")
    assert answer.code == 2
    assert "would go back to step 2 each time" in answer.said
    assert f"type resume=auto output.dir={run} " in answer.said
    assert check_supervise(ask(f"resume={run}", "supervise.requeue=true").config) == []


def test_what_started_the_ranks_starts_them_again(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = (f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "trainer.devices=2")
    assert ask(*words, environment=torchrun).code == 0
    answer = ask(*words, "supervise.max_restarts=2", environment=torchrun)
    assert answer.code == 2
    assert "RANK is set" in answer.said and "torchrun has --max-restarts" in answer.said
    config = ask(*words, "supervise.max_restarts=2").config
    assert check_supervise(config) == []
