"""`make` in a fresh clone and after an interrupted install, with a fake Python and no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.installation import ROOT
from tests.conftest import LONGEST_FILES
from tests.processes import LONGEST

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
    command = ["make", f"PYTHON={clone / 'python'}", *words]
    subprocess.run(
        command,
        cwd=clone,
        env=environment | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        timeout=LONGEST,
    )
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
    (
        clone / ".venv" / ".complete"
    ).unlink()  # as after an interrupted pip: installed packages are kept
    assert not any("venv" in call for call in make(clone, "install"))


@pytest.mark.parametrize("gpu", ["", "1"])
def test_what_a_gpu_needs_is_installed_where_it_is(
    gpu: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU", gpu)
    torch, program = (call for call in make(clone, "install") if "pip install" in call)
    assert torch.endswith("constraints.txt --extra-index-url there torch" if gpu else "torch")
    assert program.endswith("--editable .[dev,gpu]" if gpu else "--editable .[dev]")


def test_pairs_are_trained_on_by_a_target_of_their_own(clone: Path) -> None:
    make(clone, "install")
    (call,) = make(clone, "train-dpo", "ARGS=trainer.max_steps=2")
    assert call == "-m app.train +experiment=dpo_quickstart trainer.max_steps=2"


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


def test_eval_compare_and_eval_mt_bench_take_data_of_ones_own(clone: Path) -> None:
    make(clone, "install")
    (gate,) = make(clone, "eval-compare", "RUN=there", "DATA=a.jsonl", "MAX_REGRESSION=0.02")
    assert gate.startswith("-m app.evaluate run=there evaluation.max_regression=0.02 ")
    assert "data.datasets=[{path: a.jsonl}] data.test_datasets=[]" in gate
    (gate,) = make(clone, "eval-compare", "RUN=there")
    assert gate.split() == ["-m", "app.evaluate", "run=there", "evaluation.max_regression=0"]
    (offline,) = make(clone, "eval-mt-bench", "RUN=there")
    assert offline.startswith("-m tools.sample_judge .venv/bin/python -m app.evaluate run=there ")
    url = ("JUDGE_URL=https://host/v1", "JUDGE=name")
    (judged,) = make(clone, "eval-mt-bench", "RUN=there", "DATA=folder", *url)
    assert judged.split() == [
        "-m",
        "app.evaluate",
        "run=there",
        "evaluation=mt_bench",
        "evaluation.judge.questions=folder",
        "evaluation.judge.url=https://host/v1",
        "evaluation.judge.model=name",
    ]


def test_tasks_are_evaluated_on_data_of_ones_own_or_on_the_samples(clone: Path) -> None:
    make(clone, "install")
    for task in ("mmlu", "gsm8k"):
        for words, ending in (((), ""), (("DATA=there",), " evaluation.task_dir=there")):
            (call,) = make(clone, f"eval-{task}", "RUN=run", *words)
            assert call.rstrip() == f"-m app.evaluate run=run evaluation={task}{ending}"
    *_, call = make(clone, "eval-harness", "RUN=run", "TASKS=arc_easy,boolq")
    assert call.rstrip() == "-m app.evaluate run=run evaluation.harness=[arc_easy,boolq]"
    *_, call = make(clone, "eval-harness", "RUN=run")
    name, folder, allowed = (word.partition("=")[2] for word in call.split()[3:])
    assert (ROOT / folder / f"{name[1:-1]}.yaml").is_file() and allowed == "true"


def test_bandwidth_starts_ranks_by_torchrun(clone: Path) -> None:
    make(clone, "install")
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node="
    (call,) = make(clone, "bandwidth", "RANKS=4", "ARGS=strategy=fsdp seconds=5")
    assert call == f"{torchrun}4 -m app.doctor strategy=fsdp seconds=5"
    (call,) = make(clone, "bandwidth", "GPUS=/dev/nvidia0 /dev/nvidia1 /dev/nvidia2")
    assert call.rstrip() == f"{torchrun}3 -m app.doctor"
    (call,) = make(clone, "bandwidth", "GPUS=")
    assert call.rstrip() == f"{torchrun}2 -m app.doctor"


def test_tests_run_in_two_processes_of_whole_files(clone: Path) -> None:
    make(clone, "install")
    (everyday,) = make(clone, "test", "ARGS=tests/config/test_help.py")
    assert everyday.startswith("-m pytest -n 2 --dist loadfile ")
    assert everyday.endswith("-m not slow tests/config/test_help.py")
    both, versions, record = make(clone, "test-all", "WORKERS=4")
    assert both.startswith("-m pytest -n 4 ") and both.rstrip().endswith("-m not versions")
    assert versions.rstrip().endswith("-m versions") and record.endswith("tested_versions record")
    (slow,) = make(clone, "test-slow")
    assert slow.startswith("-m pytest -n 3 ") and slow.rstrip().endswith("slow and not versions")


def test_the_files_that_are_run_first_are_there() -> None:
    tests = ROOT / "tests"
    assert [file for file in LONGEST_FILES if not (tests / file).exists()] == []
