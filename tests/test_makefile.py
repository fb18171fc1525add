"""`make` in a fresh clone and after an interrupted install, with a fake Python and no network."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from common.installation import ROOT
from tests.conftest import LONGEST_FILES
from tests.processes import run

PYTHON = f"""#!/bin/sh
echo "$*" >> calls.txt
case "$*" in
    "-m tools.gpu_packages index") test -z "$GPU" || echo "--extra-index-url there" ;;
    "-m tools.gpu_packages extra") test -z "$GPU" || echo ",gpu" ;;
esac
case "$1" in
    -c) exec {sys.executable} "$@" ;;
esac
if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(clone: Path, *words: str) -> list[str]:
    """Run make; return the arguments of every call of Python."""
    (clone / "calls.txt").write_text("")
    # The environment contains the arguments of the make that runs these tests.
    typed = re.findall(r"\$\(([A-Z_]+)\)", (clone / "Makefile").read_text())
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in typed and not name.startswith(("MAKE", "MFLAGS"))
    }
    environment["PYTHONPATH"] = str(ROOT)
    run("make", f"PYTHON={clone / 'python'}", *words, cwd=clone, env=environment, check=True)
    return (clone / "calls.txt").read_text().splitlines()


def test_an_interrupted_install_is_repaired(clone: Path) -> None:
    broken = clone / ".venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")  # as without pip
    broken.chmod(0o755)
    calls = make(clone, "install")
    assert calls[0] == "-m venv --clear .venv"
    assert sum("pip install" in call for call in calls) == 2
    assert make(clone, "install") == []
    # As after an interrupted pip: installed packages are kept.
    (clone / ".venv" / ".complete").unlink()
    assert not any("venv" in call for call in make(clone, "install"))


@pytest.mark.parametrize("gpu", ["", "1"])
def test_what_a_gpu_needs_is_installed_where_it_is(
    gpu: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU", gpu)
    torch, program = (call for call in make(clone, "install") if "pip install" in call)
    assert torch.endswith("constraints.txt --extra-index-url there torch" if gpu else "torch")
    assert program.endswith("--editable .[dev,gpu]" if gpu else "--editable .[dev]")


def test_eval_trains_first_where_no_training_has_finished(clone: Path) -> None:
    make(clone, "install")
    run = clone / "outputs" / "name" / "time"
    run.mkdir(parents=True)
    (run / "metrics.json").write_text("{}")
    (run / "config.yaml").write_text("run: null\n")  # as in an evaluation
    assert make(clone, "eval")[-2:] == ["-m app.train", "-m app.evaluate"]
    for words in (["RUN=there"], ["ARGS=model.path=there"], ["ARGS=run=there"]):
        assert not any("app.train" in call for call in make(clone, "eval", *words))
    (run / "config.yaml").write_text("optimizer:\n  name: adamw\n")
    assert make(clone, "eval")[-1] == "-m app.evaluate"
    assert not any("app.train" in call for call in make(clone, "eval"))


JUDGED = (
    "evaluation=mt_bench evaluation.judge.questions=folder evaluation.judge.url=https://host/v1"
)
GATED = "data.datasets=[{path: a.jsonl}] data.test_datasets=[] data.val_set_size=0.99"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node="
PYTEST = "--dist loadfile --no-loadscope-reorder --max-worker-restart 1 -m"
CALLS = {
    "train-dpo ARGS=seed=2": "-m app.train +experiment=dpo_quickstart seed=2",
    "eval-compare RUN=there": "-m app.evaluate run=there evaluation.max_regression=0",
    "eval-compare RUN=there DATA=a.jsonl MAX_REGRESSION=0.02": "-m app.evaluate run=there"
    f" evaluation.max_regression=0.02 {GATED} evaluation.exact_match=true",
    "eval-mt-bench RUN=there": "-m tools.sample_judge .venv/bin/python -m app.evaluate run=there"
    " evaluation=mt_bench",
    "eval-mt-bench RUN=there DATA=folder JUDGE_URL=https://host/v1 JUDGE=name": "-m app.evaluate"
    f" run=there {JUDGED} evaluation.judge.model=name",
    "eval-mmlu RUN=run": "-m app.evaluate run=run evaluation=mmlu",
    "eval-gsm8k RUN=run DATA=there": "-m app.evaluate run=run evaluation=gsm8k"
    " evaluation.task_dir=there",
    "eval-harness RUN=run TASKS=arc_easy,boolq": "-m app.evaluate run=run"
    " evaluation.harness=[arc_easy,boolq]",
    "bandwidth RANKS=4 ARGS=seconds=5": f"{TORCHRUN}4 -m app.doctor seconds=5",
    "bandwidth GPUS=": f"{TORCHRUN}2 -m app.doctor",
    "test ARGS=tests/config": f"-m pytest -n 2 {PYTEST} not slow tests/config",
    "test-slow": f"-m pytest -n 4 {PYTEST} slow and not versions",
    "test-both WORKERS=3": f"-m pytest -n 3 {PYTEST} not versions",
}
"""what a person types after `make` -> arguments of the last call of Python"""


def test_targets_call_python_with_what_was_typed(clone: Path) -> None:
    make(clone, "install")
    called = {typed: make(clone, *typed.split(" "))[-1].rstrip() for typed in CALLS}
    assert called == CALLS


def test_the_files_that_are_run_first_are_there() -> None:
    tests = ROOT / "tests"
    assert [file for file in LONGEST_FILES if not (tests / file).exists()] == []
