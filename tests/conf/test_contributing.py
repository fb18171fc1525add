"""What CONTRIBUTING.md says of adding parts is enough, and the hosted CI runs every test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.installation import ROOT
from tests.conftest import read_column


def put(file: Path, before: str, added: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, (file, before)
    file.write_text(text.replace(before, added + before))


@pytest.mark.slow
def test_an_optimizer_a_strategy_and_a_format_are_added_in_the_files_that_it_names(
    tmp_path: Path,
) -> None:
    """At most four files each, all at once in a copy of the program, which then trains."""
    for name in ("app", "common", "conf", "data_modules"):
        shutil.copytree(ROOT / name, tmp_path / name)
    app, conf = tmp_path / "app", tmp_path / "conf"

    optimizers = app / "training/optimizers.py"
    put(
        optimizers,
        "def build_optimizer(\n",
        "@dataclass(kw_only=True, slots=True)\nclass ToyConfig(OptimizerConfig):\n"
        '    """Plain SGD."""\n\n    name: str = "toy"\n\n\n',
    )
    put(
        optimizers,
        "    if isinstance(config, AdafactorConfig):\n",
        "    if isinstance(config, ToyConfig):\n        import torch\n\n"
        "        return torch.optim.SGD(groups)\n",
    )
    muon = '        "muon": optimizers.MuonConfig,'
    put(app / "config/verbs.py", muon, '        "toy": optimizers.ToyConfig,\n')
    put(optimizers, '"paged_adamw8bit": 0}', '"toy": 0, ')
    (conf / "optimizer/toy.yaml").write_text("name: toy\n")

    put(app / "strategy/settings.py", '    "fsdp_pp": Pipe', '    "toy": DdpConfig,\n')
    (conf / "strategy/toy.yaml").write_text("name: toy\n")

    put(
        tmp_path / "data_modules/format/format.py",
        '        Format("sharegpt", ',
        '        Format("toy", (("question",), ("reply",)), (), lambda values, origin: '
        '_read_alpaca({"instruction": values["question"], "output": values["reply"]}, origin)),\n',
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 1 + 1?", "reply": "two"}\n' * 40)

    words = ["optimizer=toy", "strategy=toy", "trainer.devices=1", "trainer.accelerator=cpu"]
    words += ["trainer.max_steps=2", "optimizer.lr=0.1", "evaluation.exact_match=false"]
    data = f"data.datasets=[{{path: {rows}}}]"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "app.train", "model=tiny", data, *words, f"output.dir={run}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = read_column(run, "train/loss")
    assert losses[2] < losses[1]


def test_the_hosted_ci_runs_every_folder_of_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    rooms = workflow["jobs"]["slow"]["strategy"]["matrix"]["rooms"]
    named = [word for words in rooms for word in words.split()]
    tests = [file.relative_to(ROOT).parts for file in (ROOT / "tests").glob("*/**/test_*.py")]
    folders = {f"tests/{parts[1]}" for parts in tests}
    assert sorted(named) == sorted(folders)
